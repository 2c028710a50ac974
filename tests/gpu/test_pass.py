"""A whole pass on the device: against the plain forward, and bit for bit in company."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from backends.base import Readout
from backends.prefill_only.decoder import Decoder
from backends.prefill_only.direct import run_directly
from backends.prefill_only.kv_pages import KvPages
from backends.prefill_only.prefill_pass import PassJob
from backends.prefill_only.readout import LmHead
from tests.backends.prefill_only.reference import reference_logprobs
from tests.backends.prefill_only.tiny import TINY, tiny_weights, with_window

DEVICE = torch.device("cuda")


def on_device(dtype: torch.dtype, window: int) -> tuple[Decoder, LmHead]:
    spec = with_window(TINY, window)
    weights = tiny_weights(spec, dtype, device=DEVICE)
    kv = KvPages(
        num_layers=spec.num_layers, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, page_tokens=32,
        pool_pages=8, scratch_pages=512, dtype=dtype, device=DEVICE,
    )  # fmt: skip
    assert weights.lm_head is not None
    return Decoder(spec, weights, kv, max_positions=spec.max_position, chunk_rows=256), LmHead(weights.lm_head)


def prompts_of(lengths: list[int]) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(TINY.vocab_size) for _ in range(n)] for n in lengths]


@pytest.mark.parametrize("window", [0, 40])
def test_agrees_with_a_plain_forward(window: int) -> None:
    decoder, head = on_device(torch.float32, window)
    for prompt in prompts_of([1, 16, 33, 700]):
        job = PassJob(prompt, Readout(top_logprobs=TINY.vocab_size, prompt_logprobs=1))
        answer = run_directly(decoder, head, [job])[0]
        expected = reference_logprobs(decoder.spec, decoder.weights, prompt).cpu()
        assert answer.next_token is not None and answer.prompt is not None
        assert max(abs(t.logprob - expected[-1][t.token_id]) for t in answer.next_token.top) < 2e-3
        for i, actual in enumerate(answer.prompt.actual):
            assert abs(actual.logprob - expected[i][actual.token_id]) < 2e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_same_alone_and_in_company(dtype: torch.dtype) -> None:
    decoder, head = on_device(dtype, 0)
    prompts = prompts_of([1, 17, 40, 64, 90, 300, 700])
    prompts[4] = prompts[3] + prompts[4]
    readout = Readout(top_logprobs=20)
    jobs = [PassJob(p, replace(readout, prompt_logprobs=1 if i % 3 == 0 else None)) for i, p in enumerate(prompts)]
    together = run_directly(decoder, head, jobs)
    for job, answer in zip(jobs, together, strict=True):
        alone = run_directly(decoder, head, [job])[0]
        assert alone == answer
