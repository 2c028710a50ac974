"""Directories of safetensors files, memory-mapped.

The format is a header length, a JSON header and raw tensors (https://github.com/huggingface/safetensors). It is read
here, not by the safetensors package, so that pages can be given back once their tensor is copied.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from backends.prefill_only.models.mapped_file import MappedFile
from backends.prefill_only.models.source import CheckpointError, TensorSource

__all__ = ["SafetensorsSource", "safetensors_files"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_PICKLED = ("*.bin", "*.pt", "*.pth")
_COPY_ELEMENTS = 8 << 20  # copied, then given back


class _Stored(NamedTuple):
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int  # bytes from the start of the file
    stop: int


class SafetensorsSource(TensorSource):
    """All tensors of a sharded or single-file checkpoint. Raises :class:`CheckpointError` for a broken one."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._maps: dict[Path, MappedFile] = {}
        self._tensors: dict[str, _Stored] = {}
        for file in files:
            self._tensors.update(_read_header(file))

    def names(self) -> set[str]:
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        stored = self._tensors[name]
        try:
            return _DTYPES[stored.dtype]
        except KeyError:
            raise CheckpointError(f"tensor {name!r} in {stored.file} has unknown type {stored.dtype}") from None

    def read(self, name: str, out: torch.Tensor) -> None:
        stored, dtype = self._tensors[name], self.dtype(name)
        mapped = self._map(stored.file)
        if out.dim() == 0 or out.shape[0] == 0:
            if out.numel():
                out.copy_(torch.frombuffer(mapped.buffer, dtype=dtype, count=1, offset=stored.start).view(()))
            return
        row_elements = out[0].numel()
        rows_at_once = max(1, _COPY_ELEMENTS // max(row_elements, 1))
        for first in range(0, out.shape[0], rows_at_once):
            target = out[first : first + rows_at_once]
            start = stored.start + first * row_elements * dtype.itemsize
            part = torch.frombuffer(mapped.buffer, dtype=dtype, count=target.numel(), offset=start)
            target.copy_(part.view(target.shape))
            mapped.give_back(start, start + target.numel() * dtype.itemsize)

    def close(self) -> None:
        self._maps.clear()  # unmapped with the last tensor that views them

    def _map(self, file: Path) -> MappedFile:
        if file not in self._maps:
            self._maps[file] = MappedFile(file)
        return self._maps[file]


def safetensors_files(directory: Path) -> list[Path]:
    """The checkpoint's files, by its index if it has one. Raises :class:`CheckpointError` if there are none."""
    index = directory / _INDEX
    if index.exists():
        try:
            shards = sorted({str(shard) for shard in json.loads(index.read_text())["weight_map"].values()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} cannot be read as an index of safetensors files: {error!r}") from error
        missing = [shard for shard in shards if not (directory / shard).exists()]
        if missing:
            raise CheckpointError(f"{directory} lacks {', '.join(missing)}, which {_INDEX} names")
        return [directory / shard for shard in shards]
    if (directory / _SINGLE).exists():
        return [directory / _SINGLE]
    found = sorted(directory.glob("*.safetensors"))
    if found:
        return found
    pickled = sorted(path.name for pattern in _PICKLED for path in directory.glob(pattern))
    if pickled:
        raise CheckpointError(
            f"{directory} has its weights as {pickled[0]}, a pickle: reading it could run any code, so it is not read; "
            "convert it to safetensors (transformers: save_pretrained) or use a revision that has them"
        )
    raise CheckpointError(f"{directory} has no .safetensors files (other weight formats are not read)")


def _read_header(file: Path) -> dict[str, _Stored]:
    size = file.stat().st_size
    try:
        with file.open("rb") as handle:
            (length,) = struct.unpack("<Q", handle.read(8))
            if length > size - 8:
                raise ValueError("its header is longer than the file")
            header = json.loads(handle.read(length))
        tensors = {}
        for name, item in header.items():
            if name == "__metadata__":
                continue
            start, stop = (8 + length + int(offset) for offset in item["data_offsets"])
            tensors[name] = stored = _Stored(file, str(item["dtype"]), tuple(map(int, item["shape"])), start, stop)
            kind = _DTYPES.get(stored.dtype)  # tensors of types unknown here are refused when they are asked for
            if kind is not None and stop - start != math.prod(stored.shape) * kind.itemsize:
                raise ValueError(f"tensor {name!r} has {stop - start} bytes, which its shape does not need")
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise CheckpointError(f"{file} cannot be read as safetensors: {error}") from error
    if any(tensor.stop > size for tensor in tensors.values()):
        raise CheckpointError(f"{file} is shorter than its header says: is the download complete?")
    return tensors
