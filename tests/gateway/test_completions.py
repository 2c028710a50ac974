"""POST /v1/completions: forms of a prompt, echo, scores as harnesses read them."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion

from tests.gateway.double import END, MODEL, DoublePrefill, logprobs_after, trained_tokenizer

TOKENS = trained_tokenizer()
TEXT = "The capital of France is 東京 🎉 naïve"


async def ask(http: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": TEXT, "max_tokens": 1, **fields}
    return await http.post("/v1/completions", json={k: v for k, v in body.items() if v is not ...})


async def test_shape_and_numbers(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt=TEXT, max_tokens=1, logprobs=3, temperature=0)
    Completion.model_validate(answer.model_dump(), strict=True)
    row = logprobs_after(TOKENS.encode(TEXT), TOKENS.vocab_size)
    best = sorted(range(len(row)), key=lambda i: -row[i])[:3]
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason, choice.index) == (TOKENS.token_text(best[0]), "length", 0)
    scores = choice.logprobs
    assert scores and scores.top_logprobs and scores.token_logprobs
    assert list(scores.top_logprobs[0].values()) == [row[i] for i in best]
    assert scores.token_logprobs == [row[best[0]]] and scores.text_offset == [0]
    assert answer.object == "text_completion" and answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 1


async def test_four_forms_of_a_prompt(http: httpx.AsyncClient) -> None:
    ids = TOKENS.encode(TEXT)
    answers = [
        (await ask(http, prompt=form, logprobs=2, temperature=0)).json()["choices"]
        for form in (TEXT, [TEXT], ids, [ids])
    ]
    assert all(choices == answers[0] for choices in answers)
    mixed = (await ask(http, prompt=[ids[:2], TEXT], n=2, temperature=0)).json()
    assert [c["index"] for c in mixed["choices"]] == [0, 1, 2, 3]
    assert mixed["choices"][2]["text"] == mixed["choices"][3]["text"] == answers[0][0]["text"]
    assert mixed["usage"] == {
        "prompt_tokens": 2 + len(ids), "completion_tokens": 4, "total_tokens": 6 + len(ids),
        "prompt_tokens_details": {"cached_tokens": 0}, "completion_tokens_details": None,
    }  # fmt: skip


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("form", ["text", "ids"])
async def test_echo_scores_every_prompt_token(http: httpx.AsyncClient, max_tokens: int, form: str) -> None:
    ids = TOKENS.encode(TEXT)
    prompt = TEXT if form == "text" else [ids]
    answer = (await ask(http, prompt=prompt, max_tokens=max_tokens, echo=True, logprobs=2, temperature=0)).json()
    [choice] = answer["choices"]
    scores = choice["logprobs"]
    assert {len(scores[k]) for k in ("tokens", "token_logprobs", "top_logprobs", "text_offset")} == {
        len(ids) + max_tokens
    }
    assert scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None
    for i in range(1, len(ids)):
        row = logprobs_after(ids[:i], TOKENS.vocab_size)
        value, listed = scores["token_logprobs"][i], scores["top_logprobs"][i]
        assert value == row[ids[i]] and value in listed.values()
        # What a harness takes for greedy.
        assert (value == max(listed.values())) == (int(row.argmax()) == ids[i])
        assert len(listed) in (2, 3)
    assert choice["text"].startswith(TEXT) and (choice["text"] == TEXT) == (max_tokens == 0)
    assert answer["usage"]["completion_tokens"] == max_tokens
    assert choice["finish_reason"] == "length"


async def test_offsets_count_characters_of_the_text(http: httpx.AsyncClient) -> None:
    scores = (await ask(http, echo=True, logprobs=0)).json()["choices"][0]["logprobs"]
    ids = TOKENS.encode(TEXT)
    for i, (token_id, offset) in enumerate(zip(ids, scores["text_offset"], strict=False)):
        raw = TOKENS.token_bytes(token_id) or b""
        try:
            piece = raw.decode()
        except UnicodeDecodeError:
            continue
        assert TEXT[offset : offset + len(piece)] == piece, i
    assert scores["text_offset"][-1] == len(TEXT)


async def test_token_names_keep_every_byte(http: httpx.AsyncClient) -> None:
    text = "👩‍👩‍👧‍👦 鬱 ẞ"
    scores = (await ask(http, prompt=text, echo=True, logprobs=0, max_tokens=0)).json()["choices"][0]["logprobs"]
    raw = b"".join(
        bytes.fromhex(name.removeprefix("bytes:").replace("\\x", "")) if name.startswith("bytes:") else name.encode()
        for name in scores["tokens"]
    )
    assert raw.decode() == text


async def test_echo_of_one_token_and_without_scores(http: httpx.AsyncClient) -> None:
    one = (await ask(http, prompt=[70], echo=True, max_tokens=0, logprobs=1)).json()["choices"][0]
    assert one["logprobs"]["token_logprobs"] == [None] and one["text"] == TOKENS.decode([70])
    bare = (await ask(http, echo=True, max_tokens=0)).json()["choices"][0]
    assert bare["logprobs"] is None and bare["text"] == TEXT


async def test_a_length_of_exactly_the_context(http: httpx.AsyncClient, backend: DoublePrefill) -> None:
    from backends.base import ContextLengthExceeded

    backend.fault = ContextLengthExceeded("this model's maximum context length is 4 tokens")
    answer = await ask(http, prompt=[1, 2, 3, 4, 5])
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")


async def test_named_tokens_keep_apart_even_with_equal_texts(http: httpx.AsyncClient) -> None:
    row = logprobs_after(TOKENS.encode(TEXT), TOKENS.vocab_size)
    named = [300, 7, int(row.argmin())]
    scores = (await ask(http, logprob_token_ids=named, temperature=0)).json()["choices"][0]["logprobs"]
    assert set(scores["top_logprobs"][0].values()) == {row[i] for i in [*named, int(row.argmax())]}


@pytest.mark.parametrize("given", [True, 1])
async def test_logprobs_may_be_true(http: httpx.AsyncClient, given: Any) -> None:
    scores = (await ask(http, logprobs=given, temperature=0)).json()["choices"][0]["logprobs"]
    assert len(scores["top_logprobs"][0]) == 1


async def test_prompt_logprobs_beside_echo(http: httpx.AsyncClient) -> None:
    choice = (await ask(http, prompt_logprobs=1, echo=True, logprobs=3, return_token_ids=True)).json()["choices"][0]
    ids = TOKENS.encode(TEXT)
    assert choice["prompt_token_ids"] == ids and len(choice["token_ids"]) == 1
    assert len(choice["prompt_logprobs"]) == len(ids) and len(choice["prompt_logprobs"][1]) in (1, 2)
    assert len(choice["logprobs"]["top_logprobs"][1]) in (3, 4)


async def test_token_prompts_are_not_echoed_as_text_when_ids_come_back(http: httpx.AsyncClient) -> None:
    choice = (await ask(http, prompt=[70, 71], echo=True, return_token_ids=True, allowed_token_ids=[80])).json()[
        "choices"
    ][0]
    assert choice["text"] == TOKENS.token_text(80)


async def test_special_text_in_a_prompt_is_a_control_token(http: httpx.AsyncClient, backend: DoublePrefill) -> None:
    await ask(http, prompt=f"a{END}")
    assert list(backend.seen[0].token_ids)[-1] in TOKENS.eos_token_ids


async def test_streams_one_event_a_choice(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(
        model=MODEL, prompt=["a", "b"], max_tokens=1, n=2, temperature=0, stream=True, echo=True, logprobs=1,
        stream_options={"include_usage": True},
    )  # fmt: skip
    events = [event async for event in stream]
    whole = await client.completions.create(
        model=MODEL, prompt=["a", "b"], max_tokens=1, n=2, temperature=0, echo=True, logprobs=1
    )
    assert [event.choices[0] for event in events[:-1]] == whole.choices
    assert events[-1].choices == [] and events[-1].usage == whole.usage


REFUSALS: list[tuple[dict[str, Any], str, str | None]] = [
    ({"prompt": ...}, "prompt", "missing_required_parameter"),
    ({"prompt": None}, "prompt", "missing_required_parameter"),
    ({"prompt": ""}, "prompt", "invalid_value"),
    ({"prompt": []}, "prompt", "empty_array"),
    ({"prompt": [""]}, "prompt[0]", "invalid_value"),
    ({"prompt": [[1], []]}, "prompt[1]", "empty_array"),
    ({"prompt": 5}, "prompt", "invalid_type"),
    ({"prompt": {"a": 1}}, "prompt", "invalid_type"),
    ({"prompt": [1, "a"]}, "prompt[0]", "invalid_type"),
    ({"prompt": [[1, True]]}, "prompt[0]", "invalid_type"),
    ({"prompt": [1, 10**6]}, "prompt[1]", "invalid_value"),
    ({"prompt": [[1], [2, -1]]}, "prompt[1][1]", "invalid_value"),
    ({"max_tokens": 0}, "max_tokens", "integer_below_min_value"),
    ({"logprobs": 21}, "logprobs", "integer_above_max_value"),
    ({"logprobs": -1}, "logprobs", "integer_below_min_value"),
    ({"logprobs": "3"}, "logprobs", "invalid_type"),
    ({"stop": ["x"] * 65}, "stop", "array_above_max_length"),
]


@pytest.mark.parametrize(("fields", "param", "code"), REFUSALS, ids=[f"{f}"[:60] for f, _, _ in REFUSALS])
async def test_refusals_name_the_field(
    http: httpx.AsyncClient, backend: DoublePrefill, fields: dict[str, Any], param: str, code: str | None
) -> None:
    answer = await ask(http, **fields)
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert code is None or error["code"] == code
    assert not backend.seen


async def test_sixteen_stops_pass(http: httpx.AsyncClient) -> None:
    assert (await ask(http, stop=[f"s{i}" for i in range(16)])).status_code == 200
