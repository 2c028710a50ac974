"""The attention kernel against float64, and a row's bits in any company."""

from __future__ import annotations

import pytest
import torch

from kernels import triton_attention
from kernels.attention import HEAD_DIMS
from tests.kernels import attention_cases as cases
from tests.kernels.accuracy import DTYPES, assert_close

# Ragged tails, single rows, an empty segment, page boundaries and one to either side of them.
RAGGED = [(0, 5), (0, 70), (3, 0), (0, 1), (63, 33), (64, 16), (31, 1), (0, 16), (17, 15)]


def run(case: cases.Attention, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = case.outputs(device)
    options = dict(case.options)
    if options["sinks"] is not None:
        options["sinks"] = options["sinks"].to(device)
    triton_attention.attention(*case.tensors(device), max_q=case.max_q, out=out, lse=lse, **options)
    return out.cpu(), lse.cpu()


def check(case: cases.Attention, device: torch.device) -> None:
    out, lse = run(case, device)
    expected_out, expected_lse = cases.expected(case)
    assert_close(out, expected_out, case.q.dtype)
    # Scores are fp32 whatever the operands are.
    assert_close(lse, expected_lse, torch.float32, slack=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ragged_segments(dtype: torch.dtype, device: torch.device) -> None:
    check(cases.make(RAGGED, dtype=dtype), device)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dims(head_dim: int, device: torch.device) -> None:
    check(cases.make([(0, 3), (40, 20)], head_dim=head_dim, dtype=torch.float16), device)
    check(cases.make([(0, 3), (14, 20)], head_dim=head_dim, dtype=torch.float32), device)


@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (3, 3), (9, 3), (7, 1), (10, 2)])
def test_head_counts(heads: int, kv_heads: int, device: torch.device) -> None:
    check(cases.make([(0, 9), (20, 5)], heads=heads, kv_heads=kv_heads), device)


@pytest.mark.parametrize("page", [16, 32, 64, 128])
def test_page_sizes(page: int, device: torch.device) -> None:
    check(cases.make([(0, 1), (page - 1, 1), (page, 1), (page - 1, 2), (0, page)], page=page), device)
    check(cases.make([(page, page + 1)], page=page, dtype=torch.bfloat16), device)


@pytest.mark.parametrize("window", [1, 2, 16, 31, 64, 500])
def test_windows(window: int, device: torch.device) -> None:
    check(cases.make([(0, 70), (100, 40), (199, 1)], window=window), device)


@pytest.mark.parametrize("window", [64, 250])
def test_a_window_leaves_tiles_that_need_no_mask(window: int, device: torch.device) -> None:
    check(cases.make([(300, 130)], window=window, dtype=torch.bfloat16), device)


def test_soft_cap_sinks_and_window_together(device: torch.device) -> None:
    check(cases.make(RAGGED, heads=4, kv_heads=2, window=20, soft_cap=3.0, sinks=True), device)


def test_a_sink_that_outweighs_every_key(device: torch.device) -> None:
    case = cases.make([(0, 40)], sinks=True)
    case.options["sinks"] = torch.tensor([60.0, -60.0])
    check(case, device)


def test_large_scores(device: torch.device) -> None:
    case = cases.make([(0, 50), (30, 30)])
    case.q *= 40
    out, lse = run(case, device)
    expected_out, expected_lse = cases.expected(case)
    # A score of 200 carries an fp32 error of 1e-5, which the exponential turns into a relative one.
    assert_close(out, expected_out, torch.float32, slack=20)
    assert_close(lse, expected_lse, torch.float32, slack=2)


def test_strided_query_and_output(device: torch.device) -> None:
    """q is a view of a fused projection, out one of a wider buffer: what lies beside them is not touched."""
    case = cases.make([(0, 20), (5, 7)], heads=4, kv_heads=2)
    rows = case.q.shape[0]
    fused = torch.randn(rows, 8 * 64, generator=torch.Generator().manual_seed(1))
    fused[:, : 4 * 64] = case.q.flatten(1)
    wide = torch.full((rows, 5, 64), 7.0, device=device)
    q, *rest = case.tensors(device)
    q = fused.to(device)[:, : 4 * 64].unflatten(1, (4, 64))
    triton_attention.attention(q, *rest, max_q=case.max_q, out=wide[:, :4], lse=None, **case.options)
    assert_close(wide[:, :4], cases.expected(case)[0], torch.float32)
    assert bool((wide[:, 4] == 7.0).all())


def test_no_segments(device: torch.device) -> None:
    case = cases.make([(7, 0)])
    out, lse = run(case, device)
    assert out.numel() == 0 and lse.numel() == 0


# --- the fixed order --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, window", [(torch.float32, 0), (torch.bfloat16, 0), (torch.bfloat16, 50)], ids=str)
def test_a_row_is_bitwise_the_same_in_any_company(dtype: torch.dtype, window: int, device: torch.device) -> None:
    """Alone, beside others, or with any part of its prefix computed in an earlier call."""
    length = 150
    whole = run(cases.make([(0, length)], dtype=dtype, window=window), device)
    packed = run(cases.make([(0, length), (0, 33), (64, 1), (20, 90)], dtype=dtype, window=window), device)
    for part, alone in zip(packed, whole, strict=True):
        assert torch.equal(part[:length], alone), "other segments changed a row"
    for before in (1, 16, 63, 64, 100, length - 1):
        split = run(cases.make([(before, length - before)], dtype=dtype, window=window), device)
        for part, alone in zip(split, whole, strict=True):
            assert torch.equal(part, alone[before:]), f"a prefix of {before} rows changed a row"
    short = run(cases.make([(0, 77)], dtype=dtype, window=window), device)
    for part, alone in zip(short, whole, strict=True):
        assert torch.equal(part, alone[:77]), "later rows changed an earlier one"


def test_where_pages_lie_changes_no_bit(device: torch.device) -> None:
    case = cases.make([(20, 90)], dtype=torch.bfloat16)
    moved = cases.make([(20, 90)], dtype=torch.bfloat16)
    order = torch.randperm(len(case.k_pages), generator=torch.Generator().manual_seed(3))
    moved.k_pages, moved.v_pages = case.k_pages[order], case.v_pages[order]
    moved.page_table = torch.argsort(order).int()[case.page_table.long()]
    assert torch.equal(run(case, device)[0], run(moved, device)[0])
