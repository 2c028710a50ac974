"""From a GGUF file's metadata to a :class:`TokenizerDefinition`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backends.prefill_only.models.gguf_header import read_gguf_header
from backends.prefill_only.models.source import CheckpointError
from backends.prefill_only.text.definition import TokenizerDefinition, TokenizerUnsupported
from backends.prefill_only.text.pretokenizers import GGUF_PRETOKENIZERS, Pretokenizer

__all__ = ["gguf_definition"]

log = logging.getLogger(__name__)

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # values of tokenizer.ggml.token_type
_NAMED = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
    "sep_token": "seperator",
}


def gguf_definition(path: Path) -> TokenizerDefinition:
    """Raises :class:`TokenizerUnsupported` if the file is damaged or its tokenizer is of a kind not known here."""
    try:
        metadata = read_gguf_header(path).metadata
    except CheckpointError as error:
        raise TokenizerUnsupported(str(error)) from error
    kind = metadata.get("tokenizer.ggml.model")
    if "tokenizer.ggml.tokens" not in metadata:
        raise TokenizerUnsupported(f"{path} carries no tokenizer (no key tokenizer.ggml.tokens)")
    if kind == "gpt2":
        spec = _byte_pair_spec(metadata)
    elif kind == "llama":
        spec = _sentencepiece_spec(metadata)
    else:
        raise TokenizerUnsupported(f"GGUF tokenizer model {kind!r} is not supported; supported: gpt2, llama")
    tokens = metadata["tokenizer.ggml.tokens"]
    named = {}
    for name, key in _NAMED.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and 0 <= token_id < len(tokens):
            named[name] = tokens[token_id]
    return TokenizerDefinition(spec=spec, named_tokens=named, chat_templates=_chat_templates(metadata))


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    templates = {}
    for key, value in metadata.items():
        if key == "tokenizer.chat_template":
            templates["default"] = value
        elif key.startswith("tokenizer.chat_template."):
            templates[key.removeprefix("tokenizer.chat_template.")] = value
    return templates


def _added_tokens(metadata: Mapping[str, Any], *, special: tuple[int, ...]) -> list[dict[str, Any]]:
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.token_type", ())
    return [
        {
            "id": i,
            "content": tokens[i],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind in special,
        }
        for i, kind in enumerate(types)
        if (kind in special or kind == _USER_DEFINED) and tokens[i]
    ]


def _bos_eos_processor(metadata: Mapping[str, Any], *, add_bos: bool, add_eos: bool) -> dict[str, Any] | None:
    """What ``add_special_tokens`` adds, as a tokenizer.json says it."""
    tokens = metadata["tokenizer.ggml.tokens"]
    single: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    used = {}
    for key, wanted, at_front in (("bos", add_bos, True), ("eos", add_eos, False)):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if not metadata.get(f"tokenizer.ggml.add_{key}_token", wanted) or token_id is None:
            continue
        token = tokens[token_id]
        used[token] = {"id": token, "ids": [token_id], "tokens": [token]}
        single.insert(0 if at_front else len(single), {"SpecialToken": {"id": token, "type_id": 0}})
    if not used:
        return None
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": used}


def _byte_pair_spec(metadata: Mapping[str, Any]) -> dict[str, Any]:
    pre = _pretokenizer(metadata.get("tokenizer.ggml.pre"))
    merges = metadata.get("tokenizer.ggml.merges")
    if merges is None:
        raise TokenizerUnsupported("the GGUF file's byte-pair tokenizer has no merges (no key tokenizer.ggml.merges)")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(metadata, special=(_CONTROL,)),
        "normalizer": pre.normalizer,
        "pre_tokenizer": pre.library,
        "post_processor": _bos_eos_processor(metadata, add_bos=pre.adds_bos, add_eos=False),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre.ignore_merges,
            "vocab": {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])},
            "merges": [merge.split(" ", 1) for merge in merges],
        },
    }


def _pretokenizer(name: str | None) -> Pretokenizer:
    if name is None:
        log.warning("the GGUF file does not name its pre-tokenizer: GPT-2's is used, token ids may be wrong")
        return GGUF_PRETOKENIZERS["default"]
    if name not in GGUF_PRETOKENIZERS:
        known = ", ".join(sorted(GGUF_PRETOKENIZERS))
        raise TokenizerUnsupported(f"GGUF pre-tokenizer {name!r} is not supported; supported: {known}")
    return GGUF_PRETOKENIZERS[name]


def _sentencepiece_spec(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """SentencePiece's byte-pair model, as the library expresses it: merges in the order of the merged token's score."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.scores")
    if scores is None:
        raise TokenizerUnsupported(
            "the GGUF file's SentencePiece tokenizer has no scores (no key tokenizer.ggml.scores)"
        )
    vocab = {token: i for i, token in enumerate(tokens)}
    ranked: list[tuple[float, int, int, str, str]] = []
    types = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    for token, token_id in vocab.items():
        if types[token_id] != _NORMAL:  # the others are never the outcome of a merge, whatever their score
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[token_id], vocab[left], vocab[right], left, right))
    ranked.sort()
    prefix_space = metadata.get("tokenizer.ggml.add_space_prefix", True)
    to_space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    normalizers = [{"type": "Prepend", "prepend": "▁"}, to_space] if prefix_space else [to_space]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix_space:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(metadata, special=(_UNKNOWN, _CONTROL)),
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "post_processor": _bos_eos_processor(metadata, add_bos=True, add_eos=False),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None if unknown is None else tokens[unknown],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [[left, right] for *_, left, right in ranked],
        },
    }
