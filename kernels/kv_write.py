"""Writing a chunk's keys and values into pages, with the keys' rotary embedding on the way."""

from __future__ import annotations

import torch

from kernels.dispatch import use_native, use_triton
from kernels.rope import rope_torch_


def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slots: torch.Tensor,
    *,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    interleaved: bool = False,
) -> None:
    """k_pages[slot // page, slot % page] = rope(k[i]) and v_pages[…] = v[i], for each row i with slot = slots[i] ≥ 0.

    k, v             [n, Hkv, D]         bf16, fp16 or fp32; last stride 1, rows may be strided; not changed
    k_pages, v_pages [P, page, Hkv, D]   same dtype; pages and rows may be strided
    slots            [n]                 int64; negative: the row is not written; no slot twice (not checked)
    cos, sin         [max_pos, rot/2]    fp32; without them k is written as it is
    positions        [n]                 int32 or int64, required with cos

    Errors: ValueError if shapes do not fit. Source: vLLM's slot mapping; rope as in rope.py.
    """
    if k.ndim != 3 or k.shape != v.shape or k_pages.shape != v_pages.shape or k_pages.shape[2:] != k.shape[1:]:
        raise ValueError(f"k, v {tuple(k.shape)}, {tuple(v.shape)} do not fit pages {tuple(k_pages.shape)}")
    if slots.shape != k.shape[:1] or (cos is None) != (sin is None) or (cos is not None and positions is None):
        raise ValueError("slots must be [n]; cos, sin and positions go together")
    if k.shape[0] == 0:
        return
    if use_triton("kv_write", k):
        from kernels import triton_rope as implementation

        implementation.kv_write(
            k, v, k_pages, v_pages, slots, cos=cos, sin=sin, positions=positions, interleaved=interleaved
        )
        return
    native = use_native("rope_kv_write", k)
    if native is not None:
        native.rope_kv_write(
            k, v, k_pages, v_pages, slots, cos=cos, sin=sin, positions=positions, interleaved=interleaved
        )
        return
    kv_write_torch(k, v, k_pages, v_pages, slots, cos=cos, sin=sin, positions=positions, interleaved=interleaved)


def kv_write_torch(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slots: torch.Tensor,
    *,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    interleaved: bool = False,
) -> None:
    """`kv_write` in torch: the reference and the plain CPU path."""
    page = k_pages.shape[1]
    if cos is not None and sin is not None and positions is not None:
        k = rope_torch_(k.clone(), cos, sin, positions, interleaved=interleaved)
    written = slots >= 0
    if not bool(written.all()):
        k, v, slots = k[written], v[written], slots[written]
    where = (slots // page, slots % page)
    k_pages[where] = k
    v_pages[where] = v
