"""GGUF files: every architecture against the transformers model that was written to it, block formats, damage."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize

from backends.prefill_only.models.families import UnsupportedModel
from backends.prefill_only.models.gguf_source import GgufSource
from backends.prefill_only.models.loader import load
from backends.prefill_only.models.source import CheckpointError
from tests.backends.prefill_only.models.engine import logprobs
from tests.backends.prefill_only.models.gguf_files import write_gguf
from tests.backends.prefill_only.models.transformers_models import prompt, save_model, transformers_logprobs

pytestmark = pytest.mark.usefixtures("one_thread")

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def check(theirs: Any, file: Path, tokens: int = 60) -> None:
    token_ids = prompt(tokens)
    model = load(str(file), dtype="float32", device="cpu")
    expected = transformers_logprobs(theirs, token_ids)
    torch.testing.assert_close(logprobs(model, token_ids), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True, "head_dim": 32}),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 32}),
        (
            "qwen3_moe",
            {
                "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
                "norm_topk_prob": True,
            },
        ),
        ("gemma2", {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 20}),
        ("gemma3_text", {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 20, "num_hidden_layers": 7}),
        ("phi3", {"original_max_position_embeddings": 512}),
    ],
)  # fmt: skip
def test_each_architecture_answers_as_the_model_that_was_written(
    model_type: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    theirs = save_model(tmp_path / "hf", model_type, **settings)
    write_gguf(theirs, tmp_path / "model.gguf")
    check(theirs, tmp_path / "model.gguf")


def test_frequency_factors_of_llama_3(tmp_path: Path) -> None:
    theirs = save_model(tmp_path / "hf", "llama", rope_parameters=_LLAMA3)
    own = load(str(tmp_path / "hf"), dtype="float32", device="cpu").spec.ropes[0]
    factors = 1 / (10000.0 ** (torch.arange(0, 16, 2) / 16)) / own.inv_freq(200)
    assert factors.max() > 1.5
    write_gguf(theirs, tmp_path / "model.gguf", tensors={"rope_freqs.weight": factors.numpy()})
    check(theirs, tmp_path / "model.gguf", tokens=200)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling_of_the_metadata(kind: str, tmp_path: Path) -> None:
    scaling = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
    theirs = save_model(tmp_path / "hf", "qwen2", rope_parameters=scaling)
    described = {
        "{arch}.rope.scaling.type": kind,
        "{arch}.rope.scaling.factor": 4.0,
        "{arch}.rope.scaling.original_context_length": 128.0,
    }
    write_gguf(theirs, tmp_path / "model.gguf", metadata=described)
    check(theirs, tmp_path / "model.gguf", tokens=150)


def test_long_and_short_factors_of_phi_3(tmp_path: Path) -> None:
    short, long = [1.0 + 0.1 * i for i in range(8)], [2.0 + i for i in range(8)]
    scaling = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": short, "long_factor": long}
    theirs = save_model(
        tmp_path / "hf", "phi3", original_max_position_embeddings=64,
        rope_parameters=scaling | {"original_max_position_embeddings": 64},
    )  # fmt: skip
    write_gguf(
        theirs,
        tmp_path / "model.gguf",
        metadata={"{arch}.rope.scaling.original_context_length": 64.0},
        tensors={
            "rope_factors_short.weight": np.array(short, dtype=np.float32),
            "rope_factors_long.weight": np.array(long, dtype=np.float32),
        },
    )
    check(theirs, tmp_path / "model.gguf", tokens=150)


def test_end_tokens_of_the_metadata(tmp_path: Path) -> None:
    write_gguf(save_model(tmp_path / "hf", "llama"), tmp_path / "model.gguf")
    assert load(str(tmp_path / "model.gguf"), dtype="float32", device="cpu").eos_token_ids == (2,)


def test_random_weights_for_a_gguf_description(tmp_path: Path) -> None:
    write_gguf(save_model(tmp_path / "hf", "gemma2", head_dim=32), tmp_path / "model.gguf")
    model = load(str(tmp_path / "model.gguf"), dtype="float32", device="cpu", load_format="dummy")
    assert model.weights.final_norm.eq(1).all()
    assert logprobs(model, prompt(20)).isfinite().all()


# --- formats of tensors ----------------------------------------------------------------------------------------------

_KINDS = [
    "F16",
    "BF16",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
]


@pytest.mark.parametrize("name", _KINDS)
@pytest.mark.parametrize("shape", [(48, 512), (3, 16, 256)])
def test_blocks_are_dequantised(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    """Random blocks. The values are what the gguf package makes of the whole tensor at once."""
    kind = gguf.GGMLQuantizationType[name]
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] // block * block_bytes), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "blocks.gguf", "llama")
    writer.add_tensor("blocks", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = GgufSource(tmp_path / "blocks.gguf")
    assert source.shape("blocks") == shape
    out = torch.empty(*shape[:-1], shape[-1] + 7)[..., : shape[-1]]  # rows that do not follow on each other

    with np.errstate(all="ignore"):  # random bits make scales that are no numbers
        source.read("blocks", out)
        expected = torch.from_numpy(np.array(dequantize(raw, kind), dtype=np.float32))
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


# --- damage ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_gguf(save_model(tmp_path / "hf", "llama"), tmp_path / "model.gguf")
    return tmp_path / "model.gguf"


def refusal(file: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        load(str(file), dtype="float32", device="cpu")
    assert "\n" not in str(error.value) and str(file) in str(error.value)
    return str(error.value)


def test_a_file_that_ends_early(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5000])
    assert "is the download complete?" in refusal(file)


@pytest.mark.parametrize("length", [0, 3, 23, 24, 60, 300])
def test_a_file_that_ends_in_its_head(file: Path, length: int) -> None:
    file.write_bytes(file.read_bytes()[:length])
    assert "GGUF file" in refusal(file)


def test_a_file_of_another_kind(file: Path) -> None:
    file.write_bytes(b"PK\x03\x04" + bytes(100))
    assert "does not begin with the letters GGUF" in refusal(file)


@pytest.mark.parametrize("version", [1, 4, 0x03000000])
def test_another_version_or_byte_order(file: Path, version: int) -> None:
    content = bytearray(file.read_bytes())
    content[4:8] = struct.pack("<I", version)
    file.write_bytes(content)
    assert "version" in refusal(file)


def test_a_length_beyond_the_file_is_not_believed(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[24:32] = struct.pack("<Q", 1 << 62)  # of the first key
    file.write_bytes(content)
    assert "longer than the file" in refusal(file)


def test_a_missing_tensor_is_named(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"))
    with pytest.raises(CheckpointError, match=r"no tensor 'blk\.1\.ffn_up\.weight'"):
        load(str(file), dtype="float32", device="cpu")


def test_an_unsupported_architecture(file: Path) -> None:
    content = file.read_bytes()
    at = content.index(b"general.architecture") + len(b"general.architecture") + 4 + 8
    file.write_bytes(content[:at] + b"mamba" + content[at + 5 :])
    with pytest.raises(UnsupportedModel, match=r"'mamba'.*llama, qwen2"):
        load(str(file), dtype="float32", device="cpu")


def test_a_part_of_a_split_model(tmp_path: Path) -> None:
    write_gguf(save_model(tmp_path / "hf", "llama"), tmp_path / "part.gguf", metadata={"split.count": 3.0})
    with pytest.raises(UnsupportedModel, match="join them with llama-gguf-split"):
        load(str(tmp_path / "part.gguf"), dtype="float32", device="cpu")
