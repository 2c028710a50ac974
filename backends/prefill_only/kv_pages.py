"""The memory that holds keys and values: one address space of pages for the prefix pool and for running passes.

A pool page exists once a layer, because a cached prefix needs the KV of all layers. A scratch page exists once: a pass
overwrites it layer by layer, since only the current layer's KV is ever read. Both live in one tensor, so that attention
sees a single page table:

    address of pool page p in layer l   = p · num_layers + l
    address of scratch page s           = num_layers · pool_pages + s

A pool page's layers lie together, so that the first use of a page touches one stretch of memory.

Which prefix lies in which pool page is the scheduler's prefix index's business, not this module's.
"""

from __future__ import annotations

import math

import numpy as np
import torch

__all__ = ["KvPages"]


class KvPages:
    """K and V, each ``[num_layers · pool_pages + scratch_pages, page_tokens, num_kv_heads, head_dim]``.

    On a CPU the memory is committed by the operating system as pages are first written, so an unused pool costs
    address space alone.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        page_tokens: int,
        pool_pages: int,
        scratch_pages: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers * pool_pages + scratch_pages, page_tokens, num_kv_heads, head_dim)
        # Zeros: a masked key still meets its value in some kernels, and 0 · NaN of old memory would be NaN.
        self.k = _zeros(shape, dtype, device)
        self.v = _zeros(shape, dtype, device)
        self.page_tokens = page_tokens
        self.num_layers, self.pool_pages = num_layers, pool_pages
        self.scratch_pages = scratch_pages
        self.scratch_base = num_layers * pool_pages
        # Popped from the end: low addresses first, so that a lightly used server touches little memory.
        self._free = list(range(self.scratch_base + scratch_pages - 1, self.scratch_base - 1, -1))

    def pool_address(self, page: int) -> int:
        """Of pool page ``page`` in layer 0; layer l's comes l later."""
        return page * self.num_layers

    @property
    def free_scratch_pages(self) -> int:
        return len(self._free)

    def take_scratch(self, count: int) -> list[int]:
        """``count`` scratch addresses. Raises MemoryError when fewer are free."""
        if count > len(self._free):
            raise MemoryError(f"{count} KV scratch pages wanted, {len(self._free)} free")
        if count == 0:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        taken.reverse()
        return taken

    def give_back(self, addresses: list[int]) -> None:
        self._free.extend(reversed(addresses))

    def scrub(self, addresses: list[int]) -> None:
        """Zeroes pages (a pool page in all its layers) that may hold NaN, before anybody else gets them."""
        for address in addresses:
            end = address + (self.num_layers if address < self.scratch_base else 1)
            self.k[address:end].zero_()
            self.v[address:end].zero_()


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy asks the operating system for zeroed pages, which costs nothing until they are touched; torch writes them.
    size = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(dtype).view(shape)
