"""The expert products and the products with 8-bit weights, against float64."""

from __future__ import annotations

import pytest
import torch

from kernels import triton_linear
from kernels.moe_grouped_gemm import sort_by_expert
from tests.kernels import references
from tests.kernels.accuracy import DTYPES, assert_close


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# --- experts ----------------------------------------------------------------------------------------------------------


def grouped(device: torch.device, x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, **options):
    pairs = int(offsets[-1])
    out = torch.full((pairs, weight.shape[1]), float("nan"), dtype=x.dtype, device=device)
    given = {name: None if part is None else part.to(device) for name, part in options.items()}
    given = {"row_ids": None, "row_scale": None, "bias": None, **given}
    return triton_linear.moe_grouped_gemm(x.to(device), weight.to(device), offsets.to(device), out=out, **given).cpu()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_routed_rows(dtype: torch.dtype, device: torch.device) -> None:
    """Experts with none, one, a tile's worth and more rows; everything ragged."""
    x, weight = randn(150, 40, dtype=dtype), randn(6, 70, 40, seed=1, dtype=dtype) / 6
    chosen = torch.tensor([0, 2, 2, 5, 5, 5])[torch.randint(6, (150, 2), generator=torch.Generator().manual_seed(2))]
    chosen[0, 0] = 3
    routed = sort_by_expert(chosen, 6)
    options = {
        "row_ids": routed.row_ids, "row_scale": randn(300, seed=3), "bias": randn(6, 70, seed=4, dtype=dtype),
    }  # fmt: skip
    out = grouped(device, x, weight, routed.offsets, **options)
    assert_close(out, references.grouped(x, weight, routed.offsets, **options), dtype)


@pytest.mark.parametrize("counts", [[1], [0, 0, 5], [128, 1, 0, 127, 129], [3] * 40])
def test_rows_in_order(counts: list[int], device: torch.device) -> None:
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    x, weight = randn(sum(counts), 32), randn(len(counts), 16, 32, seed=1) / 6
    assert_close(grouped(device, x, weight, offsets), references.grouped(x, weight, offsets), torch.float32)


def test_a_row_does_not_depend_on_the_others_of_its_expert(device: torch.device) -> None:
    x, weight = randn(200, 64, dtype=torch.bfloat16), randn(2, 48, 64, seed=1, dtype=torch.bfloat16)
    together = grouped(device, x, weight, torch.tensor([0, 150, 200], dtype=torch.int32))
    for first, last in [(0, 1), (100, 150), (7, 90)]:
        alone = grouped(device, x[first:last], weight, torch.tensor([0, last - first, last - first], dtype=torch.int32))
        assert torch.equal(alone, together[first:last]), f"rows {first} to {last} changed"


# --- 8-bit weights ----------------------------------------------------------------------------------------------------


def linear(device: torch.device, op: str, x, weight, scale, bias=None) -> torch.Tensor:
    out = torch.full((x.shape[0], weight.shape[0]), float("nan"), dtype=x.dtype, device=device)
    bias = None if bias is None else bias.to(device)
    function = getattr(triton_linear, op)
    return function(x.to(device), weight.to(device), scale.to(device), bias=bias, out=out).cpu()


def fp8_weight(channels: int, inputs: int) -> torch.Tensor:
    """Subnormals, both zeros and the largest values among ordinary ones."""
    weight = (randn(channels, inputs, seed=1) * 10).to(torch.float8_e4m3fn)
    special = torch.tensor([0.0, -0.0, 2**-9, -7 * 2**-9, 448.0, -448.0, 0.0625]).to(torch.float8_e4m3fn)
    weight.view(torch.uint8)[-1, : len(special)] = special.view(torch.uint8)
    return weight


FP8_SCALES = {"tensor": (), "tensor of one": (1,), "channel": (150,), "channel column": (150, 1), "block": (2, 3)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", FP8_SCALES)
def test_fp8(layout: str, dtype: torch.dtype, device: torch.device) -> None:
    x, weight, bias = randn(5, 300, dtype=dtype) / 60, fp8_weight(150, 300), randn(150, seed=3, dtype=dtype)
    scale = randn(*FP8_SCALES[layout], seed=2).abs() / 10
    wide = references.spread_blocks(scale, weight) if layout == "block" else scale.reshape(-1, 1)
    wanted = references.scaled_linear(x, weight, wide, bias)
    assert_close(linear(device, "fp8_linear", x, weight, scale, bias), wanted, dtype)


@pytest.mark.parametrize("capability", [80, 89])
def test_every_fp8_number_is_read_exactly(
    capability: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One channel a number, the two NaNs aside; in the interpreter both ways of reading them, on a device its own."""
    if device.type == "cpu":
        monkeypatch.setattr(triton_linear, "capability_of", lambda _: capability)
    numbers = torch.tensor([b for b in range(256) if b & 0x7F != 0x7F], dtype=torch.uint8)
    weight = torch.zeros(len(numbers), 16, dtype=torch.uint8)
    weight[:, 3] = numbers
    x = torch.zeros(1, 16)
    x[0, 3] = 1.0
    out = linear(device, "fp8_linear", x, weight.view(torch.float8_e4m3fn), torch.ones(1))
    assert torch.equal(out[0], numbers.view(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inputs, groups", [(64, 0), (300, 1), (192, 2), (256, 8)])
def test_int8(inputs: int, groups: int, dtype: torch.dtype, device: torch.device) -> None:
    x, bias = randn(5, inputs, dtype=dtype), randn(150, seed=3, dtype=dtype)
    weight = torch.randint(-128, 128, (150, inputs), generator=torch.Generator().manual_seed(1), dtype=torch.int8)
    scale = randn(*((150, groups) if groups else (150,)), seed=2).abs() / 2000
    wide = scale.reshape(150, -1).repeat_interleave(inputs // max(groups, 1), 1)
    wanted = references.scaled_linear(x, weight, wide, bias)
    assert_close(linear(device, "int8_linear", x, weight, scale, bias), wanted, dtype)


@pytest.mark.parametrize("op", ["fp8_linear", "int8_linear"])
def test_a_row_does_not_depend_on_the_others(op: str, device: torch.device) -> None:
    x = randn(200, 128, dtype=torch.bfloat16)
    weight = fp8_weight(32, 128) if op == "fp8_linear" else torch.arange(-64, 64, dtype=torch.int8).expand(32, 128)
    scale = randn(32, seed=2).abs()
    together = linear(device, op, x, weight, scale)
    for first, last in [(0, 1), (130, 200), (7, 90)]:
        assert torch.equal(linear(device, op, x[first:last], weight, scale), together[first:last]), (first, last)
