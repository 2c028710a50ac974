"""The key-value section of a GGUF file, without its tensors.

The gguf package's reader indexes every array element on its own, which takes seconds for a vocabulary; a tokenizer
needs nothing but the values. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["GgufFormatError", "read_gguf_metadata"]

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_ELEMENTS = 1 << 28  # a damaged length must not be taken for a request for memory


class GgufFormatError(ValueError):
    """The file is no GGUF file of a version that can be read here."""


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """All keys of ``path``; arrays become lists. Raises :class:`GgufFormatError`, or OSError."""
    with path.open("rb") as file:
        try:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:  # an empty file cannot be mapped
            raise GgufFormatError(f"{path} is empty") from error
        with data:
            try:
                return _Reader(data).metadata()
            except (struct.error, UnicodeDecodeError, KeyError, IndexError) as error:
                raise GgufFormatError(f"{path} is damaged: its metadata cannot be read ({error!r})") from error


class _Reader:
    """A cursor over the file; GGUF is little-endian unless its version number only makes sense the other way round."""

    def __init__(self, data: mmap.mmap) -> None:
        if data[:4] != _MAGIC:
            raise GgufFormatError("not a GGUF file: it does not begin with the letters GGUF")
        self._data = data
        self._at = 4
        self._order = "<"
        version = self._number("I")
        if version & 0xFFFF == 0:
            self._order, self._at = ">", 4
            version = self._number("I")
        if version not in (2, 3):
            raise GgufFormatError(f"GGUF version {version} is not supported; supported: 2, 3")

    def metadata(self) -> dict[str, Any]:
        self._number("Q")  # number of tensors
        pairs = self._number("Q")
        found: dict[str, Any] = {}
        for _ in range(pairs):
            key = self._string()
            found[key] = self._value(self._number("I"))
        return found

    def _number(self, code: str) -> Any:
        (value,) = struct.unpack_from(self._order + code, self._data, self._at)
        self._at += struct.calcsize("=" + code)
        return value

    def _string(self) -> str:
        length = self._number("Q")
        raw = self._data[self._at : self._at + length]
        if len(raw) != length:
            raise IndexError("a string ends beyond the file")
        self._at += length
        return raw.decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._number(_NUMBERS[kind])
        element, length = self._number("I"), self._number("Q")
        if length > _MAX_ELEMENTS:
            raise IndexError(f"an array of {length} elements")
        if element == _STRING:
            return self._strings(length)
        if element == _ARRAY:
            return [self._value(element) for _ in range(length)]
        dtype = np.dtype(self._order + _NUMBERS[element])
        values = np.frombuffer(self._data, dtype=dtype, count=length, offset=self._at).tolist()
        self._at += dtype.itemsize * length
        return values

    def _strings(self, count: int) -> list[str]:
        """A vocabulary has hundreds of thousands: one loop without calls of our own."""
        data, at, unpack = self._data, self._at, struct.Struct(self._order + "Q").unpack_from
        found = []
        for _ in range(count):
            begin = at + 8
            at = begin + unpack(data, at)[0]
            found.append(data[begin:at].decode("utf-8"))
        if at > len(data):
            raise IndexError("an array of strings ends beyond the file")
        self._at = at
        return found
