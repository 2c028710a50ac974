"""Short bodies that ask for very much are refused by name, before anything of that size is built."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.closed_set import plan_closed_set
from gateway.wire.vocabulary import VocabularyIndex
from tests.gateway.double import MODEL, DoublePrefill, trained_tokenizer

TOKENS = trained_tokenizer()
VOCABULARY = VocabularyIndex(TOKENS)


async def ask(http: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await http.post("/v1/completions", json={"model": MODEL, "prompt": "x", "max_tokens": 1, **fields})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ["x"] * 2048, "n": 128, "logprobs": 20}, "n"),
        ({"prompt": [5] * 500, "n": 128, "echo": True, "logprobs": 20}, "n"),
        ({"prompt": ["x"] * 500, "n": 128, "guided_choice": list("abcdefghij")}, "n"),
        (
            {"prompt": ["x"] * 600, "guided_choice": ["aa", *(f"a{i}" for i in range(10))], "max_tokens": 99},
            "guided_choice",
        ),
    ],
    ids=["draws", "echoed draws", "reports", "passes"],
)
async def test_products_have_a_bound(http: httpx.AsyncClient, backend: DoublePrefill, fields: Any, param: str) -> None:
    answer = await ask(http, **fields)
    assert answer.status_code == 400, answer.text[:200]
    error = answer.json()["error"]
    assert error["param"] == param and "at a time" in error["message"]


async def test_options_behind_a_prompt_stay_within_the_model(http: httpx.AsyncClient) -> None:
    longest = (await http.get("/v1/models")).json()["data"][0]["max_model_len"]
    options = ["a", "ab", "abc"]
    for room, status in ((8, 200), (1, 400)):
        answer = await ask(http, prompt=[5] * (longest - room), guided_choice=options, max_tokens=99)
        assert answer.status_code == status, answer.text[:200]
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert "guided_choice" in answer.json()["error"]["message"]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text("ab \u00e9", min_size=1, max_size=5), min_size=2, max_size=8, unique=True))
def test_the_end_counts_where_one_option_begins_another(options: list[str]) -> None:
    found = plan_closed_set(options, TOKENS, VOCABULARY, param="guided_choice")
    begun = any(a != b and b[: len(a)] == a for a in found.option_ids for b in found.option_ids)
    assert (found.end_token is not None) == (found.method == "full_options" and begun)
