"""Log-probabilities as clients read them: token texts, bytes, ranked lists and the older dictionaries.

Values arrive as the backend computed them, one float per token, and leave as the same floats.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from backends.base import BadLogits, PromptLogprobs, Tokenizer, TokenLogprob

__all__ = ["IMPOSSIBLE", "TokenIds", "TokenNames", "chat_entry", "completion_dict", "finite", "prompt_logprobs_maps"]

IMPOSSIBLE = -9999.0


def finite(logprob: float) -> float:
    """JSON has no infinities: an impossible token gets the floor other servers use. NaN is an error."""
    if math.isnan(logprob):
        raise BadLogits("The model produced NaN for this prompt.")
    return logprob if logprob > IMPOSSIBLE else IMPOSSIBLE


class TokenNames:
    """How tokens are printed. One that is not whole characters prints its bytes, so that two never look alike.

    Remembers what it has printed: keep one for each tokenizer."""

    def __init__(self, tokenizer: Tokenizer, *, byte_prefix: str) -> None:
        self._tokenizer = tokenizer
        self._byte_prefix = byte_prefix
        self._names: dict[int, str] = {}
        self._bytes: dict[int, list[int] | None] = {}

    def __call__(self, token_id: int) -> str:
        text = self._names.get(token_id)
        if text is None:
            text = self._names[token_id] = self._name(token_id)
        return text

    def _name(self, token_id: int) -> str:
        raw = self._tokenizer.token_bytes(token_id)
        if raw:
            try:
                raw.decode()
            except UnicodeDecodeError:
                return self._byte_prefix + "".join(f"\\x{byte:02x}" for byte in raw)
        return self._tokenizer.token_text(token_id)

    def bytes_of(self, token_id: int) -> list[int] | None:
        if token_id not in self._bytes:
            raw = self._tokenizer.token_bytes(token_id)
            self._bytes[token_id] = None if raw is None else list(raw)
        return self._bytes[token_id]


class TokenIds(TokenNames):
    """``return_tokens_as_token_ids``: tokens print as their ids, with their own bytes all the same."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer, byte_prefix="")

    def __call__(self, token_id: int) -> str:
        return f"token_id:{token_id}"


def chat_entry(
    drawn: TokenLogprob, ranked: Sequence[TokenLogprob], named: Sequence[TokenLogprob], names: TokenNames
) -> dict[str, Any]:
    """One element of ``logprobs.content``. ``top_logprobs``: the ranked ones and the drawn one if it is not among them;
    when tokens were named, the drawn one, those in the order given, then the ranked ones not yet listed."""
    listed: dict[int, TokenLogprob] = {}
    if named:
        listed[drawn.token_id] = drawn
        for item in named:
            listed.setdefault(item.token_id, item)
    for item in ranked:
        listed.setdefault(item.token_id, item)
    if ranked:
        listed.setdefault(drawn.token_id, drawn)
    entry = _token(drawn, names)
    entry["top_logprobs"] = [_token(item, names) for item in listed.values()]
    return entry


def _token(item: TokenLogprob, names: TokenNames) -> dict[str, Any]:
    return {
        "token": names(item.token_id),
        "logprob": finite(item.logprob),
        "bytes": names.bytes_of(item.token_id),
    }


def completion_dict(items: Iterable[TokenLogprob], names: TokenNames) -> dict[str, float]:
    """Text to log-probability. Of two ids with one text the likelier has it; the other goes by ``token_id:<id>``, so
    that as many entries come back as were asked for."""
    owners: dict[str, TokenLogprob] = {}
    for item in items:
        name = names(item.token_id)
        owner = owners.get(name)
        if owner is None:
            owners[name] = item
        elif owner.token_id != item.token_id:
            first, second = (owner, item) if owner.logprob >= item.logprob else (item, owner)
            owners[name] = first
            owners[f"token_id:{second.token_id}"] = second
    return {name: finite(item.logprob) for name, item in owners.items()}


def prompt_logprobs_maps(
    prompt: PromptLogprobs, token_ids: Sequence[int], tokenizer: Tokenizer, k: int | None = None
) -> list[dict[str, Any] | None]:
    """vLLM's ``prompt_logprobs``: null for the first token, then id → entry, the actual token first and then the ``k``
    likeliest (None: all there are)."""
    maps: list[dict[str, Any] | None] = [None] * (len(token_ids) - len(prompt.actual))
    tops = prompt.top or [[]] * len(prompt.actual)
    for actual, top in zip(prompt.actual, tops, strict=True):
        entries: dict[str, Any] = {}
        for item in (actual, *top[:k]):
            entries.setdefault(
                str(item.token_id),
                {
                    "logprob": finite(item.logprob),
                    "rank": item.rank,
                    "decoded_token": tokenizer.token_text(item.token_id),
                },
            )
        maps.append(entries)
    return maps
