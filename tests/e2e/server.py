"""The gateway as a separate process, for end-to-end tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from loadtest.server_process import ServerProcess

__all__ = ["start_server"]


def start_server(env: Mapping[str, str], log: Path | None = None) -> ServerProcess:
    """A ready server; the caller stops it. ``.url`` is its root, ``.process`` the process."""
    server = ServerProcess(env, log)
    try:
        server.wait_ready()
    except BaseException:
        server.stop()
        raise
    return server
