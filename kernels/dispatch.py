"""Which implementation an op runs: Triton on a GPU, the C++ kernel on a CPU that has it, torch otherwise.

Holds the counters the engine exports. It computes nothing itself, and never imports triton before a GPU asks for it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
import threading
from types import ModuleType
from typing import Any

import torch

logger = logging.getLogger(__name__)

#: (op, reason) -> calls that ran the torch version on a GPU although a Triton kernel exists.
fallback_counts: dict[tuple[str, str], int] = {}

#: kernel -> times it was compiled after `count_compilations`, that is on somebody's request.
compilation_counts: dict[str, int] = {}
_lock = threading.Lock()


@functools.cache
def triton_missing() -> str | None:
    """Why Triton cannot be used in this process, or None if it can."""
    try:
        importlib.import_module("kernels.triton_lang")
    except ImportError as error:
        return f"triton cannot be imported ({error})"
    return None


@functools.cache
def native_cpu() -> ModuleType | None:
    """The C++ kernels' module (`kernels.cpu.native`) where its library is built and this CPU supports it, else None."""
    try:
        native = importlib.import_module("kernels.cpu.native")
    except ImportError:
        return None
    return native if native.available() else None


def describe_kernels(device: torch.device) -> str:
    """What computes on ``device``, for a log line: "triton 3.6.0", "avx512-bf16", "torch"."""
    if device.type == "cuda":
        return "torch" if triton_missing() else f"triton {importlib.metadata.version('triton')}"
    native = native_cpu() if device.type == "cpu" else None
    return "torch" if native is None else str(native.describe())


def use_triton(op: str, tensor: torch.Tensor, unsupported: str | None = None) -> bool:
    """True if `op` on `tensor`'s device runs as a Triton kernel.

    `unsupported` says why the kernel cannot take these arguments. On a GPU such a call, or one without triton, is
    logged once for each (op, reason) and counted in `fallback_counts`; on a CPU torch is the regular path.
    """
    if tensor.device.type != "cuda":
        return False
    reason = unsupported or triton_missing()
    if reason is None:
        return True
    with _lock:
        seen = fallback_counts.get((op, reason), 0)
        fallback_counts[op, reason] = seen + 1
    if seen == 0:
        logger.warning("%s falls back to torch on %s: %s", op, tensor.device, reason)
    return False


def count_compilations(device: torch.device) -> None:
    """From now on, counts and logs every kernel that Triton compiles. Call it when warm; does nothing on a CPU.

    A kernel that Triton finds in its cache on disk is loaded, not compiled, and not counted.
    """
    if device.type != "cuda" or triton_missing():
        return
    knobs = importlib.import_module("triton.knobs")
    before = knobs.compilation.listener

    def listen(**event: Any) -> None:
        if before is not None:
            before(**event)
        if not event["cache_hit"]:
            record_compilation(str(getattr(event["src"], "name", "unknown")))

    knobs.compilation.listener = listen


def record_compilation(kernel: str) -> None:
    """Counts one compilation of `kernel` and logs it."""
    with _lock:
        compilation_counts[kernel] = compilation_counts.get(kernel, 0) + 1
    logger.warning("%s was compiled on a request: warm-up did not foresee its arguments", kernel)


def use_native(op: str, tensor: torch.Tensor) -> ModuleType | None:
    """The C++ module if it implements `op` for `tensor`'s device and dtype, else None."""
    native = native_cpu() if tensor.device.type == "cpu" else None
    return native if native is not None and native.supports(op, tensor.dtype) else None
