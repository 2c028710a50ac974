"""Keeps a client's words from becoming control tokens.

A chat template joins its own text with the client's, and afterwards nobody can tell whose ``<|im_end|>`` it was. So
before rendering, in every string a client sent, each character that can begin or end a control token is replaced by a
stand-in, one character for one: lengths, trimming and searching for other text work as before. In the rendered text a
control token is one that is spelled without stand-ins, so it was written by the template from first to last character;
also pieces of a token in two parts or messages, which the template joins, stay text. Then the stand-ins are put back.

Stand-ins are lone surrogates: text that comes from clients cannot contain any, so none can be forged.

What a model wrote itself may hold tokens of its language other than the control of turns, such as ``<think>``, and
templates take an assistant's text apart at them. In the text of assistant messages those are left as they are.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from backends.base import InvalidInput

__all__ = ["UNUSED_STAND_IN", "StandIns", "check_data", "check_text"]

_FIRST_STAND_IN, _STAND_INS = 0xD800, 0x7FF
UNUSED_STAND_IN = "\udfff"
_SURROGATE = re.compile("[\ud800-\udfff]")
_ASSISTANT_TEXT = frozenset(["content", "reasoning_content", "reasoning", "thinking"])
# Templates build tokens like <|user|> around these.
_ROLES = frozenset(["system", "user", "assistant", "tool", "developer", "function", "ipython", "model"])


def check_text(text: str) -> None:
    """Raises :class:`InvalidInput` for text that is no Unicode text: half of a surrogate pair."""
    if not text.isascii() and (found := _SURROGATE.search(text)):
        raise InvalidInput(
            f"the text has half of a surrogate pair (\\u{ord(found[0]):04x}) at character {found.start()}, "
            "which no encoding can express"
        )


def check_data(value: Any) -> Any:
    """A deep copy of JSON data, all of whose strings passed :func:`check_text`."""
    if isinstance(value, str):
        check_text(value)
    elif isinstance(value, Mapping):
        return {check_data(key): check_data(item) for key, item in value.items()}
    elif isinstance(value, (list, tuple)):
        return [check_data(item) for item in value]
    return value


class StandIns:
    """``control``: spellings of the tokens that no client's text may become. ``kept``: text that stays as it is in an
    assistant's own words, control tokens among it; what could help to spell another control token is not kept."""

    def __init__(self, control: Collection[str], kept: Collection[str] = ()) -> None:
        self._control = tuple(control)
        chars = sorted({char for token in control for char in token})
        if len(chars) > _STAND_INS:
            raise ValueError(f"the control tokens are spelled with {len(chars)} characters: more than {_STAND_INS}")
        self._stand_in = {char: chr(_FIRST_STAND_IN + i) for i, char in enumerate(chars)}
        self._char = {stand_in: char for char, stand_in in self._stand_in.items()}
        ends = {token[0] for token in control} | {token[-1] for token in control}
        self._marks = {char for char in ends if not (char.isalnum() or char.isspace())}
        # Tokens that begin and end like words are marked where they stand in full.
        words = [token for token in control if not self._marks & {token[0], token[-1]}]
        self._words = _any_of(words) if words else None
        others = [token for token in control if token not in kept]
        self._kept = _any_of([text for text in kept if not any(_overlap(text, token) for token in others)])

    def mark(self, value: Any) -> Any:
        """``value`` is plain JSON data; strings in it, keys included, are marked. Raises InvalidInput for bad text."""
        if isinstance(value, str):
            return self._mark_text(value)
        if isinstance(value, Mapping):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.mark(item) for item in value]
        return value

    def mark_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        own_words = message.get("role") == "assistant"
        marked = {}
        for key, value in message.items():
            if key == "role":
                marked[key] = self._mark_role(value)
            elif own_words and key in _ASSISTANT_TEXT:
                marked[self.mark(key)] = self._mark_own_words(value)
            else:
                marked[self.mark(key)] = self.mark(value)
        return marked

    def marks(self, text: str) -> bool:
        """Whether ``text`` holds stand-ins."""
        return not text.isascii() and _SURROGATE.search(text) is not None

    def restore(self, text: str) -> str:
        """Back to what the client wrote."""
        if text.isascii():
            return text
        for stand_in, char in self._char.items():  # some dozens; each pass is a search in C
            text = text.replace(stand_in, char)
        return text

    def _mark_text(self, text: str) -> str:
        check_text(text)
        for char in self._marks:
            text = text.replace(char, self._stand_in[char])
        if self._words is not None:
            text = self._words.sub(lambda found: self._stand_in[found[0][0]] + found[0][1:], text)
        return text

    def _mark_own_words(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._mark_own_part(part) for part in value]
        return self._mark_around_kept(value) if isinstance(value, str) else self.mark(value)

    def _mark_own_part(self, part: Any) -> Any:
        if isinstance(part, Mapping) and isinstance(part.get("text"), str):
            rest = {key: value for key, value in part.items() if key != "text"}
            return {**self.mark(rest), "text": self._mark_around_kept(part["text"])}
        return self.mark(part)

    def _mark_around_kept(self, text: str) -> str:
        pieces, at = [], 0
        for found in self._kept.finditer(text):
            pieces += [self._mark_text(text[at : found.start()]), found[0]]
            at = found.end()
        return "".join([*pieces, self._mark_text(text[at:])])

    def _mark_role(self, role: Any) -> Any:
        if not isinstance(role, str) or role in _ROLES:
            return role
        marked = self._mark_text(role)
        if marked and any(marked in token for token in self._control):
            # "<|" + role + "|>" must not become a token that the template did not mean.
            return self._stand_in[marked[0]] + marked[1:]
        return marked


def _overlap(text: str, token: str) -> bool:
    """Whether ``text`` could be, contain or continue a part of ``token``."""
    shorter = min(len(text), len(token))
    ends = range(1, shorter + 1)
    return text in token or token in text or any(text[-n:] == token[:n] or text[:n] == token[-n:] for n in ends)


def _any_of(texts: Collection[str]) -> re.Pattern[str]:
    longest_first = sorted(set(texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
