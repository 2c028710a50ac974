"""A checkpoint file in memory, whose pages are given back once they are read.

Mapped pages count as resident: a checkpoint that stays mapped while it is copied would take its size twice.
"""

from __future__ import annotations

import mmap
from pathlib import Path

__all__ = ["MappedFile"]


class MappedFile:
    def __init__(self, path: Path) -> None:
        with path.open("rb") as handle:
            # A private map: torch wants writable buffers, and nothing is ever written.
            self.buffer = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)

    def give_back(self, start: int, stop: int) -> None:
        """Drops whole pages of the range from this process; they are read again if they are needed again."""
        if not hasattr(self.buffer, "madvise"):
            return
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        last = stop // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            self.buffer.madvise(mmap.MADV_DONTNEED, first, last - first)
