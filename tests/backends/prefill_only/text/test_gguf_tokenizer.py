"""Tokenizers of GGUF files other than the built-in one, written here."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader, GGUFWriter
from tokenizers import Tokenizer

from backends.prefill_only.models.gguf_header import read_gguf_header
from backends.prefill_only.models.source import CheckpointError
from backends.prefill_only.text import TokenizerUnsupported, load_tokenizer
from backends.prefill_only.text.hf_directory import directory_definition
from backends.prefill_only.text.model_tokenizer import ModelTokenizer
from backends.prefill_only.text.tiktoken_engine import TiktokenEngine
from tests.backends.prefill_only.text.texts import random_texts

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6


def write(path: Path, keys: dict[str, Any]) -> Path:
    writer = GGUFWriter(path, "llama")
    for key, value in keys.items():
        key = f"tokenizer.{key}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def sentencepiece_keys() -> dict[str, Any]:
    """A vocabulary in the manner of Llama 2: control tokens, bytes, then pieces with falling scores."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256]
    pieces = "▁t ▁a he in ▁the re on ▁s ▁b th s> <s ▁an ▁and ing ▁in le".split()
    letters = "▁etaoinshrdlcumwfgypbvk.,!<>/0123456789é中"
    tokens += [*pieces, *letters]
    types += [NORMAL] * (len(pieces) + len(letters))
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces) + len(letters))]
    return {
        "ggml.model": "llama",
        "ggml.tokens": tokens,
        "ggml.token_type": types,
        "ggml.scores": scores,
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.unknown_token_id": 0,
        "chat_template": "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{{ eos_token }}{% endfor %}",
        "chat_template.tool_use": "{{ tools | tojson }}",
    }


def sentencepiece_by_hand(keys: dict[str, Any], text: str) -> list[int]:
    """The algorithm as SentencePiece states it: merge the adjacent pair whose piece has the best score."""
    ids = {token: i for i, token in enumerate(keys["ggml.tokens"]) if keys["ggml.token_type"][i] == NORMAL}
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        joined = [a + b for a, b in pairwise(parts)]
        pairs = [(-keys["ggml.scores"][ids[piece]], i) for i, piece in enumerate(joined) if piece in ids]
        if not pairs:
            break
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [i for part in parts for i in ([ids[part]] if part in ids else [3 + byte for byte in part.encode()])]


def test_sentencepiece(tmp_path: Path) -> None:
    keys = sentencepiece_keys()
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf", keys), vocab_rows=512, eos_token_ids=[2])
    texts = ["the thing in sand", "the  café, 中文 and 😀!", " a", "<s> </s>", "x\ny\t"]
    texts += [t for t in random_texts(200, seed=31, max_pieces=8) if t]
    for text in texts:
        wanted = sentencepiece_by_hand(keys, text)
        got = tokenizer.encode(text, parse_special=False)
        assert got == [1, *wanted], repr(text)
        assert tokenizer.decode(got, skip_special_tokens=True) == text
        raw = b"".join(tokenizer.token_bytes(i) or b"" for i in got[1:])
        assert raw == b" " + text.encode()
    assert tokenizer.encode("<s>the") == [1, *sentencepiece_by_hand(keys, "the")], "the start token is there once"
    assert tokenizer.token_text(keys["ggml.tokens"].index("▁the")) == " the"
    assert tokenizer.token_text(3 + 0xE4) == "\ufffd" and tokenizer.token_bytes(3 + 0xE4) == b"\xe4"


def test_sentencepiece_chat(tmp_path: Path) -> None:
    keys = sentencepiece_keys()
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf", keys), vocab_rows=512, eos_token_ids=[2])
    for content in ("the", "</s> and <s>"):
        got = tokenizer.render_chat([{"role": "user", "content": content}])
        assert got.token_ids == [1, *sentencepiece_by_hand(keys, f"[{content}]"), 2]
        assert got.text == f"<s>[{content}]</s>"
    assert tokenizer.render_chat([{"role": "user", "content": "x"}], tools=[{"a": 1}]).text == '[{"a": 1}]'


@pytest.mark.parametrize(("family", "pre"), [("llama3", "llama-bpe"), ("qwen2", "qwen2"), ("gpt2", "gpt-2")])
def test_byte_pairs_of_other_families(tmp_path: Path, directories: dict[str, Path], family: str, pre: str) -> None:
    spec = directory_definition(directories[family]).spec
    vocab, added = spec["model"]["vocab"], {token["id"]: token for token in spec["added_tokens"]}
    tokens = dict(sorted({**{i: t for t, i in vocab.items()}, **{i: t["content"] for i, t in added.items()}}.items()))
    types = [1 if i not in added else 3 if added[i]["special"] else 4 for i in tokens]
    keys = {
        "ggml.model": "gpt2",
        "ggml.pre": pre,
        "ggml.tokens": list(tokens.values()),
        "ggml.token_type": types,
        "ggml.merges": [" ".join(merge) for merge in spec["model"]["merges"]],
        "ggml.bos_token_id": vocab["<s>"],
        "ggml.eos_token_id": vocab["</s>"],
    }
    mine = load_tokenizer(write(tmp_path / "m.gguf", keys), vocab_rows=4096, eos_token_ids=[1])
    assert isinstance(mine, ModelTokenizer) and isinstance(mine._engine, TiktokenEngine)
    reference: Tokenizer = Tokenizer.from_str(json.dumps(spec))
    for text in random_texts(300, seed=32, control=["<s>", "<|end|>", "<think>"]):
        assert mine.encode(text, add_special_tokens=False) == reference.encode(text, add_special_tokens=False).ids
    assert (mine.encode("x")[0] == vocab["<s>"]) == (family == "llama3")
    explicit = load_tokenizer(
        write(tmp_path / "b.gguf", {**keys, "ggml.add_bos_token": family != "llama3", "ggml.add_eos_token": True}),
        vocab_rows=4096,
        eos_token_ids=[1],
    )
    ids = explicit.encode("x")
    assert ids[-1] == vocab["</s>"] and (ids[0] == vocab["<s>"]) == (family != "llama3")
    assert mine.bos_token == "<s>" and mine.eos_token == "</s>" and mine.pad_token is None
    assert mine.chat_template is None


def test_metadata_is_what_the_gguf_package_reads(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", sentencepiece_keys())
    fields = GGUFReader(path).fields
    got = read_gguf_header(path).metadata
    for key, value in got.items():
        wanted = fields[key].contents()
        assert value == (pytest.approx(wanted) if key.endswith("scores") else wanted), key
    assert {key for key in fields if not key.startswith("GGUF.")} == set(got)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"ggml.model": "rwkv"}, "'rwkv' is not supported; supported: gpt2, llama"),
        ({"ggml.model": "gpt2", "ggml.pre": "poro-chat"}, "pre-tokenizer 'poro-chat' is not supported"),
        ({"ggml.model": "gpt2", "ggml.pre": "gpt-2"}, "no key tokenizer.ggml.merges"),
        ({"ggml.tokens": None}, "no key tokenizer.ggml.tokens"),
        ({"ggml.scores": None}, "no key tokenizer.ggml.scores"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path: Path, change: dict[str, Any], complaint: str) -> None:
    keys = {key: value for key, value in {**sentencepiece_keys(), **change}.items() if value is not None}
    with pytest.raises(TokenizerUnsupported, match=complaint):
        load_tokenizer(write(tmp_path / "m.gguf", keys), vocab_rows=512, eos_token_ids=[2])


def test_damaged_files(tmp_path: Path) -> None:
    whole = write(tmp_path / "m.gguf", sentencepiece_keys()).read_bytes()
    for name, raw in {
        "empty": b"",
        "other": b"PK\x03\x04" + bytes(100),
        "version": whole[:4] + b"\x09" + whole[5:],
        "cut": whole[: len(whole) // 2],
        "cut in a string": whole[:60],
        "huge array": whole.replace(len(sentencepiece_keys()["ggml.tokens"]).to_bytes(8, "little"), b"\xff" * 8, 1),
    }.items():
        path = tmp_path / name
        path.write_bytes(raw)
        with pytest.raises(CheckpointError):
            read_gguf_header(path)
        with pytest.raises(TokenizerUnsupported):
            load_tokenizer(path, vocab_rows=512, eos_token_ids=[2])


def test_a_directory_without_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TokenizerUnsupported, match=r"has no tokenizer\.json; save one"):
        load_tokenizer(tmp_path, vocab_rows=8, eos_token_ids=[])
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerUnsupported, match="cannot be read"):
        load_tokenizer(tmp_path, vocab_rows=8, eos_token_ids=[])
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "BPE", "vocab": 7}}')
    with pytest.raises(TokenizerUnsupported, match="library refuses"):
        load_tokenizer(tmp_path, vocab_rows=8, eos_token_ids=[])


def test_templates_of_a_directory(tmp_path: Path, directories: dict[str, Path]) -> None:
    """Each place they are kept in; files win over the configuration."""
    source = directories["gpt2"]
    (tmp_path / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    config = {"chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert directory_definition(tmp_path).chat_templates == {"default": "a", "tool_use": "b"}
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "c"}))
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("d")
    assert directory_definition(tmp_path).chat_templates == {"default": "c", "tool_use": "b", "rag": "d"}
    (tmp_path / "chat_template.jinja").write_text("e")
    assert directory_definition(tmp_path).chat_templates["default"] == "e"


def test_tokens_that_only_the_configuration_knows(tmp_path: Path, directories: dict[str, Path]) -> None:
    spec = json.loads((directories["gpt2"] / "tokenizer.json").read_text())
    end = next(token for token in spec["added_tokens"] if token["content"] == "<|end|>")
    spec["added_tokens"].remove(end)
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    config = {"added_tokens_decoder": {str(end["id"]): {"content": "<|end|>", "special": True}}, "eos_token": "<|end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path, vocab_rows=4096, eos_token_ids=[end["id"]])
    assert tokenizer.encode("a<|end|>", add_special_tokens=False)[-1] == end["id"] and tokenizer.is_special(end["id"])
    assert tokenizer.eos_token == "<|end|>" and tokenizer.eos_token_ids == {end["id"]}
    assert directory_definition(tmp_path).named_tokens == {"eos_token": "<|end|>"}
