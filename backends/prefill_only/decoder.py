"""The transformer, one chunk of rows in one layer at a time.

A pass sweeps each layer once, chunk by chunk in row order (a row's ancestors come before it, see ``forest``):

    norm → q,k,v → rope → K,V into pages → attention over the pages → o, residual in place
         → norm → gate,up → activation → down, residual in place

so a chunk's keys and values are in place before any later row asks for them, and nothing but the hidden rows and one
layer's K and V outlives a chunk. A separate sweep for K and V over all rows, as hybrid prefilling describes it, would
normalise every row twice for the same result. In the last layer only K and V are computed for all rows; the rest is for
the rows that somebody reads.

Hidden rows are ``[rows, hidden]`` in the model's dtype, row counts multiples of ``ROW_ALIGN``.
"""

from __future__ import annotations

import torch

from backends.prefill_only.kv_pages import KvPages
from backends.prefill_only.models.spec import ModelSpec
from backends.prefill_only.models.weights import LayerWeights, ModelWeights
from backends.prefill_only.moe import moe_mlp
from backends.prefill_only.rows import AttentionRows, KvRows
from kernels.attention import attention
from kernels.gated_act import gated_act
from kernels.kv_write import kv_write
from kernels.rms_norm import rms_norm
from kernels.rope import rope_

__all__ = ["Decoder"]


class Decoder:
    """Executes a :class:`ModelSpec` with its weights. Owns the chunk workspace, so one pass steps at a time."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        kv: KvPages,
        *,
        max_positions: int,
        chunk_rows: int,
    ) -> None:
        self.spec, self.weights, self.kv = spec, weights, kv
        self.chunk_rows = chunk_rows  # may be lowered, to no less than ROW_ALIGN
        self.max_positions = max_positions
        self.device, self.dtype = weights.embed.device, weights.embed.dtype
        self._ropes = [
            tuple(t.to(self.device) for t in spec.rope_tables(i, max_positions)) for i in range(len(spec.ropes))
        ]
        self._q_cols = spec.num_heads * spec.head_dim
        self._kv_cols = spec.num_kv_heads * spec.head_dim

        def buffer(columns: int) -> torch.Tensor:
            return torch.zeros(chunk_rows, columns, dtype=self.dtype, device=self.device)

        self._normed = buffer(spec.hidden_size)
        self._qkv = buffer(self._q_cols + 2 * self._kv_cols)
        self._attended = buffer(self._q_cols)
        self._gate_up = buffer(2 * spec.intermediate_size)
        self._activated = buffer(spec.intermediate_size)
        self._branch = buffer(spec.hidden_size) if spec.post_norms else None

    def embed(self, token_ids: torch.Tensor, out: torch.Tensor) -> None:
        """``token_ids`` int64 ``[rows]`` on the device; ``out[rows:]`` is padding and is zeroed."""
        rows = token_ids.shape[0]
        torch.index_select(self.weights.embed, 0, token_ids, out=out[:rows])
        out[rows:].zero_()
        if self.spec.embed_scale != 1.0:
            out.mul_(torch.tensor(self.spec.embed_scale, dtype=self.dtype, device=self.device))

    def layer(self, index: int, hidden: torch.Tensor, kv_rows: KvRows, queries: AttentionRows) -> None:
        """One layer for the chunk ``hidden`` (``[kv_rows.count, hidden]``), in place."""
        weights = self.weights.layers[index]
        n = kv_rows.count
        normed = self._norm(hidden, weights.input_norm, self._normed[:n])
        qkv = weights.qkv(normed, out=self._qkv[:n])
        q = qkv[:, : self._q_cols].unflatten(1, (-1, self.spec.head_dim))
        self._write_kv(index, weights, qkv[:, self._q_cols :], kv_rows)
        self._attend(index, weights, q, hidden, queries)
        self._mlp(index, weights, hidden)

    def layer_kv(self, index: int, hidden: torch.Tensor, kv_rows: KvRows) -> None:
        """K and V alone of one layer, for the chunk ``hidden``."""
        weights = self.weights.layers[index]
        n = kv_rows.count
        normed = self._norm(hidden, weights.input_norm, self._normed[:n])
        kv = weights.qkv.rows(self._q_cols, self._q_cols + 2 * self._kv_cols)(normed)
        self._write_kv(index, weights, kv, kv_rows)

    def layer_queries(self, index: int, hidden: torch.Tensor, queries: AttentionRows) -> None:
        """All of a layer but K and V, for gathered rows ``hidden`` (``[queries.count, hidden]``), in place."""
        weights = self.weights.layers[index]
        normed = self._norm(hidden, weights.input_norm, self._normed[: queries.count])
        q = weights.qkv.rows(0, self._q_cols)(normed).unflatten(1, (-1, self.spec.head_dim))
        self._attend(index, weights, q, hidden, queries)
        self._mlp(index, weights, hidden)

    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden, self.weights.final_norm, self.spec.norm_eps, offset=self.spec.norm_offset)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight, self.spec.norm_eps, offset=self.spec.norm_offset, out=out)

    def _write_kv(self, index: int, weights: LayerWeights, kv: torch.Tensor, rows: KvRows) -> None:
        spec = self.spec
        k = kv[:, : self._kv_cols].unflatten(1, (-1, spec.head_dim))
        v = kv[:, self._kv_cols :].unflatten(1, (-1, spec.head_dim))
        if weights.k_norm is not None:
            k = rms_norm(k, weights.k_norm, spec.norm_eps, offset=spec.norm_offset)
        slots = rows.slots_at(index * self.kv.page_tokens)
        rope = spec.layers[index].rope
        if rope < 0:
            kv_write(k, v, self.kv.k, self.kv.v, slots)
            return
        cos, sin = self._ropes[rope]
        kv_write(
            k, v, self.kv.k, self.kv.v, slots,
            cos=cos, sin=sin, positions=rows.positions, interleaved=spec.ropes[rope].interleaved,
        )  # fmt: skip

    def _attend(
        self, index: int, weights: LayerWeights, q: torch.Tensor, hidden: torch.Tensor, queries: AttentionRows
    ) -> None:
        spec, layer = self.spec, self.spec.layers[index]
        if weights.q_norm is not None:
            q = rms_norm(q, weights.q_norm, spec.norm_eps, offset=spec.norm_offset)
        if layer.rope >= 0:
            cos, sin = self._ropes[layer.rope]
            rope_(q, cos, sin, queries.positions, interleaved=spec.ropes[layer.rope].interleaved)
        attended = self._attended[: queries.count]
        attention(
            q,
            self.kv.k,
            self.kv.v,
            queries.table_at(index),
            queries.cu_q,
            queries.q_pos,
            scale=spec.attn_scale,
            max_q=queries.max_q,
            window=layer.window,
            soft_cap=spec.attn_soft_cap,
            sinks=weights.sinks,
            out=attended.unflatten(1, (-1, spec.head_dim)),
        )
        if weights.post_attn_norm is None:
            weights.o.add_(attended, hidden)
            return
        assert self._branch is not None
        branch = weights.o(attended, out=self._branch[: queries.count])
        hidden += self._norm(branch, weights.post_attn_norm, self._normed[: queries.count])

    def _mlp(self, index: int, weights: LayerWeights, hidden: torch.Tensor) -> None:
        spec, n = self.spec, hidden.shape[0]
        normed = self._norm(hidden, weights.mlp_norm, self._normed[:n])
        if spec.layers[index].moe:
            hidden += moe_mlp(spec, weights, normed)
            return
        assert weights.gate_up is not None and weights.down is not None
        gate_up = weights.gate_up(normed, out=self._gate_up[:n])
        activated = gated_act(gate_up, kind=spec.activation, out=self._activated[:n])
        if weights.post_mlp_norm is None:
            weights.down.add_(activated, hidden)
            return
        assert self._branch is not None
        branch = weights.down(activated, out=self._branch[:n])
        hidden += self._norm(branch, weights.post_mlp_norm, self._normed[:n])
