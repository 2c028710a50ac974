from __future__ import annotations

from pathlib import Path

import pytest
import torch

from backends.prefill_only.models import dtype
from backends.prefill_only.models.dtype import cpu_has_bfloat16, resolve_device, resolve_dtype

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        ("flags : fpu avx512f avx512_bf16 avx512_vnni", torch.bfloat16),
        ("flags : fpu amx_bf16", torch.bfloat16),
        ("Features : fp asimd bf16", torch.bfloat16),
        ("flags : fpu avx2 avx512f", torch.float32),
        (None, torch.float32),
    ],
)
def test_auto_takes_bfloat16_where_the_cpu_multiplies_it(
    cpuinfo: str | None, expected: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cpuinfo"
    if cpuinfo is not None:
        file.write_text(cpuinfo)
    monkeypatch.setattr(dtype, "_CPUINFO", file)
    cpu_has_bfloat16.cache_clear()
    try:
        assert resolve_dtype("auto", CPU) == expected
    finally:
        cpu_has_bfloat16.cache_clear()


def test_named_types_are_taken_as_they_are() -> None:
    assert resolve_dtype("float16", CPU) == torch.float16
    with pytest.raises(ValueError, match="unknown dtype 'int8': use auto, bfloat16, float16, float32"):
        resolve_dtype("int8", CPU)


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == resolve_device("cpu") == CPU
    with pytest.raises(ValueError, match="finds no CUDA device; set ONEPASS_DEVICE=cpu"):
        resolve_device("cuda:1")
    with pytest.raises(ValueError, match="unknown device 'gpu'"):
        resolve_device("gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("auto") == torch.device("cuda", 0) and resolve_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ValueError, match="there are 2 CUDA devices"):
        resolve_device("cuda:2")
