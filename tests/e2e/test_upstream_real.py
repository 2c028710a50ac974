"""What the gateway passes on, compared with asking the same upstream directly. The upstream is llama.cpp's server."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from loadtest.server_process import ServerProcess
from tests.e2e import llama_upstream
from tests.e2e.conftest import MODEL as LOCAL
from tests.e2e.llama_upstream import LlamaServer
from tests.e2e.server import start_server

pytestmark = pytest.mark.slow

UPSTREAM = llama_upstream.MODEL
COUNT: list[Any] = [{"role": "user", "content": "Name three colours."}]
STORY: list[Any] = [{"role": "user", "content": "Tell a very long story about a river."}]


@pytest.fixture(scope="module")
def llama(builtin_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaServer]:
    server = LlamaServer(builtin_gguf, tmp_path_factory.mktemp("llama") / "log")
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def gateway(llama: LlamaServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Without an engine of its own: all that it does is pass on."""
    env = {"ONEPASS_BACKENDS": "upstream", "ONEPASS_UPSTREAM_BASE_URL": f"{llama.url}/v1"}
    process = start_server(env, tmp_path_factory.mktemp("gateway") / "log")
    yield process
    assert process.stop() == 0


@pytest.fixture
def sdk(gateway: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0, timeout=300) as client:
        yield client


def ask(root: str, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{root}{path}", json=body, timeout=300)


def ran_where(answer: Any) -> tuple[str, str]:
    return answer.headers["x-onepass-backend"], answer.headers["x-onepass-reason"]


def without_identity(answer: httpx.Response) -> dict[str, Any]:
    """A JSON answer but for what differs between any two requests."""
    return {key: value for key, value in answer.json().items() if key not in ("id", "created")}


def test_one_base_url_generates_there_and_reads_here(llama: LlamaServer, tmp_path: Path) -> None:
    # The engine shares the machine with the upstream: a short context and one thread make it ready soon all the same.
    env = {"ONEPASS_MAX_MODEL_LEN": "256", "OMP_NUM_THREADS": "1", "ONEPASS_UPSTREAM_BASE_URL": f"{llama.url}/v1"}
    server = start_server(env, tmp_path / "log")
    try:
        with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=300) as sdk:
            ask_raw = sdk.chat.completions.with_raw_response.create
            there = ask_raw(model=UPSTREAM, messages=COUNT, max_tokens=12, temperature=0)
            assert ran_where(there) == ("upstream", "unknown-model")
            answer = there.parse()
            assert answer.choices[0].message.content and answer.usage and answer.usage.completion_tokens == 12
            here = ask_raw(model=LOCAL, messages=COUNT, max_tokens=1, temperature=0)
            assert ran_where(here) == ("prefill-only", "one-token")
            long = ask_raw(model=LOCAL, messages=COUNT, max_tokens=3, temperature=0)
            assert ran_where(long) == ("upstream", "max-tokens")
            assert {UPSTREAM, LOCAL} <= {model.id for model in sdk.models.list()}
    finally:
        assert server.stop() == 0


def test_an_answer_equals_the_direct_one(gateway: ServerProcess, llama: LlamaServer) -> None:
    body = {"model": UPSTREAM, "messages": COUNT, "max_tokens": 16, "temperature": 0, "unknown": {"kept": None}}
    direct, passed = (ask(root, "/v1/chat/completions", body) for root in (llama.url, gateway.url))
    assert without_identity(direct) == without_identity(passed)
    assert list(direct.json()) == list(passed.json())
    added = {"x-onepass-backend", "x-onepass-reason"}
    assert set(passed.headers) - added == set(direct.headers)


def test_embeddings_are_the_same_bytes(gateway: ServerProcess, llama: LlamaServer) -> None:
    body = {"model": UPSTREAM, "input": ["one pass", "and another"]}
    direct, passed = (ask(root, "/v1/embeddings", body) for root in (llama.url, gateway.url))
    assert passed.headers["x-onepass-reason"] == "other-route"
    assert direct.status_code == passed.status_code == 200
    assert direct.content == passed.content


def test_an_error_is_the_upstreams_own(gateway: ServerProcess, llama: LlamaServer) -> None:
    body = {"model": UPSTREAM, "messages": "not a list", "max_tokens": 5}
    direct, passed = (ask(root, "/v1/chat/completions", body) for root in (llama.url, gateway.url))
    assert direct.status_code == passed.status_code >= 400
    assert direct.content == passed.content
    assert passed.headers["content-type"] == direct.headers["content-type"]


def test_a_stream_equals_the_direct_one(gateway: ServerProcess, llama: LlamaServer, sdk: OpenAI) -> None:
    body = {"model": UPSTREAM, "messages": COUNT, "max_tokens": 16, "temperature": 0, "stream": True}
    direct, passed = (ask(root, "/v1/chat/completions", body).text for root in (llama.url, gateway.url))

    def events(text: str) -> list[Any]:
        data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        assert data.pop() == "[DONE]"
        return [{k: v for k, v in json.loads(line).items() if k not in ("id", "created")} for line in data]

    assert events(direct) == events(passed)
    stream = sdk.chat.completions.create(model=UPSTREAM, messages=COUNT, max_tokens=16, temperature=0, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    whole = sdk.chat.completions.create(model=UPSTREAM, messages=COUNT, max_tokens=16, temperature=0)
    assert text == whole.choices[0].message.content


def test_hanging_up_stops_the_upstream(llama: LlamaServer, sdk: OpenAI) -> None:
    """It answers one request at a time: the next would wait for some 1,900 tokens if nothing stopped."""
    before = llama.log().count("Disconnected from client")
    stream = sdk.chat.completions.create(model=UPSTREAM, messages=STORY, max_tokens=1900, temperature=0, stream=True)
    received = 0
    for chunk in stream:
        received += bool(chunk.choices[0].delta.content)
        if received == 3:
            break
    stream.close()
    began = time.monotonic()
    answer = sdk.chat.completions.create(model=UPSTREAM, messages=COUNT, max_tokens=3, temperature=0)
    assert answer.usage and answer.usage.completion_tokens == 3
    end = time.monotonic() + 20
    while llama.log().count("Disconnected from client") == before:
        assert time.monotonic() < end, f"not stopped; the next answer took {time.monotonic() - began:.1f} s"
        time.sleep(0.05)


def test_an_upstream_that_is_not_there() -> None:
    server = start_server({"ONEPASS_BACKENDS": "upstream", "ONEPASS_UPSTREAM_BASE_URL": "http://127.0.0.1:1"})
    try:
        answer = ask(server.url, "/v1/chat/completions", {"model": UPSTREAM, "messages": COUNT, "max_tokens": 5})
        assert answer.status_code == 502 and answer.json()["error"]["code"] == "upstream_unreachable"
        assert answer.headers["x-onepass-backend"] == "gateway"
    finally:
        assert server.stop() == 0
