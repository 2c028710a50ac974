"""Places where text may be cut without changing its tokens.

Each pattern in :mod:`pretokenizers` ends a piece after a letter or digit that a space or common punctuation follows,
whatever comes before and after, and none looks back. Apostrophes are left out: they begin contractions. Normalisation
does not reach across such a place either: neither a space nor these signs combine with a letter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

__all__ = ["chunks"]

_LETTERS = "A-Za-z0-9à-öø-ÿа-яА-Я一-鿿ぁ-ゖァ-ヺ가-힣"
_BOUNDARY = re.compile(f"(?<=[{_LETTERS}])(?=[ \\n.,;:!?，。、；：！？])")


def chunks(text: str, chars: int) -> Iterator[str]:
    """``text`` in pieces of about ``chars`` characters, longer where there is no place to cut."""
    start = 0
    while len(text) - start > chars:
        found = _BOUNDARY.search(text, start + chars)
        if found is None:
            break
        yield text[start : found.start()]
        start = found.start()
    yield text[start:] if start else text
