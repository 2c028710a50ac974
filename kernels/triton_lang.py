"""What the Triton kernels share: rounding, matrix products, launching. Imported only where triton is wanted.

Arithmetic on 16-bit operands goes through fp32 in every kernel, and `rounded` and `dot` stand in for a cast and
`tl.dot`, because Triton's interpreter keeps bfloat16 as bit patterns: it would truncate the one and corrupt the other.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl

#: True if this process interprets kernels on the CPU (TRITON_INTERPRET=1 before triton's first import).
INTERPRETED: bool = triton.knobs.runtime.interpret
INTERP = tl.constexpr(INTERPRETED)

Launcher = Callable[[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]], None]
_redirection: tuple[int, Launcher] | None = None


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """fp32 x to `dtype`, to nearest even. In the interpreter NaN payloads may change."""
    if INTERP:
        if dtype == tl.bfloat16:
            bits = x.to(tl.int32, bitcast=True)
            bits = bits + 0x7FFF + ((bits >> 16) & 1)
            r = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        else:
            r = x.to(dtype)
    else:
        r = x.to(dtype)
    return r


@triton.jit
def dot(a, b, acc):
    """acc + a · b in fp32, on tensor cores; fp32 operands as three tf32 products, to about fp32's precision."""
    if INTERP:
        # A BLAS rounds an element by where in the matrix it stands; rounding from fp64 hides that.
        r = acc + tl.dot(a.to(tl.float64), b.to(tl.float64), out_dtype=tl.float64).to(tl.float32)
    elif a.dtype == tl.float32:
        r = tl.dot(a, b, acc, input_precision="tf32x3")
    else:
        r = tl.dot(a, b, acc)
    return r


@triton.jit
def tanh(x):
    """tanh in fp32, absolute error about 1e-7."""
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **options: Any) -> None:
    """kernel[grid](*args, **options) on `device`, whatever the current one is."""
    if _redirection is not None:
        _redirection[1](kernel, grid, args, options)
    elif device.type == "cuda" and device.index not in (None, torch.cuda.current_device()):
        with torch.cuda.device(device):
            kernel[grid](*args, **options)
    else:
        kernel[grid](*args, **options)


@contextlib.contextmanager
def redirected(capability: int, launcher: Launcher) -> Iterator[None]:
    """Within, `launch` hands kernels to `launcher` and `capability_of` says `capability`: see compile_only.py."""
    global _redirection
    outer, _redirection = _redirection, (capability, launcher)
    try:
        yield
    finally:
        _redirection = outer


def capability_of(device: torch.device) -> int:
    """90 for sm_90; 0 where kernels are interpreted on a CPU."""
    if _redirection is not None:
        return _redirection[0]
    return _device_capability(device) if device.type == "cuda" else 0


@functools.cache
def _device_capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
