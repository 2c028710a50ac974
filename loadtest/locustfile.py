"""Three kinds of traffic: labelling with one token, many posts behind one profile, and generation upstream.

Run through ``make loadtest`` (``python -m loadtest.run``), or by hand: ``locust -f loadtest/locustfile.py --host URL``.
"""

from __future__ import annotations

import os
import random

from locust import FastHttpUser, between, task

MODEL = os.environ.get("ONEPASS_LOADTEST_MODEL", "smollm2-135m-instruct")
UPSTREAM_MODEL = os.environ.get("ONEPASS_LOADTEST_UPSTREAM_MODEL", "")

_rng = random.Random(17)
_PROFILES = [[_rng.randrange(300, 40000) for _ in range(1500)] for _ in range(4)]
_WORDS = (
    "the order arrived late but support was kind and the refund came within two days of asking for it again"
).split()


class _Asks(FastHttpUser):
    abstract = True
    wait_time = between(0.05, 0.3)

    def ask(self, path: str, body: dict, name: str, expected_backend: str) -> None:
        with self.client.post(path, json=body, name=name, catch_response=True) as answer:
            if answer.status_code == 429:
                answer.failure("refused: the queue is full")
            elif answer.status_code != 200:
                answer.failure(f"{answer.status_code}: {answer.text[:200]}")
            elif answer.headers.get("x-onepass-backend") != expected_backend:
                answer.failure(f"answered by {answer.headers.get('x-onepass-backend')}")


class Labeller(_Asks):
    """Sentiment of a short review: a chat with one token and its alternatives."""

    weight = 6

    @task
    def label(self) -> None:
        review = " ".join(random.choices(_WORDS, k=random.randrange(20, 80)))
        self.ask(
            "/v1/chat/completions",
            {
                "model": MODEL,
                "messages": [{"role": "user", "content": f"Positive or negative?\n{review}\nAnswer with one word."}],
                "max_tokens": 1,
                "temperature": 0,
                "logprobs": True,
                "top_logprobs": 5,
            },
            "one token",
            "prefill-only",
        )


class Recommender(_Asks):
    """A fresh post after one of a few long profiles."""

    weight = 3

    @task
    def rank(self) -> None:
        prompt = random.choice(_PROFILES) + [random.randrange(300, 40000) for _ in range(100)]
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 2}
        self.ask("/v1/completions", body, "shared prefix", "prefill-only")


if UPSTREAM_MODEL:

    class Writer(_Asks):
        """A few generated tokens."""

        weight = 1

        @task
        def write(self) -> None:
            body = {
                "model": UPSTREAM_MODEL,
                "messages": [{"role": "user", "content": f"Name {random.randrange(2, 9)} colours."}],
                "max_tokens": 8,
            }
            self.ask("/v1/chat/completions", body, "generation", "upstream")
