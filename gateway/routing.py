"""Decides where a request is answered. A pure function of the few body fields that decide; no I/O, no tokenizer.

Values may have any JSON type here: a field of the wrong type never fails the decision. It is reported by the validation
that follows when the request stays local, and is the upstream's business when it does not.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from gateway.errors import ApiError, InvalidRequest, ModelNotFound, NoUpstream, UnsupportedParameter

__all__ = ["MAX_LOGPROBS", "MAX_NAMED_TOKENS", "Decision", "Local", "Peek", "Refuse", "Upstream", "World", "decide"]

MAX_LOGPROBS = 20
MAX_NAMED_TOKENS = 128

_TEXT_PARTS = ("text", "refusal")


class Peek(msgspec.Struct):
    """What decides. Everything else in the body, prompts among it, is skipped unread."""

    model: Any = None
    messages: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    logprobs: Any = None
    top_logprobs: Any = None
    prompt_logprobs: Any = None
    logprob_token_ids: Any = None
    echo: Any = None
    structured_outputs: Any = None
    guided_choice: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_grammar: Any = None
    response_format: Any = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None
    prediction: Any = None
    moderation: Any = None
    store: Any = None
    use_beam_search: Any = None
    best_of: Any = None
    suffix: Any = None
    prompt_embeds: Any = None
    kv_transfer_params: Any = None
    chat_template: Any = None


@dataclass(frozen=True, slots=True)
class World:
    """``local_models``: every name and alias served here. ``upstream``: one is configured."""

    local_models: Set[str]
    upstream: bool


@dataclass(frozen=True, slots=True)
class Local:
    reason: str


@dataclass(frozen=True, slots=True)
class Upstream:
    reason: str


@dataclass(frozen=True, slots=True)
class Refuse:
    error: ApiError


Decision = Local | Upstream | Refuse
Route = Literal["chat", "completions"]


def decide(route: Route, peek: Peek, world: World) -> Decision:
    """The decision table of docs/api.md for the two text routes: model, refusals, then the first row that matches."""
    if peek.model is not None and not (isinstance(peek.model, str) and peek.model in world.local_models):
        if world.upstream:
            return Upstream("unknown-model")
        if not isinstance(peek.model, str):
            return Refuse(_wrong_type("model", "a string", peek.model))
        return Refuse(ModelNotFound(peek.model))
    if peek.model is None and not world.local_models:
        return _elsewhere(world, "no-local-model", "No model is served locally.")

    max_tokens, max_tokens_field = _max_tokens(route, peek)
    refusal = _refusal(route, peek, max_tokens, max_tokens_field)
    if refusal is not None:
        return Refuse(refusal)

    if route == "chat":
        decision = _chat_features(peek, world)
        if decision is not None:
            return decision
    decision = _generator_features(peek, world)
    if decision is not None:
        return decision
    return _constraint_and_length(route, peek, world, max_tokens, max_tokens_field)


def _max_tokens(route: Route, peek: Peek) -> tuple[Any, str]:
    if route == "chat" and peek.max_completion_tokens is not None:
        return peek.max_completion_tokens, "max_completion_tokens"
    return peek.max_tokens, "max_tokens"


def _refusal(route: Route, peek: Peek, max_tokens: Any, max_tokens_field: str) -> ApiError | None:
    """What no server of this kind accepts, whatever else the request asks for."""
    if route == "chat":
        if _is_int(peek.top_logprobs):
            if not 0 <= peek.top_logprobs <= MAX_LOGPROBS:
                return _too_many_logprobs("top_logprobs", peek.top_logprobs)
            if peek.top_logprobs > 0 and peek.logprobs is not True:
                return InvalidRequest(
                    "top_logprobs needs logprobs to be true.", param="top_logprobs", code="invalid_value"
                )
        if peek.logprob_token_ids is not None and peek.logprobs is False:
            return InvalidRequest(
                "logprob_token_ids needs logprobs to be true.", param="logprob_token_ids", code="invalid_value"
            )
    elif _is_int(peek.logprobs) and not 0 <= peek.logprobs <= MAX_LOGPROBS:
        return _too_many_logprobs("logprobs", peek.logprobs)
    if _is_int(peek.prompt_logprobs) and not 0 <= peek.prompt_logprobs <= MAX_LOGPROBS:
        return _too_many_logprobs("prompt_logprobs", peek.prompt_logprobs)
    if isinstance(peek.logprob_token_ids, list) and len(peek.logprob_token_ids) > MAX_NAMED_TOKENS:
        return InvalidRequest(
            f"logprob_token_ids lists {len(peek.logprob_token_ids)} ids; at most {MAX_NAMED_TOKENS} are answered.",
            param="logprob_token_ids",
            code="array_above_max_length",
        )
    if _is_int(max_tokens) and max_tokens == 0 and (route == "chat" or peek.echo is not True):
        wants = "at least 1" if route == "chat" else "at least 1, or 0 together with echo"
        return InvalidRequest(
            f"{max_tokens_field} must be {wants}.", param=max_tokens_field, code="integer_below_min_value"
        )
    return None


def _chat_features(peek: Peek, world: World) -> Decision | None:
    media = _media_part(peek.messages)
    if media is not None:
        path, kind = media
        if world.upstream:
            return Upstream("media")
        return Refuse(
            InvalidRequest(
                f"{path} is of type {kind!r}; the local model reads text only.", param=path, code="unsupported_value"
            )
        )
    if peek.audio is not None or (isinstance(peek.modalities, list) and any(m != "text" for m in peek.modalities)):
        if world.upstream:
            return Upstream("modalities")
        field = "audio" if peek.audio is not None else "modalities"
        return Refuse(
            InvalidRequest(f"{field}: the local model writes text only.", param=field, code="unsupported_value")
        )
    if (peek.tools and peek.tool_choice != "none") or (peek.functions and peek.function_call != "none"):
        return _elsewhere(world, "tools", "The request offers tools.")
    for field in ("web_search_options", "prediction", "moderation"):
        if getattr(peek, field) is not None:
            return _elsewhere(world, field.replace("_", "-"), f"The request uses {field}.")
    if peek.store is True and world.upstream:
        return Upstream("store")
    if peek.echo is True:
        if world.upstream:
            return Upstream("echo")
        return Refuse(UnsupportedParameter("echo is answered on /v1/completions only.", param="echo"))
    return None


def _generator_features(peek: Peek, world: World) -> Decision | None:
    if peek.use_beam_search is True:
        return _elsewhere(world, "beam-search", "The request asks for beam search.")
    if _is_int(peek.best_of) and peek.best_of > 1:
        return _elsewhere(world, "best-of", "The request asks for best_of above 1.")
    for field in ("suffix", "prompt_embeds", "kv_transfer_params", "chat_template"):
        if getattr(peek, field) is not None:
            return _elsewhere(world, field.replace("_", "-"), f"The request uses {field}.")
    return None


def _constraint_and_length(route: Route, peek: Peek, world: World, max_tokens: Any, field: str) -> Decision:
    structured = peek.structured_outputs
    choice = peek.guided_choice is not None or (isinstance(structured, dict) and structured.get("choice") is not None)
    others = [key for key in ("guided_json", "guided_regex", "guided_grammar") if getattr(peek, key) is not None]
    if isinstance(structured, dict):
        others += [
            f"structured_outputs.{key}"
            for key in ("regex", "json", "grammar", "json_object", "structural_tag")
            if structured.get(key)
        ]
    if isinstance(peek.response_format, dict) and peek.response_format.get("type", "text") != "text":
        others.append("response_format")
    if choice and others:
        return Refuse(
            InvalidRequest(f"A choice cannot be combined with {others[0]}.", param=others[0], code="invalid_value")
        )
    if others:
        return _elsewhere(world, "grammar", f"The request constrains its answer with {others[0]}.")
    if choice:
        return Local("closed-set")
    if max_tokens is None:
        default = "is open-ended" if route == "chat" else "defaults to 16 tokens"
        return _elsewhere(world, "max-tokens", f"A request without {field} {default}.")
    if not _is_int(max_tokens):
        if world.upstream:
            return Upstream("max-tokens")
        return Refuse(_wrong_type(field, "an integer", max_tokens))
    if max_tokens < 0:
        if world.upstream:
            return Upstream("max-tokens")
        return Refuse(InvalidRequest(f"{field} must be at least 1.", param=field, code="integer_below_min_value"))
    if max_tokens > 1:
        return _elsewhere(world, "max-tokens", f"The request asks for {max_tokens} tokens.")
    if peek.echo is True or peek.prompt_logprobs is not None:
        return Local("prompt-scoring")
    return Local("one-token")


def _elsewhere(world: World, reason: str, why: str) -> Decision:
    return Upstream(reason) if world.upstream else Refuse(NoUpstream(why))


def _media_part(messages: Any) -> tuple[str, str] | None:
    """The path and type of the first content part that is not text."""
    if not isinstance(messages, list):
        return None
    for i, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, list):
            continue
        for j, part in enumerate(content):
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind not in _TEXT_PARTS:
                return f"messages[{i}].content[{j}]", kind
    return None


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _wrong_type(field: str, wanted: str, value: Any) -> InvalidRequest:
    return InvalidRequest(f"{field} must be {wanted}, not {type(value).__name__}.", param=field, code="invalid_type")


def _too_many_logprobs(field: str, value: int) -> InvalidRequest:
    low = value < 0
    return InvalidRequest(
        f"{field} must be between 0 and {MAX_LOGPROBS}, not {value}; "
        "logprob_token_ids answers named tokens at any rank.",
        param=field,
        code="integer_below_min_value" if low else "integer_above_max_value",
    )
