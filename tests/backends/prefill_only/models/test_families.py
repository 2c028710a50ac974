"""Every family against transformers: all log-probabilities at all positions of small random models, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from backends.prefill_only.models.loader import load
from tests.backends.prefill_only.models.engine import logprobs
from tests.backends.prefill_only.models.transformers_models import prompt, save_model, transformers_logprobs
from tests.backends.prefill_only.reference import reference_logprobs

TOLERANCE = 1e-4

_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def _rope(**scaling: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **scaling}}


# Name: model type, settings, tokens of the prompt.
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "llama": ("llama", {}, 150),
    "llama-one-token": ("llama", {}, 1),
    "llama-tied": ("llama", {"tie_word_embeddings": True}, 40),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}, 40),
    "llama-wide-heads": ("llama", {"head_dim": 32}, 40),
    "llama-no-gqa": ("llama", {"num_key_value_heads": 4}, 40),
    "llama3-rope": ("llama", _rope(**_LLAMA3), 200),
    "linear-rope": ("llama", _rope(rope_type="linear", factor=3.0), 150),
    "dynamic-rope-within": ("llama", _rope(rope_type="dynamic", factor=2.0), 150),
    "dynamic-rope-beyond": (
        "llama",
        {"max_position_embeddings": 64, **_rope(rope_type="dynamic", factor=4.0)},
        150,
    ),
    "yarn-rope": ("llama", _rope(**_YARN), 200),
    "yarn-rope-attention-factor": ("llama", _rope(**_YARN, attention_factor=1.3, beta_fast=16.0), 100),
    "mistral-window": ("mistral", {"sliding_window": 24}, 150),
    "mistral-no-window": ("mistral", {"sliding_window": None}, 60),
    "qwen2": ("qwen2", {}, 100),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
        100,
    ),
    "qwen2-yarn": ("qwen2", _rope(**_YARN), 200),
    "qwen3": ("qwen3", {"head_dim": 32}, 100),
    "qwen3-biases-tied": ("qwen3", {"head_dim": 32, "attention_bias": True, "tie_word_embeddings": True}, 60),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}, 100),
    "smollm3-window": (
        "smollm3",
        {"num_hidden_layers": 5, "use_sliding_window": True, "sliding_window": 20, "no_rope_layer_interval": 2},
        100,
    ),
    "gemma2": ("gemma2", {"head_dim": 32, "sliding_window": 20, "query_pre_attn_scalar": 24}, 100),
    "gemma2-sharp-caps": (
        "gemma2",
        {"head_dim": 32, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "num_hidden_layers": 2},
        40,
    ),
    "gemma3": ("gemma3_text", {"head_dim": 32, "sliding_window": 20, "num_hidden_layers": 7}, 100),
    "gemma3-scaled": (
        "gemma3_text",
        {
            "head_dim": 32,
            "sliding_window": 20,
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        100,
    ),
    "phi3": ("phi3", {"original_max_position_embeddings": 512}, 100),
    "phi3-partial-rotary": (
        "phi3",
        {"original_max_position_embeddings": 512, "head_dim": 32, **_rope(partial_rotary_factor=0.5)},
        100,
    ),
    "phi3-longrope-short": (
        "phi3",
        {
            "original_max_position_embeddings": 128,
            **_rope(
                rope_type="longrope",
                short_factor=[1.0 + 0.1 * i for i in range(8)],
                long_factor=[2.0 + i for i in range(8)],
                original_max_position_embeddings=128,
            ),
        },
        100,
    ),
    "phi3-longrope-long": (
        "phi3",
        {
            "original_max_position_embeddings": 64,
            "sliding_window": 48,
            **_rope(
                rope_type="longrope",
                short_factor=[1.0 + 0.1 * i for i in range(8)],
                long_factor=[2.0 + i for i in range(8)],
                original_max_position_embeddings=64,
            ),
        },
        150,
    ),
    "qwen3-moe": (
        "qwen3_moe",
        {
            "head_dim": 32,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
        100,
    ),
    "qwen3-moe-unnormed": (
        "qwen3_moe",
        {"head_dim": 32, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48},
        40,
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24}, 100),
    "gpt-oss": (
        "gpt_oss",
        {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24},
        150,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_log_probabilities_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model_type, settings, tokens = CASES[name]
    theirs = save_model(tmp_path, model_type, **settings)
    token_ids = prompt(tokens)
    expected = transformers_logprobs(theirs, token_ids)

    model = load(str(tmp_path), dtype="float32", device="cpu")

    plain = reference_logprobs(model.spec, model.weights, token_ids)
    torch.testing.assert_close(plain, expected, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(logprobs(model, token_ids), expected, atol=TOLERANCE, rtol=0)
