"""Kernels at the sizes of real models, through the public functions, against float64 on sampled rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels import dispatch
from kernels.attention import attention
from kernels.fp8_linear import fp8_linear
from kernels.gated_act import gated_act
from kernels.int8_linear import int8_linear
from kernels.lm_head_readout import lm_head_readout
from kernels.moe_grouped_gemm import moe_grouped_gemm, sort_by_expert
from kernels.rms_norm import rms_norm
from kernels.warmup import warm_up
from tests.kernels.accuracy import assert_close
from tests.kernels.compiled_session import Model, request

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def nothing_falls_back() -> object:
    before = dict(dispatch.fallback_counts)
    yield
    assert dispatch.fallback_counts == before, "an op ran in torch on the GPU"


def randn(device: torch.device, *shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device).to(dtype)


class Prompt:
    """One prompt of 32/8 heads in scattered pages."""

    def __init__(self, device: torch.device, length: int, head_dim: int = 128, page: int = 64) -> None:
        pages = -(-length // page)
        self.length, self.page, self.scale = length, page, head_dim**-0.5
        self.q = randn(device, length, 32, head_dim)
        self.k, self.v = (randn(device, pages, page, 8, head_dim, seed=seed) for seed in (1, 2))
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(3))
        self.table = order.int().to(device)[None]

    def attend(self, first: int, last: int, window: int = 0) -> torch.Tensor:
        """Rows first … last − 1, as one segment."""
        device = self.q.device
        cu_q = torch.tensor([0, last - first], dtype=torch.int32, device=device)
        start = torch.tensor([first], dtype=torch.int32, device=device)
        return attention(
            self.q[first:last], self.k, self.v, self.table, cu_q, start, scale=self.scale, max_q=last - first,
            window=window,
        )  # fmt: skip

    def expected(self, row: int, window: int = 0) -> torch.Tensor:
        keys = slice(max(0, row - window + 1) if window else 0, row + 1)
        k, v = (p[self.table[0].long()].flatten(0, 1)[keys].double().repeat_interleave(4, 1) for p in (self.k, self.v))
        scores = torch.einsum("hd,khd->hk", self.q[row].double(), k) * self.scale
        return torch.einsum("hk,khd->hd", torch.softmax(scores, 1), v)


@pytest.mark.parametrize(
    "length, head_dim, window", [(8192, 128, 0), (32768, 128, 0), (8192, 64, 0), (8192, 256, 4096)]
)
def test_attention_of_a_long_prompt(length: int, head_dim: int, window: int, device: torch.device) -> None:
    prompt = Prompt(device, length, head_dim)
    out = prompt.attend(0, length, window)
    for row in (0, 1, 63, 64, 127, 128, 4095, 4096, 5000, length - 1):
        assert_close(out[row], prompt.expected(row, window).cpu(), BF16)


def test_a_long_prompt_is_bitwise_the_same_however_it_is_cut(device: torch.device) -> None:
    prompt = Prompt(device, 8192)
    whole = prompt.attend(0, 8192)
    for cut in (1, 100, 4096, 5003, 8191):
        assert torch.equal(prompt.attend(cut, 8192), whole[cut:]), f"cut at {cut}"
        assert torch.equal(prompt.attend(0, cut), whole[:cut]), f"first {cut} rows"


def test_many_short_segments(device: torch.device) -> None:
    """512 segments of 40 rows, each over its own pages, in one launch; each as it is alone."""
    segments, rows = 512, 40
    q = randn(device, segments * rows, 32, 128)
    k, v = (randn(device, segments, 64, 8, 128, seed=seed) for seed in (1, 2))
    table = torch.arange(segments, dtype=torch.int32, device=device)[:, None]
    cu_q = torch.arange(segments + 1, dtype=torch.int32, device=device) * rows
    start = torch.zeros(segments, dtype=torch.int32, device=device)
    out = attention(q, k, v, table, cu_q, start, scale=0.1, max_q=rows)
    for segment in (0, 255, 511):
        part = slice(segment * rows, (segment + 1) * rows)
        alone = attention(q[part], k, v, table[segment][None], cu_q[:2], start[:1], scale=0.1, max_q=rows)
        assert torch.equal(out[part], alone), f"segment {segment}"


def test_a_vocabulary_of_128k(device: torch.device) -> None:
    hidden, weight = randn(device, 512, 4096), randn(device, 128256, 4096, seed=1) / 64
    targets = torch.randint(128256, (512,), generator=torch.Generator(device).manual_seed(2), device=device)
    read = lm_head_readout(hidden, weight, targets=targets, top_k=20)
    assert read.target_logit is not None and read.top_values is not None
    for row in (0, 127, 128, 511):
        logits = weight.double() @ hidden[row].double()
        assert_close(read.lse[row], torch.logsumexp(logits, 0).cpu(), torch.float32, slack=5)
        assert_close(read.target_logit[row], logits[targets[row]].cpu(), torch.float32, slack=10)
        assert_close(read.top_values[row], torch.topk(logits, 20).values.cpu(), torch.float32, slack=10)
    alone = lm_head_readout(hidden[100:101], weight, targets=targets[100:101], top_k=20)
    for name in ("lse", "target_logit", "target_rank", "top_values", "top_ids"):
        assert torch.equal(getattr(alone, name)[0], getattr(read, name)[100]), f"{name} changed in company"


def test_norms_and_activations(device: torch.device) -> None:
    x, weight = randn(device, 8192, 4096), randn(device, 4096, seed=1)
    wide = x.double()
    wanted = wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    assert_close(rms_norm(x, weight, 1e-5), wanted.cpu(), BF16)
    gate_up = randn(device, 4096, 2 * 14336)
    gate, up = gate_up[:64].double().chunk(2, 1)
    assert_close(gated_act(gate_up)[:64], (gate * torch.sigmoid(gate) * up).cpu(), BF16)


def test_128_experts(device: torch.device) -> None:
    x, weight = randn(device, 4096, 2048), randn(device, 128, 1536, 2048, seed=1) / 45
    chosen = torch.randint(128, (4096, 8), generator=torch.Generator(device).manual_seed(2), device=device)
    routed = sort_by_expert(chosen, 128)
    out = moe_grouped_gemm(x, weight, routed.offsets, row_ids=routed.row_ids)
    experts = chosen.flatten()[torch.argsort(chosen.flatten(), stable=True)]
    for pair in (0, 1, 5000, 4096 * 8 - 1):
        wanted = weight[experts[pair]].double() @ x[routed.row_ids[pair]].double()
        assert_close(out[pair], wanted.cpu(), BF16)


def test_8_bit_weights(device: torch.device) -> None:
    x = randn(device, 4096, 4096)
    weight = randn(device, 14336, 4096, seed=1).to(torch.float8_e4m3fn)
    scale = randn(device, 112, 32, seed=2, dtype=torch.float32).abs() / 64
    rows = x[:32].double()
    wide = weight.double() * scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert_close(fp8_linear(x, weight, scale)[:32], (rows @ wide.T).cpu(), BF16)
    integers = torch.randint(-128, 128, (14336, 4096), generator=torch.Generator(device).manual_seed(3), device=device)
    per_channel = randn(device, 14336, seed=4, dtype=torch.float32).abs() / 5000
    wanted = rows @ (integers.double() * per_channel.double()[:, None]).T
    assert_close(int8_linear(x, integers.to(torch.int8), per_channel)[:32], wanted.cpu(), BF16)


def test_nothing_is_compiled_after_warm_up(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(
        "TRITON_CACHE_DIR", str(tmp_path)
    )  # what an earlier run left there would be loaded, not compiled
    model, pages = Model(), torch.zeros(3, 16, 1, 64, dtype=BF16, device=device)
    warm_up(model, pages)
    monkeypatch.setattr(dispatch, "compilation_counts", {})
    dispatch.count_compilations(device)
    for count, segments, position, window in ((1, 1, 0, 0), (16, 2, 16, 20), (48, 1, 5000, 20), (33, 33, 1, 0)):
        request(model, pages, count, segments, position, window)
    assert dispatch.compilation_counts == {}
    # The counter does count: an argument that warm-up did not see.
    rms_norm(torch.ones(3, 200, device=device), torch.ones(200, device=device), 1e-5)
    assert sum(dispatch.compilation_counts.values()) == 1
