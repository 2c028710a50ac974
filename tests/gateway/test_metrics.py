"""What is counted, and what the request log says and does not say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from backends.base import Overloaded
from gateway.app import Application
from gateway.metrics import Metrics
from tests.gateway.double import MODEL, DoublePrefill, double_app
from tests.gateway.stub_proxy import StubProxy

SECRET = "a secret prompt"
ASK = {"model": MODEL, "messages": [{"role": "user", "content": SECRET}], "max_tokens": 1}


async def series(http: httpx.AsyncClient) -> dict[tuple[str, ...], float]:
    text = (await http.get("/metrics")).text
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_local_requests_are_timed_by_stage(http: httpx.AsyncClient, backend: DoublePrefill) -> None:
    backend.cached_tokens = 3
    answer = await http.post("/v1/chat/completions", json=ASK)
    prompt_tokens = answer.json()["usage"]["prompt_tokens"]
    found = await series(http)
    for name, value in (("queue", 0.0015), ("prefill", 0.0035)):
        assert found[f"onepass_request_{name}_seconds_count", MODEL, "local"] == 1
        assert found[f"onepass_request_{name}_seconds_sum", MODEL, "local"] == pytest.approx(value)
    assert found["onepass_request_seconds_count", MODEL, "local"] == 1
    assert found["onepass_time_to_first_token_seconds_count", MODEL, "local"] == 1
    assert found["onepass_prompt_tokens_total", MODEL] == prompt_tokens
    assert found["onepass_prompt_cached_tokens_total", MODEL] == 3
    assert found["onepass_requests_total", "200", "chat", "double", "one-token"] == 1
    assert found[("onepass_requests_in_flight",)] == 1  # the scrape itself


async def test_refusals_are_counted_by_code(http: httpx.AsyncClient, backend: DoublePrefill) -> None:
    backend.fault = Overloaded("full", 1.0)
    await http.post("/v1/chat/completions", json=ASK)
    await http.post("/v1/chat/completions", json={**ASK, "n": 0})
    found = await series(http)
    assert found["onepass_refusals_total", "429", "rate_limit_exceeded"] == 1
    assert found["onepass_refusals_total", "400", "integer_below_min_value"] == 1
    assert ("onepass_time_to_first_token_seconds_count", MODEL, "local") not in found


async def test_upstream_requests_are_timed_apart(backend: DoublePrefill) -> None:
    app = double_app([backend, StubProxy(["big"])])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://double") as http:
        await http.get("/v1/models")
        for name in ("big", "invented-1", "invented-2"):
            await http.post("/v1/chat/completions", json={**ASK, "model": name})
        found = await series(http)
    assert found["onepass_upstream_first_byte_seconds_count", "big", "upstream"] == 1
    # A client cannot grow the number of series by inventing models.
    assert found["onepass_upstream_first_byte_seconds_count", "other", "upstream"] == 2
    assert not any("invented" in label for key in found for label in key)


def test_collectors_of_backends_are_shown() -> None:
    own = CollectorRegistry()
    Counter("engine_things", "x", registry=own).inc(4)

    class Forward:
        def collect(self) -> Any:
            return own.collect()

        def describe(self) -> Any:
            return []

    assert b"engine_things_total 4.0" in Metrics([Forward()]).render()


async def test_the_request_log_can_be_replayed_and_tells_no_secrets(tmp_path: Path, backend: DoublePrefill) -> None:
    path = tmp_path / "requests.jsonl"
    app: Application = double_app([backend], request_log=str(path), api_keys=("the-key",))
    headers = {"authorization": "Bearer the-key"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://double") as http:
        await http.post("/v1/chat/completions", json=ASK, headers=headers)
        await http.post("/v1/completions", json={"prompt": [SECRET, SECRET, "other"], "max_tokens": 1}, headers=headers)
        await http.post("/v1/completions", json={"prompt": SECRET, "max_tokens": 9}, headers=headers)
        await http.post("/v1/completions", json={"prompt": SECRET, "max_tokens": 1})
        await http.get("/health/ready")
    await app.runtime.stop(0.0)
    text = path.read_text()
    assert SECRET not in text and "the-key" not in text
    one, several, refused, stranger = [json.loads(line) for line in text.splitlines()]
    assert one["tokens"] == [len(backend.seen[0].token_ids)] and one["cached"] == [0]
    assert (one["tenant"], one["backend"], one["reason"], one["status"]) == ("key-1", "double", "one-token", 200)
    assert (one["queue_ms"], one["predicted_ms"], one["compute_ms"]) == (1.5, 2.5, 3.5)
    assert one["arrival"] <= several["arrival"] and one["total_ms"] > 0
    same, again, other = several["prefix_groups"]
    assert same == again != other and len(several["tokens"]) == 3
    assert (refused["status"], refused["error"], refused["tokens"]) == (501, "no_upstream", [])
    assert (stranger["status"], stranger["tenant"]) == (401, "")
