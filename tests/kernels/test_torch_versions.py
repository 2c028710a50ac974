"""The torch versions, which are the CPU path and the reference on a GPU, against float64; and what ops refuse."""

from __future__ import annotations

import pytest
import torch

from kernels.attention import attention, attention_torch
from kernels.fp8_linear import fp8_linear_torch, scale_layout
from kernels.gated_act import KINDS, Kind, gated_act, gated_act_torch
from kernels.int8_linear import group_size, int8_linear_torch
from kernels.kv_write import kv_write, kv_write_torch
from kernels.lm_head_readout import lm_head_readout, lm_head_readout_torch
from kernels.moe_grouped_gemm import combine, moe_grouped_gemm, moe_grouped_gemm_torch, sort_by_expert
from kernels.rms_norm import rms_norm, rms_norm_torch
from kernels.rope import rope_, rope_torch_
from tests.kernels import attention_cases, references
from tests.kernels.accuracy import DTYPES, TOLERANCE, assert_close

RAGGED = [(0, 5), (0, 70), (3, 0), (0, 1), (63, 33), (64, 16), (31, 1), (600, 20), (511, 2)]
EPS = 1e-5


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# --- attention -------------------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict] = {
    "plain": {}, "window": {"window": 20}, "cap and sinks": {"soft_cap": 3.0, "sinks": True, "window": 33},
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention(dtype: torch.dtype, options: str) -> None:
    case = attention_cases.make(RAGGED, heads=6, kv_heads=2, head_dim=80, dtype=dtype, **OPTIONS[options])
    # SDPA multiplies what a row does not see by 0: pages are zeros where no key was written.
    case.k_pages, case.v_pages = case.k_pages.nan_to_num(), case.v_pages.nan_to_num()
    expected_out, expected_lse = attention_cases.expected(case)
    out, lse = case.outputs(torch.device("cpu"))
    attention_torch(*case.tensors(torch.device("cpu")), out=out, lse=lse, **case.options)
    assert_close(out, expected_out, dtype)
    assert_close(lse, expected_lse, torch.float32, slack=4)
    without_lse, _ = case.outputs(torch.device("cpu"))
    attention_torch(*case.tensors(torch.device("cpu")), out=without_lse, **case.options)
    assert_close(without_lse, expected_out, dtype)


def test_attention_refuses_what_does_not_fit() -> None:
    case = attention_cases.make([(0, 5)])
    q, k, v, table, cu_q, start = case.tensors(torch.device("cpu"))

    def call(**other: torch.Tensor) -> None:
        given = {"q": q, "k_pages": k, "v_pages": v, "page_table": table, "cu_q": cu_q, "q_pos": start} | other
        attention(**given, scale=1.0, max_q=5)

    call()
    for wrong in (
        {"q": q[0]}, {"q": q.half()}, {"q": q[..., :32]}, {"k_pages": k[:, :8], "v_pages": v[:, :8]},
        {"v_pages": v[:1]}, {"cu_q": cu_q[:1]}, {"page_table": table[0]}, {"q": q.double()},
    ):  # fmt: skip
        with pytest.raises(ValueError):
            call(**wrong)
    assert attention(q[:0], k, v, table, cu_q * 0, start, scale=1.0, max_q=0).shape == (0, 2, 64)


# --- norms, activations, rope, pages ---------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm(dtype: torch.dtype, offset: float) -> None:
    x, residual, weight = randn(7, 96, dtype=dtype), randn(7, 96, seed=1, dtype=dtype), randn(96, seed=2, dtype=dtype)
    total = x + residual
    rms_norm_torch(x, weight, EPS, residual=residual, offset=offset, out=x)
    assert_close(x, references.rms_norm(total, weight, EPS, offset), dtype)
    heads, weight = randn(5, 3, 64, dtype=dtype), randn(64, dtype=dtype)
    out = rms_norm_torch(heads, weight, EPS, offset=offset, out=torch.empty_like(heads))
    assert_close(out, references.rms_norm(heads, weight, EPS, offset), dtype)


def test_rms_norm_refuses_what_does_not_fit() -> None:
    for weight, residual in ((torch.ones(5), None), (torch.ones(6), torch.ones(1, 6))):
        with pytest.raises(ValueError, match="rms_norm"):
            rms_norm(torch.ones(2, 6), weight, EPS, residual=residual)
    assert rms_norm(torch.ones(0, 6), torch.ones(6), EPS).shape == (0, 6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_act(dtype: torch.dtype, kind: Kind) -> None:
    gate_up = (4 * randn(5, 60)).to(dtype)
    wanted = references.gated_act(gate_up, kind)
    assert_close(gated_act_torch(gate_up, kind=kind, out=torch.empty(5, 30, dtype=dtype)), wanted, dtype)
    gated_act_torch(gate_up, kind=kind, out=gate_up[:, :30])
    assert_close(gate_up[:, :30], wanted, dtype)


def test_gated_act_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="kind must be one of"):
        gated_act(torch.ones(1, 4), kind="relu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="gate_up"):
        gated_act(torch.ones(1, 5))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rot", [64, 20])
def test_rope_and_kv_write(rot: int, dtype: torch.dtype, interleaved: bool) -> None:
    cos, sin = references.rope_tables(50, rot)
    positions, slots = torch.tensor([0, 49, 7, 7]), torch.tensor([31, -1, 0, 16])
    k, v = randn(4, 3, 64, dtype=dtype), randn(4, 3, 64, seed=1, dtype=dtype)
    wanted = references.rope(k, cos, sin, positions, interleaved)
    pages, values = torch.zeros(2, 16, 3, 64, dtype=dtype), torch.zeros(2, 16, 3, 64, dtype=dtype)
    before = k.clone()
    kv_write_torch(k, v, pages, values, slots, cos=cos, sin=sin, positions=positions, interleaved=interleaved)
    assert torch.equal(k, before), "k is not changed"
    for row, slot in ((0, 31), (2, 0), (3, 16)):
        assert_close(pages[slot // 16, slot % 16], wanted[row], dtype)
        assert torch.equal(values[slot // 16, slot % 16], v[row])
    assert int((values != 0).any(-1).any(-1).sum()) == 3, "a negative slot is not written"
    rope_torch_(k, cos, sin, positions, interleaved=interleaved)
    assert_close(k, wanted, dtype)


def test_rope_and_kv_write_refuse_what_does_not_fit() -> None:
    x, cos = torch.ones(2, 1, 8), torch.ones(3, 4)
    for wrong in ((x[0], cos, cos), (x, cos, cos[:, :2]), (x, cos.double(), cos.double()), (x[..., :4], cos, cos)):
        with pytest.raises(ValueError):
            rope_(*wrong, torch.zeros(2, dtype=torch.int32))
    pages, slots = torch.ones(1, 16, 1, 8), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError):
        kv_write(x, x[:1], pages, pages, slots)
    with pytest.raises(ValueError):
        kv_write(x, x, pages, pages, slots, cos=cos)
    with pytest.raises(ValueError):
        kv_write(x, x, pages, pages, slots[:1])


# --- products --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lm_head_readout(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks of 16 rows; 16-bit logits carry that dtype's rounding."""
    monkeypatch.setattr("kernels.lm_head_readout.WORKSPACE_BYTES", 1)
    hidden, weight = randn(37, 48, dtype=dtype), randn(300, 48, seed=1, dtype=dtype) / 7
    targets, named = torch.arange(37), torch.arange(74).view(37, 2)
    options: dict = {"bias": randn(300, seed=2), "allowed": torch.ones(300, dtype=torch.bool), "soft_cap": 5.0}
    options["allowed"][200:] = False
    read = lm_head_readout_torch(hidden, weight, targets=targets, top_k=5, scale=1.5, named_ids=named, **options)
    logits = references.logits(hidden, weight, scale=1.5, **options)
    assert read.target_logit is not None and read.top_ids is not None and read.top_values is not None
    assert read.named_logits is not None and read.target_rank is not None
    assert_close(read.lse, torch.logsumexp(logits, 1), dtype, slack=2)
    assert_close(read.target_logit, logits.gather(1, targets[:, None])[:, 0], dtype, slack=2)
    assert_close(read.named_logits, logits.gather(1, named), dtype, slack=2)
    assert_close(read.top_values, torch.topk(logits, 5).values, dtype, slack=2)
    assert_close(read.top_values, logits.gather(1, read.top_ids), dtype, slack=2)
    margin = 20 * TOLERANCE[dtype]
    marks = logits.gather(1, targets[:, None])
    assert bool((read.target_rank > (logits > marks + margin).sum(1)).all())
    assert bool((read.target_rank <= (logits > marks - margin).sum(1).clamp(min=1)).all())


def test_a_readout_does_not_depend_on_the_rows_beside_it() -> None:
    """Single rows included, which torch would add up in parts, one a thread: that shows in a few of many."""
    hidden, weight = randn(70, 32, dtype=torch.bfloat16), randn(49152, 32, seed=1, dtype=torch.bfloat16) / 3
    targets = torch.arange(70)
    together = lm_head_readout_torch(hidden, weight, targets=targets, top_k=3)
    for first, last in [(i, i + 1) for i in range(70)] + [(31, 34), (32, 49), (1, 70)]:
        alone = lm_head_readout_torch(hidden[first:last], weight, targets=targets[first:last], top_k=3)
        for name in ("lse", "target_logit", "target_rank", "top_values", "top_ids"):
            assert torch.equal(getattr(alone, name), getattr(together, name)[first:last]), f"{name} {first} {last}"


def test_lm_head_readout_refuses_what_does_not_fit() -> None:
    hidden, weight, ids = torch.ones(2, 8), torch.ones(5, 8), torch.zeros(3, dtype=torch.int64)
    for wrong in ({"top_k": 6}, {"top_k": -1}, {"targets": ids}, {"bias": ids.float()}, {"allowed": ids > 0}):
        with pytest.raises(ValueError):
            lm_head_readout(hidden, weight, **wrong)
    with pytest.raises(ValueError):
        lm_head_readout(hidden, weight[:, :7])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts(dtype: torch.dtype) -> None:
    x, weight, bias = randn(50, 40, dtype=dtype), randn(6, 30, 40, seed=1, dtype=dtype) / 6, randn(6, 30, dtype=dtype)
    chosen = torch.randint(5, (50, 2), generator=torch.Generator().manual_seed(2))
    routed = sort_by_expert(chosen, 6)
    shares = randn(100, seed=3)
    out = torch.empty(100, 30, dtype=dtype)
    options = {"row_ids": routed.row_ids, "row_scale": shares, "bias": bias}
    moe_grouped_gemm_torch(x, weight, routed.offsets, out=out, **options)
    # The product is rounded to the dtype before the share multiplies it.
    assert_close(out, references.grouped(x, weight, routed.offsets, **options), dtype, slack=2)
    for token in (0, 17, 49):
        experts = [int(torch.searchsorted(routed.offsets, int(p), right=True)) - 1 for p in routed.places[token]]
        assert experts == chosen[token].tolist()
        assert routed.row_ids[routed.places[token]].tolist() == [token, token]
    summed = out.double()[routed.places].sum(1)
    assert_close(combine(out, routed.places), summed, dtype)


def test_experts_refuse_what_does_not_fit() -> None:
    offsets = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(ValueError):
        moe_grouped_gemm(torch.ones(2, 8), torch.ones(3, 4, 8), offsets)
    with pytest.raises(ValueError):
        moe_grouped_gemm(torch.ones(2, 7), torch.ones(2, 4, 8), offsets)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (1100,), (1100, 1), (9, 3)])
def test_fp8_linear(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """More channels than are widened at a time."""
    x, bias = randn(5, 300, dtype=dtype) / 60, randn(1100, seed=3, dtype=dtype)
    weight = (randn(1100, 300, seed=1) * 10).to(torch.float8_e4m3fn)
    scale = randn(*shape, seed=2).abs() / 10
    wide = references.spread_blocks(scale, weight) if shape == (9, 3) else scale.reshape(-1, 1)
    out = fp8_linear_torch(x, weight, scale, bias=bias, out=torch.empty(5, 1100, dtype=dtype))
    # The scaled weight is rounded to the activations' dtype.
    assert_close(out, references.scaled_linear(x, weight, wide, bias), dtype, slack=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("groups", [0, 1, 4])
def test_int8_linear(groups: int, dtype: torch.dtype) -> None:
    x, bias = randn(5, 256, dtype=dtype), randn(1100, seed=3, dtype=dtype)
    weight = torch.randint(-128, 128, (1100, 256), generator=torch.Generator().manual_seed(1), dtype=torch.int8)
    scale = randn(*((1100, groups) if groups else (1100,)), seed=2).abs() / 2000
    wide = scale.reshape(1100, -1).repeat_interleave(256 // max(groups, 1), 1)
    out = int8_linear_torch(x, weight, scale, bias=bias, out=torch.empty(5, 1100, dtype=dtype))
    assert_close(out, references.scaled_linear(x, weight, wide, bias), dtype, slack=2)


def test_scales_that_fit_no_layout_are_refused() -> None:
    with pytest.raises(ValueError, match="fits neither"):
        scale_layout(torch.empty(200, 300), torch.ones(3, 3))
    for wrong in ((100,), (200, 7), (200, 20), (200, 1, 1)):
        with pytest.raises(ValueError, match="neither"):
            group_size(torch.empty(200, 320), torch.ones(wrong))
