"""Long texts are worked on beside the event loop, short ones do not wait for them, and an index is built off it too."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest

from backends.base import Tokenizer
from gateway.app import Application
from gateway.text_pool import INLINE_BYTES, TextPool
from tests.gateway.double import MODEL, DoublePrefill, DoubleTokenizer, double_app

LONG = "long text " * 100_000


class SlowTokenizer(DoubleTokenizer):
    """Long texts take as long as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()
        self.release = threading.Event()

    def encode(self, text: str, **options: Any) -> list[int]:
        if len(text) > INLINE_BYTES:
            self.begun.set()
            assert self.release.wait(120)
            text = text[:100]
        return super().encode(text, **options)


class SlowBackend(DoublePrefill):
    def __init__(self) -> None:
        super().__init__()
        self.slow = SlowTokenizer()

    def tokenizer(self, model: str) -> Tokenizer:
        return self.slow


@pytest.fixture
def backend() -> SlowBackend:
    return SlowBackend()


@pytest.fixture
def app(backend: SlowBackend) -> Application:
    return double_app([backend])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": LONG, "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}], "max_tokens": 1}),
        ("/tokenize", {"prompt": LONG}),
    ],
)
async def test_the_server_answers_while_a_long_text_is_tokenised(
    http: httpx.AsyncClient, backend: SlowBackend, path: str, body: dict[str, Any]
) -> None:
    long = asyncio.create_task(http.post(path, json={"model": MODEL, **body}))
    await asyncio.to_thread(backend.slow.begun.wait, 120)
    assert (await http.get("/health/live")).status_code == 200
    short = await http.post("/v1/completions", json={"prompt": "short", "max_tokens": 1})
    medium = await http.post("/v1/completions", json={"prompt": [["x", [70] * 5000][1]], "max_tokens": 1})
    assert short.status_code == medium.status_code == 200 and not long.done()
    backend.slow.release.set()
    assert (await long).status_code == 200


async def test_small_work_stays_and_big_work_goes() -> None:
    pool = TextPool()
    try:
        here = threading.current_thread().name
        names = [await pool.run(size, lambda: threading.current_thread().name) for size in (1, 10**5, 10**7)]
    finally:
        pool.close()
    assert names[0] == here and len({here, *names}) == 3


async def test_the_first_closed_set_builds_the_vocabularys_index_on_a_thread(
    http: httpx.AsyncClient, backend: SlowBackend
) -> None:
    threads: set[str] = set()
    original = backend.slow.token_bytes

    def token_bytes(token_id: int) -> bytes | None:
        threads.add(threading.current_thread().name)
        return original(token_id)

    backend.slow.token_bytes = token_bytes  # type: ignore[method-assign]
    body = {"prompt": "x", "guided_choice": ["Yes", "No"]}
    assert (await http.post("/v1/completions", json=body)).status_code == 200
    assert any(name.startswith("onepass-text") for name in threads)
