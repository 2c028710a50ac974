"""How far from float64 an op may be, by dtype: one table for the interpreter and for devices."""

from __future__ import annotations

import torch

# The last bits of the result's dtype, twice over for bf16 and fp16: a result is rounded once, its inputs are exact.
# Attention's weights are rounded to the values' dtype as well, so its error grows with the spread of the values.
TOLERANCE = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = tuple(TOLERANCE)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, slack: float = 1.0) -> None:
    """|actual − expected| ≤ slack · TOLERANCE[dtype] · (1 + |expected|), everywhere. `expected` is float64."""
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} is not {tuple(expected.shape)}"
    assert expected.dtype == torch.float64, expected.dtype
    wide = actual.cpu().double()
    bound = slack * TOLERANCE[dtype] * (1 + expected.abs())
    # Written so that a NaN is a failure.
    wrong = ~(((wide - expected).abs() <= bound) | (wide == expected))
    assert not bool(wrong.any()), (
        f"{int(wrong.sum())} of {wrong.numel()} wrong, first at {tuple(wrong.nonzero()[0].tolist())}: "
        f"{wide[wrong][0].item()} for {expected[wrong][0].item()}"
    )
