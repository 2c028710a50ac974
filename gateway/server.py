"""The server process: socket, uvicorn, signals, exit status.

The first SIGTERM or Ctrl-C starts a drain: readiness turns to 503 and new or waiting work is refused at once, while the
socket stays open so that clients hear it; what runs gets the grace time; then the process exits with status 0. A second
signal ends it on the spot.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from types import FrameType

import uvicorn

from gateway.app import STOP_S, Application, create_app
from gateway.protocol import Protocol
from gateway.settings import Settings, SettingsError

__all__ = ["bind", "check_exposure", "serve"]

log = logging.getLogger("onepass.gateway")

EXIT_FAILURE = 1
EXIT_SETTINGS = 2

_POLL_S = 0.05
_UNWIND_S = 1  # after the grace time: for what was cut off to unwind
# Longer than common clients keep idle connections, so that the server is not the one to close a reused one.
_KEEP_ALIVE_S = 75
_BACKLOG = 2048


def serve(env: Mapping[str, str]) -> int:
    """Runs until told to leave; the exit status. Problems of configuration are one line on standard error."""
    try:
        settings = Settings.from_env(env)
        _configure_logging(settings)
        check_exposure(settings)
        listener = bind(settings.host, settings.port)
    except SettingsError as exc:
        return _complain(str(exc), EXIT_SETTINGS)
    except OSError as exc:
        reason = exc.strerror or str(exc)
        return _complain(f"cannot listen on {settings.host}:{settings.port}: {reason}", EXIT_FAILURE)
    try:
        app = create_app(env)
    except SettingsError as exc:
        listener.close()
        return _complain(str(exc), EXIT_SETTINGS)
    host, port = listener.getsockname()[:2]
    log.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)
    server = _Server(app, settings)
    server.run(sockets=[listener])
    return server.exit_status


def check_exposure(settings: Settings) -> None:
    """An open server answers anybody who can reach it: beyond loopback that has to be said out loud."""
    if settings.api_keys or settings.allow_open or _is_loopback(settings.host):
        return
    raise SettingsError(
        f"ONEPASS_HOST={settings.host} is reachable from other machines: set ONEPASS_API_KEYS, "
        "or ONEPASS_ALLOW_OPEN=1 to serve without keys"
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind(host: str, port: int) -> socket.socket:
    """A socket that is bound and listening. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _config(app: Application, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=Protocol,
        loop="uvloop" if sys.platform != "win32" else "asyncio",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=settings.access_log,
        server_header=False,
        # Ours is added with the other headers of our own answers; the upstream's answers bring theirs.
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_UNWIND_S,
        backlog=_BACKLOG,
    )


class _Server(uvicorn.Server):
    """uvicorn with our own leave-taking."""

    def __init__(self, app: Application, settings: Settings) -> None:
        super().__init__(_config(app, settings))
        self._app = app
        self._signals = 0
        self.exit_status = 0

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """In place of uvicorn's, which raises the signal again at the end and so spoils the exit status."""
        taken = (signal.SIGTERM, signal.SIGINT)
        before = {number: signal.signal(number, self._on_signal) for number in taken}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._signals > 1:
            os._exit(128 + number)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._supervisor = asyncio.create_task(self._supervise())

    async def _supervise(self) -> None:
        try:
            if await self._until_told_to_leave():
                await self._drain()
        except Exception:
            log.exception("the server's supervision failed")
            self.exit_status = EXIT_FAILURE
        finally:
            self.should_exit = True

    async def _until_told_to_leave(self) -> bool:
        """Says when the server is ready. False when it never will be."""
        runtime = self._app.runtime
        began = time.monotonic()
        was_ready = False
        while not self._signals:
            if not was_ready:
                failure = runtime.failure()
                if failure is not None:
                    self.exit_status = _complain(failure, EXIT_FAILURE)
                    return False
                if runtime.ready():
                    was_ready = True
                    names = ", ".join(served.model_id for served in runtime.catalog.models) or "no local model"
                    log.info("ready in %.1f s: %s", time.monotonic() - began, names)
            await asyncio.sleep(_POLL_S)
        return True

    async def _drain(self) -> None:
        runtime = self._app.runtime
        log.info("leaving: finishing %d running requests", self._app.in_flight)
        runtime.begin_drain()
        deadline = time.monotonic() + runtime.settings.grace_s
        while self._app.in_flight and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
        # What the backends fail now is still answered, with a 503.
        await runtime.stop_backends(STOP_S)


def _configure_logging(settings: Settings) -> None:
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    logging.getLogger("uvicorn").setLevel("WARNING" if not settings.access_log else settings.log_level.upper())


def _complain(message: str, status: int) -> int:
    print(f"onepass: {message}", file=sys.stderr, flush=True)
    return status
