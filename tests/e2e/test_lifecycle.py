"""Starting, hanging up, overload of the event loop, and leaving."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from loadtest.server_process import ServerProcess, free_port
from tests.e2e.conftest import MODEL
from tests.e2e.server import start_server


def metric(server: ServerProcess, name: str) -> float:
    """The sum over all labels of one series."""
    text = httpx.get(f"{server.url}/metrics").text
    return sum(s.value for f in text_string_to_metric_families(text) for s in f.samples if s.name == name)


def wait_until(happened, timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def body_of(length: int, seed: int) -> dict:
    rng = random.Random(seed)
    prompt = [rng.randrange(300, 40000) for _ in range(length)]
    return {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 1}


def post(server: ServerProcess, body: dict, timeout: float = 120.0) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=timeout)


def hang_up_after_sending(server: ServerProcess, body: dict) -> socket.socket:
    """A request on a bare socket, so that closing it is all that happens."""
    payload = json.dumps(body).encode()
    s = socket.create_connection(("127.0.0.1", server.port))
    s.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: "
        + str(len(payload)).encode()
        + b"\r\n\r\n"
        + payload
    )
    return s


def test_hanging_up_stops_the_work(server: ServerProcess) -> None:
    before = metric(server, "onepass_cancelled_total")
    sockets = [hang_up_after_sending(server, body_of(7500, seed)) for seed in range(4)]
    wait_until(lambda: metric(server, "onepass_jobs_in_engine") == 4)
    for s in sockets:
        s.close()
    wait_until(lambda: metric(server, "onepass_cancelled_total") == before + 4)
    wait_until(lambda: metric(server, "onepass_jobs_in_engine") == 0)
    answer = post(server, body_of(50, 99))
    assert answer.status_code == 200
    # Far less than even one of the dead prompts would have taken.
    assert float(answer.headers["x-onepass-queue-ms"]) < 1000


def test_short_prompts_overtake_long_ones(server: ServerProcess) -> None:
    done: list[tuple[float, str]] = []

    def ask(kind: str, length: int, seed: int) -> None:
        assert post(server, body_of(length, seed)).status_code == 200
        done.append((time.monotonic(), kind))

    with ThreadPoolExecutor(16) as pool:
        for i in range(4):
            pool.submit(ask, "long", 1500, 200 + i)
        wait_until(lambda: metric(server, "onepass_jobs_in_engine") == 4)
        for i in range(12):
            pool.submit(ask, "short", 128, 300 + i)
    order = [kind for _, kind in sorted(done)]
    assert len(order) == 16
    # All short ones are back before the second of the long ones.
    assert order[:13].count("short") == 12


def test_health_answers_while_five_megabytes_are_tokenised(server: ServerProcess) -> None:
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randrange(2, 9))) for _ in range(5000)]
    text = " ".join(rng.choices(words, k=800_000))[: 5 << 20]
    answers: list[int] = []
    threads = [
        threading.Thread(
            target=lambda: answers.append(
                httpx.post(
                    f"{server.url}/v1/chat/completions",
                    json={"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 1},
                    timeout=120,
                ).status_code
            )
        ),
        threading.Thread(target=lambda: answers.append(post(server, body_of(3000, 5)).status_code)),
    ]
    for t in threads:
        t.start()
    latencies = []
    with httpx.Client(base_url=server.url) as http:
        while any(t.is_alive() for t in threads):
            began = time.perf_counter()
            assert http.get("/health/live").status_code == 200
            latencies.append(time.perf_counter() - began)
            time.sleep(0.005)
    assert sorted(answers) == [200, 400]
    assert len(latencies) > 20
    assert statistics.quantiles(latencies, n=100)[98] < 0.2


def test_ready_means_loaded_and_warm(base_env: dict[str, str], tmp_path: Path) -> None:
    server = ServerProcess(base_env, tmp_path / "log")
    try:
        seen = []
        while not seen or seen[-1] != 200:
            try:
                seen.append(httpx.get(f"{server.url}/health/ready").status_code)
                assert httpx.get(f"{server.url}/health/live").status_code == 200
            except httpx.TransportError:
                assert server.process.poll() is None
            time.sleep(0.02)
        assert set(seen) == {503, 200}
        first = {n: float(post(server, body_of(n, n)).headers["x-onepass-compute-ms"]) for n in (8, 128, 700)}
        again = {
            n: statistics.median(
                float(post(server, body_of(n, n * 10 + i)).headers["x-onepass-compute-ms"]) for i in range(3)
            )
            for n in first
        }
        assert all(first[n] < 2 * again[n] + 20 for n in first), (first, again)
        assert metric(server, "onepass_compilations_after_ready_total") == 0
        log = (tmp_path / "log").read_text()
        assert "loading weights" in log and "ready" in log and "cpu" in log
    finally:
        assert server.stop() == 0


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"ONEPASS_DEVICE": "cuda"}, ("cuda", "ONEPASS_DEVICE")),
        ({"ONEPASS_DTYPE": "int3"}, ("ONEPASS_DTYPE",)),
        ({"ONEPASS_MODEL": "/nowhere/model.gguf"}, ("/nowhere/model.gguf",)),
        ({"ONEPASS_PORT": "eighty"}, ("ONEPASS_PORT",)),
    ],
)
def test_what_cannot_start_says_so_in_one_line(env: dict[str, str], words: tuple[str, ...]) -> None:
    full = {**os.environ, "ONEPASS_PORT": str(free_port()), **env}
    run = subprocess.run(
        [sys.executable, "-m", "gateway.cli", "serve"], env=full, capture_output=True, text=True, timeout=90
    )
    output = run.stdout + run.stderr
    assert run.returncode not in (0, -9) and "Traceback" not in output
    assert any(all(w in line for w in words) for line in output.splitlines()), output


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGINT])
def test_leaving_finishes_what_runs_and_refuses_what_waits(base_env: dict[str, str], which: signal.Signals) -> None:
    server = start_server({**base_env, "ONEPASS_SCHEDULER": "fcfs"})
    statuses: list[tuple[int, str]] = []

    def ask(seed: int) -> None:
        answer = post(server, body_of(1200, seed))
        statuses.append((answer.status_code, answer.text))

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(3)]
    try:
        for t in threads:
            t.start()
        wait_until(lambda: metric(server, "onepass_jobs_in_engine") == 3)
        began = time.monotonic()
        server.process.send_signal(which)
        for t in threads:
            t.join(30)
        assert server.process.wait(15) == 0
        assert time.monotonic() - began < 11
    finally:
        server.stop()
    assert sorted(status for status, _ in statuses) == [200, 503, 503]
    refused = [json.loads(text)["error"] for status, text in statuses if status == 503]
    assert all(error["code"] == "overloaded" and error["message"] for error in refused)


def test_what_nobody_waits_for_any_more_does_not_hold_up_the_leaving(base_env: dict[str, str]) -> None:
    server = start_server({**base_env, "ONEPASS_GRACE_S": "60"})
    s = hang_up_after_sending(server, body_of(8000, 1))
    try:
        wait_until(lambda: metric(server, "onepass_jobs_in_engine") == 1)
        server.process.send_signal(signal.SIGTERM)
        s.close()
        assert server.process.wait(15) == 0
    finally:
        s.close()
        server.stop()


def test_readiness_turns_at_once_and_a_second_signal_ends_at_once(base_env: dict[str, str]) -> None:
    server = start_server({**base_env, "ONEPASS_GRACE_S": "60"})
    s = hang_up_after_sending(server, body_of(8000, 1))
    try:
        wait_until(lambda: metric(server, "onepass_jobs_in_engine") == 1)
        server.process.send_signal(signal.SIGTERM)

        def status() -> int:
            try:
                with urllib.request.urlopen(f"{server.url}/health/ready", timeout=2) as answer:
                    return answer.status
            except urllib.error.HTTPError as error:
                return error.code
            except (urllib.error.URLError, OSError):
                return 503  # the socket no longer takes connections

        wait_until(lambda: status() == 503, 2.0)
        assert server.process.poll() is None  # the long prompt is still computed
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(5)
    finally:
        s.close()
        server.stop()
