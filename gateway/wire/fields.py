"""The request fields that chat and completions share, their ranges, and what they mean for the one draw.

Decoding is strict: a wrong type is an error that names the field. Unknown fields are ignored, as peers do.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from backends.base import Sampling, Tokenizer
from gateway.errors import InvalidRequest, UnsupportedParameter
from gateway.routing import MAX_LOGPROBS, MAX_NAMED_TOKENS

__all__ = [
    "CommonFields",
    "StopRules",
    "StreamOptions",
    "check_ids",
    "check_range",
    "decode_request",
    "field_error",
    "named_token_ids",
    "sampling_of",
    "stop_rules_of",
    "truncate",
]

MAX_N = 128
MAX_STOP_BYTES = 4096
_INT64 = (-(2**63), 2**63 - 1)
_SALT_FORBIDDEN = re.compile(r"[@/\\\x00]")
_TOKEN_KEY = re.compile(r"-?[0-9]{1,20}")
_MISSING = re.compile(r"Object missing required field `([^`]*)`")
_AT = re.compile(r" - at `([^`]*)`$")

T = TypeVar("T", bound=msgspec.Struct)


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class StructuredOutputs(msgspec.Struct):
    choice: list[str] | None = None


class CommonFields(msgspec.Struct, kw_only=True):
    model: str | None = None
    max_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logprob_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_choice: list[str] | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    logits_processors: Any = None
    echo: bool | None = None


class StopRules(msgspec.Struct, frozen=True):
    """What ends an answer early, and what of it is shown."""

    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    include_stop: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True


def decode_request(body: bytes, kind: type[T]) -> T:
    """Raises InvalidRequest that names the field."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as exc:
        raise field_error(exc) from None
    except msgspec.DecodeError as exc:
        raise InvalidRequest(f"The body is not valid JSON: {exc}") from None
    except UnicodeDecodeError:
        raise InvalidRequest("The body is not valid JSON: it is not UTF-8.") from None
    except RecursionError:
        raise InvalidRequest("The body is nested too deeply.") from None


def field_error(exc: msgspec.ValidationError) -> InvalidRequest:
    """Names the field that a value of the wrong type or size stands in."""
    text = str(exc)
    at = _AT.search(text)
    path = at.group(1).removeprefix("$").removeprefix(".") if at else ""
    message = _AT.sub("", text)
    missing = _MISSING.search(message)
    if missing:
        path = f"{path}.{missing.group(1)}" if path else missing.group(1)
        return InvalidRequest(f"Missing required parameter: {path}.", param=path, code="missing_required_parameter")
    if not path:
        return InvalidRequest(f"The body must be a JSON object. {message}.")
    return InvalidRequest(f"Invalid type for {path}: {message.lower()}.", param=path, code="invalid_type")


def check_range(name: str, value: float | None, low: float, high: float, *, open_low: bool = False) -> None:
    """Raises InvalidRequest naming the field when ``value`` is outside ``low..high``; None passes."""
    if value is None:
        return
    kind = "integer" if isinstance(value, int) else "decimal"
    if value > high:
        raise InvalidRequest(
            f"{name} must be at most {_shown(high)}, not {_shown(value)}.", param=name, code=f"{kind}_above_max_value"
        )
    if value < low or (open_low and value == low) or value != value:
        bound = f"above {_shown(low)}" if open_low else f"at least {_shown(low)}"
        raise InvalidRequest(
            f"{name} must be {bound}, not {_shown(value)}.", param=name, code=f"{kind}_below_min_value"
        )


def _shown(number: float) -> str:
    """JSON's integers have any length, also beyond what a float can hold."""
    text = str(number) if isinstance(number, int) else f"{number:g}"
    return text if len(text) <= 24 else f"{text[:24]}…"


def check_ids(name: str, ids: list[int], vocab_size: int) -> None:
    """Raises InvalidRequest naming the first id outside the vocabulary."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        i = next(i for i, token in enumerate(ids) if not 0 <= token < vocab_size)
        raise InvalidRequest(
            f"{name}[{i}] is {ids[i]}; the vocabulary has ids 0 to {vocab_size - 1}.",
            param=f"{name}[{i}]",
            code="invalid_value",
        )


def check_common(req: CommonFields) -> None:
    """Ranges and combinations that do not depend on the model."""
    check_range("n", req.n, 1, MAX_N)
    check_range("seed", req.seed, *_INT64)
    check_range("priority", req.priority, *_INT64)
    check_range("frequency_penalty", req.frequency_penalty, -2, 2)
    check_range("presence_penalty", req.presence_penalty, -2, 2)
    check_range("prompt_logprobs", req.prompt_logprobs, 0, MAX_LOGPROBS)
    if req.stream_options is not None and not req.stream:
        raise InvalidRequest("stream_options needs stream to be true.", param="stream_options", code="invalid_value")
    if req.structured_outputs is not None and req.structured_outputs.choice is None:
        raise InvalidRequest(
            "structured_outputs must hold one constraint.", param="structured_outputs", code="invalid_value"
        )
    if req.logits_processors is not None:
        raise UnsupportedParameter("logits_processors are not run here.", param="logits_processors")
    if req.stream and req.prompt_logprobs is not None:
        raise UnsupportedParameter("prompt_logprobs are not streamed.", param="prompt_logprobs")
    if req.cache_salt is not None and (
        not req.cache_salt or len(req.cache_salt) > 128 or _SALT_FORBIDDEN.search(req.cache_salt)
    ):
        raise InvalidRequest(
            "cache_salt must be 1 to 128 characters without @, /, \\ and NUL.", param="cache_salt", code="invalid_value"
        )
    check_range("truncate_prompt_tokens", req.truncate_prompt_tokens, -1, _INT64[1])
    if req.truncate_prompt_tokens == 0:
        raise InvalidRequest(
            "truncate_prompt_tokens must be at least 1, or -1.", param="truncate_prompt_tokens", code="invalid_value"
        )
    if req.truncation_side not in (None, "left", "right"):
        raise InvalidRequest("truncation_side must be left or right.", param="truncation_side", code="invalid_value")


def sampling_of(req: CommonFields, tokenizer: Tokenizer, rules: StopRules) -> Sampling:
    """Raises InvalidRequest for values out of range or ids outside the vocabulary."""
    check_range("temperature", req.temperature, 0, 2)
    check_range("top_p", req.top_p, 0, 1, open_low=True)
    check_range("top_k", req.top_k, -1, 2**31 - 1)
    check_range("min_p", req.min_p, 0, 1)
    check_range("repetition_penalty", req.repetition_penalty, 0, 1e6, open_low=True)
    banned: set[int] = set()
    if rules.min_tokens >= 1:
        banned |= tokenizer.eos_token_ids | rules.stop_token_ids
    for i, word in enumerate(req.bad_words or ()):
        banned |= _bad_word_ids(i, word, tokenizer)
    allowed: tuple[int, ...] | None = None
    if req.allowed_token_ids is not None:
        if not req.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids is empty.", param="allowed_token_ids", code="empty_array")
        check_ids("allowed_token_ids", req.allowed_token_ids, tokenizer.vocab_size)
        allowed = tuple(dict.fromkeys(req.allowed_token_ids))
        if banned.issuperset(allowed):
            raise InvalidRequest(
                "Every id in allowed_token_ids is banned by bad_words or min_tokens.",
                param="allowed_token_ids",
                code="invalid_value",
            )
    return Sampling(
        n=1 if req.n is None else req.n,
        temperature=1.0 if req.temperature is None else req.temperature,
        top_p=1.0 if req.top_p is None else req.top_p,
        top_k=max(req.top_k or 0, 0),
        min_p=req.min_p or 0.0,
        seed=req.seed,
        repetition_penalty=1.0 if req.repetition_penalty is None else req.repetition_penalty,
        logit_bias=_logit_bias(req.logit_bias, tokenizer.vocab_size),
        allowed_token_ids=allowed,
        banned_token_ids=tuple(sorted(banned)),
    )


def _logit_bias(biases: dict[str, float] | None, vocab_size: int) -> dict[int, float]:
    parsed: dict[int, float] = {}
    for key, bias in (biases or {}).items():
        path = f"logit_bias.{key[:32]}"
        # int() would also read "1_0", " 5" and digits of other scripts.
        if not _TOKEN_KEY.fullmatch(key):
            raise InvalidRequest("logit_bias keys must be token ids.", param=path, code="invalid_value")
        token = int(key)
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"logit_bias names token {token}; the vocabulary has ids 0 to {vocab_size - 1}.",
                param=path,
                code="invalid_value",
            )
        check_range(path, bias, -100, 100)
        parsed[token] = bias
    return parsed


def _bad_word_ids(i: int, word: str, tokenizer: Tokenizer) -> set[int]:
    """A word of several tokens cannot appear in an answer of one, so only one-token spellings matter."""
    if not word:
        raise InvalidRequest("bad_words holds an empty string.", param=f"bad_words[{i}]", code="invalid_value")
    spellings = (
        tokenizer.encode(prefix + word.lstrip(), add_special_tokens=False, parse_special=False) for prefix in ("", " ")
    )
    return {ids[0] for ids in spellings if len(ids) == 1}


def stop_rules_of(req: CommonFields, tokenizer: Tokenizer, *, max_stops: int, max_tokens: int | None) -> StopRules:
    stops = [req.stop] if isinstance(req.stop, str) else req.stop or []
    if len(stops) > max_stops:
        raise InvalidRequest(
            f"stop lists {len(stops)} strings; at most {max_stops} are allowed.",
            param="stop",
            code="array_above_max_length",
        )
    for i, stop in enumerate(stops):
        if not stop or len(stop) > MAX_STOP_BYTES:
            path = "stop" if isinstance(req.stop, str) else f"stop[{i}]"
            raise InvalidRequest(
                f"{path} must have 1 to {MAX_STOP_BYTES} characters.", param=path, code="invalid_value"
            )
    stop_ids = req.stop_token_ids or []
    check_ids("stop_token_ids", stop_ids, tokenizer.vocab_size)
    check_range("min_tokens", req.min_tokens, 0, _INT64[1])
    if max_tokens is not None and (req.min_tokens or 0) > max_tokens:
        raise InvalidRequest(
            f"min_tokens ({req.min_tokens}) exceeds max_tokens ({max_tokens}).",
            param="min_tokens",
            code="invalid_value",
        )
    return StopRules(
        stop=tuple(stops),
        stop_token_ids=frozenset(stop_ids),
        include_stop=bool(req.include_stop_str_in_output),
        ignore_eos=bool(req.ignore_eos),
        min_tokens=req.min_tokens or 0,
        skip_special_tokens=req.skip_special_tokens is not False,
    )


def named_token_ids(req: CommonFields, vocab_size: int) -> tuple[int, ...]:
    ids = req.logprob_token_ids or []
    if req.logprob_token_ids is not None and not ids:
        raise InvalidRequest("logprob_token_ids is empty.", param="logprob_token_ids", code="empty_array")
    if len(ids) > MAX_NAMED_TOKENS:
        raise InvalidRequest(
            f"logprob_token_ids lists {len(ids)} ids; at most {MAX_NAMED_TOKENS} are answered.",
            param="logprob_token_ids",
            code="array_above_max_length",
        )
    check_ids("logprob_token_ids", ids, vocab_size)
    return tuple(ids)


def truncate(ids: list[int], req: CommonFields, max_model_len: int) -> list[int]:
    """vLLM's ``truncate_prompt_tokens``: keep the last k ids, or the first with ``truncation_side`` right."""
    keep = req.truncate_prompt_tokens
    if keep is None:
        return ids
    keep = max_model_len if keep == -1 else keep
    if len(ids) <= keep:
        return ids
    return ids[:keep] if req.truncation_side == "right" else ids[-keep:]
