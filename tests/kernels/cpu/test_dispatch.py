"""Which CPU kernels the ops use, and that torch does the same work without the library."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from kernels import dispatch
from kernels.attention import attention
from kernels.cpu import native
from kernels.gated_act import gated_act
from kernels.kv_write import kv_write
from kernels.rms_norm import rms_norm
from kernels.rope import rope_
from tests.kernels import attention_cases as cases
from tests.kernels.accuracy import assert_close


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Lets a test set ONEPASS_CPU_KERNELS; what is remembered of it is forgotten before and after."""

    def forget() -> None:
        native.missing.cache_clear()
        dispatch.native_cpu.cache_clear()

    forget()
    yield monkeypatch
    monkeypatch.undo()
    forget()


def test_the_library_is_built_where_it_can_be() -> None:
    buildable = sys.platform == "linux" and platform.machine() == "x86_64" and shutil.which("g++")
    assert not buildable or native.missing() in (None, "ONEPASS_CPU_KERNELS=torch"), native.missing()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_torch_does_the_same_work(choose: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    choose.setenv("ONEPASS_CPU_KERNELS", "torch")
    assert dispatch.native_cpu() is None
    assert dispatch.describe_kernels(torch.device("cpu")) == "torch"
    by_torch = _everything(dtype)
    choose.setenv("ONEPASS_CPU_KERNELS", "auto")
    native.missing.cache_clear()
    dispatch.native_cpu.cache_clear()
    for name, result in _everything(dtype).items():
        assert_close(result, by_torch[name].double(), dtype)


def _everything(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 256, generator=generator).to(dtype)
    weight = torch.randn(256, generator=generator).to(dtype)
    angles = torch.outer(torch.arange(20), torch.linspace(1, 0.01, 32))
    turn = {"cos": angles.cos(), "sin": angles.sin(), "positions": torch.arange(20)}
    heads = x.view(20, 4, 64)
    pages = [torch.zeros(2, 16, 4, 64, dtype=dtype) for _ in range(2)]
    kv_write(heads, heads, *pages, torch.arange(20), **turn)
    case = cases.make([(0, 40), (30, 5)], dtype=dtype)
    return {
        "attention": attention(*case.tensors(torch.device("cpu")), max_q=case.max_q, **case.options),
        "rms_norm": rms_norm(x, weight, 1e-6),
        "wide weight": rms_norm(x, weight.float() / 3, 1e-6, offset=1.0),
        "rope": rope_(heads.clone(), **turn),
        "keys": pages[0],
        "values": pages[1],
        "silu": gated_act(x),
        "gelu": gated_act(x, kind="gelu"),
        "clamped": gated_act(x, kind="clamped_swiglu"),
    }


def test_an_absent_library_is_an_error_only_where_it_was_asked_for(choose: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise OSError("not built")

    choose.setattr(native, "_library", absent)
    choose.setenv("ONEPASS_CPU_KERNELS", "auto")
    assert native.missing() == "not built"
    native.missing.cache_clear()
    choose.setenv("ONEPASS_CPU_KERNELS", "native")
    with pytest.raises(RuntimeError, match="ONEPASS_CPU_KERNELS=native, but not built"):
        native.available()


def test_an_unknown_choice_names_the_known_ones(choose: pytest.MonkeyPatch) -> None:
    choose.setenv("ONEPASS_CPU_KERNELS", "fast")
    with pytest.raises(ValueError, match="auto, native or torch"):
        native.available()


def test_head_dims_that_the_kernel_lacks_run_in_torch() -> None:
    case = cases.make([(0, 20)], head_dim=72, dtype=torch.bfloat16)
    out = attention(*case.tensors(torch.device("cpu")), max_q=case.max_q, **case.options)
    assert_close(out, cases.expected(case)[0], torch.bfloat16)


def test_one_openmp_library_serves_torch_and_the_kernels() -> None:
    if native.missing() is not None:
        return
    script = (
        "import torch; from kernels.cpu import native; native.describe(); "
        "torch.ones(1 << 20).exp_(); print(len({line.split()[-1] for line in open('/proc/self/maps') "
        "if 'gomp' in line or 'iomp' in line}))"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "1", found.stdout
