"""Every family against transformers: all log-probabilities at all positions of small random models, in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForSequenceClassification

from backends.prefill_only.models.families import UnsupportedModel, config_spec
from backends.prefill_only.models.loader import load
from tests.backends.prefill_only.models.engine import logprobs, logprobs_together
from tests.backends.prefill_only.models.transformers_models import prompt, save_model, transformers_logprobs
from tests.backends.prefill_only.reference import reference_hidden, reference_logits, reference_logprobs

TOLERANCE = 1e-4

pytestmark = pytest.mark.usefixtures("one_thread")

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


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "name", ["llama-biases", "mistral-window", "qwen3", "smollm3-window", "gemma3", "qwen3-moe", "gpt-oss"]
)
def test_answers_do_not_depend_on_company(name: str, dtype: str, tmp_path: Path) -> None:
    """Bit for bit: alone, and in one pass with others that share the beginning or do not."""
    model_type, settings, _ = CASES[name]
    save_model(tmp_path, model_type, **settings)
    model = load(str(tmp_path), dtype=dtype, device="cpu")
    long = prompt(90)
    prompts = [prompt(17, seed=1), long, long[:64] + prompt(20, seed=2), [5], long[:40]]

    together = logprobs_together(model, prompts)

    for token_ids, found in zip(prompts, together, strict=True):
        assert torch.equal(found, logprobs(model, token_ids))


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "gemma2", "phi3", "mistral", "mixtral", "smollm3"])
@torch.inference_mode()
def test_classification_logits_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    labels = {0: "sad", 1: "neutral", 2: "glad"}
    theirs = save_model(
        tmp_path, model_type, auto_class=AutoModelForSequenceClassification, head_dim=16,
        id2label=labels, label2id={label: i for i, label in labels.items()},
    )  # fmt: skip
    token_ids = prompt(40)
    expected = theirs(torch.tensor([token_ids])).logits[0]

    model = load(str(tmp_path), dtype="float32", device="cpu")

    assert model.spec.head == "classification" and model.spec.id2label == labels
    assert model.weights.lm_head is None and model.weights.score is not None
    assert model.weights.score.out_features == model.spec.num_labels == 3
    logits = reference_logits(model.spec, model.weights, token_ids)[-1]
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text"])
@torch.inference_mode()
def test_hidden_rows_of_a_bare_model_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    theirs = save_model(tmp_path, model_type, auto_class=AutoModel, head_dim=16)
    token_ids = prompt(40)
    expected = theirs(torch.tensor([token_ids])).last_hidden_state[0]

    model = load(str(tmp_path), dtype="float32", device="cpu")

    assert model.spec.head == "none" and model.weights.lm_head is None and model.weights.score is None
    hidden = reference_hidden(model.spec, model.weights, token_ids)
    torch.testing.assert_close(hidden, expected, atol=TOLERANCE, rtol=0)


def test_the_text_part_of_a_multimodal_checkpoint_is_read(tmp_path: Path) -> None:
    theirs = save_model(tmp_path, "gemma3_text", head_dim=32)
    tensors = load_file(tmp_path / "model.safetensors")
    moved = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    save_file(moved | {"vision_tower.patches.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": config}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    token_ids = prompt(40)

    model = load(str(tmp_path), dtype="float32", device="cpu")

    expected = transformers_logprobs(theirs, token_ids)
    torch.testing.assert_close(logprobs(model, token_ids), expected, atol=TOLERANCE, rtol=0)


def test_settings_of_older_transformers_mean_the_same(tmp_path: Path) -> None:
    """``rope_theta`` and ``rope_scaling`` side by side, ``torch_dtype``, and keys left at their defaults."""
    old = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 96, "rope_theta": 500000.0, "rope_scaling": _LLAMA3,
        "eos_token_id": [2, 3],
    }  # fmt: skip
    new = {**old, "rope_parameters": {"rope_theta": 500000.0, **_LLAMA3}}
    del new["rope_theta"], new["rope_scaling"]

    spec, _ = config_spec(old)

    assert spec == config_spec(new)[0]
    assert spec.ropes[0].scaling == "llama3" and spec.num_kv_heads == 4 and spec.eos_token_ids == (2, 3)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architectures": ["BertForMaskedLM"]}, ["BertForMaskedLM", "LlamaForCausalLM", "Qwen3MoeForCausalLM"]),
        ({"architectures": ["LlamaForQuestionAnswering"]}, ["LlamaForQuestionAnswering", "LlamaForCausalLM"]),
        ({"model_type": "mamba"}, ["mamba", "LlamaForCausalLM"]),
        ({"architectures": ["LlamaForCausalLM"], "hidden_act": "relu"}, ["relu", "silu"]),
        (
            {"architectures": ["LlamaForCausalLM"], "rope_scaling": {"type": "mrope", "factor": 2.0}},
            ["mrope", "llama3", "yarn"],
        ),
    ],
)
def test_what_is_not_supported_is_refused_with_what_is(config: dict[str, Any], words: list[str]) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    with pytest.raises(UnsupportedModel) as refusal:
        config_spec({**sizes, "vocab_size": 96, **config})
    assert all(word in str(refusal.value) for word in words)


def test_a_configuration_without_a_size_names_it() -> None:
    with pytest.raises(ValueError, match="LlamaForCausalLM lacks 'hidden_size'"):
        config_spec({"architectures": ["LlamaForCausalLM"]})
