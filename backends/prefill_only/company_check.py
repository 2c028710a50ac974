"""Does a row get the same bits whatever it is packed with? Measured at start: libraries pick loops by CPU and shape."""

from __future__ import annotations

import torch

from backends.prefill_only.decoder import Decoder
from backends.prefill_only.direct import probe_job, run_directly
from backends.prefill_only.readout import LmHead
from backends.prefill_only.rows import ROW_ALIGN

__all__ = ["check_company"]


def check_company(decoder: Decoder, head: LmHead | None) -> dict[str, bool]:
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


def _passes(decoder: Decoder, head: LmHead | None) -> bool:
    jobs = [probe_job(decoder, head, length, seed=length, top=5) for length in (1, 31, 70, 200)]
    together = run_directly(decoder, head, jobs)
    return all(run_directly(decoder, head, [job])[0] == answer for job, answer in zip(jobs, together, strict=True))
