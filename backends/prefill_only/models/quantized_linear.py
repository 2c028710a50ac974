"""Linear layers whose weight stays in 8 bits; the kernels widen it as they multiply."""

from __future__ import annotations

from collections.abc import Callable

import torch

from backends.prefill_only.models.linear import LinearBase
from backends.prefill_only.models.quantized import BLOCK
from kernels.fp8_linear import fp8_linear
from kernels.int8_linear import int8_linear

__all__ = ["QuantizedLinear"]


class QuantizedLinear(LinearBase):
    """``weight`` float8_e4m3fn or int8 ``[out, in]``.

    ``scale`` fp32: ``[out, groups]``, or for float8 ``[⌈out / 128⌉, ⌈in / 128⌉]``.
    """

    def __init__(
        self, weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, bias: torch.Tensor | None = None
    ) -> None:
        self.weight, self.scale, self.dtype, self.bias = weight, scale, dtype, bias
        self.out_features, self.in_features = weight.shape
        self._blocks = scale.shape[0] != weight.shape[0]
        self._multiply: Callable[..., torch.Tensor] = int8_linear if weight.dtype == torch.int8 else fp8_linear

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._multiply(x, self.weight, self.scale, bias=self.bias, out=out)

    def add_(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        residual += self(x)
        return residual

    def rows(self, start: int, stop: int) -> LinearBase:
        bias = None if self.bias is None else self.bias[start:stop]
        if not self._blocks:
            return QuantizedLinear(self.weight[start:stop], self.scale[start:stop], self.dtype, bias)
        first = start // BLOCK * BLOCK  # scales belong to whole blocks
        aligned = QuantizedLinear(
            self.weight[first:stop], self.scale[first // BLOCK : -(-stop // BLOCK)], self.dtype,
            None if self.bias is None else self.bias[first:stop],
        )  # fmt: skip
        return aligned if first == start else _Tail(aligned, start - first)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + self.scale.nbytes + (0 if self.bias is None else self.bias.nbytes)


class _Tail(LinearBase):
    """A layer without its first output columns, which are computed and dropped."""

    def __init__(self, whole: LinearBase, dropped: int) -> None:
        self._whole, self._dropped = whole, dropped
        self.out_features, self.in_features = whole.out_features - dropped, whole.in_features
        self.dtype = whole.dtype
        self.bias = None if whole.bias is None else whole.bias[dropped:]

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        result = self._whole(x)[:, self._dropped :]
        return result if out is None else out.copy_(result)

    def add_(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        residual += self(x)
        return residual

    def rows(self, start: int, stop: int) -> LinearBase:
        return self._whole.rows(start + self._dropped, stop + self._dropped)

    @property
    def nbytes(self) -> int:
        return self._whole.nbytes
