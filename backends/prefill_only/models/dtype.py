"""Which number format to compute in."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

__all__ = ["DTYPES", "cpu_has_bfloat16", "resolve_device", "resolve_dtype"]

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_CPUINFO = Path("/proc/cpuinfo")


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """``auto``: bfloat16 where the device multiplies it in hardware, float32 elsewhere. Raises ValueError."""
    if name != "auto":
        try:
            return DTYPES[name]
        except KeyError:
            raise ValueError(f"unknown dtype {name!r}: use auto, {', '.join(DTYPES)}") from None
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    return torch.bfloat16 if cpu_has_bfloat16() else torch.float32


def resolve_device(name: str) -> torch.device:
    """``auto``: the first CUDA device if there is one, else the CPU. Raises ValueError for a device that is absent."""
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"unknown device {name!r}: use auto, cpu, cuda or cuda:N")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(
                f"device {name!r} was asked for, but torch {torch.__version__} finds no CUDA device; "
                "set ONEPASS_DEVICE=cpu, or install a driver and a torch built for it"
            )
        index = device.index or 0
        if index >= torch.cuda.device_count():
            raise ValueError(f"device {name!r} was asked for, but there are {torch.cuda.device_count()} CUDA devices")
        return torch.device("cuda", index)
    return device


@functools.cache
def cpu_has_bfloat16() -> bool:
    """Whether the CPU has bfloat16 dot products (AVX512-BF16, AMX-BF16, or Arm's). Known on Linux alone."""
    try:
        words = set(_CPUINFO.read_text().split())
    except OSError:
        return False
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16"})
