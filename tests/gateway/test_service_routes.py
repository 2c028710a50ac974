"""Health, readiness, models, tokens: what stands around the work."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from backends.base import BackendStatus
from tests.gateway.double import END, MODEL, DoublePrefill, trained_tokenizer

TOKENS = trained_tokenizer()
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("state", "live", "ready"),
    [
        (BackendStatus(ready=True), 200, 200),
        (BackendStatus(ready=False, message="loading 40 %"), 200, 503),
        (BackendStatus(ready=False, alive=False, message="out of memory"), 503, 503),
    ],
)
async def test_health(
    http: httpx.AsyncClient, backend: DoublePrefill, state: BackendStatus, live: int, ready: int
) -> None:
    backend.state = state
    assert (await http.get("/health/live")).status_code == live
    assert (await http.get("/health")).status_code == live == (await http.get("/ping")).status_code
    answer = await http.get("/health/ready")
    assert answer.status_code == ready and answer.json()["backends"]["double"]["message"] == state.message
    assert (await http.get("/health")).content == b""


async def test_version_and_load(http: httpx.AsyncClient) -> None:
    assert (await http.get("/version")).json()["version"]
    assert (await http.get("/load")).json() == {"server_load": 0}


async def test_models(http: httpx.AsyncClient) -> None:
    listed = (await http.get("/v1/models")).json()
    assert listed["object"] == "list" and [m["id"] for m in listed["data"]] == [MODEL, "org/double"]
    one = (await http.get("/v1/models/org/double")).json()
    assert one == {
        "id": "org/double", "object": "model", "created": 7, "owned_by": "onepass", "max_model_len": 4096,
    }  # fmt: skip
    missing = await http.get("/v1/models/other")
    assert missing.status_code == 404 and missing.json()["error"]["param"] == "model"


async def test_what_is_known_only_once_loaded_is_not_kept_from_before(
    http: httpx.AsyncClient, backend: DoublePrefill
) -> None:
    backend.state, backend.max_model_len = BackendStatus(ready=False), 0
    assert (await http.get(f"/v1/models/{MODEL}")).json()["max_model_len"] is None
    backend.state, backend.max_model_len = BackendStatus(ready=True), 99
    assert (await http.get(f"/v1/models/{MODEL}")).json()["max_model_len"] == 99


async def test_tokenize_and_back(http: httpx.AsyncClient) -> None:
    text = "The capital 🎉 of France"
    answer = (await http.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
    ids = TOKENS.encode(text)
    assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (ids, len(ids), 4096)
    assert answer["token_strs"] == [TOKENS.token_text(i) for i in ids]
    back = (await http.post("/detokenize", json={"model": MODEL, "tokens": ids})).json()
    assert back == {"prompt": text}
    plain = (await http.post("/tokenize", json={"prompt": text})).json()
    assert plain["token_strs"] is None


async def test_tokenize_messages_as_chat_does(http: httpx.AsyncClient) -> None:
    for more, options in (({}, {}), ({"add_generation_prompt": False}, {"add_generation_prompt": False})):
        answer = (await http.post("/tokenize", json={"messages": MESSAGES, **more})).json()
        assert answer["tokens"] == TOKENS.render_chat(MESSAGES, **options).token_ids


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"model": "other", "prompt": "x"}, 404, "model"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [1, 10**6]}, 400, "tokens[1]"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens[0]"),
    ],
)
async def test_tokens_refused(http: httpx.AsyncClient, path: str, body: Any, status: int, param: str) -> None:
    answer = await http.post(path, json=body)
    assert answer.status_code == status and answer.json()["error"]["param"] == param


async def test_tokenizer_info(http: httpx.AsyncClient) -> None:
    assert (await http.get("/tokenizer_info")).json()["eos_token"] == END


async def test_tokens_of_a_model_that_is_not_loaded(http: httpx.AsyncClient, backend: DoublePrefill) -> None:
    backend.state = BackendStatus(ready=False, message="loading")
    for path in ("/tokenize", "/detokenize"):
        assert (await http.post(path, json={"prompt": "x", "tokens": [1]})).status_code == 503
    assert (await http.get("/tokenizer_info")).status_code == 503
