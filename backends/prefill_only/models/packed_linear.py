"""Linear layers whose weight lies in the layout that a CPU's matrix product wants.

torch hands a plain weight to oneDNN, which lays it out anew at every call: at 16 rows that is a quarter of the time, at
500 a few hundredths. Packing once takes that off, and the packed copy takes the plain one's place. The bits of a result
are the plain layer's: the product is the same.
"""

from __future__ import annotations

import torch

from backends.prefill_only.models.linear import Linear, LinearBase
from backends.prefill_only.models.weights import ModelWeights

__all__ = ["PackedLinear", "pack_linears"]

_ROWS = 512  # that the layout is chosen for; any number can be computed
_PARTS = ("qkv", "o", "gate_up", "down")


class PackedLinear(LinearBase):
    """Made from a plain layer on a CPU. ``rows`` is not to be had: keep the plain layer where it is needed."""

    def __init__(self, plain: Linear) -> None:
        self.out_features, self.in_features = plain.out_features, plain.in_features
        self.dtype, self.bias = plain.dtype, plain.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(plain.weight, _ROWS)
        self._bytes = plain.nbytes

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return result

    def add_(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        summed = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._packed, self.bias, "add")
        return residual.copy_(summed)

    def rows(self, start: int, stop: int) -> LinearBase:
        raise TypeError("a packed layer cannot be divided")

    @property
    def nbytes(self) -> int:
        return self._bytes


@torch.inference_mode()
def pack_linears(weights: ModelWeights) -> bool:
    """Packs the dense layers of ``weights`` in place; False, and nothing done, where that is not to be had.

    The last layer's ``qkv`` stays plain: its parts are computed for different rows.
    """
    first = weights.layers[0].qkv
    if not isinstance(first, Linear) or not _same_bits(first):
        return False
    for layer in weights.layers:
        for part in _PARTS:
            plain = getattr(layer, part)
            if isinstance(plain, Linear) and not (part == "qkv" and layer is weights.layers[-1]):
                setattr(layer, part, PackedLinear(plain))
    return True


def _same_bits(plain: Linear) -> bool:
    """Whether this torch and this CPU pack, and to the same result."""
    if plain.weight.device.type != "cpu" or plain.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return False
    x = torch.randn(64, plain.in_features, generator=torch.Generator().manual_seed(0)).to(plain.dtype)
    residual = torch.randn(64, plain.out_features, generator=torch.Generator().manual_seed(1)).to(plain.dtype)
    try:
        packed = PackedLinear(plain)
        return torch.equal(packed(x), plain(x)) and torch.equal(
            packed.add_(x, residual.clone()), plain.add_(x, residual.clone())
        )
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):  # these ops are torch's own business
        return False
