"""Seeded random text that mixes scripts, blanks, digits and the spellings of control tokens."""

from __future__ import annotations

import random
import sys
import unicodedata
from collections.abc import Sequence

__all__ = ["random_texts"]

_RANGES = (
    (0x20, 0x7E), (0x00, 0x1F), (0x7F, 0xFF), (0x100, 0x24F), (0x300, 0x36F), (0x370, 0x52F), (0x590, 0x6FF),
    (0x900, 0xDFF), (0xE00, 0xFFF), (0x1100, 0x11FF), (0x2000, 0x206F), (0x2070, 0x218F), (0x2190, 0x2BFF),
    (0x3000, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xE000, 0xE0FF), (0xF900, 0xFFFD), (0x10000, 0x1FFFF),
    (0x20000, 0x323AF), (0xE0000, 0xE01EF),
)  # fmt: skip
_WORDS = (
    "the quick Brown FOX it's I'LL don't 2024 3.14 1,000 x1 foo_bar() e.g. naïve Zürich привет мир 中文 한국어 👍🏽"
).split()
_BLANKS = (" ", "  ", "    ", "\n", "\n\n", "\r\n", "\t", " \n ", "\u00a0", "\u3000", "\u2028", "\x1c", "\x85")
_DIGITS = "0123456789٣४½²Ⅷ"


def random_texts(count: int, seed: int, control: Sequence[str] = (), max_pieces: int = 24) -> list[str]:
    """Without unassigned characters: engines may know different versions of Unicode."""
    rng = random.Random(seed)
    return [_text(rng, control, max_pieces) for _ in range(count)]


def _text(rng: random.Random, control: Sequence[str], max_pieces: int) -> str:
    pieces = []
    for _ in range(rng.randint(0, max_pieces)):
        kind = rng.random()
        if kind < 0.35:
            pieces.append(rng.choice(_WORDS))
        elif kind < 0.6:
            pieces.append(rng.choice(_BLANKS))
        elif kind < 0.7:
            pieces.append("".join(rng.choices(_DIGITS, k=rng.randint(1, 8))))
        elif kind < 0.75 and control:
            token = rng.choice(control)
            pieces.append(token if rng.random() < 0.7 else token[: rng.randint(1, len(token))])
        else:
            low, high = rng.choice(_RANGES)
            pieces.append("".join(_assigned(rng, low, high) for _ in range(rng.randint(1, 6))))
    return "".join(pieces)


def _assigned(rng: random.Random, low: int, high: int) -> str:
    while True:
        char = chr(rng.randint(low, min(high, sys.maxunicode)))
        if unicodedata.category(char) not in ("Cn", "Cs"):
            return char
