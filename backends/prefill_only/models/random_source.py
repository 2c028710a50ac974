"""Random weights of any model description: the same numbers in every run, for memory and speed work.

Values have the spread of freshly initialised checkpoints, so activations stay finite through deep models. They are cut
from one block of random numbers, at a place that depends on the tensor's name: filling runs at the speed of memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Set

import torch

from backends.prefill_only.models.quantized import BLOCK
from backends.prefill_only.models.source import TensorSource

__all__ = ["RandomSource"]

_STD = 0.02
_BLOCK_ELEMENTS = 16_777_213  # prime, so that the rows of a tensor do not repeat
_STEPS = 32  # standard deviation of values in 8 bits, in units of their scale


class RandomSource(TensorSource):
    """Has the tensors ``shapes``. Those named in ``eight_bits`` are of type ``kind`` and have scales beside them."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        norm_gain: float = 1.0,
        eight_bits: Set[str] = frozenset(),
        kind: torch.dtype = torch.float8_e4m3fn,
        block_scales: bool = False,
    ) -> None:
        self._shapes, self._norm_gain = dict(shapes), norm_gain
        self._eight_bits, self._kind = eight_bits, kind
        for name in eight_bits:
            rows, columns = shapes[name]
            shape = (-(-rows // BLOCK), -(-columns // BLOCK)) if block_scales else (rows, 1)
            self._shapes[f"{name}_scale"] = shape
        self._blocks: dict[tuple[torch.device, torch.dtype, float], torch.Tensor] = {}

    def names(self) -> set[str]:
        return set(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        return self._kind if name in self._eight_bits else torch.float32

    def read(self, name: str, out: torch.Tensor) -> None:
        if name.endswith("norm.weight"):
            out.fill_(self._norm_gain)
        elif name.endswith(".weight_scale"):
            out.fill_(_STD / _STEPS)
        else:
            at = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") % _BLOCK_ELEMENTS
            self._fill(out, at, _STEPS if name in self._eight_bits else _STD)

    def _fill(self, out: torch.Tensor, at: int, scale: float) -> None:
        if not out.is_contiguous():
            for part in out:
                self._fill(part, at, scale)
                at = (at + part.numel()) % _BLOCK_ELEMENTS
            return
        flat, block = out.view(-1), self._block(out.device, out.dtype, scale)
        done = 0
        while done < flat.numel():
            count = min(flat.numel() - done, _BLOCK_ELEMENTS - at)
            flat[done : done + count].copy_(block[at : at + count])
            done, at = done + count, 0

    def _block(self, device: torch.device, dtype: torch.dtype, scale: float) -> torch.Tensor:
        """Normal numbers; drawn on the CPU, whose generator gives the same everywhere."""
        key = (device, dtype, scale)
        if key not in self._blocks:
            values = torch.randn(_BLOCK_ELEMENTS, generator=torch.Generator().manual_seed(0)).mul_(scale)
            if dtype == torch.int8:
                values = values.round_().clamp_(-127, 127)
            self._blocks[key] = values.to(dtype).to(device)
        return self._blocks[key]
