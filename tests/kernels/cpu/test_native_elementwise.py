"""The C++ norm, rope, KV writing, activations and head product against float64, and a row's bits in any company."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from kernels.cpu import native

pytestmark = pytest.mark.usefixtures("variant")

DTYPES = (torch.bfloat16, torch.float32)
# Half a unit in the last place (bf16 keeps 8 bits), and what fp32 arithmetic may have moved a tie by.
RELATIVE = {torch.bfloat16: 2**-8 + 1e-5, torch.float32: 2e-6}


def random(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def assert_rounded(actual: torch.Tensor, expected: torch.Tensor, magnitude: float = 1.0) -> None:
    """`magnitude`: of the terms that the result is a sum of."""
    error = (actual.double() - expected).abs()
    bound = RELATIVE[actual.dtype] * expected.abs() + 1e-6 * magnitude
    assert bool((error <= bound).all()), f"off by {error.max().item()}"


def assert_rows_independent(op: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    """`op` maps rows to rows; one row, a few, and all on two threads give the same bits."""
    torch.set_num_threads(2)
    whole = op(x)
    torch.set_num_threads(1)
    assert torch.equal(op(x), whole)
    for row in (0, 1, x.shape[0] - 1):
        assert torch.equal(op(x[row : row + 1])[0], whole[row])


def exact_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * (weight.double() + offset)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 7, 64, 100, 576, 4096])
def test_rms_norm(width: int, dtype: torch.dtype) -> None:
    for offset, scale in ((0.0, 1.0), (1.0, 1e-3), (0.0, 300.0)):
        x, weight = random(33, width, dtype=dtype, scale=scale), random(width, dtype=dtype, seed=1)
        out = torch.empty_like(x)
        assert native.rms_norm(x, weight, 1e-6, offset=offset, out=out) is out
        assert_rounded(out, exact_norm(x, weight, 1e-6, offset))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_with_residual_and_in_place(dtype: torch.dtype) -> None:
    x, residual, weight = (random(17, 96, dtype=dtype, seed=s) for s in (0, 1, 2))
    weight = weight[0].contiguous()
    added = x + residual
    out = torch.empty_like(x)
    native.rms_norm(x, weight, 1e-5, residual=residual, out=out)
    assert torch.equal(x, added), "the rounded sum is left in x"
    assert_rounded(out, exact_norm(added, weight, 1e-5))
    assert native.rms_norm(x, weight, 1e-5, out=x) is x
    assert torch.equal(x, out)


def test_rms_norm_of_heads_inside_wider_rows() -> None:
    fused = random(20, 10 * 64, dtype=torch.bfloat16)
    x = fused[:, 64 : 7 * 64].unflatten(1, (-1, 64))
    weight = random(64, dtype=torch.bfloat16, seed=1)
    out = torch.empty_like(x)
    native.rms_norm(x, weight, 1e-6, out=out)
    assert_rounded(out, exact_norm(x, weight, 1e-6))


def test_rms_norm_keeps_nan() -> None:
    x = random(3, 64, dtype=torch.bfloat16)
    x[1, 5] = float("nan")
    out = native.rms_norm(x, torch.ones(64, dtype=torch.bfloat16), 1e-6, out=torch.empty_like(x))
    assert out[1].isnan().all() and not out[::2].isnan().any()


def exact_rope(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    out, half = x.double().clone(), cos.shape[1]
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    c, s = cos[positions.long(), None].double(), sin[positions.long(), None].double()
    a, b = out[..., first].clone(), out[..., second].clone()
    out[..., first], out[..., second] = a * c - b * s, b * c + a * s
    return out


def tables(half: int, positions: int = 50) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.outer(torch.arange(positions), 100.0 ** (-torch.arange(half) / max(half, 1)))
    return angles.cos().float(), angles.sin().float()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("head_dim, half", [(64, 32), (80, 20), (96, 48), (128, 16), (6, 3)])
def test_rope(head_dim: int, half: int, interleaved: bool, dtype: torch.dtype) -> None:
    fused = random(31, 5, head_dim, dtype=dtype)
    positions = torch.randint(0, 50, (31,), generator=torch.Generator().manual_seed(1))
    cos, sin = tables(half)
    for kind in (torch.int32, torch.int64):
        x = fused.clone()[:, 1:4]
        assert native.rope_(x, cos, sin, positions.to(kind), interleaved=interleaved) is x
        assert_rounded(x, exact_rope(fused[:, 1:4], cos, sin, positions, interleaved), magnitude=4)
        assert torch.equal(x[..., 2 * half :], fused[:, 1:4, 2 * half :])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page", [16, 128])
def test_kv_write(page: int, dtype: torch.dtype) -> None:
    fused = random(40, 4 * 64, dtype=dtype)
    k, v = (fused[:, part].unflatten(1, (2, 64)) for part in (slice(0, 128), slice(128, 256)))
    before = fused.clone()
    slots = torch.randperm(3 * page, generator=torch.Generator().manual_seed(2))[:40]
    slots[[3, 39]] = -1
    positions = torch.arange(40, dtype=torch.int32)
    cos, sin = tables(32)
    for turned in (True, False):
        pools = [torch.full((3, page, 2, 64), 7.0, dtype=dtype) for _ in range(2)]
        extra = {"cos": cos, "sin": sin, "positions": positions} if turned else {}
        native.rope_kv_write(k, v, *pools, slots, **extra)
        exact = exact_rope(k, cos, sin, positions, False) if turned else k.double()
        written = torch.zeros(3 * page, dtype=torch.bool)
        for row, slot in enumerate(slots.tolist()):
            if slot < 0:
                continue
            written[slot] = True
            assert_rounded(pools[0][slot // page, slot % page], exact[row], magnitude=4)
            assert torch.equal(pools[1][slot // page, slot % page], v[row])
        assert all(bool((pool.flatten(0, 1)[~written] == 7).all()) for pool in pools)
    assert torch.equal(fused, before)


def test_written_keys_are_the_rope_of_keys() -> None:
    k = random(30, 3, 64, dtype=torch.bfloat16)
    cos, sin = tables(32)
    positions = torch.arange(30)
    pools = [torch.zeros(2, 16, 3, 64, dtype=torch.bfloat16) for _ in range(2)]
    native.rope_kv_write(k, k, *pools, positions, cos=cos, sin=sin, positions=positions)
    assert torch.equal(pools[0].flatten(0, 1)[:30], native.rope_(k.clone(), cos, sin, positions))


def exact_gate(gate_up: torch.Tensor, kind: str) -> torch.Tensor:
    gate, up = gate_up.double().chunk(2, 1)
    if kind == "silu":
        return F.silu(gate) * up
    if kind == "gelu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    gate = gate.clamp(max=7)
    return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7, 7) + 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", native.GATED_KINDS)
def test_gated_act(kind: str, dtype: torch.dtype) -> None:
    for width in (1, 33, 1536):
        for scale in (0.1, 1.0, 30.0):
            gate_up = random(9, 2 * width, dtype=dtype, scale=scale)
            out = torch.empty(9, width, dtype=dtype)
            native.gated_act(gate_up, kind=kind, out=out)
            assert_rounded(out, exact_gate(gate_up, kind), magnitude=1e-3)


def test_gated_act_in_place_and_inside_wider_rows() -> None:
    wide = random(20, 200, dtype=torch.bfloat16)
    gate_up = wide[:, 40:168]
    expected = native.gated_act(gate_up, kind="silu", out=torch.empty(20, 64, dtype=torch.bfloat16))
    before = wide.clone()
    native.gated_act(gate_up, kind="silu", out=gate_up[:, :64])
    assert torch.equal(gate_up[:, :64], expected)
    wide[:, 40:104] = before[:, 40:104]
    assert torch.equal(wide, before)


def test_gated_act_of_infinite_and_missing_numbers() -> None:
    gates = torch.tensor([float("inf"), float("-inf"), float("nan"), 3e38, -3e38, 0.0], dtype=torch.bfloat16)
    gate_up = torch.stack([gates, torch.ones_like(gates)], 1)
    out = native.gated_act(gate_up, kind="silu", out=torch.empty(6, 1, dtype=torch.bfloat16))[:, 0]
    assert torch.equal(out.nan_to_num(nan=5, posinf=9), F.silu(gates.float()).bfloat16().nan_to_num(nan=5, posinf=9))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_do_not_depend_on_their_number(dtype: torch.dtype, two_threads: None) -> None:
    cos, sin = tables(32)
    weight = random(640, dtype=dtype, seed=3)
    x = random(301, 640, dtype=dtype)
    assert_rows_independent(lambda x: native.rms_norm(x, weight, 1e-6, out=torch.empty_like(x)), x)
    assert_rows_independent(lambda x: native.gated_act(x, kind="silu", out=torch.empty_like(x[:, :320])), x)
    assert_rows_independent(
        lambda x: native.rope_(x.clone().view(-1, 10, 64), cos, sin, torch.full((x.shape[0],), 7)), x
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 6, 16, 255, 600])
def test_linear_in_fp32(columns: int, dtype: torch.dtype) -> None:
    weight = random(columns, 160, dtype=dtype, seed=1)
    for rows in (1, 2, 3, 4, 7, 16):
        x = random(rows, 200, dtype=dtype)[:, 40:]
        assert_rounded(native.linear(x, weight), x.double() @ weight.double().T, magnitude=10)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_rows_do_not_depend_on_their_number(dtype: torch.dtype, two_threads: None) -> None:
    weight = random(700, 576, dtype=dtype, seed=1)
    assert_rows_independent(lambda x: native.linear(x, weight), random(103, 576, dtype=dtype))
