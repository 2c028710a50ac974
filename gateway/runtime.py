"""What a running gateway consists of, and its life: start, drain, stop. Handlers are given it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from backends.base import Backend
from gateway.auth import Authenticator
from gateway.catalog import Catalog
from gateway.metrics import Metrics
from gateway.request_log import RequestLog
from gateway.routing import World
from gateway.settings import Settings
from gateway.text_pool import TextPool

__all__ = ["Runtime"]

_STOP_MARGIN_S = 0.5

log = logging.getLogger("onepass.gateway")


class Runtime:
    def __init__(
        self,
        settings: Settings,
        backends: list[Backend],
        clock: Callable[[], float] = time.perf_counter,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.settings = settings
        self.catalog = Catalog(backends)
        self.auth = Authenticator(settings.api_keys)
        self.metrics = Metrics(collector for backend in backends for collector in backend.collectors())
        self.request_log = RequestLog(settings.request_log, wall_clock)
        self.text = TextPool()
        self.world = World(local_models=self.catalog.names, upstream=self.catalog.upstream is not None)
        self.clock = clock
        self.wall_clock = wall_clock
        self.draining = False
        self._started: list[Backend] = []
        self._start_failure: str | None = None

    async def start(self) -> None:
        """What goes wrong here is told by :meth:`failure`."""
        for backend in self.catalog.backends:
            try:
                self._started.append(backend)
                await backend.start()
            except Exception as exc:
                log.debug("backend %r did not start", backend.name, exc_info=True)
                self._start_failure = f"backend {backend.name!r}: {exc}"

    def begin_drain(self) -> None:
        """Readiness turns to 503 and new work is refused at once; what runs goes on."""
        if self.draining:
            return
        self.draining = True
        for backend in self.catalog.backends:
            backend.begin_drain()

    async def stop_backends(self, grace_s: float) -> None:
        """Whatever still runs after ``grace_s`` is failed by its backend. Once is enough."""
        self.begin_drain()
        backends, self._started = self._started, []
        stops = [asyncio.create_task(backend.stop(grace_s)) for backend in backends]
        if not stops:
            return
        done, late = await asyncio.wait(stops, timeout=grace_s + _STOP_MARGIN_S)
        for stop in done:
            if not stop.cancelled() and stop.exception() is not None:
                log.error("a backend did not stop cleanly: %s", stop.exception())
        for stop in late:
            stop.cancel()
            log.error("a backend did not stop in time")

    async def stop(self, grace_s: float) -> None:
        await self.stop_backends(grace_s)
        self.text.close()
        self.request_log.close()

    def failure(self) -> str | None:
        """Why this server will never be ready, if so."""
        if self._start_failure is not None:
            return self._start_failure
        for backend in self.catalog.backends:
            status = backend.status()
            if not status.alive:
                return f"backend {backend.name!r}: {status.message}"
        return None

    def ready(self) -> bool:
        """All backends that compute are ready; one that passes on is where none computes."""
        backends: list[Backend] = [*self.catalog.local] or self.catalog.backends
        return not self.draining and all(backend.status().ready for backend in backends)
