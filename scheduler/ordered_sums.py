"""A sorted collection with running sums: the order of a queue, and how much work stands before a place in it.

Sorted buckets of bounded length (the layout of the ``sortedcontainers`` package), with the sum of each bucket kept
beside it: finding a place is two binary searches, changing it moves at most one bucket's tail, and a prefix sum adds up
whole buckets and then part of one. Buckets are arrays of plain numbers: with 100,000 places, what a search costs is the
memory that it touches.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator

__all__ = ["OrderedSums", "Place"]

Place = tuple[float, int]  # key, then identity, which breaks ties

_FULL = 256  # places in a bucket before it is cut in two


class _Bucket:
    __slots__ = ("ids", "keys", "values")

    def __init__(self, keys: array[float], ids: array[int], values: array[float]) -> None:
        self.keys, self.ids, self.values = keys, ids, values

    def find(self, place: Place) -> int:
        """Index of the first entry that is not before ``place``."""
        key, identity = place
        low = bisect_left(self.keys, key)
        if low == len(self.keys) or self.keys[low] != key:
            return low
        return bisect_left(self.ids, identity, low, bisect_right(self.keys, key, low))

    def last(self) -> Place:
        return self.keys[-1], self.ids[-1]


class OrderedSums:
    """Places in order, a value at each. Every place is there once."""

    def __init__(self) -> None:
        self._buckets: list[_Bucket] = []
        self._last: list[Place] = []  # greatest place of each bucket
        self._sums: list[float] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Place]:
        """In order. The collection must not change meanwhile."""
        for bucket in self._buckets:
            yield from zip(bucket.keys, bucket.ids, strict=True)

    def first(self) -> Place:
        """Raises IndexError when empty."""
        bucket = self._buckets[0]
        return bucket.keys[0], bucket.ids[0]

    def total(self) -> float:
        return sum(self._sums, 0.0)

    def add(self, place: Place, value: float) -> None:
        self._count += 1
        if not self._buckets:
            self._buckets.append(_Bucket(array("d", [place[0]]), array("q", [place[1]]), array("d", [value])))
            self._last.append(place)
            self._sums.append(value)
            return
        b = min(bisect_left(self._last, place), len(self._last) - 1)
        bucket = self._buckets[b]
        i = bucket.find(place)
        bucket.keys.insert(i, place[0])
        bucket.ids.insert(i, place[1])
        bucket.values.insert(i, value)
        self._sums[b] += value
        if i == len(bucket.keys) - 1:
            self._last[b] = place
        if len(bucket.keys) > _FULL:
            self._cut(b)

    def remove(self, place: Place) -> None:
        """Raises KeyError when it is not there."""
        b = bisect_left(self._last, place)
        if b == len(self._last):
            raise KeyError(place)
        bucket = self._buckets[b]
        i = bucket.find(place)
        if bucket.keys[i] != place[0] or bucket.ids[i] != place[1]:
            raise KeyError(place)
        self._count -= 1
        del bucket.keys[i], bucket.ids[i]
        value = bucket.values.pop(i)
        if not bucket.keys:
            del self._buckets[b], self._last[b], self._sums[b]
            return
        self._sums[b] -= value  # rounding adds up only as long as the bucket lives
        if i == len(bucket.keys):
            self._last[b] = bucket.last()

    def sum_before(self, place: Place) -> float:
        """Sum of the values at the places before ``place``, which need not be there."""
        b = bisect_left(self._last, place)
        before = sum(self._sums[:b], 0.0)
        if b < len(self._buckets):
            bucket = self._buckets[b]
            before += sum(bucket.values[: bucket.find(place)])
        return before

    def _cut(self, b: int) -> None:
        whole = self._buckets[b]
        half = len(whole.keys) // 2
        parts = [
            _Bucket(whole.keys[:half], whole.ids[:half], whole.values[:half]),
            _Bucket(whole.keys[half:], whole.ids[half:], whole.values[half:]),
        ]
        self._buckets[b : b + 1] = parts
        self._last[b : b + 1] = [part.last() for part in parts]
        self._sums[b : b + 1] = [sum(part.values) for part in parts]
