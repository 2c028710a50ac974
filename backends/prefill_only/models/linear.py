"""Linear layers as plain objects: a weight in some storage format and how to multiply by it.

No autograd, no modules, no initialisation. ``y = x @ weight.T + bias`` throughout, ``weight`` being ``[out, in]``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F

__all__ = ["Linear", "LinearBase"]


class LinearBase(ABC):
    """``[rows, in] -> [rows, out]``. ``dtype`` is that of activations, whatever the weight is stored in."""

    out_features: int
    in_features: int
    dtype: torch.dtype
    bias: torch.Tensor | None  # [out], activations' dtype

    @abstractmethod
    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """``x``: ``[rows, in]``. ``out`` (``[rows, out]``) may be written to, and may be what is returned."""

    @abstractmethod
    def add_(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """``residual += self(x)`` in place; ``residual`` is ``[rows, out]``, contiguous, and returned."""

    @abstractmethod
    def rows(self, start: int, stop: int) -> LinearBase:
        """The layer that computes output columns ``start..stop`` alone; shares the weight."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of weight, scales and bias."""


class Linear(LinearBase):
    """Weight stored in the activations' dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self._transposed = weight.t()

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if out is None:
            return F.linear(x, self.weight, self.bias)
        if self.bias is None:
            return torch.mm(x, self._transposed, out=out)
        return torch.addmm(self.bias, x, self._transposed, out=out)

    def add_(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        torch.addmm(residual, x, self._transposed, out=residual)
        if self.bias is not None:
            residual += self.bias
        return residual

    def rows(self, start: int, stop: int) -> Linear:
        return Linear(self.weight[start:stop], None if self.bias is None else self.bias[start:stop])

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)
