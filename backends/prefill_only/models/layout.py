"""The tensors of a checkpoint that is stored plainly, by name: what ``build`` asks a source for."""

from __future__ import annotations

from backends.prefill_only.models.names import Names
from backends.prefill_only.models.spec import ModelSpec

__all__ = ["checkpoint_tensors", "layer_linears"]

Shape = tuple[int, ...]


def checkpoint_tensors(spec: ModelSpec, names: Names, body_prefix: str = "", head_prefix: str = "") -> dict[str, Shape]:
    """Shapes by full name, in the order of the model."""
    hidden = spec.hidden_size
    found: dict[str, Shape] = {f"{body_prefix}{names.embed}.weight": (spec.vocab_size, hidden)}
    for i in range(spec.num_layers):
        for template, shape in _layer(spec, names, i).items():
            found[body_prefix + template.format(i=i)] = shape
    found[f"{body_prefix}{names.final_norm}.weight"] = (hidden,)
    if spec.head == "lm" and not spec.tie_embeddings:
        found[f"{head_prefix}{names.lm_head}.weight"] = (spec.vocab_size, hidden)
    if spec.head == "classification":
        found[f"{head_prefix}{names.score}.weight"] = (spec.num_labels, hidden)
    return found


def layer_linears(spec: ModelSpec, names: Names, body_prefix: str = "") -> set[str]:
    """The weights that quantised checkpoints store in 8 bits: attention and dense MLPs."""
    templates = [*names.qkv, names.o, *names.gate_up, names.down]
    return {f"{body_prefix}{t.format(i=i)}.weight" for i in range(spec.num_layers) for t in templates}


def _layer(spec: ModelSpec, names: Names, i: int) -> dict[str, Shape]:
    hidden, q, kv = spec.hidden_size, spec.q_size, spec.kv_size
    found: dict[str, Shape] = {}

    def linear(template: str, size: int, in_features: int, bias: bool) -> None:
        found[f"{template}.weight"] = (size, in_features)
        if bias:
            found[f"{template}.bias"] = (size,)

    found[f"{names.input_norm}.weight"] = (hidden,)
    for template, size in zip(names.qkv, [q, kv, kv] if len(names.qkv) > 1 else [q + 2 * kv], strict=True):
        linear(template, size, hidden, spec.qkv_bias)
    linear(names.o, hidden, q, spec.o_bias)
    if spec.qk_norm:
        found |= {f"{names.q_norm}.weight": (spec.head_dim,), f"{names.k_norm}.weight": (spec.head_dim,)}
    if spec.layers[i].sinks:
        found[names.sinks] = (spec.num_heads,)
    found[f"{names.mlp_norm}.weight"] = (hidden,)
    if spec.post_norms:
        found |= {f"{names.post_attn_norm}.weight": (hidden,), f"{names.post_mlp_norm}.weight": (hidden,)}
    if spec.layers[i].moe:
        return found | _experts(spec, names)
    parts = len(names.gate_up)
    for template in names.gate_up:
        linear(template, 2 * spec.intermediate_size // parts, hidden, spec.mlp_bias)
    linear(names.down, hidden, spec.intermediate_size, spec.mlp_bias)
    return found


def _experts(spec: ModelSpec, names: Names) -> dict[str, Shape]:
    assert spec.moe is not None
    count, inner, hidden = spec.moe.num_experts, spec.moe.intermediate_size, spec.hidden_size
    found: dict[str, Shape] = {f"{names.router}.weight": (count, hidden)}
    match names.expert_layout:
        case "each":
            for e in range(count):
                for template in names.expert_gate_up:
                    found[template.replace("{{e}}", str(e)) + ".weight"] = (inner, hidden)
                found[names.expert_down.replace("{{e}}", str(e)) + ".weight"] = (hidden, inner)
        case "stacked":
            for template in names.expert_gate_up:
                found[f"{template}.weight"] = (count, inner, hidden)
            found[f"{names.expert_down}.weight"] = (count, hidden, inner)
        case "gpt_oss":
            (gate_up,) = names.expert_gate_up
            found |= {
                f"{names.router}.bias": (count,),
                gate_up: (count, hidden, 2 * inner),
                f"{gate_up}_bias": (count, 2 * inner),
                names.expert_down: (count, inner, hidden),
                f"{names.expert_down}_bias": (count, hidden),
            }
    return found
