"""Small random models made by transformers, written to disk as it writes them, and what it answers for a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

__all__ = ["VOCAB", "prompt", "save_model", "transformers_logprobs"]

VOCAB = 96

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def save_model(
    path: Path, model_type: str, *, auto_class: Any = AutoModelForCausalLM, seed: int = 0, **settings: Any
) -> PreTrainedModel:
    """A float32 model of ``settings`` with every parameter random (norms and biases too), saved to ``path``."""
    config = AutoConfig.for_model(model_type, **(_COMMON | settings))
    torch.manual_seed(seed)
    model = auto_class.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Wide enough that attention is far from uniform and experts differ.
            spread = 0.3 if parameter.dim() == 1 else 1.5 / parameter.shape[-1] ** 0.5
            parameter.add_(torch.randn_like(parameter) * spread)
    model.save_pretrained(path)
    return model


def prompt(tokens: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (tokens,), generator=generator).tolist()


@torch.inference_mode()
def transformers_logprobs(model: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """Natural-log probabilities after each position, fp32 ``[tokens, vocab]``."""
    logits = model(torch.tensor([list(token_ids)])).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)
