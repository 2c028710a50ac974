"""The kernels that turn heads and write keys and values, against float64."""

from __future__ import annotations

import pytest
import torch

from kernels import triton_rope
from tests.kernels import references
from tests.kernels.accuracy import DTYPES, assert_close

MAX_POS = 50


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads, head_dim, rot", [(1, 64, 64), (9, 80, 32), (3, 96, 96), (40, 64, 2)])
def test_rope(heads: int, head_dim: int, rot: int, dtype: torch.dtype, interleaved: bool, device: torch.device) -> None:
    """Whole and partial rotation, on a view of a fused projection."""
    fused = randn(5, heads * head_dim + 16, dtype=dtype)
    positions = torch.tensor([0, 49, 7, 7, 1], dtype=torch.int32)
    cos, sin = references.rope_tables(MAX_POS, rot)
    here = fused.to(device, copy=True)
    x = here[:, : heads * head_dim].unflatten(1, (heads, head_dim))
    triton_rope.rope_(x, cos.to(device), sin.to(device), positions.to(device), interleaved=interleaved)
    wanted = references.rope(
        fused[:, : heads * head_dim].unflatten(1, (heads, head_dim)), cos, sin, positions, interleaved
    )
    assert_close(x, wanted, dtype)
    assert torch.equal(here[:, heads * head_dim :].cpu(), fused[:, heads * head_dim :])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads, head_dim, rot", [(1, 64, 64), (3, 80, 32), (9, 96, 0), (20, 128, 128)])
def test_kv_write(
    heads: int, head_dim: int, rot: int, dtype: torch.dtype, interleaved: bool, device: torch.device
) -> None:
    page, rows = 16, 6
    fused = randn(rows, 2 * heads * head_dim, dtype=dtype)
    k, v = (half.unflatten(1, (heads, head_dim)) for half in fused.chunk(2, 1))
    before = randn(4, page, heads, 2 * head_dim, dtype=dtype, seed=1)
    here = before.to(device, copy=True)
    k_pages, v_pages = here[..., :head_dim], here[..., head_dim:]
    slots = torch.tensor([0, 15, -1, 16, 63, 31])
    positions = torch.tensor([3, 0, 1, 49, 20, 20])
    cos, sin = references.rope_tables(MAX_POS, rot) if rot else (None, None)
    on_device = fused.to(device, copy=True)
    triton_rope.kv_write(
        *(half.unflatten(1, (heads, head_dim)) for half in on_device.chunk(2, 1)), k_pages, v_pages, slots.to(device),
        cos=None if cos is None else cos.to(device), sin=None if sin is None else sin.to(device),
        positions=positions.to(device) if rot else None, interleaved=interleaved,
    )  # fmt: skip
    assert torch.equal(on_device.cpu(), fused), "k and v are not changed"
    wanted_k = k.double() if cos is None or sin is None else references.rope(k, cos, sin, positions, interleaved)
    wanted = before.double()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            wanted[slot // page, slot % page, :, :head_dim] = wanted_k[row]
            wanted[slot // page, slot % page, :, head_dim:] = v[row].double()
    assert_close(here, wanted, dtype)
    assert torch.equal(v_pages.cpu().double(), wanted[..., head_dim:]), "values are copied, not computed"
    kept = wanted[..., 2 * (rot // 2) : head_dim]
    assert torch.equal(k_pages[..., 2 * (rot // 2) :].cpu().double(), kept), "dims that do not turn are copied"


def test_keys_written_and_queries_turned_agree_bitwise(device: torch.device) -> None:
    """A key turned on its way into a page is the key that rope would have turned in place."""
    k = randn(5, 3, 64, dtype=torch.bfloat16).to(device)
    cos, sin = (t.to(device) for t in references.rope_tables(MAX_POS, 64))
    positions = torch.arange(5, device=device)
    pages = torch.zeros(1, 16, 3, 64, dtype=torch.bfloat16, device=device)
    triton_rope.kv_write(
        k, k, pages, torch.zeros_like(pages), torch.arange(5, device=device),
        cos=cos, sin=sin, positions=positions, interleaved=False,
    )  # fmt: skip
    assert torch.equal(pages[0, :5], triton_rope.rope_(k.clone(), cos, sin, positions, interleaved=False))
