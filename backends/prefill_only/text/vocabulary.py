"""What each token stands for: its bytes and the text that shows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["BYTE_OF_CHAR", "token_bytes_table"]


def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 bytes are themselves, the others follow from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in shown}
    hidden = (byte for byte in range(256) if byte not in shown)
    table.update({chr(0x100 + i): byte for i, byte in enumerate(hidden)})
    return table


BYTE_OF_CHAR = _byte_of_char()


def token_bytes_table(spec: Mapping[str, Any], rows: int) -> list[bytes | None]:
    """``[rows]``: each token's own bytes; None where the vocabulary has no such token."""
    table: list[bytes | None] = [None] * rows
    model = spec["model"]
    vocab = model["vocab"]
    entries = vocab.items() if isinstance(vocab, Mapping) else ((text, i) for i, (text, _) in enumerate(vocab))
    to_bytes = _from_byte_level if _has_stage(spec.get("decoder"), "ByteLevel") else _from_sentencepiece
    for text, token_id in entries:
        if token_id < rows:
            table[token_id] = to_bytes(text)
    for token in spec.get("added_tokens", ()):
        if token["id"] < rows:
            table[token["id"]] = token["content"].encode("utf-8")
    return table


def _has_stage(stage: Mapping[str, Any] | None, kind: str) -> bool:
    if stage is None:
        return False
    return stage.get("type") == kind or any(_has_stage(inner, kind) for inner in stage.get("decoders", ()))


def _from_byte_level(text: str) -> bytes:
    try:
        return bytes([BYTE_OF_CHAR[char] for char in text])
    except KeyError:  # not in the alphabet, so the decoder leaves it as it is
        return text.encode("utf-8")


def _from_sentencepiece(text: str) -> bytes:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        try:
            return bytes([int(text[3:5], 16)])
        except ValueError:
            pass
    return text.replace("▁", " ").encode("utf-8")
