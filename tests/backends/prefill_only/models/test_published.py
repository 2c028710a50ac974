"""Configurations as their publishers wrote them (keys that decide nothing left out): sizes and what sets each apart."""

from __future__ import annotations

import math
from typing import Any

import pytest

from backends.prefill_only.models.families import config_spec
from backends.prefill_only.models.layout import checkpoint_tensors

_LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3",
}  # fmt: skip


def config(architecture: str, hidden: int, inner: int, layers: int, heads: int, kv: int, **rest: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture], "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv, **rest,
    }  # fmt: skip


# Name: configuration and the number of parameters that its model card gives.
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "SmolLM2-135M": (
        config("LlamaForCausalLM", 576, 1536, 30, 9, 3, vocab_size=49152, tie_word_embeddings=True, rope_theta=100000),
        134_515_008,
    ),
    "Llama-2-7b": (config("LlamaForCausalLM", 4096, 11008, 32, 32, 32, vocab_size=32000), 6_738_415_616),
    "Llama-3.1-8B": (
        config("LlamaForCausalLM", 4096, 14336, 32, 32, 8, vocab_size=128256, rope_scaling=_LLAMA3),
        8_030_261_248,
    ),
    "Llama-3.2-1B": (
        config(
            "LlamaForCausalLM", 2048, 8192, 16, 32, 8, vocab_size=128256, head_dim=64, tie_word_embeddings=True,
            rope_scaling=_LLAMA3 | {"factor": 32.0},
        ),
        1_235_814_400,
    ),
    "Mistral-7B-v0.3": (
        config("MistralForCausalLM", 4096, 14336, 32, 32, 8, vocab_size=32768, sliding_window=None), 7_248_023_552
    ),
    "Qwen2.5-0.5B": (
        config(
            "Qwen2ForCausalLM", 896, 4864, 24, 14, 2, vocab_size=151936, tie_word_embeddings=True,
            use_sliding_window=False, sliding_window=32768, max_window_layers=24,
        ),
        494_032_768,
    ),
    "Qwen3-0.6B": (
        config("Qwen3ForCausalLM", 1024, 3072, 28, 16, 8, vocab_size=151936, head_dim=128, tie_word_embeddings=True),
        596_049_920,
    ),
    "Qwen3-8B": (config("Qwen3ForCausalLM", 4096, 12288, 36, 32, 8, vocab_size=151936, head_dim=128), 8_190_735_360),
    "SmolLM3-3B": (
        config("SmolLM3ForCausalLM", 2048, 11008, 36, 16, 4, vocab_size=128256, rope_theta=5000000.0), 3_075_098_624
    ),
    "gemma-2-2b": (
        config("Gemma2ForCausalLM", 2304, 9216, 26, 8, 4, vocab_size=256000, head_dim=256), 2_614_341_888
    ),
    "gemma-3-1b": (
        config("Gemma3ForCausalLM", 1152, 6912, 26, 4, 1, vocab_size=262144, head_dim=256, sliding_window=512),
        999_885_952,
    ),
    "Phi-4-mini": (
        config(
            "Phi3ForCausalLM", 3072, 8192, 32, 24, 8, vocab_size=200064, tie_word_embeddings=True,
            partial_rotary_factor=0.75, max_position_embeddings=131072, original_max_position_embeddings=4096,
            rope_scaling={"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
        ),
        3_836_021_760,
    ),
    "Qwen3-30B-A3B": (
        config(
            "Qwen3MoeForCausalLM", 2048, 6144, 48, 32, 4, vocab_size=151936, head_dim=128, num_experts=128,
            num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True, decoder_sparse_step=1,
        ),
        30_532_122_624,
    ),
    "Mixtral-8x7B": (
        config(
            "MixtralForCausalLM", 4096, 14336, 32, 32, 8, vocab_size=32000, num_local_experts=8, num_experts_per_tok=2,
            sliding_window=None,
        ),
        46_702_792_704,
    ),
    "gpt-oss-20b": (
        config(
            "GptOssForCausalLM", 2880, 2880, 24, 64, 8, vocab_size=201088, head_dim=64, num_local_experts=32,
            num_experts_per_tok=4, swiglu_limit=7.0,
        ),
        20_914_757_184,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_add_up_to_the_published_number(name: str) -> None:
    described, parameters = PUBLISHED[name]
    spec, names = config_spec(described)
    assert sum(math.prod(shape) for shape in checkpoint_tensors(spec, names, "model.").values()) == parameters


def spec_of(name: str) -> Any:
    return config_spec(PUBLISHED[name][0])[0]


def test_what_sets_them_apart() -> None:
    assert spec_of("Llama-3.2-1B").ropes[0].factor == 32.0
    assert {layer.window for layer in spec_of("Qwen2.5-0.5B").layers} == {0}
    assert [layer.rope for layer in spec_of("SmolLM3-3B").layers[:5]] == [0, 0, 0, -1, 0]
    assert [layer.window for layer in spec_of("gemma-2-2b").layers[:4]] == [4096, 0, 4096, 0]
    assert spec_of("gemma-2-2b").attn_soft_cap == 50.0 and spec_of("gemma-2-2b").final_soft_cap == 30.0
    gemma3 = spec_of("gemma-3-1b")
    assert [(layer.window, layer.rope) for layer in gemma3.layers[4:7]] == [(512, 1), (0, 0), (512, 1)]
    assert [rope.theta for rope in gemma3.ropes] == [1000000.0, 10000.0]
    phi4 = spec_of("Phi-4-mini")
    assert phi4.ropes[0].rotary_dim == 96 and phi4.ropes[0].scaling == "longrope"
    assert phi4.ropes[0].attention_factor == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))
    gpt_oss = spec_of("gpt-oss-20b")
    assert [layer.window for layer in gpt_oss.layers[:3]] == [128, 0, 128] and all(x.sinks for x in gpt_oss.layers)
    assert gpt_oss.ropes[0].scaling == "yarn" and not gpt_oss.ropes[0].truncate and gpt_oss.max_position == 131072


def test_the_text_part_of_gemma_3_4b_relies_on_defaults() -> None:
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }  # fmt: skip
    spec, names = config_spec(
        {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "text_config": text}
    )
    assert sum(math.prod(shape) for shape in checkpoint_tensors(spec, names).values()) == 3_880_263_168
    assert spec.ropes[0].scaling == "linear" and spec.ropes[0].factor == 8.0 and spec.ropes[1].scaling == "none"
    assert spec.eos_token_ids == (1, 106) and spec.vocab_size == 262208
