"""The gateway's Prometheus series. Times are in seconds; ``path`` is ``local``, ``upstream`` or ``gateway``.

Model labels are names this server knows: a client cannot grow the number of series by inventing models.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from backends.base import Timing

__all__ = ["CONTENT_TYPE", "Metrics"]

CONTENT_TYPE = CONTENT_TYPE_LATEST

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKENS = (16, 64, 256, 1024, 4096, 8192, 16384, 32768, 65536, 131072, 262144)


class Metrics:
    """One registry for the gateway's series and those that backends bring."""

    def __init__(self, collectors: Iterable[Any] = ()) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(name, about, labels, registry=registry)

        def seconds(name: str, about: str) -> Histogram:
            return Histogram(name, about, ("model", "path"), buckets=_SECONDS, registry=registry)

        self._requests = counter("onepass_requests", "Requests answered", "route", "backend", "reason", "status")
        self._total = seconds("onepass_request_seconds", "From arrival to the answer's end")
        self._first_token = seconds(
            "onepass_time_to_first_token_seconds", "From arrival to the answer's first body byte"
        )
        self._queue = seconds("onepass_request_queue_seconds", "Waiting for a pass")
        self._prefill = seconds("onepass_request_prefill_seconds", "Computing")
        self._upstream = seconds("onepass_upstream_first_byte_seconds", "From forwarding to the upstream's first byte")
        self._prompt_size = Histogram(
            "onepass_request_prompt_tokens", "Of local requests", ["model"], buckets=_TOKENS, registry=registry
        )
        self._prompt_tokens = counter("onepass_prompt_tokens", "Prompt tokens answered locally", "model")
        self._prompt_cached = counter("onepass_prompt_cached_tokens", "Of these, from the prefix cache", "model")
        self._spills = counter("onepass_spills", "Local requests sent upstream instead", "reason")
        self._disconnects = counter("onepass_disconnects", "Clients gone before their answer", "path")
        self._refusals = counter("onepass_refusals", "Requests answered with an error", "status", "code")
        self._upstream_failures = counter("onepass_upstream_failures", "Failed upstream requests", "kind")
        self.in_flight = 0  # requests being answered
        in_flight = Gauge("onepass_requests_in_flight", "Requests being answered", registry=registry)
        in_flight.set_function(lambda: self.in_flight)
        self._children: dict[tuple[Any, ...], Any] = {}
        for collector in collectors:
            self.registry.register(collector)

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def request_finished(
        self, *, route: str, backend: str, reason: str, status: int, model: str, path: str, seconds: float
    ) -> None:
        self._child(self._requests, route, backend, reason, str(status)).inc()
        self._child(self._total, model, path).observe(seconds)

    def first_token(self, model: str, path: str, seconds: float) -> None:
        self._child(self._first_token, model, path).observe(seconds)

    def local_result(self, model: str, timing: Timing, prompt_tokens: int, cached_tokens: int) -> None:
        self._child(self._queue, model, "local").observe(timing.queue_ms / 1000)
        self._child(self._prefill, model, "local").observe(timing.compute_ms / 1000)
        self._child(self._prompt_size, model).observe(prompt_tokens)
        self._child(self._prompt_tokens, model).inc(prompt_tokens)
        self._child(self._prompt_cached, model).inc(cached_tokens)

    def upstream_first_byte(self, model: str, seconds: float) -> None:
        self._child(self._upstream, model, "upstream").observe(seconds)

    def upstream_failed(self, kind: str) -> None:
        """``kind``: ``unreachable``, ``timeout`` or ``broken``."""
        self._child(self._upstream_failures, kind).inc()

    def spilled(self, reason: str) -> None:
        self._child(self._spills, reason).inc()

    def disconnected(self, path: str) -> None:
        self._child(self._disconnects, path).inc()

    def refused(self, status: int, code: str) -> None:
        self._child(self._refusals, str(status), code).inc()

    def _child(self, series: Any, *labels: str) -> Any:
        """``series.labels`` takes a lock and checks its arguments at every call; the children never change."""
        key = (series, *labels)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = series.labels(*labels)
        return child
