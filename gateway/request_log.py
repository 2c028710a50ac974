"""The request log: one JSON line for each request, without prompts, answers or keys.

Its local lines are enough to replay the traffic in simulated time: arrival, tokens of each prompt, tokens that were
cached, and which prompts began alike (``prefix_groups``: a keyed hash of the first tokens, whose key dies with the
process, so that it says *same* or *different* and nothing else).
"""

from __future__ import annotations

import hashlib
import secrets
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from typing import IO, TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from gateway.exchange import Exchange

__all__ = ["PREFIX_TOKENS", "RequestLog"]

PREFIX_TOKENS = 256


class RequestLog:
    """``target``: a file's path to append to, ``-`` for standard output, None for no log. Raises OSError."""

    def __init__(self, target: str | None, wall_clock: Callable[[], float] = time.time) -> None:
        self.enabled = target is not None
        self._wall_clock = wall_clock
        self._key = secrets.token_bytes(16)
        self._file: IO[str] | None = None
        if target is not None:
            self._file = sys.stdout if target == "-" else open(target, "a", encoding="utf-8", buffering=1)  # noqa: SIM115

    def prefix_group(self, token_ids: Sequence[int]) -> str:
        first = array("q", token_ids[:PREFIX_TOKENS]).tobytes()
        return hashlib.blake2b(first, key=self._key, digest_size=6).hexdigest()

    def write(self, exchange: Exchange, seconds: float) -> None:
        if self._file is None:
            return
        timing = exchange.timing
        line = {
            "arrival": round(self._wall_clock() - seconds, 6),
            "request_id": exchange.request_id,
            "route": exchange.route,
            "model": exchange.model,
            "tenant": exchange.tenant,
            "backend": exchange.backend,
            "reason": exchange.reason,
            "status": exchange.status,
            "error": exchange.error_code,
            "total_ms": round(seconds * 1000, 3),
            "queue_ms": None if timing is None else round(timing.queue_ms, 3),
            "predicted_ms": None if timing is None else round(timing.predicted_ms, 3),
            "compute_ms": None if timing is None else round(timing.compute_ms, 3),
            "tokens": exchange.prompt_tokens,
            "cached": exchange.cached_tokens,
            "prefix_groups": exchange.prefix_groups,
        }
        self._file.write(msgspec.json.encode(line).decode() + "\n")
        self._file.flush()

    def close(self) -> None:
        """Requests that end later are not written."""
        file, self._file = self._file, None
        if file is not None and file is not sys.stdout:
            file.close()
