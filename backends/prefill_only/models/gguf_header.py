"""The head of a GGUF file: its key-value pairs and where its tensors lie.

The gguf package's own reader indexes every element of every array on its own, which takes seconds for a vocabulary.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from backends.prefill_only.models.source import CheckpointError

__all__ = ["GgufHeader", "GgufTensor", "read_gguf_header"]

_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_VERSIONS = (2, 3)


class GgufTensor(NamedTuple):
    kind: GGMLQuantizationType
    shape: tuple[int, ...]  # outermost dimension first
    start: int  # bytes from the start of the file
    stop: int


class GgufHeader(NamedTuple):
    metadata: dict[str, Any]  # arrays as lists
    tensors: dict[str, GgufTensor]


def read_gguf_header(path: Path) -> GgufHeader:
    """Raises :class:`CheckpointError` for a file that is no GGUF file, is damaged, or ends before its last tensor."""
    size = path.stat().st_size
    if size < 24:
        raise CheckpointError(f"{path} is not a GGUF file: it has {size} bytes")
    with path.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != b"GGUF":
            raise CheckpointError(f"{path} is not a GGUF file: it does not begin with the letters GGUF")
        try:
            header = _Reader(data).header()
        except (struct.error, UnicodeDecodeError, KeyError, ValueError, OverflowError) as error:
            raise CheckpointError(f"{path} cannot be read as a GGUF file: {error!r}") from error
    for name, tensor in header.tensors.items():
        if tensor.stop > size:
            raise CheckpointError(f"{path} ends before its tensor {name!r} does: is the download complete?")
    return header


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 4
        version = self._number("I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version} of the format, or its byte order, is not supported")

    def header(self) -> GgufHeader:
        tensor_count, pair_count = self._number("Q"), self._number("Q")
        metadata = {}
        for _ in range(pair_count):
            key = self._string()
            metadata[key] = self._value(self._number("I"))
        placed = {}
        for _ in range(tensor_count):
            name = self._string()
            shape = tuple(reversed([self._number("Q") for _ in range(self._number("I"))]))
            placed[name] = (GGMLQuantizationType(self._number("I")), shape, self._number("Q"))
        alignment = int(metadata.get("general.alignment", 32))
        begin = -(-self._at // alignment) * alignment
        return GgufHeader(metadata, {name: _placed(begin, *item) for name, item in placed.items()})

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            element, count = self._number("I"), self._number("Q")
            if element in _NUMBERS:
                return list(self._numbers(_NUMBERS[element], count))
            return [self._value(element) for _ in range(count)]
        return self._number(_NUMBERS[kind])

    def _string(self) -> str:
        length = self._number("Q")
        if length > len(self._data) - self._at:
            raise ValueError(f"a text of {length} bytes is longer than the file")
        self._at += length
        return self._data[self._at - length : self._at].decode("utf-8", "replace")

    def _number(self, kind: str) -> Any:
        return self._numbers(kind, 1)[0]

    def _numbers(self, kind: str, count: int) -> tuple[Any, ...]:
        if count > len(self._data) - self._at:
            raise ValueError(f"an array of {count} elements is longer than the file")
        layout = struct.Struct(f"<{count}{kind}")
        values = layout.unpack_from(self._data, self._at)
        self._at += layout.size
        return values


def _placed(begin: int, kind: GGMLQuantizationType, shape: tuple[int, ...], offset: int) -> GgufTensor:
    block, block_bytes = GGML_QUANT_SIZES[kind]
    elements = 1
    for length in shape:
        elements *= length
    if shape and shape[-1] % block:
        raise ValueError(f"rows of {shape[-1]} values are no whole blocks of {kind.name}")
    start = begin + offset
    return GgufTensor(kind, shape, start, start + elements // block * block_bytes)
