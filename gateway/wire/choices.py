"""What was answered, before it takes an API's shape: each choice's text, ending and the readout of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from backends.base import PrefillResult, Tokenizer, TokenLogprob
from gateway.wire.fields import StopRules
from gateway.wire.finish import finish_one

__all__ = ["Choice", "TokenReadout", "one_token_choices"]


class TokenReadout(NamedTuple):
    """One answered token, the likeliest at its place, and those that the client named."""

    drawn: TokenLogprob
    ranked: Sequence[TokenLogprob]
    named: Sequence[TokenLogprob]


@dataclass(slots=True)
class Choice:
    text: str
    finish_reason: str
    stop_reason: str | int | None
    tokens: list[TokenReadout]
    closed_set: dict[str, Any] | None = None  # how an answer from a closed set came about


def one_token_choices(result: PrefillResult, tokenizer: Tokenizer, rules: StopRules) -> list[Choice]:
    choices = []
    for drawn in result.drawn:
        finish = finish_one(drawn.token_id, tokenizer, rules)
        readout = TokenReadout(drawn, result.top, result.named)
        choices.append(Choice(finish.text, finish.reason, finish.stop_reason, [readout]))
    return choices
