"""What lm-evaluation-harness sends to a completions server, and what it reads from the answers.

Its ``local-completions`` model tokenizes through the server when ``/tokenizer_info`` and ``/tokenize`` answer, sends a
context and a continuation as one prompt with ``echo`` and ``max_tokens: 1``, sums the continuation's ``token_logprobs``
without the last one, and calls a continuation greedy when each of its log-probabilities *equals* the greatest of its
``top_logprobs``. Bodies: ``lm_eval/models/openai_completions.py`` and ``RemoteTokenizer`` of lm_eval 0.4.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import pytest

from loadtest.server_process import ServerProcess
from tests.e2e.conftest import MODEL, Reference

CLOSE = 2e-4  # of one token's log-probability; sums of n may differ by n times that

QUESTIONS = [
    ("Question: What colour is a clear sky at noon?\nAnswer:", [" blue", " a deep green", " red, orange and yellow"]),
    ("Question: How many legs has a spider?\nAnswer:", [" eight", " 8", " six", " four or five"]),
    ("The capital of France is", [" Paris", " Berlin", " naïve café — 東京 🎉"]),
    ("", ["Once upon a time", "<|im_end|>"]),  # without a context the harness puts the prefix token before it
]


@dataclass(frozen=True)
class Pair:
    context: list[int]
    continuation: list[int]


class Harness:
    """A session with the requests, and only these, that the harness makes."""

    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """Status and answer of a GET, or of a POST if there is a body."""
        # The key is empty unless OPENAI_API_KEY is set; the header is sent all the same.
        headers = {"Content-Type": "application/json", "Authorization": "Bearer "}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as refused:
            return refused.code, json.load(refused)

    def answer_of(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        status, answer = self.ask(path, body)
        assert status == 200, answer
        return answer

    def tokenizer_info(self) -> dict[str, Any]:
        return self.answer_of("/tokenizer_info")

    def encode(self, text: str) -> list[int]:
        """Without a model name, and without special tokens around it."""
        return self.answer_of("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]

    def decode(self, ids: Sequence[int]) -> str:
        return self.answer_of("/detokenize", {"tokens": list(ids)})["prompt"]

    def prefix_token(self) -> int:
        info = self.tokenizer_info()
        return self.encode(info["bos_token"] or info["eos_token"])[0]

    def pairs(self, questions: Sequence[tuple[str, Sequence[str]]]) -> list[Pair]:
        """A continuation's tokens are those that the whole text has more than its context."""
        found = []
        for context, continuations in questions:
            for continuation in continuations:
                whole = self.encode(context + continuation)
                if context:
                    size = len(self.encode(context))
                    found.append(Pair(whole[:size], whole[size:]))
                else:
                    found.append(Pair([self.prefix_token()], whole))
        return found

    def loglikelihoods(self, pairs: Sequence[Pair], *, batch: int, as_text: bool = False) -> list[tuple[float, bool]]:
        found = []
        for first in range(0, len(pairs), batch):
            part = pairs[first : first + batch]
            prompts: Any = [pair.context + pair.continuation for pair in part]
            if as_text:
                prompts = [self.decode(ids) for ids in prompts]
                prompts = prompts[0] if batch == 1 else prompts
            answer = self.answer_of(
                "/v1/completions",
                {
                    "model": MODEL,
                    "prompt": prompts,
                    "temperature": 0,
                    "max_tokens": 1,
                    "logprobs": 1,
                    "seed": 1234,
                    "echo": True,
                },
            )
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            assert len(choices) == len(part)
            for pair, choice in zip(part, choices, strict=True):
                scores = choice["logprobs"]
                assert len(scores["token_logprobs"]) == len(pair.context) + len(pair.continuation) + 1
                values = scores["token_logprobs"][len(pair.context) : -1]
                best = [max(top.values()) for top in scores["top_logprobs"][len(pair.context) : -1]]
                found.append((sum(values), values == best))
        return found


@pytest.fixture(scope="module")
def harness(exact_server: ServerProcess) -> Harness:
    return Harness(exact_server.url)


@pytest.fixture(scope="module")
def pairs(harness: Harness) -> list[Pair]:
    return harness.pairs(QUESTIONS)


@pytest.fixture(scope="module")
def one_by_one(harness: Harness, pairs: list[Pair]) -> list[tuple[float, bool]]:
    return harness.loglikelihoods(pairs, batch=1)


def expected(pair: Pair, reference: Reference) -> tuple[float, bool]:
    values = reference.logprobs(pair.context + pair.continuation)[len(pair.context) - 1 : -1]
    own = values[range(len(pair.continuation)), pair.continuation]
    return float(own.sum()), bool((own == values.max(dim=-1).values).all())


def test_the_remote_tokenizer_is_transformers_own(harness: Harness, reference: Reference) -> None:
    info = harness.tokenizer_info()
    tokenizer = reference.tokenizer
    assert (info["bos_token"], info["eos_token"]) == (tokenizer.bos_token, tokenizer.eos_token)
    assert harness.encode(info["eos_token"]) == [tokenizer.eos_token_id]
    for context, continuations in QUESTIONS:
        for text in (context, *(context + more for more in continuations)):
            ids = harness.encode(text)
            assert ids == tokenizer.encode(text, add_special_tokens=False)
            assert harness.decode(ids) == text


def test_the_chat_template_renders_to_the_chats_own_ids(harness: Harness, reference: Reference) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Is water wet?"}]
    # The harness's own settings, which leave no block of the template trimmed.
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    template = environment.from_string(harness.tokenizer_info()["chat_template"])
    text = template.render(messages=messages, add_generation_prompt=True)
    assert harness.encode(text) == reference.chat_ids(messages)


def test_sums_and_greediness_are_transformers_own(
    pairs: list[Pair], one_by_one: list[tuple[float, bool]], reference: Reference
) -> None:
    for pair, (total, greedy) in zip(pairs, one_by_one, strict=True):
        total_expected, greedy_expected = expected(pair, reference)
        assert abs(total - total_expected) < CLOSE * len(pair.continuation)
        assert greedy == greedy_expected
    assert {greedy for _, greedy in one_by_one} == {True, False}
    assert one_by_one[0][0] > one_by_one[1][0]  # the sky is blue


@pytest.mark.parametrize(("batch", "as_text"), [(1, True), (4, True), (100, False)])
def test_neither_batches_nor_text_change_a_score(
    harness: Harness, pairs: list[Pair], one_by_one: list[tuple[float, bool]], batch: int, as_text: bool
) -> None:
    assert harness.loglikelihoods(pairs, batch=batch, as_text=as_text) == one_by_one


def test_the_models_own_words_are_greedy(harness: Harness) -> None:
    """Eight tokens drawn one by one; the harness must find each the likeliest, by equality of floats."""
    context = harness.encode("Once upon a time, there was a")
    ids = list(context)
    for _ in range(8):
        body = {"model": MODEL, "prompt": [ids], "temperature": 0, "max_tokens": 1, "return_token_ids": True}
        ids += harness.answer_of("/v1/completions", body)["choices"][0]["token_ids"]
    own = Pair(context, ids[len(context) :])
    other = Pair(context, [*own.continuation[:-1], harness.encode(" zebra")[0]])
    assert [greedy for _, greedy in harness.loglikelihoods([own, other], batch=2)] == [True, False]


def test_rolling_windows_add_up_to_the_text(harness: Harness, reference: Reference) -> None:
    """``loglikelihood_rolling``: disjoint windows, the first after the prefix token, the others after one token."""
    text = "Prefill-only requests ask for one token; everything else is generation. " * 4
    ids = harness.encode(text)
    size = 25
    before = [harness.prefix_token(), *ids[size - 1 :: size]]
    windows = [
        Pair([token], ids[first : first + size]) for token, first in zip(before, range(0, len(ids), size), strict=False)
    ]
    assert len(windows) > 2 and sum(len(window.continuation) for window in windows) == len(ids)
    total = sum(value for value, _ in harness.loglikelihoods(windows, batch=len(windows)))
    total_expected = sum(expected(window, reference)[0] for window in windows)
    assert abs(total - total_expected) < CLOSE * len(ids)


def test_one_generated_token_is_answered_here_and_more_are_not(harness: Harness, reference: Reference) -> None:
    """``generate_until``: ids or texts, a list of stops that may be empty or longer than OpenAI's four."""
    text = "The capital of France is"
    ids = harness.encode(text)
    greedy = reference.tokenizer.decode(int(reference.logprobs(ids)[-1].argmax()))
    for prompt, stop in ([ids], ["\n\n", "Question:", "Q:", "###", "<|im_end|>"]), (text, []), ([text], ["zzz"]):
        body = {"prompt": prompt, "model": MODEL, "max_tokens": 1, "temperature": 0, "stop": stop, "seed": 1234}
        assert harness.answer_of("/v1/completions", body)["choices"][0]["text"] == greedy
        status, refused = harness.ask("/v1/completions", {**body, "max_tokens": 256})
        assert status == 501 and refused["error"]["code"] == "no_upstream"


def test_chats_with_one_token(harness: Harness, reference: Reference) -> None:
    """``local-chat-completions``: messages, at most four stops."""
    messages = [{"role": "user", "content": "Is water wet? Answer Yes or No."}]
    answer = harness.answer_of(
        "/v1/chat/completions",
        {
            "messages": messages,
            "model": MODEL,
            "max_tokens": 1,
            "temperature": 0,
            "stop": ["\n\n", "Q:", "###", "<|im_end|>"],
            "seed": 1234,
        },
    )
    likeliest = int(reference.logprobs(reference.chat_ids(messages))[-1].argmax())
    assert answer["choices"][0]["message"]["content"] == reference.tokenizer.decode(likeliest)
