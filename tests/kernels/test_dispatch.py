"""Who computes, and what is counted when it is not who it should be."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from kernels import dispatch


class OnGpu:
    """As much of a CUDA tensor as dispatch looks at."""

    device = torch.device("cuda", 0)
    dtype = torch.bfloat16


@pytest.fixture(autouse=True)
def fresh_counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(dispatch, "fallback_counts", {})
    monkeypatch.setattr(dispatch, "compilation_counts", {})
    yield


def test_a_fallback_on_a_gpu_is_counted_each_time_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="kernels.dispatch"):
        for _ in range(3):
            assert not dispatch.use_triton("attention", OnGpu(), "head_dim 72")
        assert not dispatch.use_triton("attention", OnGpu(), "head_dim 40")
    assert dispatch.fallback_counts == {("attention", "head_dim 72"): 3, ("attention", "head_dim 40"): 1}
    assert [record.getMessage() for record in caplog.records] == [
        "attention falls back to torch on cuda:0: head_dim 72",
        "attention falls back to torch on cuda:0: head_dim 40",
    ]


def test_a_gpu_without_triton_falls_back_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "triton_missing", lambda: "no module named triton")
    assert not dispatch.use_triton("rope", OnGpu())
    assert dispatch.fallback_counts == {("rope", "no module named triton"): 1}


def test_a_gpu_with_triton_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "triton_missing", lambda: None)
    assert dispatch.use_triton("rope", OnGpu())
    assert dispatch.fallback_counts == {}


def test_torch_on_a_cpu_is_no_fallback() -> None:
    assert not dispatch.use_triton("attention", torch.zeros(1), "head_dim 72")
    assert dispatch.fallback_counts == {}


def test_compilations_are_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="kernels.dispatch"):
        dispatch.record_compilation("_rope_kernel")
        dispatch.record_compilation("_rope_kernel")
    assert dispatch.compilation_counts == {"_rope_kernel": 2}
    assert "_rope_kernel was compiled on a request" in caplog.text
