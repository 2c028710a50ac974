"""POST /v1/chat/completions: the request's fields, the messages' forms, the answer and its events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from backends.base import PrefillResult
from gateway.catalog import Served
from gateway.errors import InvalidRequest, UnsupportedParameter
from gateway.routing import Route
from gateway.wire.api import (
    Answered,
    Caller,
    Head,
    Prepared,
    Prompt,
    TextApi,
    answered,
    assemble,
    event_usage,
    refuse_unless_text,
    usage_of,
)
from gateway.wire.choices import Choice
from gateway.wire.fields import CommonFields, decode_request, truncate
from gateway.wire.logprobs import TokenIds, TokenNames, chat_entry, prompt_logprobs_maps

__all__ = ["ChatApi", "ChatRequest", "normalised_messages"]

MAX_STOPS = 4  # OpenAI's limit
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_TEXT_KEYS = {"text": "text", "refusal": "refusal"}


class ChatRequest(CommonFields, kw_only=True):
    messages: list[Any]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None
    response_format: Any = None
    add_special_tokens: bool | None = None
    documents: list[Any] | None = None
    reasoning_effort: str | None = None


class ChatApi(TextApi):
    route: Route = "chat"
    prompt_param = "messages"

    def prepare(self, body: bytes, served: Served, caller: Caller) -> Prepared:
        request = decode_request(body, ChatRequest)
        refuse_unless_text(request.response_format)
        max_tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        opens = request.add_generation_prompt is not False
        continues = bool(request.continue_final_message)
        if opens and continues:
            raise InvalidRequest(
                "continue_final_message needs add_generation_prompt to be false.",
                param="continue_final_message",
                code="invalid_value",
            )
        if request.add_special_tokens:
            raise UnsupportedParameter(
                "add_special_tokens: the template writes the special tokens of a chat.", param="add_special_tokens"
            )
        tokenizer = served.tokenizer
        messages = normalised_messages(request.messages, tokenizer.chat_template)
        rendered = tokenizer.render_chat(
            messages,
            add_generation_prompt=opens,
            continue_final_message=continues,
            tools=request.tools or None,
            template_kwargs=_template_kwargs(request),
        )
        ids = truncate(rendered.token_ids, request, served.info.max_model_len)
        wants_scores = bool(request.logprobs) or request.logprob_token_ids is not None
        return assemble(
            request,
            served,
            caller,
            [Prompt(ids, rendered.text)],
            max_tokens=max_tokens,
            max_stops=MAX_STOPS,
            top_logprobs=(request.top_logprobs or 0) if wants_scores else None,
            prompt_logprobs=request.prompt_logprobs,
        )

    def answer(self, prepared: Prepared, results: Sequence[PrefillResult], head: Head) -> dict[str, Any]:
        [one] = everything = answered(prepared, results)
        names = _names(prepared)
        role = _role(prepared.request)
        return {
            "id": head.id,
            "object": "chat.completion",
            "created": head.created,
            "model": head.model,
            "choices": [
                {
                    "index": i,
                    "message": {"role": role, "content": choice.text, "refusal": None},
                    "logprobs": _scores(prepared, choice, names),
                    "finish_reason": choice.finish_reason,
                    **_extras(prepared, choice),
                }
                for i, choice in enumerate(one.choices)
            ],
            "service_tier": None,
            "system_fingerprint": head.fingerprint,
            "usage": usage_of(prepared, everything, results),
            **_prompt_extras(prepared, one),
        }

    def events(self, prepared: Prepared, results: Sequence[PrefillResult], head: Head) -> Iterable[dict[str, Any]]:
        """OpenAI's order: every choice's role, its content with log-probabilities, its end; then the usage."""
        [one] = everything = answered(prepared, results)
        names = _names(prepared)
        frame: dict[str, Any] = {
            "id": head.id,
            "object": "chat.completion.chunk",
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.fingerprint,
        }
        usage = usage_of(prepared, everything, results)
        answered_tokens = 0

        def chunk(i: int, delta: dict[str, Any], logprobs: Any = None, end: str | None = None, **more: Any) -> Any:
            choice = {"index": i, "delta": delta, "logprobs": logprobs, "finish_reason": end, **more}
            return {**frame, "choices": [choice], **event_usage(prepared, usage, answered_tokens)}

        first = {"role": _role(prepared.request), "content": "", "refusal": None}
        for i in range(len(one.choices)):
            event = chunk(i, first)
            if i == 0:
                event |= _prompt_extras(prepared, one)
            yield event
        for i, choice in enumerate(one.choices):
            answered_tokens += len(choice.tokens)
            yield chunk(i, {"content": choice.text}, _scores(prepared, choice, names))
            yield chunk(i, {}, end=choice.finish_reason, **_extras(prepared, choice))
        if prepared.include_usage:
            yield {**frame, "choices": [], "usage": usage}


def normalised_messages(messages: Sequence[Any], chat_template: str | None) -> list[dict[str, Any]]:
    """Messages as templates expect them: text content as one string, ``developer`` as ``system`` where the template
    does not know it. Raises InvalidRequest naming the message."""
    if not messages:
        raise InvalidRequest("messages is empty.", param="messages", code="empty_array")
    knows_developer = chat_template is not None and "developer" in chat_template
    return [_message(i, message, knows_developer) for i, message in enumerate(messages)]


def _message(i: int, message: Any, knows_developer: bool) -> dict[str, Any]:
    path = f"messages[{i}]"
    if not isinstance(message, dict):
        raise InvalidRequest(f"{path} must be an object.", param=path, code="invalid_type")
    if "role" not in message:
        raise InvalidRequest(
            f"Missing required parameter: {path}.role.", param=f"{path}.role", code="missing_required_parameter"
        )
    role = message["role"]
    # Any other text in a role's place would be rendered between control tokens.
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequest(
            f"{path}.role must be one of {', '.join(sorted(_ROLES))}.", param=f"{path}.role", code="invalid_value"
        )
    out = dict(message)
    if role == "developer" and not knows_developer:
        out["role"] = "system"
    content = message.get("content")
    if isinstance(content, list):
        out["content"] = _joined_parts(f"{path}.content", content)
    elif content is None:
        if role != "assistant" or not (message.get("tool_calls") or message.get("function_call")):
            missing = "content" not in message
            raise InvalidRequest(
                f"{path}.content is {'missing' if missing else 'null'}.",
                param=f"{path}.content",
                code="missing_required_parameter" if missing else "invalid_type",
            )
        out["content"] = ""
    elif not isinstance(content, str):
        raise InvalidRequest(
            f"{path}.content must be a string or an array of parts.", param=f"{path}.content", code="invalid_type"
        )
    return out


def _joined_parts(path: str, parts: Sequence[Any]) -> str:
    texts = []
    for j, part in enumerate(parts):
        at = f"{path}[{j}]"
        if not isinstance(part, Mapping):
            raise InvalidRequest(f"{at} must be an object.", param=at, code="invalid_type")
        kind = part.get("type")
        if kind is None:
            raise InvalidRequest(
                f"Missing required parameter: {at}.type.", param=f"{at}.type", code="missing_required_parameter"
            )
        key = _TEXT_KEYS.get(kind) if isinstance(kind, str) else None
        if key is None:
            raise InvalidRequest(
                f"{at} is of type {kind!r}; the local model reads text only.", param=at, code="unsupported_value"
            )
        text = part.get(key)
        if not isinstance(text, str):
            raise InvalidRequest(f"{at}.{key} must be a string.", param=f"{at}.{key}", code="invalid_type")
        texts.append(text)
    return "\n".join(texts)


def _template_kwargs(request: ChatRequest) -> dict[str, Any]:
    """As vLLM: these two are the template's business, and an explicit keyword wins."""
    own = {"documents": request.documents, "reasoning_effort": request.reasoning_effort}
    given = {name: value for name, value in own.items() if value is not None}
    return {**given, **(request.chat_template_kwargs or {})}


def _names(prepared: Prepared) -> TokenNames:
    as_ids = prepared.request.return_tokens_as_token_ids
    return TokenIds(prepared.served.tokenizer) if as_ids else prepared.served.chat_names


def _role(request: ChatRequest) -> str:
    """With the generation prompt off the answer continues the last message, whoever's it is."""
    if request.add_generation_prompt is False:
        role: str = request.messages[-1]["role"]
        return role
    return "assistant"


def _scores(prepared: Prepared, choice: Choice, names: TokenNames) -> dict[str, Any] | None:
    if prepared.top_logprobs is None:
        return None
    content = [chat_entry(token.drawn, token.ranked, token.named, names) for token in choice.tokens]
    return {"content": content, "refusal": None}


def _extras(prepared: Prepared, choice: Choice) -> dict[str, Any]:
    extras: dict[str, Any] = {"stop_reason": choice.stop_reason}
    if prepared.request.return_token_ids:
        extras["token_ids"] = [token.drawn.token_id for token in choice.tokens]
    if choice.closed_set is not None:
        extras["closed_set"] = choice.closed_set
    return extras


def _prompt_extras(prepared: Prepared, one: Answered) -> dict[str, Any]:
    extras: dict[str, Any] = {}
    if prepared.request.return_token_ids:
        extras["prompt_token_ids"] = list(prepared.prompts[0].token_ids)
    if one.prompt is not None:
        extras["prompt_logprobs"] = prompt_logprobs_maps(
            one.prompt, prepared.prompts[0].token_ids, prepared.served.tokenizer
        )
    return extras
