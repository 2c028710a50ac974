"""What is read off the hidden rows: ranks, named tokens, draws."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from backends.base import BadLogits, Sampling
from backends.prefill_only.models.linear import Linear
from backends.prefill_only.readout import FLOOR, LmHead, NextToken, NextTokenAsk

VOCAB = 50


def ask_of(
    logits: list[float] | torch.Tensor, sampling: Sampling | None = None, top: int = 0, named: tuple = (), prompt=()
):
    """A head whose logits for a one-hot row are ``logits``."""
    row = torch.as_tensor(logits, dtype=torch.float32)
    head = LmHead(Linear(row[:, None].clone()))
    return head.next_tokens(torch.ones(1, 1), [NextTokenAsk(sampling, top, named, prompt)])[0]


def spread(seed: int = 0) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def test_top_and_named_are_raw_log_probabilities_with_ranks() -> None:
    logits = spread()
    expected = torch.log_softmax(logits.double(), 0)
    order = expected.argsort(descending=True).tolist()
    found = ask_of(logits, top=5, named=(order[0], order[30], 3, order[30]))
    assert isinstance(found, NextToken)
    assert [t.token_id for t in found.top] == order[:5] and [t.rank for t in found.top] == [1, 2, 3, 4, 5]
    assert all(abs(t.logprob - expected[t.token_id]) < 1e-5 for t in (*found.top, *found.named))
    assert [t.rank for t in found.named] == [1, 31, order.index(3) + 1, 31]


def test_bias_and_temperature_do_not_change_what_is_reported() -> None:
    logits = spread()
    plain = ask_of(logits, top=5)
    shaped = ask_of(logits, Sampling(temperature=2.0, logit_bias={4: 100.0}), top=5)
    assert isinstance(plain, NextToken) and isinstance(shaped, NextToken)
    assert shaped.top == plain.top
    assert shaped.drawn[0].token_id == 4 and abs(shaped.drawn[0].logprob - torch.log_softmax(logits, 0)[4]) < 1e-5


def test_ties_are_broken_by_token_id() -> None:
    found = ask_of([1.0] * VOCAB, Sampling(temperature=0.0), top=3)
    assert isinstance(found, NextToken)
    assert found.drawn[0].token_id == 0 == found.top[0].token_id


def test_nan_is_an_error_and_an_impossible_token_has_the_floor() -> None:
    logits = spread()
    logits[9] = float("nan")
    assert isinstance(ask_of(logits, top=1), BadLogits)
    logits[9] = -float("inf")
    found = ask_of(logits, named=(9,))
    assert isinstance(found, NextToken) and found.named[0].logprob == FLOOR


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_the_distribution(temperature: float) -> None:
    logits = spread(3)
    n = 20000
    found = ask_of(logits, Sampling(temperature=temperature, n=n, seed=5))
    assert isinstance(found, NextToken)
    counts = Counter(t.token_id for t in found.drawn)
    p = torch.softmax(logits / temperature, 0)
    chi2 = sum((counts[i] - n * p[i]) ** 2 / (n * p[i]) for i in range(VOCAB) if n * p[i] > 5)
    assert chi2 < VOCAB + 6 * math.sqrt(2 * VOCAB)


def test_top_p_top_k_and_min_p_cut_the_tail() -> None:
    logits = spread(4)
    p = torch.softmax(logits, 0)
    order = p.argsort(descending=True).tolist()
    cumulative = p[order].cumsum(0)
    nucleus = set(order[: int((cumulative < 0.6).sum()) + 1])
    for sampling, allowed in (
        (Sampling(top_p=0.6, n=3000, seed=1), nucleus),
        (Sampling(top_k=3, n=3000, seed=1), set(order[:3])),
        (Sampling(min_p=0.5, n=3000, seed=1), {i for i in order if p[i] >= 0.5 * p[order[0]]}),
    ):
        found = ask_of(logits, sampling)
        assert isinstance(found, NextToken) and {t.token_id for t in found.drawn} == allowed


def test_masks_and_penalty() -> None:
    logits = spread(5)
    best = int(logits.argmax())
    greedy = {"temperature": 0.0}

    def drawn(sampling: Sampling, prompt: tuple[int, ...] = ()) -> int:
        found = ask_of(logits, sampling, prompt=prompt)
        assert isinstance(found, NextToken)
        return found.drawn[0].token_id

    assert drawn(Sampling(**greedy)) == best
    assert drawn(Sampling(**greedy, banned_token_ids=(best,))) == int(logits.argsort(descending=True)[1])
    assert drawn(Sampling(**greedy, allowed_token_ids=(1, 2))) == (1 if logits[1] > logits[2] else 2)
    assert drawn(Sampling(**greedy, logit_bias={best: -100.0})) != best
    assert drawn(Sampling(**greedy, repetition_penalty=50.0), prompt=(best,)) != best


def test_a_seed_repeats_and_no_seed_does_not() -> None:
    logits = [0.0] * VOCAB
    same = {ask_of(logits, Sampling(seed=3, n=8)).drawn for _ in range(3)}
    other = {ask_of(logits, Sampling(n=8)).drawn for _ in range(3)}
    assert len(same) == 1 and len(other) == 3
