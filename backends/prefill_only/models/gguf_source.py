"""GGUF files: tensors, dequantised on reading. The block formats are those of the gguf package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from backends.prefill_only.models.gguf_header import read_gguf_header
from backends.prefill_only.models.mapped_file import MappedFile
from backends.prefill_only.models.source import CheckpointError, TensorSource

__all__ = ["GgufSource"]

_CHUNK_ELEMENTS = 4 << 20  # fp32 values dequantised at a time: 16 MiB
_PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


class GgufSource(TensorSource):
    """One memory-mapped GGUF file. Raises :class:`CheckpointError` if it is none."""

    def __init__(self, path: Path) -> None:
        header = read_gguf_header(path)
        self.metadata: Mapping[str, Any] = header.metadata
        self._tensors = header.tensors
        self._file = MappedFile(path)

    def names(self) -> set[str]:
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return _PLAIN.get(self._tensors[name].kind, torch.float32)

    def read(self, name: str, out: torch.Tensor) -> None:
        tensor = self._tensors[name]
        block, block_bytes = GGML_QUANT_SIZES[tensor.kind]
        columns = tensor.shape[-1]
        # Rows are whole blocks, so any number of them can be dequantised together.
        row_bytes = columns // block * block_bytes
        rows_at_once = max(1, _CHUNK_ELEMENTS // columns)
        targets = [out] if out.dim() <= 2 else list(out)  # experts one by one: ``out`` may be a slice of each
        rows = (tensor.stop - tensor.start) // row_bytes // len(targets)
        for index, target in enumerate(targets):
            for start in range(0, rows, rows_at_once):
                stop = min(start + rows_at_once, rows)
                first, count = tensor.start + (index * rows + start) * row_bytes, (stop - start) * row_bytes
                raw = np.frombuffer(self._file.buffer, dtype=np.uint8, count=count, offset=first)
                part = target if target.dim() == 1 else target[start:stop]
                part.copy_(_dequantized(raw.reshape(-1, row_bytes), tensor.kind, block_bytes).view(part.shape))
                self._file.give_back(first, first + count)


def _dequantized(rows: np.ndarray, kind: GGMLQuantizationType, block_bytes: int) -> torch.Tensor:
    """fp32 (or the stored float type), flat."""
    flat = rows.reshape(-1)
    plain = _PLAIN.get(kind)
    if plain is not None:
        return torch.from_numpy(flat.copy()).view(plain)
    try:
        # The package works on 16 rows at a time: wide rows, fewer Python calls.
        per_row = block_bytes * 512
        if flat.size % per_row == 0:
            return torch.from_numpy(dequantize(flat.reshape(-1, per_row), kind).reshape(-1))
        return torch.from_numpy(dequantize(rows, kind).reshape(-1))
    except NotImplementedError as error:
        raise CheckpointError(f"GGUF tensors of type {kind.name} are not supported") from error
