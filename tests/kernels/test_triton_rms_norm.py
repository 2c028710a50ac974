"""The norm kernel against float64."""

from __future__ import annotations

import pytest
import torch

from kernels import triton_rms_norm
from tests.kernels import references
from tests.kernels.accuracy import DTYPES, assert_close

EPS = 1e-5


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, size", [(1, 1), (1, 576), (5, 64), (9, 1000), (3, 4097)])
def test_rows(dtype: torch.dtype, rows: int, size: int, device: torch.device) -> None:
    x, weight = randn(rows, size, dtype=dtype), randn(size, dtype=dtype, seed=1)
    out = torch.empty_like(x, device=device)
    triton_rms_norm.rms_norm(x.to(device), weight.to(device), EPS, residual=None, offset=0.0, out=out)
    assert_close(out, references.rms_norm(x, weight, EPS), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_offset_and_residual_in_place(dtype: torch.dtype, device: torch.device) -> None:
    x, residual, weight = (randn(*shape, dtype=dtype, seed=i) for i, shape in enumerate([(7, 96), (7, 96), (96,)]))
    here = x.to(device, copy=True)
    triton_rms_norm.rms_norm(here, weight.to(device), EPS, residual=residual.to(device), offset=1.0, out=here)
    # The sum is rounded to x's dtype before the norm sees it.
    assert_close(here, references.rms_norm(x + residual, weight, EPS, 1.0), dtype)


def test_the_residual_sum_stays_in_x(device: torch.device) -> None:
    x, residual, weight = randn(7, 96), randn(7, 96, seed=1), randn(96, seed=2)
    here, out = x.to(device, copy=True), torch.empty(7, 96, device=device)
    triton_rms_norm.rms_norm(here, weight.to(device), EPS, residual=residual.to(device), offset=0.0, out=out)
    assert torch.equal(here.cpu(), x + residual)
    assert_close(out, references.rms_norm(x + residual, weight, EPS), torch.float32)


@pytest.mark.parametrize("heads, size", [(1, 64), (3, 80), (10, 128)])
def test_heads_of_a_fused_projection(heads: int, size: int, device: torch.device) -> None:
    """x and out are views of wider rows; what lies beside them is not touched."""
    fused = randn(6, (heads + 2) * size, dtype=torch.bfloat16)
    weight = randn(size, dtype=torch.bfloat16, seed=1)
    here = fused.to(device, copy=True)
    x = here[:, : heads * size].unflatten(1, (heads, size))
    triton_rms_norm.rms_norm(x, weight.to(device), EPS, residual=None, offset=0.0, out=x)
    wanted = references.rms_norm(fused[:, : heads * size].unflatten(1, (heads, size)), weight, EPS)
    assert_close(x, wanted, torch.bfloat16)
    assert torch.equal(here[:, heads * size :].cpu(), fused[:, heads * size :])


def test_a_row_is_bitwise_the_same_in_any_company(device: torch.device) -> None:
    x, weight = randn(40, 96, dtype=torch.bfloat16).to(device), randn(96, dtype=torch.bfloat16, seed=1).to(device)
    together = triton_rms_norm.rms_norm(x, weight, EPS, residual=None, offset=0.0, out=torch.empty_like(x))
    for first, last in [(0, 1), (17, 18), (39, 40), (3, 25)]:
        part = x[first:last]
        alone = triton_rms_norm.rms_norm(part, weight, EPS, residual=None, offset=0.0, out=torch.empty_like(part))
        assert torch.equal(alone, together[first:last]), f"rows {first} to {last} changed"


def test_a_row_of_zeros_and_a_huge_one(device: torch.device) -> None:
    x = torch.stack([torch.zeros(64), torch.full((64,), 1e15)])
    weight = torch.ones(64)
    out = torch.empty(2, 64, device=device)
    triton_rms_norm.rms_norm(x.to(device), weight.to(device), EPS, residual=None, offset=0.0, out=out)
    assert_close(out, references.rms_norm(x, weight, EPS), torch.float32)
