"""Whatever a body holds, the answer is right or is an error that OpenAI's clients can read; never a fault of ours."""

from __future__ import annotations

import json
from typing import Any, get_type_hints

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion

from gateway.routing import Peek
from gateway.wire.chat import ChatRequest
from gateway.wire.completions import CompletionRequest
from gateway.wire.tokenization import DetokenizeRequest, TokenizeRequest
from tests.gateway.double import MODEL, DoublePrefill, double_app, trained_tokenizer

VOCABULARY = trained_tokenizer().vocab_size

TEXT = st.text(max_size=6)
ODD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 130)
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
IDS = st.lists(st.integers(-1, VOCABULARY), max_size=4)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]), "content": TEXT}
)
# Values that are often right, so that the deeper layers see something.
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from([MODEL, "org/double", "nobody"]),
    "messages": st.lists(MESSAGE, max_size=3),
    "prompt": TEXT | IDS | st.lists(TEXT, max_size=3) | st.lists(IDS, max_size=3),
    "max_tokens": st.integers(0, 2),
    "n": st.integers(1, 3),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1),
    "seed": st.integers(-5, 5),
    "logprobs": st.booleans() | st.integers(0, 21),
    "top_logprobs": st.integers(0, 21),
    "prompt_logprobs": st.integers(0, 2),
    "logprob_token_ids": IDS,
    "allowed_token_ids": IDS,
    "stop_token_ids": IDS,
    "logit_bias": st.dictionaries(st.integers(0, VOCABULARY).map(str), st.floats(-100, 100), max_size=2),
    "stop": TEXT | st.lists(TEXT, max_size=3),
    "bad_words": st.lists(TEXT, max_size=2),
    "guided_choice": st.lists(TEXT, max_size=4),
    "structured_outputs": st.fixed_dictionaries({"choice": st.lists(TEXT, max_size=4)}),
    "echo": st.booleans(),
    "return_token_ids": st.booleans(),
    "return_tokens_as_token_ids": st.booleans(),
    "truncate_prompt_tokens": st.integers(-1, 3),
    "add_generation_prompt": st.booleans(),
    "continue_final_message": st.booleans(),
    "tokens": IDS,
}


def bodies(*kinds: type) -> st.SearchStrategy[dict[str, Any]]:
    names = sorted({name for kind in kinds for name in get_type_hints(kind)} - {"stream", "stream_options"})
    field = st.sampled_from(names).flatmap(
        lambda name: st.tuples(st.just(name), LIKELY[name] | ODD if name in LIKELY else ODD)
    )
    return st.lists(field, max_size=6).map(dict)


async def send(path: str, body: dict[str, Any]) -> httpx.Response:
    app = double_app([DoublePrefill()])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://double") as http:
        return await http.post(path, content=json.dumps(body).encode())


def check(answer: httpx.Response, body: dict[str, Any], kind: type[ChatCompletion] | type[Completion] | None) -> None:
    assert answer.status_code in (200, 400, 404, 501), (body, answer.text)
    found = answer.json()
    if answer.status_code == 200:
        if body.get("add_generation_prompt") is False and kind is ChatCompletion:
            # The answer goes on with the last message, whoever's it is; OpenAI has no such answers.
            for choice in found["choices"]:
                choice["message"]["role"] = "assistant"
        if kind is not None:
            kind.model_validate(found, strict=True)
        assert "NaN" not in answer.text and "Infinity" not in answer.text
        return
    error = found["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert error["param"] is None or isinstance(error["param"], str)
    if answer.status_code == 400:
        assert error["type"] == "invalid_request_error"


MANY = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@MANY
@given(bodies(Peek, ChatRequest), st.booleans())
async def test_chat(body: dict[str, Any], whole: bool) -> None:
    if whole:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1} | body
    check(await send("/v1/chat/completions", body), body, ChatCompletion)


@MANY
@given(bodies(Peek, CompletionRequest), st.booleans())
async def test_completions(body: dict[str, Any], whole: bool) -> None:
    if whole:
        body = {"prompt": "hi", "max_tokens": 1} | body
    check(await send("/v1/completions", body), body, Completion)


@MANY
@given(bodies(TokenizeRequest))
async def test_tokenize(body: dict[str, Any]) -> None:
    check(await send("/tokenize", body), body, None)


@MANY
@given(bodies(DetokenizeRequest))
async def test_detokenize(body: dict[str, Any]) -> None:
    check(await send("/detokenize", body), body, None)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=40), st.sampled_from(["gzip", "deflate", "br", "zstd", "gzip, br", "x", ""]))
async def test_bytes(raw: bytes, coding: str) -> None:
    app = double_app([DoublePrefill()])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://double") as http:
        answer = await http.post("/v1/completions", content=raw, headers={"content-encoding": coding})
    assert answer.status_code in (400, 415), answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty"])
@pytest.mark.parametrize("value", ["1e400", "-1e400", "1e308"])
async def test_numbers_beyond_floats(name: str, value: str) -> None:
    app = double_app([DoublePrefill()])
    raw = f'{{"prompt":"x","max_tokens":1,"{name}":{value}}}'.encode()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://double") as http:
        answer = await http.post("/v1/completions", content=raw)
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("name", ["n", "seed", "top_k", "priority", "min_tokens", "truncate_prompt_tokens"])
@pytest.mark.parametrize("value", [f"{sign}{'9' * digits}" for sign in ("", "-") for digits in (30, 400, 5000)])
async def test_integers_beyond_floats(name: str, value: str) -> None:
    raw = f'{{"prompt":"x","max_tokens":1,"{name}":{value}}}'.encode()
    app = double_app([DoublePrefill()])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://double") as http:
        answer = await http.post("/v1/completions", content=raw)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == name and len(error["message"]) < 1100


async def test_messages_do_not_repeat_megabytes() -> None:
    app = double_app([DoublePrefill()])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://double") as http:
        answer = await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, "model": "m" * 2_000_000})
    assert answer.status_code == 404
    assert len(answer.content) < 2000
    assert answer.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize("role", [["user"], {}, {"a": 1}, 5, None, True, "user ", ""])
async def test_a_role_is_one_of_the_known_texts(route: str, role: Any) -> None:
    answer = await send(route, {"messages": [{"role": role, "content": "x"}], "max_tokens": 1})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "messages[0].role"


async def test_tokenising_a_conversation_checks_what_answering_it_checks() -> None:
    messages = [{"role": "user", "content": "x"}]
    answer = await send("/tokenize", {"messages": messages, "continue_final_message": True})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "continue_final_message"


@pytest.mark.parametrize("key", ["1_0", " 5", "5 ", "+5", "\u0665", "5.0", "", "0x5", "9" * 5000, "-1", "99999999"])
async def test_keys_of_logit_bias_are_plain_ids(key: str) -> None:
    answer = await send("/v1/completions", {"prompt": "x", "max_tokens": 1, "logit_bias": {key: 1}})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == f"logit_bias.{key[:32]}"
