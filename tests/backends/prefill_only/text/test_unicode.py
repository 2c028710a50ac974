"""tiktoken's patterns and the library's see every character alike."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from backends.prefill_only.text.library_engine import LibraryEngine
from backends.prefill_only.text.pretokenizers import GGUF_PRETOKENIZERS, Pretokenizer
from backends.prefill_only.text.tiktoken_engine import TiktokenEngine
from backends.prefill_only.text.vocabulary import BYTE_OF_CHAR

_BASES = "a1 !"
# Of the large scripts' blocks, which have one character class each, only the ends.
_ALIKE = (range(0x3401, 0x4DBF), range(0x4E01, 0x9FFE), range(0xAC01, 0xD7A2), range(0xE001, 0xF8FE))
_ALIKE += (range(0x12010, 0x12390), range(0x13010, 0x14640), range(0x17001, 0x187F0), range(0x18801, 0x18CD0))
_CODES = (*range(0xD800), *range(0xE000, 0x20000), 0x2A6DF, 0x30000, *range(0xE0000, 0xE0200), 0x10FFFF)
_CHARS = [chr(code) for code in _CODES if not any(code in block for block in _ALIKE)]


def _revealing_spec(pre: Pretokenizer) -> dict[str, Any]:
    """Merges each of _BASES with any first byte of what follows, so that every cut between them shows in the ids."""
    char_of = {byte: char for char, byte in BYTE_OF_CHAR.items()}
    vocab = {char_of[byte]: byte for byte in range(256)}
    merges = []
    for base in _BASES:
        for byte in range(256):
            merges.append([char_of[ord(base)], char_of[byte]])
            vocab["".join(merges[-1])] = len(vocab)
    model = {"type": "BPE", "vocab": vocab, "merges": merges, "ignore_merges": pre.ignore_merges}
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": pre.normalizer,
        "pre_tokenizer": pre.library,
        "post_processor": None,
        "decoder": None,
        "model": model,
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-2", "smollm", "llama-bpe", "qwen2", "gpt-4o", "tekken"])
def test_every_character_is_cut_alike(name: str) -> None:
    spec = _revealing_spec(GGUF_PRETOKENIZERS[name])
    library = Tokenizer.from_str(json.dumps(spec))
    exact = LibraryEngine(spec, library, [])
    engine = TiktokenEngine(spec, library, [], [], exact)
    for base in _BASES:
        for start in range(0, len(_CHARS), 256):
            block = _CHARS[start : start + 256]
            text = "\n".join(base + char + "b" for char in block)
            if engine.encode(text) != exact.encode(text):
                texts = [base + char + "b" for char in block]
                seen = [ascii(t) for t in texts if engine.encode(t) != exact.encode(t)]
                raise AssertionError(f"{name} cuts these differently: {seen or ascii(text)}")
