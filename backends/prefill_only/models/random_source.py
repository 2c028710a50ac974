"""Random weights of any model description: the same numbers in every run, for memory and speed work.

Values have the spread of freshly initialised checkpoints, so activations stay finite through deep models.
"""

from __future__ import annotations

import hashlib

import torch

from backends.prefill_only.models.names import Names
from backends.prefill_only.models.source import TensorSource
from backends.prefill_only.models.spec import ModelSpec

__all__ = ["RandomSource"]

_STD = 0.02
_FILL_ELEMENTS = 16 << 20  # drawn at a time where the target cannot be filled directly


class RandomSource(TensorSource):
    """Has every tensor that the description asks for, in whatever shape it is asked for."""

    def __init__(self, spec: ModelSpec, names: Names, *, linear_dtype: torch.dtype = torch.bfloat16) -> None:
        """``linear_dtype``: how linear weights claim to be stored, ``torch.float8_e4m3fn`` for an FP8 checkpoint."""
        self._norm_offset = spec.norm_offset
        self._linear_dtype = linear_dtype
        self._norms = (names.input_norm, names.mlp_norm, names.final_norm)
