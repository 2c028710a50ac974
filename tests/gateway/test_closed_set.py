"""Answers from a closed set: which way is taken, and that its numbers are those of the model."""

from __future__ import annotations

import math
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import Sampling
from gateway.closed_set import ClosedSet, plan_closed_set
from gateway.errors import InvalidRequest
from gateway.wire.vocabulary import VocabularyIndex
from tests.gateway.double import MODEL, DoublePrefill, logprobs_after, trained_tokenizer

TOKENS = trained_tokenizer()
INDEX = VocabularyIndex(TOKENS)
ASK = [{"role": "user", "content": "Is the sky blue?"}]


def plan(*options: str) -> ClosedSet:
    return plan_closed_set(options, TOKENS, INDEX, param="guided_choice")


def spelled(ids: tuple[int, ...]) -> str:
    return b"".join(TOKENS.token_bytes(i) or b"" for i in ids).decode()


async def ask(http: httpx.AsyncClient, options: list[str], **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": ASK, "structured_outputs": {"choice": options}, **fields}
    return await http.post("/v1/chat/completions", json=body)


@pytest.mark.parametrize(
    ("options", "method"),
    [
        (("Yes", "No"), "first_bytes"),
        (("Yes", "No", "Maybe", "東京"), "first_bytes"),
        (("positive",), "first_bytes"),
        ((" Paris", " blue"), "first_tokens"),
        ((" A", " B"), "first_tokens"),
        (("one two", "one three"), "full_options"),
        (("Yes", "Yes No"), "full_options"),
    ],
)
def test_the_way_follows_from_where_options_differ(options: tuple[str, ...], method: str) -> None:
    found = plan(*options)
    assert found.method == method
    assert [spelled(ids) for ids in found.option_ids] == list(options)
    assert all(spelled(leaf.token_ids) == options[leaf.option] for leaf in found.leaves)


def test_every_token_that_begins_an_option_takes_part() -> None:
    found = plan("positive", "negative")
    firsts = {leaf.token_ids[0]: leaf.option for leaf in found.leaves}
    for token_id in range(TOKENS.vocab_size):
        raw = TOKENS.token_bytes(token_id) or b""
        begins = [i for i, option in enumerate(("positive", "negative")) if option.encode().startswith(raw)]
        assert firsts.get(token_id) == (begins[0] if begins and not TOKENS.is_special(token_id) else None)


def test_a_set_that_separates_nothing_is_refused() -> None:
    for options, param in (
        ((), "guided_choice"),
        (("a", ""), "guided_choice[1]"),
        (("a", "b", "a"), "guided_choice[2]"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            plan(*options)
        assert caught.value.param == param
    with pytest.raises(InvalidRequest):
        plan(*map(str, range(2000)))


OPTION = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=8)


@settings(max_examples=200, deadline=None)
@given(st.lists(OPTION, min_size=1, max_size=6, unique=True), st.integers(0, 2**32 - 1))
def test_shares_sum_to_one_and_draws_are_options(options: list[str], seed: int) -> None:
    found = plan(*options)
    rng = np.random.default_rng(seed)
    weights = [float(w) for w in rng.normal(size=len(found.leaves)) * 5 - 5]
    choices = found.choices(
        weights,
        Sampling(n=3, temperature=1.0, seed=seed),
        max_tokens=None,
        tokenizer=TOKENS,
        top_logprobs=20,
        named=(),
    )
    for choice in choices:
        assert choice.closed_set is not None and choice.text in options and choice.finish_reason == "stop"
        report = {o["text"]: o["logprob"] for o in choice.closed_set["options"]}
        assert math.isclose(math.fsum(map(math.exp, report.values())), 1.0, abs_tol=1e-9)
        # The chosen path's probability is the product of its tokens', and each place's rivals sum to one.
        for token in choice.tokens:
            assert token.drawn in token.ranked or len(token.ranked) == 20
            shares = math.fsum(math.exp(item.logprob) for item in token.ranked)
            assert shares <= 1 + 1e-9 and (len(token.ranked) == 20 or math.isclose(shares, 1.0, abs_tol=1e-9))
        assert spelled(tuple(t.drawn.token_id for t in choice.tokens)) == choice.text


@settings(max_examples=100, deadline=None)
@given(st.lists(OPTION, min_size=2, max_size=5, unique=True), st.integers(0, 2**32 - 1))
def test_greedy_takes_the_likeliest_leaf(options: list[str], seed: int) -> None:
    found = plan(*options)
    weights = [float(w) for w in np.random.default_rng(seed).normal(size=len(found.leaves))]
    [choice] = found.choices(
        weights, Sampling(temperature=0), max_tokens=None, tokenizer=TOKENS, top_logprobs=None, named=()
    )
    assert choice.text == options[found.leaves[int(np.argmax(weights))].option]


async def test_first_bytes_sum_over_tokens(http: httpx.AsyncClient, backend: DoublePrefill) -> None:
    answer = (await ask(http, ["Yes", "No"], temperature=0, logprobs=True, top_logprobs=20)).json()
    [choice] = answer["choices"]
    row = logprobs_after(TOKENS.render_chat(ASK).token_ids, TOKENS.vocab_size)
    mass = {option: 0.0 for option in ("Yes", "No")}
    for token_id in range(TOKENS.vocab_size):
        for option in mass:
            raw = TOKENS.token_bytes(token_id) or b""
            if raw and option.encode().startswith(raw):
                mass[option] += math.exp(row[token_id])
    report = {o["text"]: o["logprob"] for o in choice["closed_set"]["options"]}
    for option, share in mass.items():
        assert math.isclose(math.exp(report[option]), share / sum(mass.values()), rel_tol=1e-9)
    assert len(backend.seen) == 1 and backend.seen[0].readout.sampling is None
    assert choice["finish_reason"] == "stop"
    shares = [math.exp(t["logprob"]) for t in choice["logprobs"]["content"][0]["top_logprobs"]]
    assert math.isclose(sum(shares), 1.0, rel_tol=1e-9)
    assert answer["usage"]["completion_tokens"] == len(choice["logprobs"]["content"])


async def test_full_options_are_scored_as_continuations(http: httpx.AsyncClient, backend: DoublePrefill) -> None:
    options = ["Yes", "Yes No", "Yes Maybe"]
    answer = (await ask(http, options, temperature=0)).json()
    prompt = TOKENS.render_chat(ASK).token_ids
    [end] = TOKENS.eos_token_ids
    scores = {}
    for option in options:
        ids = [*TOKENS.encode(option), end]
        scores[option] = sum(logprobs_after([*prompt, *ids[:i]], TOKENS.vocab_size)[ids[i]] for i in range(len(ids)))
    total = math.log(sum(map(math.exp, scores.values())))
    report = answer["choices"][0]["closed_set"]
    assert report["method"] == "full_options" and len(backend.seen) == 3
    for option in report["options"]:
        assert math.isclose(option["logprob"], scores[option["text"]] - total, rel_tol=1e-9, abs_tol=1e-12)
    assert answer["choices"][0]["message"]["content"] == max(scores, key=lambda option: scores[option])
    assert answer["usage"]["prompt_tokens"] == len(prompt)


@pytest.mark.parametrize("max_tokens", [1, 2])
async def test_what_does_not_fit_is_cut(http: httpx.AsyncClient, max_tokens: int) -> None:
    options = ["positive neutral one two", "negative"]
    answer = (await ask(http, options, temperature=0, max_tokens=max_tokens, logit_bias=_towards(options[0]))).json()
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "length" and options[0].startswith(choice["message"]["content"])
    assert answer["usage"]["completion_tokens"] == max_tokens


def _towards(option: str) -> dict[str, float]:
    return {str(token_id): 100 for token_id, _ in INDEX.prefixes(option.encode())}


async def test_too_few_tokens_to_tell_options_apart(http: httpx.AsyncClient) -> None:
    refused = await ask(http, ["one two", "one three", "four"], max_tokens=1)
    error = refused.json()["error"]
    assert refused.status_code == 400 and error["param"] == "structured_outputs.choice"
    assert "'one two'" in error["message"] and "'one three'" in error["message"] and "'four'" not in error["message"]


async def test_bias_moves_the_draw_and_not_the_report(http: httpx.AsyncClient) -> None:
    plain = (await ask(http, ["Yes", "No"], temperature=0)).json()["choices"][0]
    texts = []
    for option in ("Yes", "No"):
        pushed = (await ask(http, ["Yes", "No"], temperature=0, logit_bias=_towards(option))).json()["choices"][0]
        assert pushed["closed_set"] == plain["closed_set"]
        texts.append(pushed["message"]["content"])
    assert texts == ["Yes", "No"]


async def test_draws_follow_the_shares_and_the_seed(http: httpx.AsyncClient) -> None:
    answer = (await ask(http, ["Yes", "No"], n=100, seed=3)).json()
    again = (await ask(http, ["Yes", "No"], n=100, seed=3)).json()
    assert answer["choices"] == again["choices"]
    share = math.exp(answer["choices"][0]["closed_set"]["options"][0]["logprob"])
    drawn = sum(c["message"]["content"] == "Yes" for c in answer["choices"]) / 100
    assert abs(drawn - share) < 4 * math.sqrt(share * (1 - share) / 100) + 0.01


async def test_named_tokens_outside_the_set_are_impossible(http: httpx.AsyncClient) -> None:
    answer = await ask(http, ["Yes", "No"], logprobs=True, logprob_token_ids=[5], return_tokens_as_token_ids=True)
    listed = answer.json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert {t["token"]: t["logprob"] for t in listed}["token_id:5"] == -9999.0


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [1]},
        {"bad_words": ["x"]},
        {"repetition_penalty": 1.1},
        {"stop": "x"},
        {"stop_token_ids": [1]},
        {"min_tokens": 1},
        {"prompt_logprobs": 1},
        {"guided_choice": ["Yes"]},
        {"response_format": {"type": "json_object"}},
    ],
)
async def test_combinations_are_refused_and_not_ignored(http: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    refused = await ask(http, ["Yes", "No"], **fields)
    assert refused.status_code == 400 and refused.json()["error"]["param"].split(".")[0] == next(iter(fields))


async def test_completions_take_closed_sets_for_each_prompt(http: httpx.AsyncClient) -> None:
    body = {"prompt": ["The sky is", [70, 71]], "guided_choice": [" A", " B", " C"], "logprobs": 3, "temperature": 0}
    answer = (await http.post("/v1/completions", json=body)).json()
    for choice, ids in zip(answer["choices"], (TOKENS.encode("The sky is"), [70, 71]), strict=True):
        row = logprobs_after(ids, TOKENS.vocab_size)
        firsts = {option: row[TOKENS.encode(option)[0]] for option in body["guided_choice"]}
        assert choice["text"] == max(firsts, key=lambda option: firsts[option])
        assert choice["closed_set"]["method"] == "first_tokens"
        assert len(choice["logprobs"]["tokens"]) == len(TOKENS.encode(choice["text"]))
