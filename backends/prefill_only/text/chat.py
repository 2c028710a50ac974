"""A conversation to a prompt: what transformers' ``apply_chat_template`` does around the template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from backends.base import InvalidInput
from backends.prefill_only.text.chat_template import ChatTemplate
from backends.prefill_only.text.untrusted import UNUSED_STAND_IN, StandIns, check_data

__all__ = ["Chat"]

_REASONING = ("reasoning_content", "thinking", "reasoning")
_OWN_VARIABLES = frozenset(["messages", "tools", "add_generation_prompt", "continue_final_message"])
_CONTINUE_HERE = UNUSED_STAND_IN + " "  # the space shows whether the template trims


class _Habits(NamedTuple):
    """What a template does with input that comes in more than one form, found out by rendering examples."""

    reads_parts: bool  # a list of content parts, rather than their text
    reads_arguments_as_text: bool  # a tool call's arguments as JSON text, rather than as an object


class Chat:
    """One template with the model's named tokens. Thread-safe.

    ``stand_ins``: None if clients may write control tokens.
    """

    def __init__(self, template: ChatTemplate, named_tokens: Mapping[str, str], stand_ins: StandIns | None) -> None:
        self._template = template
        self._named_tokens = dict(named_tokens)
        self._stand_ins = stand_ins

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any],
    ) -> str:
        """The prompt, in which stand-ins still stand. Raises :class:`InvalidInput`."""
        if add_generation_prompt and continue_final_message:
            raise InvalidInput("add_generation_prompt and continue_final_message exclude each other")
        if clash := sorted(_OWN_VARIABLES & template_kwargs.keys()):
            raise InvalidInput(f"chat_template_kwargs may not set {', '.join(clash)}")
        if not messages:
            raise InvalidInput("a conversation needs at least one message")
        try:
            chat = [self._normalized(message) for message in messages]
            variables: dict[str, Any] = {**self._named_tokens, **self._marked(template_kwargs)}
            tool_list = None if tools is None else self._marked(list(tools))
        except RecursionError as error:
            raise InvalidInput("the conversation is nested too deeply") from error
        documents = variables.pop("documents", None)
        if continue_final_message:
            self._tag_final(chat[-1])
        text = self._template.render(
            {
                **variables,
                "messages": chat,
                "tools": tool_list,
                "documents": documents,
                "add_generation_prompt": add_generation_prompt,
            }
        )
        return _cut_at_tag(text) if continue_final_message else text

    def _marked(self, value: Any) -> Any:
        return check_data(value) if self._stand_ins is None else self._stand_ins.mark(value)

    def _normalized(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A fresh copy: without nulls, with the forms and names this template reads."""
        chat = {key: value for key, value in message.items() if value is not None}
        if chat.get("role") == "developer" and "developer" not in self._template.text:
            chat["role"] = "system"
        content = chat.get("content")
        if isinstance(content, list) and not self.habits.reads_parts:
            chat["content"] = _joined_parts(content)
        calls = chat.get("tool_calls")
        if isinstance(calls, list) and calls and not self.habits.reads_arguments_as_text:
            chat["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
        reasoning = next((chat[key] for key in _REASONING if chat.get(key) is not None), None)
        if reasoning is not None:
            chat = {"thinking": reasoning, **chat, "reasoning_content": reasoning}
        if self._stand_ins is None:
            return dict(check_data(chat))
        return self._stand_ins.mark_message(chat)

    def _tag_final(self, message: dict[str, Any]) -> None:
        content = message.get("content")
        if isinstance(content, str):
            message["content"] = content + _CONTINUE_HERE
            return
        if isinstance(content, list):
            for part in reversed(content):
                if isinstance(part, dict) and isinstance(part.get("text"), str):
                    part["text"] += _CONTINUE_HERE
                    return
        raise InvalidInput("continue_final_message is set, but the last message has no text to continue")

    @cached_property
    def habits(self) -> _Habits:
        parts = self._example([{"role": "user", "content": [{"type": "text", "text": "EXAMPLE"}]}])
        call = {"type": "function", "id": "call00001", "function": {"name": "f", "arguments": '{"a": "b"}'}}
        calls = self._example(
            [
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "y", "name": "f", "tool_call_id": "call00001"},
            ]
        )
        return _Habits(
            reads_parts="EXAMPLE" in parts and "'EXAMPLE'" not in parts and '"EXAMPLE"' not in parts,
            reads_arguments_as_text='{"a": "b"}' in calls,
        )

    def _example(self, messages: list[dict[str, Any]]) -> str:
        try:
            return self._template.render(
                {**self._named_tokens, "messages": messages, "tools": None, "add_generation_prompt": False}
            )
        except InvalidInput:
            return ""


def _joined_parts(parts: Sequence[Any]) -> str:
    texts = []
    for part in parts:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise InvalidInput(f"a content part of type {kind!r} is not supported: this model reads text only")
        texts.append(text)
    return "\n".join(texts)


def _with_parsed_arguments(call: Any) -> Any:
    """The API carries arguments as JSON text, while most templates print them as JSON themselves."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _cut_at_tag(text: str) -> str:
    """Ends the prompt where the final message ended, and if the template trimmed that message, trims it too."""
    bare = _CONTINUE_HERE.strip()
    at = text.rfind(bare)
    if at < 0:
        raise InvalidInput("continue_final_message is set, but the chat template does not show the last message's text")
    kept = text[:at]
    return kept if text.startswith(_CONTINUE_HERE, at) else kept.rstrip()
