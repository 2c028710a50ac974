"""What the two OpenAI routes have in common: from a request's bytes to prefill requests, and from results to choices.

An API is a :class:`TextApi`; its siblings are ``wire.chat`` and ``wire.completions``. All of it is synchronous and pure
but for the tokenizer, so that it can run on a thread when texts are long.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from backends.base import PrefillRequest, PrefillResult, PromptLogprobs, Readout, Sampling
from gateway.catalog import Served
from gateway.closed_set import ClosedSet, plan_closed_set
from gateway.errors import InvalidRequest, NotLocally, UnsupportedParameter
from gateway.routing import Route
from gateway.wire.bounds import check_entries, check_passes
from gateway.wire.choices import Choice, one_token_choices
from gateway.wire.fields import (
    CommonFields,
    StopRules,
    StreamOptions,
    check_common,
    named_token_ids,
    sampling_of,
    stop_rules_of,
)

__all__ = ["Answered", "Caller", "Head", "Prepared", "Prompt", "TextApi"]


class Caller(NamedTuple):
    """Who asks, and by when the answer is wanted."""

    tenant: str
    request_id: str
    deadline_s: float | None


class Head(NamedTuple):
    """What all parts of one answer share."""

    id: str
    created: int
    model: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: Sequence[int]
    text: str | None  # as the client wrote it; None for a prompt of token ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A validated request, ready to be computed."""

    request: Any  # the API's own struct
    served: Served
    prompts: Sequence[Prompt]
    jobs: Sequence[PrefillRequest]  # those of the first prompt, then the second's
    rules: StopRules
    sampling: Sampling
    max_tokens: int | None
    top_logprobs: int | None  # None: no log-probabilities asked for
    named: tuple[int, ...]
    closed_set: ClosedSet | None
    stream: bool
    include_usage: bool
    continuous_usage: bool  # on every event, with what has been answered so far
    entries_per_choice: int  # tokens and options with a score of their own, of the longest choice

    @property
    def jobs_per_prompt(self) -> int:
        return len(self.jobs) // len(self.prompts)

    @property
    def scored_rows(self) -> int:
        """Prompt positions whose log-probabilities are computed: what makes an answer of few choices big."""
        return sum(len(job.token_ids) for job in self.jobs if job.readout.prompt_logprobs is not None)

    @property
    def choice_entries(self) -> int:
        """Scores in all choices together: what makes an answer of many choices big."""
        return len(self.prompts) * self.sampling.n * self.entries_per_choice


@dataclass(frozen=True, slots=True)
class Answered:
    """One prompt's choices, and the scores of the prompt itself when they were asked for."""

    choices: list[Choice]
    prompt: PromptLogprobs | None


class TextApi(ABC):
    route: Route
    prompt_param: str  # the field that the prompt comes from

    @abstractmethod
    def prepare(self, body: bytes, served: Served, caller: Caller) -> Prepared:
        """Decode, validate, render, tokenise. Raises ApiError and BackendError."""

    @abstractmethod
    def answer(self, prepared: Prepared, results: Sequence[PrefillResult], head: Head) -> dict[str, Any]: ...

    @abstractmethod
    def events(self, prepared: Prepared, results: Sequence[PrefillResult], head: Head) -> Iterable[dict[str, Any]]:
        """The same answer as a stream's events, without the final ``[DONE]``."""


def options_of(request: CommonFields) -> tuple[list[str] | None, str]:
    """The closed set of answers and the field that names it."""
    structured = None if request.structured_outputs is None else request.structured_outputs.choice
    if structured is not None and request.guided_choice is not None:
        raise InvalidRequest(
            "structured_outputs.choice and guided_choice cannot be combined.",
            param="guided_choice",
            code="invalid_value",
        )
    if structured is not None:
        return structured, "structured_outputs.choice"
    return request.guided_choice, "guided_choice"


def assemble(
    request: CommonFields,
    served: Served,
    caller: Caller,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int | None,
    max_stops: int,
    top_logprobs: int | None,
    prompt_logprobs: int | None,
    repeats_prompt: bool = False,
) -> Prepared:
    """Checks what the two APIs share and builds the jobs. ``max_tokens`` 0 draws nothing. ``repeats_prompt``: every
    choice holds its prompt's tokens."""
    check_common(request)
    tokenizer = served.tokenizer
    rules = stop_rules_of(request, tokenizer, max_stops=max_stops, max_tokens=max_tokens)
    sampling = sampling_of(request, tokenizer, rules)
    named = named_token_ids(request, tokenizer.vocab_size)
    options, options_param = options_of(request)
    closed_set = None
    if options is not None:
        _check_closed_set(request, rules)
        closed_set = plan_closed_set(options, tokenizer, served.vocabulary, param=options_param)
        _check_fits(closed_set, max_tokens, options_param)
        lengths = [len(prompt.token_ids) for prompt in prompts]
        check_passes(closed_set, lengths, served.info.max_model_len, options_param)
    entries_per_choice = _entries_per_choice(closed_set, max_tokens, top_logprobs, named)
    if repeats_prompt and sampling.n > 1:
        entries_per_choice += max(len(prompt.token_ids) for prompt in prompts) * (1 + (prompt_logprobs or 0))
    check_entries(entries_per_choice, len(prompts), sampling.n, "n" if sampling.n > 1 else options_param)
    readout = Readout(
        sampling=None if max_tokens == 0 else sampling,
        top_logprobs=0 if max_tokens == 0 else top_logprobs or 0,
        token_ids=() if max_tokens == 0 else named,
        prompt_logprobs=prompt_logprobs,
    )
    jobs = [
        PrefillRequest(
            model=served.model_id,
            token_ids=token_ids,
            readout=wanted,
            tenant=caller.tenant,
            cache_salt=request.cache_salt or "",
            priority=request.priority or 0,
            deadline_s=caller.deadline_s,
            request_id=caller.request_id,
        )
        for prompt in prompts
        for token_ids, wanted in (
            [(prompt.token_ids, readout)] if closed_set is None else closed_set.readouts(prompt.token_ids)
        )
    ]
    options_of_stream = request.stream_options or StreamOptions()
    return Prepared(
        request=request,
        served=served,
        prompts=prompts,
        jobs=jobs,
        rules=rules,
        sampling=sampling,
        max_tokens=max_tokens,
        top_logprobs=top_logprobs,
        named=named,
        closed_set=closed_set,
        stream=bool(request.stream),
        include_usage=bool(options_of_stream.include_usage),
        continuous_usage=bool(options_of_stream.include_usage and options_of_stream.continuous_usage_stats),
        entries_per_choice=entries_per_choice,
    )


def _entries_per_choice(
    closed_set: ClosedSet | None, max_tokens: int | None, top_logprobs: int | None, named: Sequence[int]
) -> int:
    beside = 0 if top_logprobs is None else top_logprobs + len(named)
    if closed_set is None:
        return 1 + beside
    longest = closed_set.longest if max_tokens is None else min(closed_set.longest, max_tokens)
    return len(closed_set.options) + longest * (1 + beside)


def _check_closed_set(request: CommonFields, rules: StopRules) -> None:
    """Fields that would shape the one draw, and have no meaning for whole texts, are refused and not ignored."""
    refused = {
        "allowed_token_ids": request.allowed_token_ids is not None,
        "bad_words": bool(request.bad_words),
        "repetition_penalty": request.repetition_penalty not in (None, 1.0),
        "stop": bool(rules.stop),
        "stop_token_ids": bool(rules.stop_token_ids),
        "min_tokens": rules.min_tokens > 0,
        "echo": bool(request.echo),
        "prompt_logprobs": request.prompt_logprobs is not None,
    }
    for field, present in refused.items():
        if present:
            raise NotLocally(
                f"{field} cannot be combined with a closed set of answers.",
                reason="closed-set-combination",
                param=field,
                code="unsupported_parameter",
            )


def _check_fits(closed_set: ClosedSet, max_tokens: int | None, param: str) -> None:
    if closed_set.method != "full_options" or max_tokens is None or max_tokens >= closed_set.longest:
        return
    labels = ", ".join(repr(closed_set.options[i]) for i in closed_set.colliding[:8])
    raise NotLocally(
        f"{labels} share their first token, so they are told apart only as whole texts, and the longest option has "
        f"{closed_set.longest} tokens: leave max_tokens out or set it to at least that.",
        reason="closed-set-too-long",
        param=param,
        code="invalid_value",
    )


def answered(prepared: Prepared, results: Sequence[PrefillResult]) -> list[Answered]:
    """What each prompt got."""
    tokenizer = prepared.served.tokenizer
    step = prepared.jobs_per_prompt
    found = []
    for i in range(len(prepared.prompts)):
        own = results[i * step : (i + 1) * step]
        if prepared.closed_set is not None:
            choices = prepared.closed_set.choices(
                prepared.closed_set.weights(own),
                prepared.sampling,
                max_tokens=prepared.max_tokens,
                tokenizer=tokenizer,
                top_logprobs=prepared.top_logprobs,
                named=prepared.named,
            )
            found.append(Answered(choices, None))
            continue
        [result] = own
        if prepared.max_tokens == 0:
            choices = [Choice("", "length", None, []) for _ in range(prepared.sampling.n)]
        else:
            choices = one_token_choices(result, tokenizer, prepared.rules)
        found.append(Answered(choices, result.prompt))
    return found


def usage_of(prepared: Prepared, everything: Sequence[Answered], results: Sequence[PrefillResult]) -> dict[str, Any]:
    """Prompts count once each, whatever ``n`` is and however many passes an answer took."""
    prompt_tokens = sum(len(prompt.token_ids) for prompt in prepared.prompts)
    completion_tokens = sum(len(choice.tokens) for one in everything for choice in one.choices)
    step = prepared.jobs_per_prompt
    cached = sum(
        min(result.cached_tokens for result in results[i * step : (i + 1) * step]) for i in range(len(prepared.prompts))
    )
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": None,
    }


def event_usage(prepared: Prepared, usage: dict[str, Any], completion_tokens: int) -> dict[str, Any]:
    """What an event other than the last says of usage: nothing, null, or the count so far."""
    if not prepared.include_usage:
        return {}
    if not prepared.continuous_usage:
        return {"usage": None}
    total = usage["prompt_tokens"] + completion_tokens
    return {"usage": {**usage, "completion_tokens": completion_tokens, "total_tokens": total}}


def refuse_unless_text(response_format: Any) -> None:
    """What routing lets through is text; anything else that is not even an object is a mistake of type."""
    if response_format is not None and not isinstance(response_format, dict):
        raise InvalidRequest("response_format must be an object.", param="response_format", code="invalid_type")
    if isinstance(response_format, dict) and "type" not in response_format:
        raise InvalidRequest(
            "Missing required parameter: response_format.type.",
            param="response_format.type",
            code="missing_required_parameter",
        )
    if isinstance(response_format, dict) and response_format["type"] != "text":
        raise UnsupportedParameter("response_format other than text is not answered here.", param="response_format")
