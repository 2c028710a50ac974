"""A pass over many prompts, held against a plain forward of each."""

from __future__ import annotations

import random

import pytest
import torch

from backends.base import BadLogits, Readout, Sampling
from backends.prefill_only.block_hashes import block_hashes
from backends.prefill_only.direct import DirectPass, run_directly
from backends.prefill_only.forest import ForestJob, build_forest
from backends.prefill_only.models.linear import Linear
from backends.prefill_only.prefill_pass import PassJob, PrefillPass
from tests.backends.prefill_only.reference import reference_hidden, reference_logprobs
from tests.backends.prefill_only.tiny import TINY, tiny_decoder, tiny_weights, with_window

ALL = TINY.vocab_size


def prompts_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(ALL) for _ in range(n)] for n in lengths]


def next_logprobs(answer) -> torch.Tensor:
    found = torch.full((ALL,), float("nan"))
    for entry in answer.next_token.top:
        found[entry.token_id] = entry.logprob
    return found


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 200, 700])
def test_agrees_with_a_plain_forward(length: int, window: int) -> None:
    spec = with_window(TINY, window)
    weights = tiny_weights(spec)
    decoder, head = tiny_decoder(spec, weights)
    prompt = prompts_of([length], seed=length)[0]
    answer = run_directly(decoder, head, [PassJob(prompt, Readout(top_logprobs=ALL))])[0]
    expected = reference_logprobs(spec, weights, prompt)[-1]
    assert (next_logprobs(answer) - expected).abs().max() < 2e-4


def test_prompt_logprobs_agree_with_a_plain_forward() -> None:
    weights = tiny_weights()
    decoder, head = tiny_decoder(weights=weights)
    for prompt in prompts_of([2, 70, 300]):
        readout = Readout(prompt_logprobs=3, top_logprobs=1)
        prompt_answer = run_directly(decoder, head, [PassJob(prompt, readout)])[0].prompt
        assert prompt_answer is not None and prompt_answer.start == 1
        expected = reference_logprobs(TINY, weights, prompt)
        for i, (actual, top) in enumerate(zip(prompt_answer.actual, prompt_answer.top, strict=True)):
            row = expected[i]
            assert actual.token_id == prompt[i + 1]
            assert abs(actual.logprob - row[actual.token_id]) < 2e-4
            assert (
                actual.rank == 1 + int((row > row[actual.token_id] + 1e-4).sum())
                or ((row - row[actual.token_id]).abs() < 1e-3).sum() > 1
            )
            assert [t.rank for t in top] == [1, 2, 3]
            assert torch.allclose(torch.tensor([t.logprob for t in top]), row.topk(3).values, atol=2e-4)


def test_prompt_logprobs_of_one_token_are_empty() -> None:
    decoder, head = tiny_decoder()
    answer = run_directly(decoder, head, [PassJob([5], Readout(prompt_logprobs=1))])[0]
    assert answer.prompt is not None and answer.prompt.actual == [] and answer.error is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_alone_and_in_any_company(dtype: torch.dtype) -> None:
    decoder, head = tiny_decoder(dtype=dtype, scratch_pages=1024)
    rng = random.Random(7)
    stems = prompts_of([40, 64, 130], seed=3)
    prompts = [
        rng.choice(stems)[: rng.randrange(1, 131)] + [rng.randrange(ALL) for _ in range(rng.randrange(1, 90))]
        for _ in range(24)
    ]
    readouts = [
        Readout(top_logprobs=20, prompt_logprobs=rng.choice([None, None, 2]), sampling=Sampling(seed=i))
        for i in range(len(prompts))
    ]
    alone = [run_directly(decoder, head, [PassJob(p, r)])[0] for p, r in zip(prompts, readouts, strict=True)]
    for _ in range(3):
        order = rng.sample(range(len(prompts)), rng.randrange(2, len(prompts)))
        together = run_directly(decoder, head, [PassJob(prompts[i], readouts[i]) for i in order])
        for i, answer in zip(order, together, strict=True):
            assert answer.next_token == alone[i].next_token
            assert answer.prompt == alone[i].prompt


def test_a_cached_prefix_changes_nothing() -> None:
    """KV written to pool pages by one pass is read by the next as if computed there."""
    decoder, head = tiny_decoder(pool_pages=8)
    prompt = prompts_of([150])[0]
    cold = run_directly(decoder, head, [PassJob(prompt, Readout(top_logprobs=20))])[0]
    hashes = block_hashes(prompt, 32, b"direct")
    pages = {h: decoder.kv.pool_address(i) for i, h in enumerate(hashes)}
    scratch = decoder.kv.take_scratch(8)
    writing = build_forest([ForestJob(prompt, hashes)], 32, pages.get, scratch.pop)
    first = PrefillPass(decoder, head, writing, [PassJob(prompt, Readout(top_logprobs=20))])
    list(first.steps())
    for cached in (1, 3, 4):
        direct = DirectPass(decoder, head, [PassJob(prompt, Readout(top_logprobs=20))], cached)
        direct.run()
        warm = direct.work.answers[0]
        assert warm is not None and warm.next_token == cold.next_token
        assert direct.work.new_tokens == 150 - 32 * cached


def test_cancelled_at_every_boundary() -> None:
    """Whoever is left gets the same answer, whenever the others went away."""
    decoder, head = tiny_decoder()
    prompts = prompts_of([100, 170, 60], seed=5)
    prompts[2] = prompts[1][:96] + prompts[2]
    readout = Readout(top_logprobs=5, prompt_logprobs=0)
    expected = run_directly(decoder, head, [PassJob(prompts[2], readout)])[0]
    steps = sum(1 for _ in DirectPass(decoder, head, [PassJob(p, readout) for p in prompts]).work.steps())
    assert steps > 3 * 5
    for cut in range(steps):
        jobs = [PassJob(p, readout) for p in prompts]
        direct = DirectPass(decoder, head, jobs)
        for done, _ in enumerate(direct.work.steps()):
            if done == cut:
                jobs[0].cancelled = jobs[1].cancelled = True
        answer = direct.work.answers[2]
        assert answer is not None and answer.next_token == expected.next_token and answer.prompt == expected.prompt
        decoder.kv.give_back(direct._scratch)


def test_a_pass_whose_jobs_all_left_stops_at_the_next_step() -> None:
    decoder, head = tiny_decoder()
    job = PassJob(prompts_of([300])[0], Readout(top_logprobs=1))
    direct = DirectPass(decoder, head, [job])
    steps = direct.work.steps()
    next(steps)
    job.cancelled = True
    assert sum(1 for _ in steps) == 0
    assert direct.work.all_cancelled and direct.work.answers == [None]


def test_nan_costs_only_its_sender() -> None:
    weights = tiny_weights()
    weights.embed[7] = float("nan")
    decoder, head = tiny_decoder(weights=weights)
    good = prompts_of([90, 40], seed=9)
    good = [[t if t != 7 else 8 for t in p] for p in good]
    alone = [run_directly(decoder, head, [PassJob(p, Readout(top_logprobs=5))])[0] for p in good]
    bad = [*good[0][:64], 7, 3]
    both = run_directly(
        decoder,
        head,
        [
            PassJob(p, Readout(top_logprobs=5, prompt_logprobs=r))
            for p, r in ((good[0], None), (bad, 1), (good[1], None))
        ],
    )
    assert isinstance(both[1].error, BadLogits)
    assert both[0].next_token == alone[0].next_token and both[2].next_token == alone[1].next_token


def test_last_layer_is_computed_for_asked_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, head = tiny_decoder()
    rows: list[int] = []
    original = decoder.layer_queries
    monkeypatch.setattr(decoder, "layer_queries", lambda i, h, q: (rows.append(h.shape[0]), original(i, h, q))[1])
    run_directly(decoder, head, [PassJob(p, Readout(top_logprobs=1)) for p in prompts_of([200, 300])])
    assert rows == [16]


def test_a_draw_with_a_seed_does_not_depend_on_company() -> None:
    decoder, head = tiny_decoder()
    prompt = prompts_of([50])[0]
    drawn = {
        run_directly(
            decoder,
            head,
            [PassJob(p, Readout(sampling=Sampling(seed=11, n=4))) for p in [*prompts_of([20] * others), prompt]],
        )[-1].next_token.drawn
        for others in range(4)
    }
    assert len(drawn) == 1


def test_linear_shares_its_weight_with_row_slices() -> None:
    linear = Linear(torch.randn(8, 4), torch.randn(8))
    x = torch.randn(3, 4)
    part = linear.rows(2, 5)
    assert torch.allclose(part(x), linear(x)[:, 2:5]) and part.weight.data_ptr() == linear.weight[2].data_ptr()


@pytest.mark.parametrize("length", [1, 33, 200])
def test_pooled_states_and_label_logits_agree_with_a_plain_forward(length: int) -> None:
    weights = tiny_weights()
    weights.score = Linear(torch.randn(5, TINY.hidden_size, generator=torch.Generator().manual_seed(1)))
    decoder, _ = tiny_decoder(weights=weights)
    prompt = prompts_of([length], seed=length)[0]
    others = prompts_of([80, 20], seed=1)
    expected = reference_hidden(TINY, weights, prompt)
    for pooled, state in (("last", expected[-1]), ("mean", expected.mean(0))):
        jobs = [PassJob(p, Readout(pooled=pooled, labels=True)) for p in (others[0], prompt, others[1])]  # type: ignore[arg-type]
        answer = run_directly(decoder, None, jobs)[1]
        assert torch.allclose(torch.tensor(answer.pooled), state, atol=2e-4)
        assert torch.allclose(torch.tensor(answer.label_logits), weights.score(expected[-1:])[0], atol=2e-3)
        assert run_directly(decoder, None, jobs[1:2])[0] == answer
