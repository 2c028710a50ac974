"""The OpenAI SDK against the server as a separate process."""

from __future__ import annotations

import asyncio
import math

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from loadtest.server_process import ServerProcess
from tests.e2e.conftest import MODEL

ASK = [{"role": "user", "content": "Is water wet? Answer Yes or No."}]


def test_chat_with_log_probabilities(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=1, logprobs=True, top_logprobs=7, temperature=0
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "length" and choice.message.role == "assistant"
    assert choice.logprobs is not None and choice.logprobs.content is not None
    entry = choice.logprobs.content[0]
    assert entry.token == choice.message.content == entry.top_logprobs[0].token
    assert len(entry.top_logprobs) == 7
    assert [t.logprob for t in entry.top_logprobs] == sorted((t.logprob for t in entry.top_logprobs), reverse=True)
    assert bytes(entry.bytes or []).decode() == entry.token
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 1
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion" and answer.system_fingerprint


def test_completion_choices_of_several_prompts_are_in_order(client: OpenAI) -> None:
    prompts = ["The capital of France is", "Two plus two is", "The opposite of hot is"]
    answer = client.completions.create(model=MODEL, prompt=prompts, max_tokens=1, temperature=0, logprobs=3, n=2)
    assert [c.index for c in answer.choices] == list(range(6))
    assert [c.text for c in answer.choices[::2]] == [c.text for c in answer.choices[1::2]]
    single = client.completions.create(model=MODEL, prompt=prompts[2], max_tokens=1, temperature=0, logprobs=3)
    assert single.choices[0].text == answer.choices[4].text
    assert single.choices[0].logprobs == answer.choices[4].logprobs


def test_raw_headers_say_where_and_how_long(client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=ASK, max_tokens=1)
    assert raw.headers["x-onepass-backend"] == "prefill-only" and raw.headers["x-onepass-reason"] == "one-token"
    for name in ("queue-ms", "predicted-ms", "compute-ms"):
        assert float(raw.headers[f"x-onepass-{name}"]) >= 0
    assert int(raw.headers["x-onepass-cached-tokens"]) >= 0
    assert raw.headers["x-request-id"] and float(raw.headers["openai-processing-ms"]) >= 0
    assert raw.parse().choices[0].message.content is not None


def test_streaming_gives_the_same_answer(client: OpenAI) -> None:
    options = {"model": MODEL, "messages": ASK, "max_tokens": 1, "logprobs": True, "top_logprobs": 4, "temperature": 0}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    scored = [c.choices[0].logprobs for c in chunks if c.choices and c.choices[0].logprobs]
    assert whole.choices[0].logprobs is not None
    assert [s.content for s in scored if s is not None] == [whole.choices[0].logprobs.content]
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert len({c.id for c in chunks}) == 1


def test_streaming_completions(client: OpenAI) -> None:
    chunks = list(client.completions.create(model=MODEL, prompt="The sky is", max_tokens=1, temperature=0, stream=True))
    whole = client.completions.create(model=MODEL, prompt="The sky is", max_tokens=1, temperature=0)
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text


async def test_many_at_once_through_the_async_client(server: ServerProcess) -> None:
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:

        async def ask(i: int) -> str | None:
            answer = await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": f"Say {i}."}], max_completion_tokens=1, temperature=0
            )
            return answer.choices[0].message.content

        first = await asyncio.gather(*map(ask, range(40)))
        assert await asyncio.gather(*map(ask, range(40))) == first

        stream = await client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=1, stream=True)
        assert [chunk async for chunk in stream][-1].choices[0].finish_reason in ("length", "stop")


def test_log_probabilities_do_not_depend_on_temperature(client: OpenAI) -> None:
    def asked(temperature: float, **more: object):
        answer = client.chat.completions.create(
            model=MODEL,
            messages=ASK,
            max_tokens=1,
            logprobs=True,
            top_logprobs=5,
            temperature=temperature,
            seed=1,
            **more,
        )
        assert answer.choices[0].logprobs and answer.choices[0].logprobs.content
        return [(t.token, t.logprob) for t in answer.choices[0].logprobs.content[0].top_logprobs[:5]]

    cold = asked(0)
    assert asked(0.7) == cold and asked(2) == cold and asked(0, logit_bias={"100": 100}, top_p=0.5)[:5] == cold


def test_exactly_as_many_candidates_as_asked_for(client: OpenAI) -> None:
    seen: dict[str, float] = {}
    for k in range(21):
        answer = client.chat.completions.create(
            model=MODEL, messages=ASK, max_tokens=1, logprobs=True, top_logprobs=k, temperature=0,
            extra_body={"return_tokens_as_token_ids": True},
        )  # fmt: skip
        assert answer.choices[0].logprobs and answer.choices[0].logprobs.content
        top = answer.choices[0].logprobs.content[0].top_logprobs
        assert len(top) == len({t.token for t in top}) == k
        for t in top:
            assert seen.setdefault(t.token, t.logprob) == t.logprob


def test_a_forced_end_token_stops(client: OpenAI) -> None:
    end = client.post("/../tokenize", cast_to=object, body={"prompt": "<|im_end|>", "add_special_tokens": False})
    ids = end["tokens"]  # type: ignore[index]
    assert len(ids) == 1
    answer = client.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=1, logprobs=True, extra_body={"allowed_token_ids": ids}
    )
    assert answer.choices[0].finish_reason == "stop" and answer.choices[0].message.content == ""
    assert answer.choices[0].logprobs and answer.choices[0].logprobs.content
    assert answer.choices[0].logprobs.content[0].token == "<|im_end|>"


def test_a_stop_string_and_a_bias(client: OpenAI) -> None:
    greedy = client.completions.create(model=MODEL, prompt="The capital of France is", max_tokens=1, temperature=0)
    text = greedy.choices[0].text
    stopped = client.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=1, temperature=0, stop=[text.strip()]
    )
    assert stopped.choices[0].finish_reason == "stop" and stopped.choices[0].text == text[: text.index(text.strip())]
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=MODEL, prompt="x", max_tokens=1, logit_bias={"9999999": 1})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": ASK, "max_tokens": 1, "top_logprobs": 3}, "top_logprobs"),
        ({"messages": ASK, "max_tokens": 1, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": ASK, "max_tokens": 0}, "max_tokens"),
        ({"messages": [], "max_tokens": 1}, "messages"),
        ({"messages": "hi", "max_tokens": 1}, "messages"),
        ({"messages": ASK, "max_tokens": 1, "temperature": 3}, "temperature"),
        ({"messages": ASK, "max_tokens": 1, "n": 0}, "n"),
    ],
)
def test_bad_requests_name_the_field(client: OpenAI, body: dict, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/chat/completions", cast_to=object, body={"model": MODEL, **body})
    assert caught.value.param is not None and caught.value.param.startswith(param)
    assert caught.value.type == "invalid_request_error" and param.split(".")[0] in str(caught.value)


def test_an_id_outside_the_vocabulary_or_an_empty_prompt_costs_its_sender_alone(client: OpenAI) -> None:
    for prompt in ([1, 2, 10**6], [1, -1], [], "", [[1], []]):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model=MODEL, prompt=prompt, max_tokens=1)
        assert caught.value.param is not None and caught.value.param.startswith("prompt")
    assert client.completions.create(model=MODEL, prompt=[1, 2, 3], max_tokens=1).choices


def test_no_upstream_is_a_501_that_is_not_retried(client: OpenAI) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        client.with_options(max_retries=2).chat.completions.create(model=MODEL, messages=ASK, max_tokens=20)
    assert caught.value.status_code == 501 and caught.value.code == "no_upstream"
    assert "ONEPASS_UPSTREAM_BASE_URL" in str(caught.value)
    assert caught.value.response.request.headers["x-stainless-retry-count"] == "0"


def test_unknown_models_and_the_model_list(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="nobody", prompt="x", max_tokens=1)
    assert caught.value.code == "model_not_found"
    models = client.models.list().data
    assert MODEL in [m.id for m in models]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


def test_a_choice_of_a_closed_set(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=ASK, temperature=0, logprobs=True, top_logprobs=2,
        extra_body={"structured_outputs": {"choice": ["Yes", "No"]}},
    )  # fmt: skip
    choice = answer.choices[0]
    assert choice.message.content in ("Yes", "No") and choice.finish_reason == "stop"
    assert choice.logprobs and choice.logprobs.content
    shares = [math.exp(t.logprob) for t in choice.logprobs.content[0].top_logprobs if t.logprob > -100]
    assert sum(shares) <= 1 + 1e-6
