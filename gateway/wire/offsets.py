"""Where each token begins in a text, in characters."""

from __future__ import annotations

from collections.abc import Sequence

from backends.base import Tokenizer

__all__ = ["text_offsets"]


def text_offsets(token_ids: Sequence[int], text: str, tokenizer: Tokenizer) -> list[int]:
    """One offset for each token. A token that begins inside a character points at that character; a token that is not
    in the text, such as a start token that the tokenizer added, has no width."""
    raw = text.encode(errors="surrogatepass")
    if len(raw) == len(text):
        return _starts(token_ids, raw, tokenizer)
    character_at = _character_index(raw)
    return [character_at[start] for start in _starts(token_ids, raw, tokenizer)]


def _starts(token_ids: Sequence[int], raw: bytes, tokenizer: Tokenizer) -> list[int]:
    """In bytes."""
    starts = []
    at = 0
    for token_id in token_ids:
        starts.append(at)
        piece = tokenizer.token_bytes(token_id)
        if piece is None:
            piece = tokenizer.token_text(token_id).encode()
        if raw.startswith(piece, at):
            at += len(piece)
        elif not tokenizer.is_special(token_id):
            # Some tokenizers put a word-start mark before a text's beginning, or normalise: stay as close as possible.
            at = min(at + len(piece.lstrip(b" ")), len(raw))
    return starts


def _character_index(raw: bytes) -> list[int]:
    """For each byte, and the end, the number of the character it belongs to."""
    index = []
    character = -1
    for byte in raw:
        if byte & 0xC0 != 0x80:
            character += 1
        index.append(max(character, 0))
    index.append(character + 1)
    return index
