"""What a tokenizer is made of, whatever file it came from. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["AddedToken", "TokenizerDefinition", "TokenizerUnsupported"]


class TokenizerUnsupported(ValueError):
    """The model's tokenizer cannot be loaded; the message says what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedToken:
    """A token that is found in text before anything else is done to it."""

    id: int
    text: str
    special: bool  # left out by ``skip_special_tokens``
    plain: bool  # matches its spelling anywhere, without stripping, word boundaries or normalisation


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerDefinition:
    """``spec`` has the form of a ``tokenizer.json``."""

    spec: dict[str, Any]
    named_tokens: Mapping[str, str] = field(default_factory=dict)  # bos_token, eos_token, pad_token, unk_token, …
    chat_templates: Mapping[str, str] = field(default_factory=dict)  # by name; "default" is the usual one

    def added_tokens(self) -> list[AddedToken]:
        return [
            AddedToken(
                id=int(token["id"]),
                text=token["content"],
                special=bool(token["special"]),
                plain=not (token["lstrip"] or token["rstrip"] or token["single_word"])
                and (not token["normalized"] or self.spec.get("normalizer") is None),
            )
            for token in self.spec.get("added_tokens", ())
        ]
