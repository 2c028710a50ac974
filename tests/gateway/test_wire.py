"""Pieces of answers: events, names of tokens, dictionaries of scores."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.base import BadLogits, TokenLogprob
from gateway.errors import InvalidRequest
from gateway.wire import sse
from gateway.wire.chat import ChatRequest
from gateway.wire.fields import decode_request
from gateway.wire.logprobs import IMPOSSIBLE, TokenNames, completion_dict, finite
from tests.gateway.double import trained_tokenizer

TOKENS = trained_tokenizer()


@given(st.lists(st.dictionaries(st.text(), st.text() | st.integers() | st.none()), max_size=5))
def test_events_come_back_as_they_went(payloads: list[dict[str, Any]]) -> None:
    text = sse.stream(payloads).decode()
    events = text.split("\n\n")
    assert events.pop() == "" and events.pop() == "data: [DONE]"
    assert all("\n" not in event and "\r" not in event for event in events)
    assert [json.loads(event.removeprefix("data: ")) for event in events] == payloads


@pytest.mark.parametrize(
    ("value", "shown"), [(-0.5, -0.5), (0.0, 0.0), (-1e9, IMPOSSIBLE), (float("-inf"), IMPOSSIBLE)]
)
def test_finite(value: float, shown: float) -> None:
    assert finite(value) == shown


def test_nan_is_never_shown() -> None:
    with pytest.raises(BadLogits):
        finite(float("nan"))


def test_names_are_distinct() -> None:
    names = TokenNames(TOKENS, byte_prefix="bytes:")
    shown = [names(i) for i in range(TOKENS.vocab_size)]
    assert len(set(shown)) == TOKENS.vocab_size and "\ufffd" not in "".join(shown)


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(-20, 0)), max_size=8, unique_by=lambda pair: pair[0]))
def test_equal_texts_lose_nothing(pairs: list[tuple[int, float]]) -> None:
    items = [TokenLogprob(token_id, value, 1) for token_id, value in pairs]

    class TwoTexts(TokenNames):
        def __init__(self) -> None:
            pass

        def __call__(self, token_id: int) -> str:
            return "ab"[token_id % 2]

    shown = completion_dict(items, TwoTexts())
    assert sorted(shown.values()) == sorted(value for _, value in pairs)
    for text in "ab":
        mine = [value for token_id, value in pairs if "ab"[token_id % 2] == text]
        assert not mine or shown[text] == max(mine)


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ('{"messages":[],"temperature":"x"}', "temperature", "invalid_type"),
        ('{"messages":[],"stop":[1]}', "stop[0]", "invalid_type"),
        ('{"messages":[],"logit_bias":{"1":"x"}}', "logit_bias[...]", "invalid_type"),
        ('{"messages":[],"stream_options":{"include_usage":1}}', "stream_options.include_usage", "invalid_type"),
        ("{}", "messages", "missing_required_parameter"),
        ("[]", None, None),
    ],
)
def test_decoding_names_the_place(body: str, param: str | None, code: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_request(body.encode(), ChatRequest)
    assert (caught.value.param, caught.value.code) == (param, code)
