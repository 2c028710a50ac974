"""Compiles the kernels that an op would launch, for a GPU that is not there.

The op's own launcher runs, on CPU tensors of any content, so what is compiled is what a device would be given:
configuration, strides, alignment and all. Works only where kernels are not interpreted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from kernels import triton_lang


class _AbsentGpu:
    """The part of Triton's driver that compiling asks for."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        # Triton keeps compiled kernels by device number: one for each capability, away from real ones.
        return -self._capability

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def compile_only(capability: int) -> Iterator[list[Any]]:
    """Within, launching an op's Triton version only compiles it for sm_`capability`; gives the compiled kernels."""
    if triton_lang.INTERPRETED:
        raise RuntimeError("kernels cannot be compiled in a process that interprets them (TRITON_INTERPRET=1)")
    compiled: list[Any] = []

    def compile_kernel(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        compiled.append(kernel.warmup(*args, grid=grid, **options))

    before = driver._active
    driver.set_active(_AbsentGpu(capability))
    try:
        with triton_lang.redirected(capability, compile_kernel):
            yield compiled
    finally:
        driver._active = before
