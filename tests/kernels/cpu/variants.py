"""The variants of the C++ kernels that this CPU can run."""

from __future__ import annotations

import functools

from kernels.cpu import native


@functools.cache
def supported_variants() -> tuple[str, ...]:
    """Empty without the library."""
    if native.missing() is not None:
        return ()
    found = []
    for variant in native.VARIANTS:
        try:
            found.append(native.select(variant))
        except ValueError:
            continue
    native.select()
    return tuple(found)
