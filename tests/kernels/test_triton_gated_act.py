"""The gated activation kernel against float64."""

from __future__ import annotations

import pytest
import torch

from kernels import triton_gated_act
from kernels.gated_act import KINDS, Kind
from tests.kernels import references
from tests.kernels.accuracy import DTYPES, assert_close


def make(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Wide enough to reach both clamps, and the ends where an exponential overflows."""
    gate_up = 4 * torch.randn(rows, 2 * width, generator=torch.Generator().manual_seed(rows))
    gate_up[0, 0], gate_up[0, 2 * width - 1] = -200.0, 100.0
    return gate_up.to(dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kinds(dtype: torch.dtype, kind: Kind, device: torch.device) -> None:
    gate_up = make(3, 70, dtype)
    out = torch.empty(3, 70, dtype=dtype, device=device)
    triton_gated_act.gated_act(gate_up.to(device), kind=kind, out=out)
    assert_close(out, references.gated_act(gate_up, kind), dtype)


@pytest.mark.parametrize("width", [1, 1023, 1024, 1025])
def test_widths_around_a_block(width: int, device: torch.device) -> None:
    gate_up = make(2, width, torch.float32)
    out = torch.empty(2, width, device=device)
    triton_gated_act.gated_act(gate_up.to(device), kind="silu", out=out)
    assert_close(out, references.gated_act(gate_up, "silu"), torch.float32)


def test_in_place_over_the_gate(device: torch.device) -> None:
    gate_up = make(5, 130, torch.bfloat16)
    here = gate_up.to(device, copy=True)
    triton_gated_act.gated_act(here, kind="silu", out=here[:, :130])
    assert_close(here[:, :130], references.gated_act(gate_up, "silu"), torch.bfloat16)
    assert torch.equal(here[:, 130:].cpu(), gate_up[:, 130:])
