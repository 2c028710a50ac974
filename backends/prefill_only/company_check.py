"""Does a row get the same bits whatever it is packed with? Measured at start: libraries pick loops by CPU and shape."""

from __future__ import annotations

import random

import torch

from backends.base import Readout
from backends.prefill_only.decoder import Decoder
from backends.prefill_only.direct import run_directly
from backends.prefill_only.prefill_pass import PassJob
from backends.prefill_only.readout import LmHead
from backends.prefill_only.rows import ROW_ALIGN

__all__ = ["check_company"]


def check_company(decoder: Decoder, head: LmHead) -> dict[str, bool]:
    """``linears``: one layer's products at several row counts; ``pass``: prompts alone and together."""
    return {"linears": _linears(decoder), "pass": _passes(decoder, head)}


def _linears(decoder: Decoder) -> bool:
    layer = decoder.weights.layers[0]
    linears = [linear for linear in (layer.qkv, layer.o, layer.gate_up, layer.down) if linear is not None]
    generator = torch.Generator().manual_seed(1)
    for linear in linears:
        x = torch.randn(decoder.chunk_rows, linear.in_features, generator=generator)
        x = x.to(decoder.device, decoder.dtype)
        whole = linear(x)
        for rows in (ROW_ALIGN, 5 * ROW_ALIGN, decoder.chunk_rows // 2):
            rows = min(rows, decoder.chunk_rows)
            if not torch.equal(linear(x[:rows].contiguous()), whole[:rows]):
                return False
    return True


def _passes(decoder: Decoder, head: LmHead) -> bool:
    rng = random.Random(2)
    lengths = (1, 31, 70, 300)
    longest = decoder.max_positions
    jobs = [
        PassJob([rng.randrange(head.vocab) for _ in range(min(n, longest))], Readout(top_logprobs=5)) for n in lengths
    ]
    together = run_directly(decoder, head, jobs)
    return all(
        run_directly(decoder, head, [job])[0].next_token == answer.next_token
        for job, answer in zip(jobs, together, strict=True)
    )
