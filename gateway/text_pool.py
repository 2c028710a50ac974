"""Threads for text: templates, tokenizers and big answers, which may take seconds, stay off the event loop.

Small texts run in place: handing one to a thread costs more than tokenising it. Medium and large ones have threads of
their own, so that a five-megabyte prompt never stands before an ordinary one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["INLINE_BYTES", "TextPool"]

INLINE_BYTES = 6 * 1024
_LARGE_BYTES = 256 * 1024

T = TypeVar("T")


class TextPool:
    def __init__(self) -> None:
        self._medium = ThreadPoolExecutor(2, thread_name_prefix="onepass-text")
        self._large = ThreadPoolExecutor(2, thread_name_prefix="onepass-large-text")

    async def run(self, size_bytes: float, work: Callable[[], T]) -> T:
        """``work()``, in place or on a thread by the size of what it reads."""
        if size_bytes <= INLINE_BYTES:
            return work()
        pool = self._medium if size_bytes <= _LARGE_BYTES else self._large
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    def close(self) -> None:
        for pool in (self._medium, self._large):
            pool.shutdown(wait=False, cancel_futures=True)
