"""From the tokenizer files of a Hugging Face model directory to a :class:`TokenizerDefinition`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backends.prefill_only.text.definition import TokenizerDefinition, TokenizerUnsupported

__all__ = ["directory_definition"]

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def directory_definition(directory: Path) -> TokenizerDefinition:
    """Reads ``tokenizer.json`` and, where they exist, ``tokenizer_config.json``, ``special_tokens_map.json``,
    ``chat_template.jinja``, ``chat_template.json`` and ``additional_chat_templates/``.

    Raises :class:`TokenizerUnsupported` if there is no tokenizer.json or a file is damaged.
    """
    spec = _read_json(directory / "tokenizer.json")
    if spec is None:
        raise TokenizerUnsupported(
            f"{directory} has no tokenizer.json; save one there with "
            "transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    config = _read_json(directory / "tokenizer_config.json") or {}
    named = {}
    sources = [config]
    if "added_tokens_decoder" not in config:  # an older layout, in which the separate file has the last word
        sources.append(_read_json(directory / "special_tokens_map.json") or {})
    for source in sources:
        for name in _NAMED:
            if (text := _token_text(source.get(name))) is not None:
                named[name] = text
    _add_configured_tokens(spec, config, named)
    spec["truncation"] = spec["padding"] = None  # both belong to training batches
    return TokenizerDefinition(spec=spec, named_tokens=named, chat_templates=_chat_templates(directory, config))


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise TokenizerUnsupported(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerUnsupported(f"{path} does not hold a JSON object")
    return value


def _token_text(value: Any) -> str | None:
    """Tokens are written as a string or as an object with ``content``."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _add_configured_tokens(spec: dict[str, Any], config: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Tokens that only tokenizer_config.json knows."""
    added: list[dict[str, Any]] = spec.setdefault("added_tokens", [])
    known = {token["content"] for token in added}
    for token_id, token in sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0])):
        if token["content"] not in known:
            added.append(_added_token(int(token_id), token["content"], token))
            known.add(token["content"])
    vocab = spec.get("model", {}).get("vocab")
    for text in named.values():
        if text not in known and isinstance(vocab, dict) and text in vocab:
            added.append(_added_token(vocab[text], text, {"special": True}))
            known.add(text)


def _added_token(token_id: int, text: str, flags: Mapping[str, Any]) -> dict[str, Any]:
    special = bool(flags.get("special", False))
    return {
        "id": token_id,
        "content": text,
        "single_word": bool(flags.get("single_word", False)),
        "lstrip": bool(flags.get("lstrip", False)),
        "rstrip": bool(flags.get("rstrip", False)),
        "normalized": bool(flags.get("normalized", not special)),
        "special": special,
    }


def _chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Files win over the configuration, as in transformers."""
    templates = {}
    for source in (
        config.get("chat_template"),
        (_read_json(directory / "chat_template.json") or {}).get("chat_template"),
    ):
        if isinstance(source, str):
            templates["default"] = source
        elif isinstance(source, list):
            templates.update({entry["name"]: entry["template"] for entry in source})
        elif isinstance(source, Mapping):
            templates.update(source)
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text("utf-8")
    default = directory / "chat_template.jinja"
    if default.is_file():
        templates["default"] = default.read_text("utf-8")
    return templates
