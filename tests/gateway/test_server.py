"""The server process: real sockets, real signals, exit statuses."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from gateway.cli import main

ROOT = Path(__file__).parents[2]
BODY = json.dumps({"prompt": "hello", "max_tokens": 1}).encode()

# Serves the formula in place of a model; HOLD makes prefills wait for a file to appear.
SCRIPT = """
import asyncio, os, sys
from pathlib import Path
import gateway.app, gateway.server
from tests.gateway.double import DoublePrefill

class Held(DoublePrefill):
    async def prefill(self, requests):
        release = os.environ.get("HOLD")
        if release:
            Path(release + ".begun").touch()
            while not Path(release).exists():
                await asyncio.sleep(0.01)
        return await super().prefill(requests)

gateway.app.load_backends = lambda settings, env: [Held()]
sys.exit(gateway.server.serve(os.environ))
"""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


class Served:
    def __init__(self, env: Mapping[str, str]) -> None:
        self.url = f"http://127.0.0.1:{env['ONEPASS_PORT']}"
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONPATH": str(ROOT), **env},
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )

    def status(self, path: str) -> int:
        try:
            with urllib.request.urlopen(self.url + path, timeout=5) as answer:
                status: int = answer.status
                return status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def complete(self) -> int:
        request = urllib.request.Request(
            f"{self.url}/v1/completions", data=BODY, headers={"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                status: int = answer.status
                return status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def until(self, path: str, status: int) -> None:
        end = time.monotonic() + 120
        while self.status(path) != status:
            assert self.process.poll() is None and time.monotonic() < end
            time.sleep(0.02)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Served, Path]]:
    release = tmp_path / "release"
    server = Served({"ONEPASS_PORT": str(free_port()), "HOLD": str(release)})
    try:
        server.until("/health/ready", 200)
        yield server, release
    finally:
        server.process.kill()
        server.process.wait()
        if server.process.stderr:
            server.process.stderr.close()


def begin_request(server: Served, release: Path) -> tuple[threading.Thread, list[int]]:
    statuses: list[int] = []
    thread = threading.Thread(target=lambda: statuses.append(server.complete()))
    thread.start()
    begun = Path(f"{release}.begun")
    end = time.monotonic() + 120
    while not begun.exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    return thread, statuses


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_lets_running_work_finish(served: tuple[Served, Path], number: signal.Signals) -> None:
    server, release = served
    thread, statuses = begin_request(server, release)
    server.process.send_signal(number)
    server.until("/health/ready", 503)
    assert server.status("/health/live") == 200
    assert server.complete() == 503
    release.touch()
    thread.join()
    assert statuses == [200] and server.process.wait(120) == 0


def test_a_second_signal_ends_it(served: tuple[Served, Path]) -> None:
    server, release = served
    thread, statuses = begin_request(server, release)
    server.process.send_signal(signal.SIGTERM)
    server.until("/health/ready", 503)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(120) not in (0, None)
    thread.join()
    assert statuses == [0]


def test_work_beyond_the_grace_time_is_cut(tmp_path: Path) -> None:
    release = tmp_path / "never"
    server = Served({"ONEPASS_PORT": str(free_port()), "HOLD": str(release), "ONEPASS_GRACE_S": "0.2"})
    try:
        server.until("/health/ready", 200)
        thread, statuses = begin_request(server, release)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(120) == 0
        thread.join()
        assert statuses == [503]
    finally:
        server.process.kill()
        _, log = server.process.communicate()
    assert "Traceback" not in log


def test_score_asks_a_running_server(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = Served({"ONEPASS_PORT": str(free_port()), "ONEPASS_API_KEYS": "the-key"})
    try:
        server.until("/health/ready", 200)
        assert main(["score", "hello", "--choices", "Yes,No", "--url", f"{server.url}/v1"]) == 1
        assert "401" in capsys.readouterr().err
        monkeypatch.setenv("ONEPASS_API_KEY", "the-key")
        assert main(["score", "hello", "--choices", "Yes,No", "--url", server.url]) == 0
        assert len(capsys.readouterr().out.splitlines()) == 2
    finally:
        server.process.kill()
        server.process.communicate()


def test_a_taken_port_is_one_line() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        server = Served({"ONEPASS_PORT": str(s.getsockname()[1])})
        _, log = server.process.communicate(timeout=60)
    assert server.process.returncode == 1
    [line] = log.strip().splitlines()
    assert "cannot listen on 127.0.0.1" in line and "in use" in line


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"ONEPASS_PORT": "eighty"}, "ONEPASS_PORT"),
        ({"ONEPASS_HOST": "0.0.0.0", "ONEPASS_PORT": "0"}, "ONEPASS_ALLOW_OPEN"),
        ({"ONEPASS_PORT": "0", "ONEPASS_REQUEST_LOG": "/nowhere/at/all"}, "ONEPASS_REQUEST_LOG"),
    ],
)
def test_settings_that_cannot_be_used_are_one_line_and_status_two(env: dict[str, str], words: str) -> None:
    server = Served(env)
    _, log = server.process.communicate(timeout=60)
    assert server.process.returncode == 2
    [line] = log.strip().splitlines()
    assert words in line
