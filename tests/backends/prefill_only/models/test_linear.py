"""Linear layers: what they compute, and that a row's bits do not depend on how many rows there are."""

from __future__ import annotations

import pytest
import torch

from backends.prefill_only.models.linear import Linear

DTYPES = {torch.bfloat16: 2e-2, torch.float32: 1e-5}


def random_linear(dtype: torch.dtype, outputs: int, inputs: int, bias: bool) -> Linear:
    torch.manual_seed(0)
    weight = (torch.randn(outputs, inputs) / inputs**0.5).to(dtype)
    return Linear(weight, torch.randn(outputs).to(dtype) if bias else None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_product_sum_and_slice(dtype: torch.dtype, bias: bool) -> None:
    linear = random_linear(dtype, 192, 64, bias)
    x, residual = torch.randn(32, 64).to(dtype), torch.randn(32, 192).to(dtype)
    exact = x.double() @ linear.weight.double().t() + (0 if linear.bias is None else linear.bias.double())
    close = {"atol": DTYPES[dtype], "rtol": DTYPES[dtype]}

    out = torch.empty(32, 192, dtype=dtype)
    assert linear(x, out=out) is out
    torch.testing.assert_close(out.double(), exact, **close)
    assert torch.equal(linear(x), out)

    torch.testing.assert_close(linear.rows(64, 128)(x).double(), exact[:, 64:128], **close)

    total = residual.clone()
    assert linear.add_(x, total) is total
    torch.testing.assert_close(total.double(), residual.double() + exact, **close)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(960, 576), (576, 1536), (3072, 576)])
def test_a_row_does_not_depend_on_the_number_of_rows(dtype: torch.dtype, outputs: int, inputs: int) -> None:
    """For multiples of 16 rows, at the sizes of the built-in model."""
    linear = random_linear(dtype, outputs, inputs, bias=False)
    x, residual = torch.randn(256, inputs).to(dtype), torch.randn(256, outputs).to(dtype)
    whole, whole_sum = linear(x), linear.add_(x, residual.clone())
    for rows in (16, 48, 112, 240):
        for first in (0, 16):
            part = slice(first, first + rows)
            assert torch.equal(linear(x[part]), whole[part])
            assert torch.equal(linear.add_(x[part], residual[part].clone()), whole_sum[part])
