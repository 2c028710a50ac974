"""How an answer of one token ends: its visible text, ``finish_reason`` and ``stop_reason``."""

from __future__ import annotations

from typing import NamedTuple

from backends.base import Tokenizer
from gateway.wire.fields import StopRules

__all__ = ["Finish", "finish_one"]


class Finish(NamedTuple):
    text: str
    reason: str  # "length" or "stop"
    stop_reason: str | int | None = None  # the stop string or the stop token id


def finish_one(token_id: int, tokenizer: Tokenizer, rules: StopRules) -> Finish:
    """Stop strings are looked for in the answer alone, and only once ``min_tokens`` tokens are past."""
    shown = "" if rules.skip_special_tokens and tokenizer.is_special(token_id) else tokenizer.token_text(token_id)
    if rules.min_tokens >= 1:
        return Finish(shown, "length")
    if token_id in tokenizer.eos_token_ids and not rules.ignore_eos:
        return Finish(shown if rules.include_stop else "", "stop")
    if token_id in rules.stop_token_ids:
        return Finish(shown if rules.include_stop else "", "stop", token_id)
    hits = [(at, i, stop) for i, stop in enumerate(rules.stop) if (at := shown.find(stop)) >= 0]
    if hits:
        at, _, stop = min(hits)
        return Finish(shown[: at + len(stop)] if rules.include_stop else shown[:at], "stop", stop)
    return Finish(shown, "length")
