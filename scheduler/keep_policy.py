"""Which prefix blocks are worth keeping when the pool is full. Knows hashes and recency, nothing of trees or pages.

Three classes, by what is known of a block's return:

- *wanted*: a waiting job would read it. Known, not guessed: the queue says so.
- *returning*: it was asked for again while cached, twice within a pass, or shortly after it had been dropped (a ghost
  list remembers hashes without their KV, as in 2Q and ARC).
- *seen once*: everything else.

A newcomer may take the place of blocks of its own class or below, the wanted excepted, least recently used first. So a
scan of one-off prompts of any length replaces other one-off blocks and never a prefix that comes back. A returning
block that nobody asked for while ``_STALE_POOLS`` poolfuls of other blocks were computed counts as seen once again:
traffic moves on. Time is measured in computed blocks, not in seconds: a quiet night ages nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol

__all__ = ["Block", "Demand", "KeepPolicy", "NoDemand", "Worth"]

Block = bytes | int

_STALE_POOLS = 2.0
_GHOST_POOLS = 1.0


class Worth(IntEnum):
    SEEN_ONCE = 0
    RETURNING = 1
    WANTED = 2


class Demand(Protocol):
    """What the waiting jobs would read."""

    def wanted(self, block: Block) -> bool:
        """Whether a waiting job's cached prefix ends with ``block``."""
        ...

    def wanted_depth(self, hashes: Sequence[Block], start: int) -> int:
        """How many leading blocks of ``hashes`` some waiting job whose cache ends at ``start`` begins with."""
        ...


class NoDemand:
    """For an index without a queue."""

    def wanted(self, block: Block) -> bool:
        return False

    def wanted_depth(self, hashes: Sequence[Block], start: int) -> int:
        return start


class KeepPolicy:
    """Judges newcomers and staleness for a pool of ``capacity`` blocks."""

    def __init__(self, capacity: int) -> None:
        self._stale_after = int(_STALE_POOLS * capacity)
        self._ghost_limit = int(_GHOST_POOLS * capacity)
        self._ghosts: OrderedDict[Block, None] = OrderedDict()
        self.clock = 0  # blocks computed so far

    def newcomer(self, block: Block) -> Worth:
        """Worth of a block about to be computed, as far as its history tells."""
        return Worth.RETURNING if block in self._ghosts else Worth.SEEN_ONCE

    def kept(self, block: Block) -> None:
        """It has a page now."""
        self._ghosts.pop(block, None)

    def dropped(self, block: Block) -> None:
        """It was evicted, or got no page: remembered for a while."""
        if self._ghost_limit == 0:
            return
        self._ghosts[block] = None
        self._ghosts.move_to_end(block)
        if len(self._ghosts) > self._ghost_limit:
            self._ghosts.popitem(last=False)

    def stale(self, used: int) -> bool:
        """Whether a returning block last used at clock ``used`` has lost its claim."""
        return self.clock - used > self._stale_after
