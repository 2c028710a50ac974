"""Where a checkpoint's tensors come from: the contract that each file format implements."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

__all__ = ["CheckpointError", "TensorSource"]


class CheckpointError(Exception):
    """The checkpoint cannot be read as the model its configuration describes. The message names file and tensor."""


class TensorSource(ABC):
    """Named tensors, read one at a time straight into their destination."""

    @abstractmethod
    def names(self) -> set[str]: ...

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]: ...

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype:
        """Of the stored values; float32 for block-quantised formats, which are dequantised on reading."""

    @abstractmethod
    def read(self, name: str, out: torch.Tensor) -> None:
        """Copies the tensor into ``out`` (same shape, any strides, any float dtype, any device)."""

    def close(self) -> None:  # noqa: B027 - not every source holds a file
        """Releases files; the source is not used after."""
