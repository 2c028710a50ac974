"""Which token ids spell which bytes: the vocabulary turned around."""

from __future__ import annotations

from backends.base import Tokenizer

__all__ = ["VocabularyIndex"]


class VocabularyIndex:
    """Built once a model, by asking for every token's bytes. Control tokens spell nothing."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._ids: dict[bytes, list[int]] = {}
        for token_id in range(tokenizer.vocab_size):
            raw = tokenizer.token_bytes(token_id)
            if raw and not tokenizer.is_special(token_id):
                self._ids.setdefault(raw, []).append(token_id)
        self.longest = max(map(len, self._ids), default=0)

    def spelled(self, raw: bytes) -> list[int]:
        return self._ids.get(raw, [])

    def prefixes(self, raw: bytes) -> list[tuple[int, int]]:
        """``(token id, its length in bytes)`` for every token that ``raw`` starts with, shortest first."""
        return [
            (token_id, length)
            for length in range(1, min(len(raw), self.longest) + 1)
            for token_id in self._ids.get(raw[:length], ())
        ]
