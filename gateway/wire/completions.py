"""POST /v1/completions: the forms of a prompt, echo, the older shape of scores, the answer and its events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

from backends.base import InvalidInput, PrefillResult, Tokenizer, TokenLogprob
from gateway.catalog import Served
from gateway.errors import InvalidRequest
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
from gateway.wire.fields import CommonFields, check_ids, decode_request, truncate
from gateway.wire.logprobs import TokenIds, TokenNames, completion_dict, finite, prompt_logprobs_maps
from gateway.wire.offsets import text_offsets

__all__ = ["CompletionRequest", "CompletionsApi"]

MAX_STOPS = 64  # harnesses send more than OpenAI's four
MAX_PROMPTS = 2048


class CompletionRequest(CommonFields, kw_only=True):
    prompt: str | list[Any] | None = None
    logprobs: int | bool | None = None
    add_special_tokens: bool | None = None
    response_format: Any = None


class CompletionsApi(TextApi):
    route: Route = "completions"
    prompt_param = "prompt"

    def prepare(self, body: bytes, served: Served, caller: Caller) -> Prepared:
        request = decode_request(body, CompletionRequest)
        refuse_unless_text(request.response_format)
        prompts = _prompts(request, served)
        # true reads as 1; bool is an int, so the order of the two tests matters.
        k = None if request.logprobs is None or request.logprobs is False else int(request.logprobs)
        if k is None and request.logprob_token_ids is not None:
            k = 0
        asked = [value for value in (k if request.echo else None, request.prompt_logprobs) if value is not None]
        return assemble(
            request,
            served,
            caller,
            prompts,
            max_tokens=request.max_tokens,
            max_stops=MAX_STOPS,
            top_logprobs=k,
            prompt_logprobs=max(asked, default=None),
            repeats_prompt=bool(request.echo or request.return_token_ids or request.prompt_logprobs is not None),
        )

    def answer(self, prepared: Prepared, results: Sequence[PrefillResult], head: Head) -> dict[str, Any]:
        everything = answered(prepared, results)
        return {
            "id": head.id,
            "object": "text_completion",
            "created": head.created,
            "model": head.model,
            "choices": list(_choices(prepared, everything)),
            "system_fingerprint": head.fingerprint,
            "usage": usage_of(prepared, everything, results),
        }

    def events(self, prepared: Prepared, results: Sequence[PrefillResult], head: Head) -> Iterable[dict[str, Any]]:
        everything = answered(prepared, results)
        frame: dict[str, Any] = {
            "id": head.id,
            "object": "text_completion",
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.fingerprint,
        }
        usage = usage_of(prepared, everything, results)
        sizes = [len(choice.tokens) for one in everything for choice in one.choices]
        so_far = accumulate(sizes)
        for choice, completion_tokens in zip(_choices(prepared, everything), so_far, strict=True):
            yield {**frame, "choices": [choice], **event_usage(prepared, usage, completion_tokens)}
        if prepared.include_usage:
            yield {**frame, "choices": [], "usage": usage}


def _prompts(request: CompletionRequest, served: Served) -> list[Prompt]:
    """All of OpenAI's forms: a string, ids, or a list of either. Raises InvalidRequest naming the element."""
    raw = request.prompt
    if raw is None:
        raise InvalidRequest("Missing required parameter: prompt.", param="prompt", code="missing_required_parameter")
    if isinstance(raw, list) and not raw:
        raise InvalidRequest("prompt is empty.", param="prompt", code="empty_array")
    if isinstance(raw, str) or all(_is_id(item) for item in raw):
        return [_prompt(raw, "prompt", request, served)]
    if len(raw) > MAX_PROMPTS:
        raise InvalidRequest(
            f"prompt lists {len(raw)} prompts; at most {MAX_PROMPTS} are answered at once.",
            param="prompt",
            code="array_above_max_length",
        )
    return [_prompt(item, f"prompt[{i}]", request, served) for i, item in enumerate(raw)]


def _prompt(raw: Any, path: str, request: CompletionRequest, served: Served) -> Prompt:
    tokenizer = served.tokenizer
    if isinstance(raw, str):
        if not raw:
            raise InvalidRequest(f"{path} is empty.", param=path, code="invalid_value")
        ids = tokenizer.encode(raw, add_special_tokens=request.add_special_tokens is not False)
        if not ids:
            raise InvalidInput(f"{path} has no tokens")
        return Prompt(truncate(ids, request, served.info.max_model_len), raw)
    if not isinstance(raw, list) or not all(_is_id(item) for item in raw):
        raise InvalidRequest(
            f"{path} must be a string or an array of token ids.",
            param=path,
            code="invalid_type",
        )
    if not raw:
        raise InvalidRequest(f"{path} is empty.", param=path, code="empty_array")
    check_ids(path, raw, tokenizer.vocab_size)
    return Prompt(truncate(raw, request, served.info.max_model_len), None)


def _is_id(value: Any) -> bool:
    return type(value) is int


def _choices(prepared: Prepared, everything: Sequence[Answered]) -> Iterable[dict[str, Any]]:
    """All draws of prompt 0, then prompt 1's."""
    request: CompletionRequest = prepared.request
    tokenizer = prepared.served.tokenizer
    as_ids = request.return_tokens_as_token_ids
    names = TokenIds(tokenizer) if as_ids else prepared.served.completion_names
    index = 0
    for prompt, one in zip(prepared.prompts, everything, strict=True):
        before = _echoed_text(prompt, request, tokenizer)
        scored_prompt = _prompt_scores(prepared, prompt, one, names, before) if _scores_prompt(prepared) else None
        for choice in one.choices:
            shaped: dict[str, Any] = {
                "index": index,
                "text": before + choice.text,
                "logprobs": _scores(prepared, choice, names, before, scored_prompt),
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            if request.prompt_logprobs is not None and one.prompt is not None:
                shaped["prompt_logprobs"] = prompt_logprobs_maps(
                    one.prompt, prompt.token_ids, tokenizer, k=request.prompt_logprobs
                )
            if request.return_token_ids:
                shaped["token_ids"] = [token.drawn.token_id for token in choice.tokens]
                shaped["prompt_token_ids"] = list(prompt.token_ids)
            if choice.closed_set is not None:
                shaped["closed_set"] = choice.closed_set
            yield shaped
            index += 1


def _echoed_text(prompt: Prompt, request: CompletionRequest, tokenizer: Tokenizer) -> str:
    if not request.echo:
        return ""
    # What a client that reads ids would have to strip off again.
    if prompt.text is None and request.return_token_ids:
        return ""
    if prompt.text is None or request.truncate_prompt_tokens is not None:
        return tokenizer.decode(prompt.token_ids)
    return prompt.text


def _scores_prompt(prepared: Prepared) -> bool:
    return bool(prepared.request.echo) and prepared.top_logprobs is not None


Columns = tuple[list[str], list[float | None], list[dict[str, float] | None], list[int]]


def _prompt_scores(prepared: Prepared, prompt: Prompt, one: Answered, names: TokenNames, text: str) -> Columns:
    """The echoed prompt's part of the four arrays; its first token has no score."""
    k = prepared.top_logprobs
    ids = prompt.token_ids
    values: list[float | None] = [None]
    dicts: list[dict[str, float] | None] = [None]
    actuals = [] if one.prompt is None else one.prompt.actual
    tops = [] if one.prompt is None else one.prompt.top
    for actual, top in zip(actuals, tops or [[]] * len(actuals), strict=True):
        values.append(finite(actual.logprob))
        dicts.append(completion_dict((actual, *top[:k]), names))
    return [names(i) for i in ids], values, dicts, text_offsets(ids, text, prepared.served.tokenizer)


def _copied(columns: Columns | None) -> Columns:
    if columns is None:
        return [], [], [], []
    tokens, values, dicts, offsets = columns
    return [*tokens], [*values], [*dicts], [*offsets]


def _scores(
    prepared: Prepared, choice: Choice, names: TokenNames, before: str, prompt_part: Columns | None
) -> dict[str, Any] | None:
    if prepared.top_logprobs is None:
        return None
    tokens, values, dicts, offsets = _copied(prompt_part)
    answered_ids = [token.drawn.token_id for token in choice.tokens]
    own_offsets = text_offsets(answered_ids, choice.text, prepared.served.tokenizer)
    for token, offset in zip(choice.tokens, own_offsets, strict=True):
        tokens.append(names(token.drawn.token_id))
        values.append(finite(token.drawn.logprob))
        dicts.append(completion_dict(_listed(token.drawn, token.named, token.ranked), names))
        offsets.append(len(before) + offset)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": dicts, "text_offset": offsets}


def _listed(
    drawn: TokenLogprob, named: Sequence[TokenLogprob], ranked: Sequence[TokenLogprob]
) -> Iterable[TokenLogprob]:
    return {item.token_id: item for item in (drawn, *named, *ranked)}.values()
