"""Every row of the decision table, and properties that hold whatever the body holds."""

from __future__ import annotations

import json
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing import Decision, Local, Peek, Refuse, Route, Upstream, World, decide

LOCAL = "served-here"
TEXT = [{"role": "user", "content": "hi"}]
WITH = World(local_models=frozenset({LOCAL, "alias"}), upstream=True)
WITHOUT = World(local_models=frozenset({LOCAL, "alias"}), upstream=False)


def route(kind: Route, world: World, **fields: Any) -> Decision:
    body = {"messages": TEXT} if kind == "chat" else {"prompt": "hi"}
    return decide(kind, msgspec.json.decode(json.dumps({**body, **fields}), type=Peek), world)


def outcome(decision: Decision) -> Any:
    match decision:
        case Local(reason):
            return ("local", reason)
        case Upstream(reason):
            return ("upstream", reason)
        case Refuse(error):
            return (error.status, error.code or error.param)


IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
TOOL = [{"type": "function", "function": {"name": "f"}}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["A", "B"]}}}
ONE: dict[str, Any] = {"max_tokens": 1}
L, U = "local", "upstream"
TOO_MANY = "array_above_max_length"

# (row, route, fields, with an upstream, without one)
TABLE: list[tuple[str, Route, dict[str, Any], Any, Any]] = [
    ("unknown model", "chat", {**ONE, "model": "x"}, (U, "unknown-model"), (404, "model_not_found")),
    ("model of a wrong type", "chat", {**ONE, "model": 5}, (U, "unknown-model"), (400, "invalid_type")),
    ("absent model", "chat", ONE, (L, "one-token"), (L, "one-token")),
    ("alias", "completions", {**ONE, "model": "alias"}, (L, "one-token"), (L, "one-token")),
    ("image", "chat", {**ONE, "messages": IMAGE}, (U, "media"), (400, "unsupported_value")),
    ("audio out", "chat", {**ONE, "modalities": ["text", "audio"]}, (U, "modalities"), (400, "unsupported_value")),
    ("audio", "chat", {**ONE, "audio": {"voice": "x"}}, (U, "modalities"), (400, "unsupported_value")),
    ("text out", "chat", {**ONE, "modalities": ["text"]}, (L, "one-token"), (L, "one-token")),
    ("tools", "chat", {**ONE, "tools": TOOL}, (U, "tools"), (501, "no_upstream")),
    ("tools auto", "chat", {**ONE, "tools": TOOL, "tool_choice": "auto"}, (U, "tools"), (501, "no_upstream")),
    ("tools none", "chat", {**ONE, "tools": TOOL, "tool_choice": "none"}, (L, "one-token"), (L, "one-token")),
    ("no tools", "chat", {**ONE, "tools": []}, (L, "one-token"), (L, "one-token")),
    ("functions", "chat", {**ONE, "functions": TOOL}, (U, "tools"), (501, "no_upstream")),
    ("web search", "chat", {**ONE, "web_search_options": {}}, (U, "web-search-options"), (501, "no_upstream")),
    ("prediction", "chat", {**ONE, "prediction": {}}, (U, "prediction"), (501, "no_upstream")),
    ("store", "chat", {**ONE, "store": True}, (U, "store"), (L, "one-token")),
    ("store off", "chat", {**ONE, "store": False}, (L, "one-token"), (L, "one-token")),
    ("echo in chat", "chat", {**ONE, "echo": True}, (U, "echo"), (400, "unsupported_parameter")),
    ("beam search", "completions", {**ONE, "use_beam_search": True}, (U, "beam-search"), (501, "no_upstream")),
    ("best_of 2", "completions", {**ONE, "best_of": 2}, (U, "best-of"), (501, "no_upstream")),
    ("best_of 1", "completions", {**ONE, "best_of": 1}, (L, "one-token"), (L, "one-token")),
    ("suffix", "completions", {**ONE, "suffix": "x"}, (U, "suffix"), (501, "no_upstream")),
    ("embeds", "completions", {**ONE, "prompt_embeds": "x"}, (U, "prompt-embeds"), (501, "no_upstream")),
    ("kv transfer", "chat", {**ONE, "kv_transfer_params": {}}, (U, "kv-transfer-params"), (501, "no_upstream")),
    ("own template", "chat", {**ONE, "chat_template": "x"}, (U, "chat-template"), (501, "no_upstream")),
    ("open-ended chat", "chat", {}, (U, "max-tokens"), (501, "no_upstream")),
    ("both null", "chat", {"max_tokens": None, "max_completion_tokens": None}, (U, "max-tokens"), (501, "no_upstream")),
    ("open-ended completion", "completions", {}, (U, "max-tokens"), (501, "no_upstream")),
    ("two tokens", "chat", {"max_tokens": 2}, (U, "max-tokens"), (501, "no_upstream")),
    ("new field wins", "chat", {"max_tokens": 1, "max_completion_tokens": 9}, (U, "max-tokens"), (501, "no_upstream")),
    ("newer field wins", "chat", {"max_tokens": 9, "max_completion_tokens": 1}, (L, "one-token"), (L, "one-token")),
    ("null falls back", "chat", {"max_tokens": 1, "max_completion_tokens": None}, (L, "one-token"), (L, "one-token")),
    ("only chat has it", "completions", {"max_completion_tokens": 1}, (U, "max-tokens"), (501, "no_upstream")),
    ("string", "chat", {"max_tokens": "1"}, (U, "max-tokens"), (400, "invalid_type")),
    ("true is no number", "chat", {"max_tokens": True}, (U, "max-tokens"), (400, "invalid_type")),
    ("text parts", "chat", {**ONE, "messages": PARTS}, (L, "one-token"), (L, "one-token")),
    ("n", "chat", {**ONE, "n": 4}, (L, "one-token"), (L, "one-token")),
    ("stream", "chat", {**ONE, "stream": True}, (L, "one-token"), (L, "one-token")),
    ("top 20", "chat", {**ONE, "logprobs": True, "top_logprobs": 20}, (L, "one-token"), (L, "one-token")),
    ("top 21", "chat", {**ONE, "logprobs": True, "top_logprobs": 21}, *[(400, "integer_above_max_value")] * 2),
    ("top -1", "chat", {**ONE, "logprobs": True, "top_logprobs": -1}, *[(400, "integer_below_min_value")] * 2),
    ("top alone", "chat", {**ONE, "top_logprobs": 2}, *[(400, "invalid_value")] * 2),
    ("top null", "chat", {**ONE, "top_logprobs": None}, (L, "one-token"), (L, "one-token")),
    ("logprobs 21", "completions", {**ONE, "logprobs": 21}, *[(400, "integer_above_max_value")] * 2),
    ("logprobs true", "completions", {**ONE, "logprobs": True}, (L, "one-token"), (L, "one-token")),
    ("129 named", "chat", {**ONE, "logprobs": True, "logprob_token_ids": [1] * 129}, *[(400, TOO_MANY)] * 2),
    ("echo", "completions", {**ONE, "echo": True, "logprobs": 1}, *[(L, "prompt-scoring")] * 2),
    ("echo alone", "completions", {"max_tokens": 0, "echo": True}, *[(L, "prompt-scoring")] * 2),
    ("prompt scores", "chat", {**ONE, "prompt_logprobs": 0}, *[(L, "prompt-scoring")] * 2),
    ("zero without echo", "completions", {"max_tokens": 0}, *[(400, "integer_below_min_value")] * 2),
    ("zero in chat", "chat", {"max_tokens": 0}, *[(400, "integer_below_min_value")] * 2),
    ("long echo", "completions", {"max_tokens": 5, "echo": True}, (U, "max-tokens"), (501, "no_upstream")),
    ("choice", "chat", {"guided_choice": ["A", "B"]}, *[(L, "closed-set")] * 2),
    ("choice, longer", "chat", {"structured_outputs": {"choice": ["A"]}, "max_tokens": 9}, *[(L, "closed-set")] * 2),
    ("choice and json", "chat", {"guided_choice": ["A"], "guided_json": {}}, *[(400, "invalid_value")] * 2),
    ("enum schema", "chat", {**ONE, "response_format": SCHEMA}, (U, "grammar"), (501, "no_upstream")),
    ("json object", "chat", {**ONE, "response_format": {"type": "json_object"}}, (U, "grammar"), (501, "no_upstream")),
    ("text format", "chat", {**ONE, "response_format": {"type": "text"}}, *[(L, "one-token")] * 2),
    ("regex", "chat", {**ONE, "structured_outputs": {"regex": "a|b"}}, (U, "grammar"), (501, "no_upstream")),
    ("guided regex", "completions", {**ONE, "guided_regex": "a"}, (U, "grammar"), (501, "no_upstream")),
    ("unknown fields", "chat", {**ONE, "x": 1, "reasoning_effort": "low"}, *[(L, "one-token")] * 2),
]  # fmt: skip


@pytest.mark.parametrize(
    ("row", "kind", "fields", "with_one", "without"), TABLE, ids=[f"{r}-{k}" for r, k, *_ in TABLE]
)
def test_table(row: str, kind: Route, fields: dict[str, Any], with_one: Any, without: Any) -> None:
    assert outcome(route(kind, WITH, **fields)) == with_one
    assert outcome(route(kind, WITHOUT, **fields)) == without


def test_501_is_not_retried_and_names_the_variable() -> None:
    decision = route("chat", WITHOUT, max_tokens=9)
    assert isinstance(decision, Refuse)
    assert decision.error.headers["x-should-retry"] == "false" and "ONEPASS_UPSTREAM_BASE_URL" in decision.error.message


def test_without_a_local_model() -> None:
    empty = World(local_models=frozenset(), upstream=True)
    assert outcome(route("chat", empty, max_tokens=1)) == ("upstream", "no-local-model")
    assert outcome(route("chat", World(frozenset(), upstream=False), max_tokens=1)) == (501, "no_upstream")


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 200)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
BODIES = st.dictionaries(st.sampled_from(Peek.__struct_fields__), JSON, max_size=8)


@given(st.sampled_from(get_args(Route)), BODIES)
def test_any_body_is_decided_and_an_upstream_only_adds_places_to_go(kind: Route, body: dict[str, Any]) -> None:
    peek = msgspec.json.decode(json.dumps(body), type=Peek)
    with_one, without = decide(kind, peek, WITH), decide(kind, peek, WITHOUT)
    assert not isinstance(without, Upstream)
    if isinstance(without, Local):
        assert with_one == without or with_one == Upstream("store")
    if isinstance(with_one, Refuse):
        assert isinstance(without, Refuse) and without.error.status == with_one.error.status


@given(BODIES, st.text(max_size=5), JSON)
def test_unknown_fields_decide_nothing(body: dict[str, Any], name: str, value: Any) -> None:
    if name in Peek.__struct_fields__:
        return
    plain = msgspec.json.decode(json.dumps(body), type=Peek)
    more = msgspec.json.decode(json.dumps({**body, name: value}), type=Peek)
    assert outcome(decide("chat", plain, WITH)) == outcome(decide("chat", more, WITH))
