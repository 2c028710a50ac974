"""GGUF files: metadata and tensors, dequantised on reading. Parsing and block formats are those of the gguf package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from backends.prefill_only.models.source import CheckpointError, TensorSource

__all__ = ["GgufSource"]

_CHUNK_ELEMENTS = 4 << 20  # fp32 values dequantised at a time: 16 MiB
_PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
# The vocabulary takes seconds to turn into Python strings and is the tokenizer's business.
_SKIPPED_METADATA = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.scores")


class GgufSource(TensorSource):
    """One memory-mapped GGUF file. Raises :class:`CheckpointError` if it is none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = GGUFReader(path)
        except (ValueError, OSError, IndexError) as error:
            raise CheckpointError(f"{path} cannot be read as a GGUF file: {error}") from error
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    def metadata(self) -> Mapping[str, Any]:
        """Key-value pairs as Python values, without the vocabulary's arrays."""
        return {k: f.contents() for k, f in self._reader.fields.items() if k not in _SKIPPED_METADATA}

    def names(self) -> set[str]:
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(n) for n in reversed(self._tensors[name].shape))

    def dtype(self, name: str) -> torch.dtype:
        return _PLAIN.get(self._tensors[name].tensor_type, torch.float32)

    def read(self, name: str, out: torch.Tensor) -> None:
        tensor = self._tensors[name]
        kind = tensor.tensor_type
        block, block_bytes = GGML_QUANT_SIZES[kind]
        shape = self.shape(name)
        # Rows are whole blocks, so any number of them can be dequantised together.
        raw = np.ascontiguousarray(tensor.data).view(np.uint8).reshape(-1, shape[-1] // block * block_bytes)
        rows_at_once = max(1, _CHUNK_ELEMENTS // shape[-1])
        target = out.view(-1, shape[-1]) if out.is_contiguous() else out
        for start in range(0, raw.shape[0], rows_at_once):
            stop = min(start + rows_at_once, raw.shape[0])
            target[start:stop].copy_(_dequantized(raw[start:stop], kind, block_bytes).view(stop - start, shape[-1]))


def _dequantized(rows: np.ndarray, kind: GGMLQuantizationType, block_bytes: int) -> torch.Tensor:
    """fp32 (or the stored float type), flat."""
    plain = _PLAIN.get(kind)
    if plain is not None:
        return torch.from_numpy(rows.reshape(-1).copy()).view(plain)
    try:
        # The package works on 16 rows at a time: wide rows, fewer Python calls.
        wide = rows.reshape(-1)
        per_row = block_bytes * 512
        if wide.size % per_row == 0:
            return torch.from_numpy(dequantize(wide.reshape(-1, per_row), kind).reshape(-1))
        return torch.from_numpy(dequantize(rows, kind).reshape(-1))
    except NotImplementedError as error:
        raise CheckpointError(f"GGUF tensors of type {kind.name} are not supported") from error
