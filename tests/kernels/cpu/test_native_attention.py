"""The C++ attention against float64, and a row's bits in any company."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from kernels.cpu import native
from tests.kernels import attention_cases as cases
from tests.kernels.accuracy import assert_close
from tests.kernels.cpu.variants import supported_variants

DTYPES = (torch.bfloat16, torch.float32)
NONE = torch.device("cpu")
# Ragged tails, single rows, an empty segment, the edges of pages, of 48-row tiles and of 128-key tiles.
RAGGED = [(0, 5), (0, 70), (3, 0), (0, 1), (63, 33), (127, 1), (128, 1), (31, 1), (0, 16), (17, 131)]


def run(case: cases.Attention) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = case.outputs(NONE)
    native.attention(*case.tensors(NONE), max_q=case.max_q, out=out, lse=lse, **case.options)
    return out, lse


def check(case: cases.Attention, slack: float = 1.0) -> None:
    """In every variant: the answer in float64 takes longer than all of them."""
    expected_out, expected_lse = cases.expected(case)
    for variant in supported_variants():
        native.select(variant)
        out, lse = run(case)
        assert_close(out, expected_out, case.q.dtype, slack)
        # Scores are fp32 whatever the operands are.
        assert_close(lse, expected_lse, torch.float32, 2 * slack)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ragged_segments(dtype: torch.dtype) -> None:
    check(cases.make(RAGGED, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
def test_head_dims(head_dim: int, dtype: torch.dtype) -> None:
    check(cases.make([(0, 3), (120, 20)], head_dim=head_dim, dtype=dtype))


@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (3, 3), (9, 3), (7, 1), (10, 2), (16, 1), (64, 2)])
def test_head_counts(heads: int, kv_heads: int) -> None:
    check(cases.make([(0, 9), (20, 5)], heads=heads, kv_heads=kv_heads, dtype=torch.bfloat16))


@pytest.mark.parametrize("page", [16, 32, 64, 128])
def test_page_sizes(page: int) -> None:
    check(cases.make([(0, 1), (page - 1, 1), (page, 1), (page - 1, 2), (0, page)], page=page, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [1, 2, 16, 31, 128, 129, 500])
def test_windows(window: int, dtype: torch.dtype) -> None:
    check(cases.make([(0, 70), (100, 200), (199, 1)], window=window, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_soft_cap_and_sinks(dtype: torch.dtype) -> None:
    for soft_cap, sinks, window in itertools.product((0.0, 2.0, 50.0), (False, True), (0, 40)):
        case = cases.make([(0, 33), (140, 20)], heads=6, kv_heads=2, soft_cap=soft_cap, sinks=sinks, window=window,
                          dtype=dtype)  # fmt: skip
        check(case)


@pytest.mark.parametrize("factor", [8.0, 40.0])
def test_sharp_distributions(factor: float) -> None:
    case = cases.make([(0, 150), (200, 60)], dtype=torch.bfloat16)
    case.options["scale"] *= factor
    check(case)


def test_scores_of_every_sign_with_a_scale_of_one() -> None:
    # A mask that is merely large would meet its own limits here: scores reach ±200 and the exponent 300.
    case = cases.make([(0, 140)], dtype=torch.float32)
    case.q.mul_(6)
    case.options["scale"] = 1.0
    check(case, slack=50)  # fp32 scores of 200 are off by 1e-5


@pytest.mark.usefixtures("variant")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_alone_packed_and_in_chunks(dtype: torch.dtype, two_threads: None) -> None:
    for window, soft_cap, sinks in ((0, 0.0, False), (50, 0.0, False), (0, 20.0, True)):
        segments = [(0, 330), (0, 1), (0, 90), (5, 140)]
        case = cases.make(segments, heads=6, kv_heads=2, dtype=dtype, window=window, soft_cap=soft_cap, sinks=sinks)
        whole, whole_lse = run(case)
        for segment, (before, here) in enumerate(segments):
            first = int(case.cu_q[segment])
            for chunk in (here, 1 if here < 100 else 47, 64, 129):
                for start in range(0, here, chunk):
                    stop = min(here, start + chunk)
                    rows = slice(first + start, first + stop)
                    out, lse = run(part(case, segment, rows, before + start))
                    assert torch.equal(out, whole[rows]), (segment, start, stop)
                    assert torch.equal(lse, whole_lse[rows]), (segment, start, stop)


def part(case: cases.Attention, segment: int, rows: slice, start: int) -> cases.Attention:
    """Some rows of one segment, as a call of its own over the same pages."""
    count = rows.stop - rows.start
    return dataclasses.replace(
        case,
        q=case.q[rows],
        page_table=case.page_table[segment : segment + 1],
        cu_q=torch.tensor([0, count], dtype=torch.int32),
        q_pos=torch.tensor([start], dtype=torch.int32),
        max_q=count,
    )


@pytest.mark.usefixtures("variant")
def test_threads_and_page_size_change_no_bit(two_threads: None) -> None:
    results = []
    for threads, page in ((2, 16), (1, 16), (2, 128)):
        torch.set_num_threads(threads)
        results.append(run(cases.make([(0, 300), (90, 77), (0, 2)], page=page, dtype=torch.bfloat16))[0])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.usefixtures("variant")
def test_segments_may_share_pages() -> None:
    case = cases.make([(0, 200)], dtype=torch.bfloat16)
    shared = dataclasses.replace(
        case,
        q=torch.cat([case.q[150:], case.q[150:]]),
        page_table=case.page_table.repeat(2, 1),
        cu_q=torch.tensor([0, 50, 100], dtype=torch.int32),
        q_pos=torch.tensor([150, 150], dtype=torch.int32),
        max_q=50,
    )
    whole, twice = run(case)[0], run(shared)[0]
    assert torch.equal(twice[:50], whole[150:])
    assert torch.equal(twice[50:], whole[150:])


@pytest.mark.usefixtures("variant")
def test_memory_before_a_window_is_not_read() -> None:
    case = cases.make([(300, 40)], window=64, dtype=torch.bfloat16)
    expected, _ = run(case)
    for pool in (case.k_pages, case.v_pages):
        pool[case.page_table[0, :14].long()] = float("nan")  # positions below 224; the first row sees 237 and up
    assert torch.equal(run(case)[0], expected)


@pytest.mark.usefixtures("variant")
def test_operands_inside_wider_rows() -> None:
    case = cases.make([(0, 40), (70, 9)], heads=6, kv_heads=2, dtype=torch.bfloat16)
    expected, expected_lse = run(case)
    rows = case.q.shape[0]
    fused = torch.full((rows, 10, 64), float("nan"), dtype=case.q.dtype)
    fused[:, 2:8] = case.q
    pools = [torch.full((p.shape[0], 16, 3, 64), float("nan"), dtype=p.dtype) for p in (case.k_pages, case.v_pages)]
    for pool, pages in zip(pools, (case.k_pages, case.v_pages), strict=True):
        pool[:, :, 1:] = pages
    wide_out = torch.zeros(rows, 8, 64, dtype=case.q.dtype)
    wide_lse = torch.zeros(6, rows)
    native.attention(
        fused[:, 2:8], pools[0][:, :, 1:], pools[1][:, :, 1:], case.page_table, case.cu_q, case.q_pos,
        max_q=case.max_q, out=wide_out[:, 1:7], lse=wide_lse.T, **case.options,
    )  # fmt: skip
    assert torch.equal(wide_out[:, 1:7], expected)
    assert torch.equal(wide_lse.T, expected_lse)
    assert not wide_out[:, 0].any() and not wide_out[:, 7].any()


@pytest.mark.usefixtures("variant")
def test_a_nan_in_a_query_stays_in_its_row() -> None:
    case = cases.make([(0, 60), (0, 30)], dtype=torch.bfloat16)
    expected, _ = run(case)
    case.q[20, 1, 3] = float("nan")
    out, _ = run(case)
    assert out[20, 1].isnan().all()
    expected[20, 1] = 0
    out[20, 1] = 0
    assert torch.equal(out, expected)
