"""Runs a loaded model through the decoder and a pass, as the engine does, and gives back whole distributions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from backends.base import Readout
from backends.prefill_only.decoder import Decoder
from backends.prefill_only.direct import run_directly
from backends.prefill_only.kv_pages import KvPages
from backends.prefill_only.models.loader import LoadedModel
from backends.prefill_only.prefill_pass import PassAnswer, PassJob
from backends.prefill_only.readout import LmHead

__all__ = ["answer", "engine_of", "logprobs", "logprobs_together"]


def engine_of(model: LoadedModel, prompts: Sequence[Sequence[int]], chunk_rows: int = 64) -> tuple[Decoder, LmHead]:
    """Room for ``prompts`` in one pass. Chunks are short, so that prompts span several."""
    spec, weights = model.spec, model.weights
    page_tokens = 32
    kv = KvPages(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        page_tokens=page_tokens,
        pool_pages=0,
        scratch_pages=sum(len(p) // page_tokens + 1 for p in prompts),
        dtype=weights.embed.dtype,
        device=weights.embed.device,
    )
    decoder = Decoder(spec, weights, kv, max_positions=max(map(len, prompts)), chunk_rows=chunk_rows)
    assert weights.lm_head is not None
    return decoder, LmHead(weights.lm_head, soft_cap=spec.final_soft_cap, scale=spec.logit_scale)


@torch.inference_mode()
def answer(model: LoadedModel, token_ids: Sequence[int], readout: Readout, chunk_rows: int = 64) -> PassAnswer:
    decoder, head = engine_of(model, [token_ids], chunk_rows)
    (found,) = run_directly(decoder, head, [PassJob(list(token_ids), readout)])
    assert found.error is None
    return found


def logprobs(model: LoadedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """Natural-log probabilities after each position, fp32 ``[tokens, vocab]``."""
    (found,) = logprobs_together(model, [token_ids])
    return found


@torch.inference_mode()
def logprobs_together(model: LoadedModel, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """The same for each of ``prompts``, all computed in one pass."""
    vocab = model.spec.vocab_size
    readout = Readout(top_logprobs=vocab, prompt_logprobs=vocab, prompt_logprobs_start=1)
    decoder, head = engine_of(model, prompts)
    found = run_directly(decoder, head, [PassJob(list(p), readout) for p in prompts])
    return [_matrix(answer, vocab) for answer in found]


def _matrix(answer: PassAnswer, vocab: int) -> torch.Tensor:
    assert answer.error is None and answer.next_token is not None and answer.prompt is not None
    rows = [*answer.prompt.top, answer.next_token.top]
    result = torch.full((len(rows), vocab), float("nan"))
    for position, row in enumerate(rows):
        for entry in row:
            result[position, entry.token_id] = entry.logprob
    return result
