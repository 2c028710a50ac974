"""From a checkpoint's ``config.json`` to a :class:`ModelSpec` and its tensor names.

One decoder serves all families; what sets a family apart is a row of the table here. Configurations of both ages are
read: ``rope_theta`` and ``rope_scaling`` side by side, or ``rope_parameters`` as transformers 5 writes it. A key that a
configuration leaves out has the family's default in transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from backends.prefill_only.models.names import GEMMA2, GPT_OSS, LLAMA, MIXTRAL, PHI3, QWEN3_MOE, Names
from backends.prefill_only.models.spec import Activation, LayerSpec, ModelSpec, MoeSpec, RopeSpec
from kernels.gated_act import SWIGLU_ALPHA, SWIGLU_LIMIT

__all__ = ["UnsupportedModel", "config_spec", "supported_architectures", "token_ids"]

Config = Mapping[str, Any]
Head = Literal["lm", "classification", "none"]

_HEADS: dict[str, Head] = {"ForCausalLM": "lm", "ForSequenceClassification": "classification", "Model": "none"}
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
_SLIDING = "sliding_attention"


class UnsupportedModel(Exception):
    """The message says what was asked for and what is supported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """What sets a family apart from Llama. Rules are given the configuration with defaults filled in."""

    model_type: str
    names: Names = LLAMA
    defaults: Config = field(default_factory=dict)
    sliding: Callable[[Config], list[bool]] = lambda config: _everywhere(config, False)  # which layers have the window
    qk_norm: bool = False
    gemma: bool = False  # norms of (1 + weight), norms after each branch, scaled embeddings
    qkv_bias: Callable[[Config], bool] = lambda config: bool(config.get("attention_bias"))
    o_bias: Callable[[Config], bool] = lambda config: bool(config.get("attention_bias"))
    moe: Callable[[Config], MoeSpec | None] = lambda config: None
    dense_layers: Callable[[Config], set[int]] = lambda config: set()  # of a mixture of experts
    sinks: bool = False


def _everywhere(config: Config, value: bool) -> list[bool]:
    return [value] * config["num_hidden_layers"]


def _if_set(config: Config) -> list[bool]:
    return _everywhere(config, config.get("sliding_window") is not None)


def _if_used(config: Config) -> list[bool]:
    return _everywhere(config, bool(config["use_sliding_window"]) and config.get("sliding_window") is not None)


def _qwen_layers(config: Config) -> list[bool]:
    if not config["use_sliding_window"] or config.get("sliding_window") is None:
        return _everywhere(config, False)
    return _by_type(config, lambda i: i >= config["max_window_layers"])


def _smollm3_layers(config: Config) -> list[bool]:
    if not config["use_sliding_window"] or config.get("sliding_window") is None:
        return _everywhere(config, False)
    rotated = _rotated_layers(config)
    return _by_type(config, lambda i: not rotated[i])


def _alternating(config: Config) -> list[bool]:
    return _by_type(config, lambda i: bool((i + 1) % config.get("sliding_window_pattern", 2)))


def _by_type(config: Config, otherwise: Callable[[int], bool]) -> list[bool]:
    types = config.get("layer_types")
    if types is not None:
        return [kind == _SLIDING for kind in types]
    return [otherwise(i) for i in range(config["num_hidden_layers"])]


def _rotated_layers(config: Config) -> list[bool]:
    """SmolLM3 leaves every fourth layer without positions."""
    listed = config.get("no_rope_layers")
    if listed is not None:
        return [bool(rotated) for rotated in listed]
    interval = config.get("no_rope_layer_interval", 0)
    return [not interval or bool((i + 1) % interval) for i in range(config["num_hidden_layers"])]


def _qwen3_moe(config: Config) -> MoeSpec:
    return MoeSpec(
        num_experts=config.get("num_experts") or config["num_local_experts"],
        top_k=config["num_experts_per_tok"],
        intermediate_size=config["moe_intermediate_size"],
        norm_topk=bool(config.get("norm_topk_prob", False)),
    )


def _qwen3_dense_layers(config: Config) -> set[int]:
    step = config.get("decoder_sparse_step", 1)
    skipped = {i for i in range(config["num_hidden_layers"]) if (i + 1) % step}
    return skipped | set(config.get("mlp_only_layers") or ())


def _mixtral_moe(config: Config) -> MoeSpec:
    return MoeSpec(
        num_experts=config["num_local_experts"],
        top_k=config["num_experts_per_tok"],
        intermediate_size=config["intermediate_size"],
    )


def _gpt_oss_moe(config: Config) -> MoeSpec:
    alpha, limit = config.get("swiglu_alpha", SWIGLU_ALPHA), config.get("swiglu_limit", SWIGLU_LIMIT)
    if (alpha, limit) != (SWIGLU_ALPHA, SWIGLU_LIMIT):
        raise UnsupportedModel(
            f"experts with swiglu_alpha {alpha} and swiglu_limit {limit} are not supported; "
            f"supported are {SWIGLU_ALPHA} and {SWIGLU_LIMIT}"
        )
    return MoeSpec(
        num_experts=config["num_local_experts"],
        top_k=config["num_experts_per_tok"],
        intermediate_size=config["intermediate_size"],
        activation="clamped_swiglu",
    )


_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_GEMMA_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}

# By the stem of the architecture's name: LlamaForCausalLM, LlamaForSequenceClassification, LlamaModel.
_FAMILIES: dict[str, _Family] = {
    "Llama": _Family(model_type="llama"),
    "Mistral": _Family(
        model_type="mistral",
        defaults={"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131072},
        sliding=_if_set,
    ),
    "Qwen2": _Family(
        model_type="qwen2",
        defaults={"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28},
        sliding=_qwen_layers,
        qkv_bias=lambda config: True,
        o_bias=lambda config: False,
    ),
    "Qwen3": _Family(
        model_type="qwen3",
        defaults={"head_dim": 128, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28},
        sliding=_qwen_layers,
        qk_norm=True,
    ),
    "SmolLM3": _Family(
        model_type="smollm3",
        defaults={
            "rope_theta": 2000000.0,
            "use_sliding_window": False,
            "no_rope_layer_interval": 4,
            "tie_word_embeddings": True,
        },
        sliding=_smollm3_layers,
    ),
    "Gemma2": _Family(
        model_type="gemma2",
        names=GEMMA2,
        defaults=_GEMMA_DEFAULTS
        | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0, "max_position_embeddings": 8192},
        sliding=_alternating,
        gemma=True,
    ),
    "Gemma3": _Family(
        model_type="gemma3_text",
        names=GEMMA2,
        defaults=_GEMMA_DEFAULTS
        | {
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            "sliding_window_pattern": 6,
            "max_position_embeddings": 131072,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "vocab_size": 262208,
        },
        sliding=_alternating,
        qk_norm=True,
        gemma=True,
    ),
    "Phi3": _Family(
        model_type="phi3",
        names=PHI3,
        defaults={"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        sliding=_if_set,
    ),
    "Qwen3Moe": _Family(
        model_type="qwen3_moe",
        names=QWEN3_MOE,
        defaults={"use_sliding_window": False, "sliding_window": 4096},
        sliding=_if_used,
        qk_norm=True,
        moe=_qwen3_moe,
        dense_layers=_qwen3_dense_layers,
    ),
    "Mixtral": _Family(
        model_type="mixtral",
        names=MIXTRAL,
        defaults={"rope_theta": 1000000.0, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072},
        sliding=_if_set,
        moe=_mixtral_moe,
    ),
    "GptOss": _Family(
        model_type="gpt_oss",
        names=GPT_OSS,
        defaults={
            "head_dim": 64,
            "attention_bias": True,
            "rope_theta": 150000.0,
            "rope_scaling": _GPT_OSS_ROPE,
            "rms_norm_eps": 1e-5,
            "sliding_window": 128,
            "max_position_embeddings": 131072,
        },
        sliding=_alternating,
        moe=_gpt_oss_moe,
        sinks=True,
    ),
}
_FAMILIES["Gemma3Text"] = _FAMILIES["Gemma3"]
_BY_MODEL_TYPE = {family.model_type: stem for stem, family in _FAMILIES.items() if stem != "Gemma3Text"}


def supported_architectures() -> list[str]:
    return [f"{stem}{suffix}" for stem in _FAMILIES for suffix in _HEADS] + ["Gemma3ForConditionalGeneration (text)"]


def config_spec(config: Config) -> tuple[ModelSpec, Names]:
    """``config``: the parsed ``config.json``. Raises :class:`UnsupportedModel`, or ValueError for a missing key."""
    architecture, stem, head = _identify(config)
    family = _FAMILIES[stem]
    text = config.get("text_config")
    given = {**config, **text} if isinstance(text, Mapping) else dict(config)
    defaults = dict(family.defaults)
    if given.get("rope_parameters") is not None:
        defaults.pop("rope_scaling", None)
    values: dict[str, Any] = {"use_sliding_window": False, **defaults, **given}
    try:
        return _spec(architecture, family, head, values), family.names
    except KeyError as error:
        raise ValueError(f"config.json of {architecture} lacks {error.args[0]!r}") from None


def _identify(config: Config) -> tuple[str, str, Head]:
    """(architecture, stem, head). Without ``architectures`` the model type stands for a causal language model."""
    listed = config.get("architectures") or []
    architecture = str(listed[0]) if listed else ""
    if not architecture:
        stem = _BY_MODEL_TYPE.get(str(config.get("model_type", "")))
        if stem is not None:
            return f"{stem}ForCausalLM", stem, "lm"
        architecture = str(config.get("model_type", "unknown"))
    if architecture == "Gemma3ForConditionalGeneration":
        return architecture, "Gemma3", "lm"
    for suffix, head in _HEADS.items():
        stem = architecture.removesuffix(suffix)
        if stem != architecture and stem in _FAMILIES:
            return architecture, stem, head
    raise UnsupportedModel(
        f"architecture {architecture!r} is not supported; supported are {', '.join(supported_architectures())}"
    )


def _spec(architecture: str, family: _Family, head: Head, config: Config) -> ModelSpec:
    hidden, heads, count = config["hidden_size"], config["num_attention_heads"], config["num_hidden_layers"]
    head_dim = config.get("head_dim") or hidden // heads
    activation = str(config.get("hidden_activation") or config.get("hidden_act") or "silu")
    if activation not in _ACTIVATIONS:
        raise UnsupportedModel(f"activation {activation!r} is not supported; supported are {', '.join(_ACTIVATIONS)}")
    if config.get("use_bidirectional_attention"):
        raise UnsupportedModel(f"{architecture} with attention in both directions is not supported")
    sliding = family.sliding(config)
    ropes, rope_of_layer = _ropes(architecture, family, config, head_dim, sliding)
    moe = family.moe(config)
    dense = family.dense_layers(config)
    num_labels = config.get("num_labels") or len(config.get("id2label") or {}) or 2
    eos = config.get("eos_token_id")
    return ModelSpec(
        architecture=architecture,
        hidden_size=hidden,
        num_layers=count,
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        intermediate_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        max_position=_max_position(family, config, ropes),
        layers=tuple(
            LayerSpec(
                window=int(config["sliding_window"]) if sliding[i] else 0,
                rope=rope_of_layer[i],
                sinks=family.sinks,
                moe=moe is not None and i not in dense,
            )
            for i in range(count)
        ),
        ropes=ropes,
        attn_scale=float(config.get("query_pre_attn_scalar", head_dim) if family.gemma else head_dim) ** -0.5,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        norm_offset=1.0 if family.gemma else 0.0,
        activation=_ACTIVATIONS[activation],
        embed_scale=hidden**0.5 if family.gemma else 1.0,
        attn_soft_cap=float(config.get("attn_logit_softcapping") or 0.0) if family.gemma else 0.0,
        final_soft_cap=float(config.get("final_logit_softcapping") or 0.0) if family.gemma else 0.0,
        qk_norm=family.qk_norm,
        post_norms=family.gemma,
        qkv_bias=family.qkv_bias(config),
        o_bias=family.o_bias(config),
        mlp_bias=bool(config.get("mlp_bias")),
        moe=moe,
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        head=head,
        num_labels=num_labels if head == "classification" else 0,
        id2label=_labels(config) if head == "classification" else {},
        bos_token_id=config.get("bos_token_id"),
        eos_token_ids=token_ids(eos),
    )


def _labels(config: Config) -> dict[int, str]:
    return {int(label_id): str(label) for label_id, label in (config.get("id2label") or {}).items()}


def token_ids(value: Any) -> tuple[int, ...]:
    """Configurations hold end tokens as nothing, a number or a list."""
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, list | tuple) else (int(value),)


def _ropes(
    architecture: str, family: _Family, config: Config, head_dim: int, sliding: list[bool]
) -> tuple[tuple[RopeSpec, ...], list[int]]:
    """The rotary embeddings and which of them each layer uses."""
    parameters = config.get("rope_parameters")
    if family.model_type != "gemma3_text":
        flat = {"rope_theta": config.get("rope_theta"), **(parameters or config.get("rope_scaling") or {})}
        index = [0 if rotated else -1 for rotated in _rotated_layers(config)]
        return (_rope(architecture, family, config, flat, head_dim),), index
    # Gemma 3: long-range layers have their own base and scaling.
    nested = parameters or {}
    scaling = config.get("rope_scaling") or {}
    full = {"rope_theta": config["rope_theta"], **scaling, **nested.get("full_attention", {})}
    local = {"rope_theta": config["rope_local_base_freq"], **nested.get(_SLIDING, {})}
    ropes = tuple(_rope(architecture, family, config, flat, head_dim) for flat in (full, local))
    return ropes, [int(windowed) for windowed in sliding]


def _rope(architecture: str, family: _Family, config: Config, flat: Config, head_dim: int) -> RopeSpec:
    kind = flat.get("rope_type") or flat.get("type") or "default"
    if family.model_type == "phi3" and kind in ("su", "yarn"):
        kind = "longrope"  # names of older releases
    partial = flat.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    base = RopeSpec(rotary_dim=int(head_dim * partial), theta=float(flat.get("rope_theta") or 10000.0))
    if kind == "default":
        return base
    limit = config.get("max_position_embeddings", 2048)
    trained = config.get("original_max_position_embeddings") or flat.get("original_max_position_embeddings") or limit
    factor = float(flat.get("factor") or limit / trained)
    match kind:
        case "linear":
            return replace(base, scaling="linear", factor=factor)
        case "dynamic":
            return replace(base, scaling="dynamic", factor=factor, original_max_position=limit)
        case "llama3":
            return replace(
                base,
                scaling="llama3",
                factor=factor,
                original_max_position=trained,
                low_freq_factor=float(flat["low_freq_factor"]),
                high_freq_factor=float(flat["high_freq_factor"]),
            )
        case "yarn":
            return replace(
                base,
                scaling="yarn",
                factor=factor,
                original_max_position=trained,
                attention_factor=_yarn_attention_factor(flat, factor),
                beta_fast=float(flat.get("beta_fast") or 32),
                beta_slow=float(flat.get("beta_slow") or 1),
                truncate=bool(flat.get("truncate", True)),
            )
        case "longrope":
            attention = flat.get("attention_factor")
            if attention is None:
                attention = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
            return replace(
                base,
                scaling="longrope",
                factor=factor,
                original_max_position=trained,
                attention_factor=float(attention),
                short_factor=tuple(map(float, flat["short_factor"])),
                long_factor=tuple(map(float, flat["long_factor"])),
            )
    raise UnsupportedModel(
        f"rope scaling {kind!r} of {architecture} is not supported; "
        "supported are default, linear, dynamic, llama3, yarn, longrope"
    )


def _yarn_attention_factor(flat: Config, factor: float) -> float:
    """YaRN's temperature, unless the configuration names it or DeepSeek's two scales."""
    given = flat.get("attention_factor")
    if given is not None:
        return float(given)

    def temperature(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    above, below = flat.get("mscale"), flat.get("mscale_all_dim")
    return temperature(above) / temperature(below) if above and below else temperature(1.0)


def _max_position(family: _Family, config: Config, ropes: tuple[RopeSpec, ...]) -> int:
    """Scaled ropes reach further than the configuration's own figure, except where that is the scaled one."""
    limit = int(config.get("max_position_embeddings", 2048))
    rope = ropes[0]
    if family.model_type == "gemma3_text":
        return limit
    if rope.scaling in ("linear", "dynamic"):
        return int(limit * rope.factor)
    if rope.scaling == "yarn":
        return max(limit, int(rope.original_max_position * rope.factor))
    return limit
