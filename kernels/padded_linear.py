"""Matrix product whose rows do not depend on how many rows there are. Torch alone; the CPU path of several ops."""

from __future__ import annotations

import torch
import torch.nn.functional as F

#: CPU libraries choose another inner loop below this many rows; a multiple of it keeps a row bitwise the same.
ROW_MULTIPLE = 16


def padded_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x[n, K] · weight[N, K]ᵀ + bias[N], computed on n rounded up to 16 rows; returns [n, N] (a view)."""
    rows = x.shape[0]
    missing = -rows % ROW_MULTIPLE
    if missing:
        x = F.pad(x, (0, 0, 0, missing))
    return F.linear(x, weight, bias)[:rows]
