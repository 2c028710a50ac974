"""Reads off a compiled kernel what decides whether it runs well: registers, spills, shared memory, tensor cores."""

from __future__ import annotations

import re
import subprocess
import tempfile
from typing import Any, NamedTuple

import triton

# The PTX of a tensor-core product: mma.sync on sm_80 and later, wgmma on sm_90, tcgen05 on sm_100.
_TENSOR_CORE = {"mma.sync": r"\bmma\.sync", "wgmma": r"\bwgmma\.mma_async", "tcgen05": r"\btcgen05\.mma"}


class CompiledFacts(NamedTuple):
    """Of one kernel, compiled for one architecture."""

    kernel: str
    registers: int  # a thread
    spill_bytes: int  # a thread: its stack, which these kernels use for nothing else
    shared_bytes: int  # a program
    tensor_core: str  # the strongest kind of product in it: "tcgen05", "wgmma", "mma.sync" or ""
    scratch_bytes: int  # global memory a launch would have to allocate


def facts_of(compiled: Any) -> CompiledFacts:
    """Of what `kernel.warmup` returned."""
    usage = _resource_usage(compiled.asm["cubin"])
    found = [name for name, pattern in _TENSOR_CORE.items() if re.search(pattern, compiled.asm["ptx"])]
    return CompiledFacts(
        kernel=compiled.metadata.name,
        registers=usage["REG"],
        spill_bytes=usage["STACK"],
        shared_bytes=compiled.metadata.shared,
        tensor_core=found[-1] if found else "",
        scratch_bytes=compiled.metadata.global_scratch_size,
    )


def _resource_usage(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = {name: int(value) for name, value in re.findall(r"\b(REG|STACK):(\d+)", text)}
    if "REG" not in usage or "STACK" not in usage:
        raise RuntimeError(f"cuobjdump says nothing of registers: {text!r}")
    return usage
