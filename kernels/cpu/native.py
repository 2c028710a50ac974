"""The C++ kernels through ctypes: finds and loads the library, passes pointers and strides.

The functions here have the signatures of the ops in `kernels` that call them, which check shapes and hold the formulas.
The library is optional (setup.py); ``ONEPASS_CPU_KERNELS`` is ``auto`` (used where it is built and the CPU fits),
``native`` (its absence is an error) or ``torch`` (never used).
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

import torch

__all__ = [
    "attention",
    "available",
    "describe",
    "gated_act",
    "linear",
    "missing",
    "rms_norm",
    "rope_",
    "rope_kv_write",
    "select",
    "supports",
]

VARIANTS = ("avx512-bf16", "avx512", "avx2")
_DTYPES = {torch.bfloat16: 0, torch.float32: 1}
_GATED_KINDS = {"silu": 0, "gelu_tanh": 1, "clamped_swiglu": 2}
GATED_KINDS = tuple(_GATED_KINDS)
LINEAR_MULTIPLE = 32
_MAX_HEAD_DIM = 256  # the attention kernel's tiles lie on the stack
_HEAD_DIM_MULTIPLE = 16

_Int = ctypes.c_int64
_Ptr = ctypes.c_void_p


class _AttentionArgs(ctypes.Structure):
    _fields_ = (
        ("dtype", _Int),
        *((name, _Ptr) for name in ("q", "k", "v", "out")),
        *((name, _Int) for name in ("q_row", "q_head", "k_page", "k_row", "k_head", "v_page", "v_row", "v_head")),
        *((name, _Int) for name in ("out_row", "out_head")),
        *((name, _Ptr) for name in ("page_table", "cu_q", "q_pos")),
        *((name, _Int) for name in ("table_row", "segments", "heads", "kv_heads", "head_dim", "page_tokens", "window")),
        *((name, ctypes.c_float) for name in ("scale", "soft_cap")),
        *((name, _Ptr) for name in ("sinks", "lse")),
        *((name, _Int) for name in ("lse_row", "lse_head")),
    )


class _RmsNormArgs(ctypes.Structure):
    _fields_ = (
        ("dtype", _Int),
        *((name, _Ptr) for name in ("x", "residual", "weight", "out")),
        *((name, _Int) for name in ("rows", "heads", "width")),
        *((name, _Int) for name in ("x_row", "x_head", "residual_row", "residual_head", "out_row", "out_head")),
        *((name, ctypes.c_float) for name in ("eps", "offset")),
    )


class _RopeArgs(ctypes.Structure):
    _fields_ = (
        ("dtype", _Int),
        *((name, _Ptr) for name in ("x", "out")),
        *((name, _Int) for name in ("rows", "heads", "head_dim", "half", "x_row", "x_head")),
        *((name, _Int) for name in ("out_page", "out_row", "out_head", "page_tokens")),
        *((name, _Ptr) for name in ("slots", "cos", "sin")),
        ("table_row", _Int),
        ("positions", _Ptr),
        *((name, ctypes.c_bool) for name in ("positions_are_int64", "interleaved")),
    )


class _GatedActArgs(ctypes.Structure):
    _fields_ = (
        ("dtype", _Int),
        *((name, _Ptr) for name in ("gate_up", "out")),
        *((name, _Int) for name in ("rows", "width", "gate_up_row", "out_row", "kind")),
    )


class _LinearArgs(ctypes.Structure):
    _fields_ = (
        ("dtype", _Int),
        *((name, _Ptr) for name in ("x", "weight", "out")),
        *((name, _Int) for name in ("rows", "width", "out_width", "x_row", "weight_row", "out_row")),
    )


@functools.cache
def _library() -> ctypes.CDLL:
    """Raises OSError if the library is not built or cannot be loaded, or this CPU has none of its variants."""
    found = sorted(Path(__file__).parent.glob("_native*.so"))
    if not found:
        raise OSError("the C++ kernels are not built: install with a C++ compiler at hand")
    library = ctypes.CDLL(str(found[0]))
    library.onepass_select.restype = ctypes.c_char_p
    library.onepass_select.argtypes = [ctypes.c_char_p]
    library.onepass_use_pool.argtypes = [_Ptr]
    library.onepass_rope.argtypes = [_Ptr, _Int, _Int]
    for name in ("attention", "rms_norm", "gated_act", "linear"):
        function = getattr(library, f"onepass_{name}")
        function.argtypes = [_Ptr, _Int]
    if library.onepass_select(b"") is None:
        raise OSError(f"this CPU has none of {', '.join(VARIANTS)}")
    library.onepass_use_pool(_torch_pool())
    return library


def _torch_pool() -> int | None:
    """Address of `GOMP_parallel` in the OpenMP library that torch itself runs on; None if it has none.

    Looked up through torch's library and not by linking: two OpenMP libraries in a process keep each other's waiting
    threads from the cores, and wheels rename the copy that they bring. LLVM's and Intel's export the function as well.
    """
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        return ctypes.cast(ctypes.CDLL(str(path)).GOMP_parallel, _Ptr).value
    except (OSError, AttributeError):
        return None


@functools.cache
def missing() -> str | None:
    """Why the C++ kernels are not used in this process, or None if they are."""
    wanted = os.environ.get("ONEPASS_CPU_KERNELS", "auto")
    if wanted not in ("auto", "native", "torch"):
        raise ValueError(f"ONEPASS_CPU_KERNELS must be auto, native or torch, got {wanted!r}")
    if wanted == "torch":
        return "ONEPASS_CPU_KERNELS=torch"
    try:
        _library()
    except OSError as error:
        if wanted == "native":
            raise RuntimeError(f"ONEPASS_CPU_KERNELS=native, but {error}") from error
        return str(error)
    return None


def available() -> bool:
    """Raises RuntimeError if ``ONEPASS_CPU_KERNELS=native`` cannot be had, ValueError for an unknown value."""
    return missing() is None


def select(variant: str = "") -> str:
    """Switches to a variant of `VARIANTS`, or to the fastest one; returns its name. ValueError if the CPU lacks it."""
    global _variant
    chosen = _library().onepass_select(variant.encode())
    if chosen is None:
        raise ValueError(f"this CPU cannot run the variant {variant!r}")
    _variant = chosen.decode()
    return _variant


_variant = ""


def describe() -> str:
    """The variant in use, for a log line: one of `VARIANTS`."""
    return _variant or select()


def supports(op: str, dtype: torch.dtype) -> bool:
    """True if the functions here take tensors of ``dtype`` for ``op``."""
    return op in __all__ and dtype in _DTYPES


def supports_head_dim(head_dim: int) -> bool:
    return head_dim % _HEAD_DIM_MULTIPLE == 0 and head_dim <= _MAX_HEAD_DIM


def attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    cu_q: torch.Tensor,
    q_pos: torch.Tensor,
    *,
    scale: float,
    max_q: int,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """`kernels.attention.attention` for any head_dim that is a multiple of 16 up to 256."""
    wide_sinks = None if sinks is None else sinks.float().contiguous()
    page_table = _int32(page_table)
    cu_q, q_pos = _int32(cu_q).contiguous(), _int32(q_pos).contiguous()
    args = _AttentionArgs(
        _DTYPES[q.dtype],
        q.data_ptr(), k_pages.data_ptr(), v_pages.data_ptr(), out.data_ptr(),
        q.stride(0), q.stride(1),
        k_pages.stride(0), k_pages.stride(1), k_pages.stride(2),
        v_pages.stride(0), v_pages.stride(1), v_pages.stride(2),
        out.stride(0), out.stride(1),
        page_table.data_ptr(), cu_q.data_ptr(), q_pos.data_ptr(),
        page_table.stride(0), q_pos.shape[0], q.shape[1], k_pages.shape[2], q.shape[2], k_pages.shape[1], window,
        scale, soft_cap,
        None if wide_sinks is None else wide_sinks.data_ptr(),
        None if lse is None else lse.data_ptr(),
        0 if lse is None else lse.stride(0), 0 if lse is None else lse.stride(1),
    )  # fmt: skip
    _library().onepass_attention(ctypes.byref(args), torch.get_num_threads())
    return out


def _int32(x: torch.Tensor) -> torch.Tensor:
    x = x.to(torch.int32)
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    offset: float = 0.0,
    out: torch.Tensor,
) -> torch.Tensor:
    """`kernels.rms_norm.rms_norm` for a weight of x's dtype."""
    rows, heads, x_row, x_head = _rows_and_heads(x)
    _, _, out_row, out_head = _rows_and_heads(out)
    residual_row, residual_head = (0, 0) if residual is None else _rows_and_heads(residual)[2:]
    weight = weight.contiguous()
    args = _RmsNormArgs(
        _DTYPES[x.dtype],
        x.data_ptr(), None if residual is None else residual.data_ptr(), weight.data_ptr(), out.data_ptr(),
        rows, heads, x.shape[-1],
        x_row, x_head, residual_row, residual_head, out_row, out_head,
        eps, offset,
    )  # fmt: skip
    _library().onepass_rms_norm(ctypes.byref(args), torch.get_num_threads())
    return out


def _rows_and_heads(x: torch.Tensor) -> tuple[int, int, int, int]:
    """(rows, heads, row stride, head stride) of [..., H], where one of the last two leading dims may be strided."""
    if x.ndim == 1:
        return 1, 1, 0, 0
    if x.ndim == 2:
        return x.shape[0], 1, x.stride(0), 0
    if x.ndim > 3:
        x = x.view(-1, *x.shape[-2:])
    return x.shape[0], x.shape[1], x.stride(0), x.stride(1)


def rope_(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, *, interleaved: bool = False
) -> torch.Tensor:
    """`kernels.rope.rope_`."""
    cos, sin, positions = cos.contiguous(), sin.contiguous(), positions.contiguous()
    args = _RopeArgs(
        _DTYPES[x.dtype],
        x.data_ptr(), x.data_ptr(),
        *x.shape, cos.shape[1], x.stride(0), x.stride(1),
        0, x.stride(0), x.stride(1), 0,
        None, cos.data_ptr(), sin.data_ptr(), cos.stride(0),
        positions.data_ptr(), positions.dtype == torch.int64, interleaved,
    )  # fmt: skip
    _library().onepass_rope(ctypes.byref(args), 1, torch.get_num_threads())
    return x


def rope_kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slots: torch.Tensor,
    *,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    interleaved: bool = False,
) -> None:
    """`kernels.kv_write.kv_write`."""
    slots = slots.contiguous()
    both = (_RopeArgs * 2)()
    for i, (x, pages) in enumerate(((k, k_pages), (v, v_pages))):
        tables: tuple[object, ...] = (None, None, 0, None, False)
        if i == 0 and cos is not None and sin is not None and positions is not None:
            cos, sin, positions = cos.contiguous(), sin.contiguous(), positions.contiguous()
            is_int64 = positions.dtype == torch.int64
            tables = (cos.data_ptr(), sin.data_ptr(), cos.stride(0), positions.data_ptr(), is_int64)
        both[i] = _RopeArgs(
            _DTYPES[x.dtype],
            x.data_ptr(), pages.data_ptr(),
            *x.shape, 0 if cos is None else cos.shape[1], x.stride(0), x.stride(1),
            *pages.stride()[:3], pages.shape[1],
            slots.data_ptr(), *tables, interleaved,
        )  # fmt: skip
    _library().onepass_rope(ctypes.byref(both), 2, torch.get_num_threads())


def gated_act(gate_up: torch.Tensor, *, kind: str, out: torch.Tensor) -> torch.Tensor:
    """`kernels.gated_act.gated_act` for the kinds in `GATED_KINDS`."""
    args = _GatedActArgs(
        _DTYPES[gate_up.dtype],
        gate_up.data_ptr(), out.data_ptr(),
        *out.shape, gate_up.stride(0), out.stride(0),
        _GATED_KINDS[kind],
    )  # fmt: skip
    _library().onepass_gated_act(ctypes.byref(args), torch.get_num_threads())
    return out


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x[n, K] · weight[V, K]ᵀ, fp32 [n, V], not rounded to the operands' dtype; K a multiple of `LINEAR_MULTIPLE`.

    For few rows and a weight that is read once; beyond a hundred rows torch is a little faster.
    """
    out = torch.empty(x.shape[0], weight.shape[0])
    args = _LinearArgs(
        _DTYPES[x.dtype],
        x.data_ptr(), weight.data_ptr(), out.data_ptr(),
        *x.shape, weight.shape[0], x.stride(0), weight.stride(0), out.stride(0),
    )  # fmt: skip
    _library().onepass_linear(ctypes.byref(args), torch.get_num_threads())
    return out
