"""Starts a gateway as a separate process on a free port, waits until it is ready, and ends it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

__all__ = ["ServerProcess", "free_port", "running_server"]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class ServerProcess:
    """A running ``onepass serve``; ``url`` is its root."""

    def __init__(self, env: Mapping[str, str], log: Path | None = None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        full = {**os.environ, "HF_HUB_OFFLINE": "1", **env, "ONEPASS_HOST": "127.0.0.1", "ONEPASS_PORT": str(self.port)}
        self._log = None if log is None else log.open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gateway.cli", "serve"],
            env=full,
            stdout=self._log or subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
        )

    def wait_ready(self, timeout_s: float = 120.0) -> float:
        """Seconds it took. Raises RuntimeError if the process ends or is not ready in time."""
        began = time.monotonic()
        while time.monotonic() - began < timeout_s:
            if (code := self.process.poll()) is not None:
                raise RuntimeError(f"the server ended with status {code} before it was ready")
            try:
                with urllib.request.urlopen(f"{self.url}/health/ready", timeout=2) as answer:
                    if answer.status == 200:
                        return time.monotonic() - began
            except (urllib.error.URLError, OSError):
                pass
            time.sleep(0.05)
        raise RuntimeError(f"the server was not ready after {timeout_s} s")

    def stop(self, timeout_s: float = 20.0) -> int:
        """Exit status after SIGTERM (SIGKILL when it does not leave)."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self._log is not None:
            self._log.close()
        return self.process.returncode


@contextmanager
def running_server(env: Mapping[str, str], log: Path | None = None) -> Iterator[ServerProcess]:
    server = ServerProcess(env, log)
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()
