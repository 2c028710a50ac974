"""Finds added tokens in text: the leftmost, and of those that begin there the longest, as the library does."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from backends.prefill_only.text.definition import AddedToken
from backends.prefill_only.text.engine import Piece

__all__ = ["AddedTokenFinder"]


class AddedTokenFinder:
    def __init__(self, tokens: Collection[AddedToken]) -> None:
        self._ids = {token.text: token.id for token in tokens}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, longest_first))) if tokens else None

    def pieces(self, text: str) -> Iterator[Piece]:
        """The text cut at added tokens: what is between them as text, they as ids. No piece is empty."""
        at = 0
        if self._any is None:
            if text:
                yield text
            return
        for found in self._any.finditer(text):
            if found.start() > at:
                yield text[at : found.start()]
            yield self._ids[found[0]]
            at = found.end()
        if at < len(text):
            yield text[at:]
