"""How text is cut into pieces before byte pairs are merged: the patterns that are known by name.

Each pattern exists in two forms: as the pre-tokenizer of the ``tokenizers`` library, and as one regular expression for
tiktoken. The patterns themselves are those published with the models.
"""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["GGUF_PRETOKENIZERS", "Pretokenizer", "known_pattern", "seen_differently"]

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# The library cuts at every digit first, so for the GPT-2 pattern a digit is the end of the text.
_SINGLE_DIGITS = r"\p{N}|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLIT_PATTERNS = (_LLAMA3, _QWEN2, _O200K, _TEKKEN)


class Pretokenizer(NamedTuple):
    """What a GGUF pre-tokenizer name stands for."""

    library: dict[str, Any]  # in the form of tokenizer.json
    normalizer: dict[str, Any] | None = None
    ignore_merges: bool = False  # a piece that is a token is that token
    adds_bos: bool = False  # unless the file says otherwise


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _byte_level(use_regex=False)]}


_GPT2_LIBRARY = _byte_level(use_regex=True)
_SINGLE_DIGITS_LIBRARY = {
    "type": "Sequence",
    "pretokenizers": [{"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)],
}
_NFC = {"type": "NFC"}
_LLAMA3_PRETOKENIZER = Pretokenizer(_split(_LLAMA3), ignore_merges=True, adds_bos=True)

GGUF_PRETOKENIZERS: dict[str, Pretokenizer] = {
    "default": Pretokenizer(_GPT2_LIBRARY),
    "gpt-2": Pretokenizer(_GPT2_LIBRARY),
    **{
        name: Pretokenizer(_SINGLE_DIGITS_LIBRARY)
        for name in ("smollm", "starcoder", "refact", "command-r", "codeshell")
    },
    **{name: _LLAMA3_PRETOKENIZER for name in ("llama3", "llama-v3", "llama-bpe")},
    "smaug-bpe": Pretokenizer(_split(_LLAMA3), ignore_merges=True),
    "dbrx": Pretokenizer(_split(_LLAMA3), ignore_merges=True),
    "qwen2": Pretokenizer(_split(_QWEN2), normalizer=_NFC),
    "deepseek-r1-qwen": Pretokenizer(_split(_QWEN2), normalizer=_NFC),
    "gpt-4o": Pretokenizer(_split(_O200K)),
    "llama4": Pretokenizer(_split(_O200K), adds_bos=True),
    "tekken": Pretokenizer(_split(_TEKKEN), ignore_merges=True, adds_bos=True),
}


def known_pattern(pre_tokenizer: dict[str, Any] | None) -> str | None:
    """The one regular expression that cuts text as this pre-tokenizer of a tokenizer.json does; None if unknown."""
    if pre_tokenizer is None:
        return None
    stages = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    cuts, last = stages[:-1], stages[-1]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return None
    if last.get("use_regex", True):
        if not cuts:
            return _GPT2
        if len(cuts) == 1 and cuts[0] == {"type": "Digits", "individual_digits": True}:
            return _SINGLE_DIGITS
        return None
    if len(cuts) == 1 and cuts[0].get("type") == "Split":
        cut = cuts[0]
        pattern = cut.get("pattern", {}).get("Regex")
        if cut.get("behavior") == "Isolated" and not cut.get("invert") and pattern in _SPLIT_PATTERNS:
            return str(pattern)
    return None


def seen_differently(pattern: str) -> list[tuple[int, int]]:
    """Ranges of characters that the library's pre-tokenizer and tiktoken's ``pattern`` take for different things."""
    return [(0x11DE0, 0x11DE9), (0x16FF4, 0x16FF6)] if pattern == _SINGLE_DIGITS else []  # Unicode 17's new digits
