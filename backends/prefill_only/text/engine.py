"""Text to token ids, without anything added around them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

__all__ = ["Engine", "Piece"]

Piece = str | int  # text in which control tokens are text, or the id of a control token


class Engine(ABC):
    """Thread-safe."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Text that spells an added token becomes that token."""

    @abstractmethod
    def encode_pieces(self, pieces: Sequence[Piece]) -> list[int]:
        """As if the pieces were one text in which only the ids among them are control tokens. No two texts meet."""
