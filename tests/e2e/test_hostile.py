"""A client that means harm, or is merely broken, on real sockets: it is refused readably, and nobody else notices."""

from __future__ import annotations

import gzip
import json
import random
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtest.server_process import ServerProcess
from tests.e2e.conftest import MODEL

JSON_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
SMALL = json.dumps({"model": MODEL, "prompt": "The sky is", "max_tokens": 1, "temperature": 0, "logprobs": 5}).encode()


def framed(body: bytes, head: bytes = JSON_HEAD) -> bytes:
    return head + b"content-length: %d\r\n\r\n" % len(body) + body


def exchange(server: ServerProcess, sent: bytes) -> bytes:
    """Everything that comes back until the server closes; ``sent`` must make it close."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as s:
        s.sendall(sent)
        return b"".join(iter(lambda: s.recv(65536), b""))


def refusal_of(raw: bytes) -> tuple[int, dict[str, Any]]:
    head, _, body = raw.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


def scores(server: ServerProcess) -> Any:
    answer = httpx.post(f"{server.url}/v1/completions", content=SMALL, timeout=60)
    assert answer.status_code == 200
    return answer.json()["choices"]


def of_process(server: ServerProcess) -> tuple[int, int]:
    """Open descriptors, and resident bytes."""
    process = Path("/proc") / str(server.process.pid)
    if not process.exists():
        pytest.skip("needs /proc")
    status = (process / "status").read_text()
    resident_kib = next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]
    return len(list((process / "fd").iterdir())), int(resident_kib) * 1024


def idle(server: ServerProcess) -> None:
    end = time.monotonic() + 30
    while httpx.get(f"{server.url}/load").json()["server_load"]:
        assert time.monotonic() < end, "requests are still being answered for clients that have gone"
        time.sleep(0.05)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),
        b"NOTAMETHOD /v1/completions HTTP/1.1\r\nhost: x\r\n\r\n",
        JSON_HEAD + b"content-length: -5\r\n\r\n{}",
        JSON_HEAD + b"content-length: 99999999999999999999999\r\n\r\n{}",
        JSON_HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\n{}",
        JSON_HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        JSON_HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    ],
    ids=["tls", "method", "negative length", "huge length", "two lengths", "length and chunks", "chunk size"],
)
def test_what_is_not_http_is_refused_in_the_usual_words(server: ServerProcess, sent: bytes) -> None:
    status, error = refusal_of(exchange(server, sent))
    assert status == 400 and error["type"] == "invalid_request_error" and error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"prompt":"x","max_tokens":1,"seed":%s}' % (b"9" * 400), "seed"),
        (b'{"prompt":"x","max_tokens":1,"n":-%s}' % (b"9" * 400), "n"),
        (b'{"prompt":[%s],"max_tokens":1}' % (b"9" * 30), "prompt[0]"),
        (b'{"prompt":"\\ud800","max_tokens":1}', None),
        (b'{"prompt":"\xff","max_tokens":1}', None),
        (b'{"prompt":"x","max_tokens":1,"temperature":NaN}', None),
        (b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b',"max_tokens":1}', None),
        (json.dumps({"prompt": ["x"] * 10_000, "max_tokens": 1}).encode(), "prompt"),
        (json.dumps({"prompt": ["x"] * 2048, "max_tokens": 1, "n": 128, "logprobs": 20}).encode(), "n"),
        (
            json.dumps({"prompt": ["x " * 400] * 64, "guided_choice": [f"o{i}" for i in range(1024)]}).encode(),
            "guided_choice",
        ),
        (json.dumps({"prompt": "a " * 500_000, "guided_choice": ["aa", "aab", "aac"]}).encode(), "prompt"),
        (b'{"prompt":"x","max_tokens":1,"model":"%s"}' % (b"m" * 1_000_000), "model"),
    ],
    ids=[
        "seed", "n", "id", "surrogate", "utf-8", "nan", "deep", "prompts", "draws", "passes", "long options", "model",
    ],
)  # fmt: skip
def test_bodies_that_ask_for_too_much_or_for_nothing(server: ServerProcess, body: bytes, param: str | None) -> None:
    status, error = refusal_of(exchange(server, framed(body, JSON_HEAD + b"connection: close\r\n")))
    assert status == (404 if param == "model" else 400), error
    assert error["param"] == param and 0 < len(error["message"]) < 1100


def test_a_bomb_is_refused_and_leaves_nothing_behind(server: ServerProcess) -> None:
    bomb = gzip.compress(gzip.compress(b" " * (100 << 20)))
    head = JSON_HEAD + b"connection: close\r\n"
    status, _ = refusal_of(exchange(server, framed(bomb, head + b"content-encoding: gzip, gzip\r\n")))
    assert status == 413
    status, error = refusal_of(exchange(server, framed(bomb, head + b"content-encoding: " + b"gzip," * 500 + b"\r\n")))
    assert status == 415 and "500 content encodings" in error["message"]


def test_pipelined_requests_are_answered_in_order(server: ServerProcess) -> None:
    names = [b"first", b"second", b"third"]
    sent = b"".join(framed(SMALL, JSON_HEAD + b"x-request-id: %s\r\n" % name) for name in names)
    got = exchange(server, sent + b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    places = [got.index(b'"id":"cmpl-%s"' % name) for name in names]
    assert places == sorted(places) and got.count(b"HTTP/1.1 200") == 4


def test_clients_that_hang_up_at_any_moment_disturb_nobody(server: ServerProcess) -> None:
    """Whole or half requests, closed politely or by reset, while somebody else's answers stay bit for bit the same."""
    before = scores(server)
    rng = random.Random(7)
    idle(server)
    descriptors, _ = of_process(server)

    def hang_up(i: int) -> None:
        prompt = [rng.randrange(300, 40000) for _ in range(rng.choice([1, 40, 300]))]
        body = {"prompt": prompt, "max_tokens": 1, "logprobs": 3, "stream": bool(i % 2), "priority": (-1) ** i * 2**62}
        sent = framed(json.dumps({**body, "cache_salt": f"s{i % 9}"}).encode())
        if i % 4 == 0:
            sent = sent[: rng.randrange(1, len(sent))]
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as s:
            s.sendall(sent)
            if i % 3 == 0:
                s.recv(rng.choice([1, 200]) if i % 4 else 0)
            if i % 5 == 0:
                s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with ThreadPoolExecutor(16) as pool:
        storm = [pool.submit(hang_up, i) for i in range(150)]
        during = [scores(server) for _ in range(5)]
        for one in storm:
            one.result()
    assert all(found == before for found in during) and scores(server) == before
    idle(server)
    assert of_process(server)[0] <= descriptors + 5


def test_many_requests_do_not_make_the_process_grow(server: ServerProcess) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as http, ThreadPoolExecutor(8) as pool:

        def ask(i: int) -> int:
            body = {"prompt": f"Question {i}?", "max_tokens": 1, "logprobs": 5, "n": 2}
            return http.post("/v1/completions", json=body).status_code

        assert set(pool.map(ask, range(100))) == {200}
        _, settled = of_process(server)
        assert set(pool.map(ask, range(100, 300))) == {200}
    _, after = of_process(server)
    assert after - settled < 48 << 20


def test_an_unkeepable_deadline_is_refused_and_an_endless_one_is_not(server: ServerProcess) -> None:
    url = f"{server.url}/v1/completions"
    for deadline_ms, status in (("0.001", 429), ("1e308", 200), ("nan", 400), ("-1", 400), ("1e-320", 429)):
        answer = httpx.post(url, content=SMALL, headers={"x-onepass-deadline-ms": deadline_ms}, timeout=60)
        assert answer.status_code == status, (deadline_ms, answer.text)
        if status == 429:
            assert int(answer.headers["retry-after"]) >= 1


def test_unfinished_requests_hold_up_nobody(server: ServerProcess) -> None:
    begun = []
    try:
        for i in range(300):
            s = socket.create_connection(("127.0.0.1", server.port), timeout=60)
            begun.append(s)
            s.sendall(framed(SMALL)[: 1 + i % (len(JSON_HEAD) + 40)])
        assert len(scores(server)) == 1
        assert httpx.get(f"{server.url}/health/live").status_code == 200
    finally:
        for s in begun:
            s.close()
