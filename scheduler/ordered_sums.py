"""A sorted collection with running sums: the order of a queue, and how much work stands before a place in it.

Sorted buckets of bounded length (the layout of the ``sortedcontainers`` package), with the sum of each bucket kept
beside it: finding a place is two binary searches, changing it moves at most one bucket's tail, and a prefix sum adds up
whole buckets and then part of one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

__all__ = ["OrderedSums", "Place"]

Place = tuple[float, int]  # key, then identity, which breaks ties

_FULL = 256  # places in a bucket before it is cut in two


class OrderedSums:
    """Places in order, a value at each. Every place is there once."""

    def __init__(self) -> None:
        self._buckets: list[list[Place]] = []
        self._values: list[list[float]] = []
        self._last: list[Place] = []  # greatest place of each bucket
        self._sums: list[float] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Place]:
        """In order. The collection must not change meanwhile."""
        for bucket in self._buckets:
            yield from bucket

    def first(self) -> Place:
        """Raises IndexError when empty."""
        return self._buckets[0][0]

    def total(self) -> float:
        return sum(self._sums, 0.0)

    def add(self, place: Place, value: float) -> None:
        self._count += 1
        if not self._buckets:
            self._buckets, self._values, self._last, self._sums = [[place]], [[value]], [place], [value]
            return
        b = min(bisect_left(self._last, place), len(self._last) - 1)
        bucket, values = self._buckets[b], self._values[b]
        i = bisect_left(bucket, place)
        bucket.insert(i, place)
        values.insert(i, value)
        if len(bucket) > _FULL:
            half = len(bucket) // 2
            self._buckets[b : b + 1] = [bucket[:half], bucket[half:]]
            self._values[b : b + 1] = [values[:half], values[half:]]
            self._last[b : b + 1] = [bucket[half - 1], bucket[-1]]
            self._sums[b : b + 1] = [sum(values[:half]), sum(values[half:])]
        else:
            self._last[b] = bucket[-1]
            self._sums[b] += value

    def remove(self, place: Place) -> None:
        """Raises KeyError when it is not there."""
        b = bisect_left(self._last, place)
        bucket = self._buckets[b] if b < len(self._buckets) else []
        i = bisect_left(bucket, place)
        if i == len(bucket) or bucket[i] != place:
            raise KeyError(place)
        self._count -= 1
        del bucket[i]
        value = self._values[b].pop(i)
        if bucket:
            self._last[b] = bucket[-1]
            self._sums[b] -= value  # rounding adds up only as long as the bucket lives
        else:
            del self._buckets[b], self._values[b], self._last[b], self._sums[b]

    def sum_before(self, key: float) -> float:
        """Sum of the values at places whose key is less than ``key``."""
        place = (key, -1)
        b = bisect_left(self._last, place)
        before = sum(self._sums[:b])
        if b < len(self._buckets):
            before += sum(self._values[b][: bisect_left(self._buckets[b], place)])
        return before
