"""The readout kernels against float64: log-sum-exp, target, rank, top-k, named tokens, under bias and mask."""

from __future__ import annotations

import pytest
import torch

from kernels import triton_lm_head
from kernels.lm_head_readout import Readout
from tests.kernels import references
from tests.kernels.accuracy import DTYPES, TOLERANCE, assert_close


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run(hidden: torch.Tensor, weight: torch.Tensor, device: torch.device, **options) -> Readout:
    defaults = {"targets": None, "top_k": 0, "bias": None, "allowed": None, "soft_cap": 0.0, "scale": 1.0}
    moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    arguments = {**defaults, "named_ids": None, **moved}
    result = triton_lm_head.lm_head_readout(hidden.to(device), weight.to(device), **arguments)
    return Readout(*(None if part is None else part.cpu() for part in result))


def check_everything(result: Readout, logits: torch.Tensor, targets: torch.Tensor, named: torch.Tensor, k: int) -> None:
    # Logits are fp32 sums of exact products whatever the dtype: as close as fp32 gets over the hidden size.
    close = {"dtype": torch.float32, "slack": 3}
    assert_close(result.lse, torch.logsumexp(logits, 1), **close)
    assert_close(result.target_logit, logits.gather(1, targets[:, None])[:, 0], **close)
    assert_close(result.named_logits, logits.gather(1, named), **close)
    assert_close(result.top_values, torch.topk(logits, k).values, **close)
    assert_close(result.top_values, logits.gather(1, result.top_ids), **close)
    for row, ids in enumerate(result.top_ids.tolist()):
        assert len(set(ids)) == k, f"row {row} names a token twice"
    # A token within rounding of the target may count or not.
    mark, margin = logits.gather(1, targets[:, None]), 3 * TOLERANCE[torch.float32] * 10
    assert bool((result.target_rank > (logits > mark + margin).sum(1)).all())
    assert bool((result.target_rank <= (logits > mark - margin).sum(1).clamp(min=1)).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_at_once(dtype: torch.dtype, device: torch.device) -> None:
    """Ragged in rows, vocabulary and hidden size."""
    hidden, weight = randn(5, 72, dtype=dtype), randn(1000, 72, seed=1, dtype=dtype) / 4
    targets, named = torch.tensor([0, 999, 500, 127, 128]), torch.tensor([[3, 999], [0, 0], [5, 6], [7, 8], [998, 1]])
    options = {
        "bias": randn(1000, seed=2), "allowed": randn(1000, seed=3) > -1, "scale": 1.5, "soft_cap": 6.0,
    }  # fmt: skip
    options["allowed"][targets] = True
    options["allowed"][named] = True
    result = run(hidden, weight, device, targets=targets, named_ids=named, top_k=7, **options)
    check_everything(result, references.logits(hidden, weight, **options), targets, named, 7)


@pytest.mark.parametrize("rows, vocab, size", [(1, 1, 16), (1, 300, 64), (130, 257, 48), (3, 128, 500)])
def test_shapes(rows: int, vocab: int, size: int, device: torch.device) -> None:
    hidden, weight = randn(rows, size), randn(vocab, size, seed=1) / size**0.5
    targets = torch.randint(vocab, (rows,), generator=torch.Generator().manual_seed(2))
    named = torch.randint(vocab, (rows, 3), generator=torch.Generator().manual_seed(3))
    k = min(vocab, 4)
    result = run(hidden, weight, device, targets=targets, named_ids=named, top_k=k)
    check_everything(result, references.logits(hidden, weight), targets, named, k)


def test_a_bare_log_sum_exp(device: torch.device) -> None:
    hidden, weight = randn(4, 32), randn(200, 32, seed=1)
    result = run(hidden, weight, device)
    assert_close(result.lse, torch.logsumexp(references.logits(hidden, weight), 1), torch.float32, slack=3)
    assert result[1:] == (None,) * 5


def test_a_top_k_that_spans_slices_of_the_vocabulary(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_lm_head, "WORKSPACE_BYTES", 1)
    hidden, weight = randn(3, 32), randn(700, 32, seed=1)
    result = run(hidden, weight, device, top_k=300)
    assert_close(result.top_values, torch.topk(references.logits(hidden, weight), 300).values, torch.float32, slack=8)


def test_ties_go_to_the_lower_id_and_do_not_count_in_a_rank(device: torch.device) -> None:
    """Tokens 3, 77 and 300 share an embedding, the best of all: each has rank 1, and they come in order of id."""
    hidden = torch.ones(1, 64)
    weight = -randn(400, 64, seed=1).abs()
    weight[[3, 77, 300]] = torch.linspace(0.1, 1, 64)
    result = run(hidden, weight, device, targets=torch.tensor([77]), named_ids=torch.tensor([[3, 77, 300]]), top_k=3)
    assert result.top_ids.tolist() == [[3, 77, 300]]
    assert result.target_rank.tolist() == [1]
    numbers = {*result.top_values.flatten().tolist(), *result.named_logits.flatten().tolist()}
    assert numbers == set(result.target_logit.tolist()), "a token's logit is one number wherever it is asked"


def test_negative_and_zero_logits_sort_below_positive_ones(device: torch.device) -> None:
    hidden, weight = torch.ones(1, 16), torch.tensor([[-2.0], [0.0], [-0.5], [3.0], [1e-30]]).expand(5, 16) / 16
    result = run(hidden, weight, device, top_k=5)
    assert result.top_ids.tolist() == [[3, 4, 1, 2, 0]]


def test_no_token_allowed_and_one_token_allowed(device: torch.device) -> None:
    hidden, weight = randn(2, 32), randn(300, 32, seed=1)
    nothing = torch.zeros(300, dtype=torch.bool)
    assert run(hidden, weight, device, allowed=nothing).lse.tolist() == [float("-inf")] * 2
    one = nothing.clone()
    one[299] = True
    result = run(hidden, weight, device, allowed=one, top_k=2, targets=torch.tensor([299, 299]))
    assert result.top_ids[:, 0].tolist() == [299, 299]
    assert torch.equal(result.lse, result.target_logit)
    assert result.target_rank.tolist() == [1, 1]


def test_a_row_that_is_not_a_number_spoils_no_other(device: torch.device) -> None:
    hidden, weight = randn(3, 32), randn(300, 32, seed=1)
    hidden[1, 5] = float("nan")
    result = run(hidden, weight, device, targets=torch.tensor([1, 2, 3]))
    assert result.lse.isfinite().tolist() == [True, False, True]


def test_a_row_is_bitwise_the_same_in_any_company(device: torch.device) -> None:
    hidden, weight = randn(140, 64, dtype=torch.bfloat16), randn(300, 64, seed=1, dtype=torch.bfloat16)
    targets = torch.arange(140)
    together = run(hidden, weight, device, targets=targets, top_k=5)
    for first, last in [(0, 1), (64, 128), (139, 140), (7, 100)]:
        alone = run(hidden[first:last], weight, device, targets=targets[first:last], top_k=5)
        for name in ("lse", "target_logit", "target_rank", "top_values", "top_ids"):
            assert torch.equal(getattr(alone, name), getattr(together, name)[first:last]), f"{name} changed"
