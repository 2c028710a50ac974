"""Texts that tell tokenizers apart: where pieces, digits, blanks, cases, marks and scripts meet."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["AWKWARD_TEXTS"]

_BLANKS = (
    "", " ", "  ", "   ", "\n", "\n\n", " \n", "\n ", "\t", "\r\n", "\r\n\r\n", " \t \n", "\u00a0", "\u3000",
    "\u2028", "\x1c",
)  # fmt: skip
_WORDS = (
    "a", "Word", "ABCdef", "IT'S", "it's", "we'LL", "'south", "don’t", "1", "12", "1234567", "3.14", "x1y2", "!",
    "?!...",
    "--", "'", "''", "/", "//\n", "_", "<", "<|im", "é", "e\u0301", "ǅ", "ß", "İ", "中文", "ひらがな", "ｶﾀ", "한국어",
    "العربية", "עברית", "हिन्दी", "ไทย", "Ελλ", "привет", "٣٤", "½", "Ⅷ", "²", "௧", "😀", "👩‍👩‍👧", "🇩🇪", "\ufeff",
    "\u200d", "\x00", "\x07", "\x7f", "\U0001d400", "\U00020000", "\U000e0001", "\uffff",
)  # fmt: skip


def _texts() -> Iterator[str]:
    yield ""
    for blank in _BLANKS:
        yield blank
        for word in _WORDS:
            yield blank + word
            yield word + blank
            yield f"a{blank}{word}{blank}b"
            yield f"7{blank}{word}{blank}8"
            yield f".{blank}{word}{blank},"
    for left in _WORDS:
        yield from (left + right for right in _WORDS)


AWKWARD_TEXTS: tuple[str, ...] = tuple(dict.fromkeys(_texts()))
