"""From a request's bytes to its answer: decide, then compute here or pass on.

The hot path of the server. Every way out is visible in ``x-onepass-backend`` and ``x-onepass-reason``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from backends.base import (
    BackendError,
    BadLogits,
    DeadlineUnmeetable,
    InvalidInput,
    OutOfMemory,
    Overloaded,
    PrefillResult,
    ShuttingDown,
    Timing,
)
from gateway.catalog import Served
from gateway.errors import ApiError, InvalidRequest, NotLocally, Unavailable, from_exception
from gateway.exchange import UPSTREAM, Exchange, Headers, Receive, Scope, Send, exchange_of, header
from gateway.http import (
    DisconnectGuard,
    check_json_content_type,
    decoded_body,
    encode_json,
    read_body,
    send_answer,
)
from gateway.passthrough import passthrough
from gateway.routing import Local, Peek, Refuse, Upstream, decide
from gateway.runtime import Runtime
from gateway.text_pool import INLINE_BYTES
from gateway.wire import sse
from gateway.wire.api import Caller, Head, Prepared, TextApi
from gateway.wire.fields import field_error

__all__ = ["answer", "forward", "read_json"]

log = logging.getLogger("onepass.gateway")

_BYTES_PER_SCORED_ROW = 64  # shaping a scored prompt position costs about as much as tokenising so many bytes
# In bytes of text that take as long to tokenise: a sent byte that unpacks to more, and a byte of JSON that is skimmed.
_UNPACKED = 10
_SKIMMED = 0.01
_BYTES_PER_ENTRY = 32  # and one of the scores in a choice, about so many
_peek = msgspec.json.Decoder(Peek)

_FALLBACK_REASONS: tuple[tuple[type[BackendError], str], ...] = (
    (DeadlineUnmeetable, "local-deadline"),
    (Overloaded, "local-overloaded"),
    (OutOfMemory, "local-out-of-memory"),
    (BadLogits, "local-bad-logits"),
)


class SentBody(NamedTuple):
    """As received, which is what an upstream gets, and with its content encoding undone."""

    raw: bytes
    decoded: bytes


class NotHere(Exception):
    """The upstream shall answer instead, for this reason. If it does not serve the model, ``cause`` is the answer; None
    means that it is known to."""

    def __init__(self, reason: str, cause: Exception | None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.cause = cause


async def answer(api: TextApi, runtime: Runtime, scope: Scope, receive: Receive, send: Send) -> None:
    """One of OpenAI's two text routes. Raises ApiError and BackendError before anything is sent, ClientGone ever."""
    exchange = exchange_of(scope)
    exchange.route = api.route
    headers = scope["headers"]
    check_json_content_type(headers)
    limit = runtime.settings.max_body_bytes
    raw = await read_body(receive, headers, limit)
    decoded, peek = await read_json(runtime, raw, headers)
    body = SentBody(raw, decoded)
    decision = decide(api.route, peek, runtime.world)
    if isinstance(decision, Refuse):
        raise decision.error
    if isinstance(decision, Upstream):
        exchange.model = _upstream_label(peek.model, runtime)
        await forward(runtime, scope, receive, send, body.raw, decision.reason)
        return
    served = runtime.catalog.find(peek.model)
    assert served is not None
    exchange.model = served.model_id
    try:
        await _answer_here(api, runtime, served, decision, body, scope, receive, send)
    except NotHere as elsewhere:
        if elsewhere.cause is not None and not await _upstream_could(peek.model, runtime):
            raise elsewhere.cause from None
        runtime.metrics.spilled(elsewhere.reason)
        await forward(runtime, scope, receive, send, body.raw, elsewhere.reason)


async def forward(
    runtime: Runtime, scope: Scope, receive: Receive, send: Send, body: bytes | None, reason: str
) -> None:
    """To the upstream, byte for byte. ``body`` None: not read yet, streamed as it comes."""
    proxy = runtime.catalog.upstream
    assert proxy is not None
    exchange = exchange_of(scope)
    exchange.answered_by(proxy.name, UPSTREAM, reason)
    exchange.model = exchange.model or "other"
    await passthrough(
        scope, receive, send, body, proxy, reason, runtime.metrics, model=exchange.model, clock=runtime.clock
    )


async def read_json(runtime: Runtime, raw: bytes, headers: Headers) -> tuple[bytes, Peek]:
    """The body without its content encoding, and what decides. Raises as :func:`decoded_body`, and InvalidRequest for
    what is not a JSON object."""

    def read() -> tuple[bytes, Peek]:
        body = decoded_body(raw, headers, runtime.settings.max_body_bytes)
        return body, decode_peek(body)

    encoded = header(headers, b"content-encoding") is not None
    return await runtime.text.run(len(raw) * (_UNPACKED if encoded else _SKIMMED), read)


def decode_peek(body: bytes) -> Peek:
    """Raises InvalidRequest for what is not a JSON object."""
    try:
        return _peek.decode(body)
    except msgspec.ValidationError as exc:
        raise field_error(exc) from None
    except msgspec.DecodeError as exc:
        raise InvalidRequest(f"The body is not valid JSON: {exc}") from None
    except UnicodeDecodeError:
        raise InvalidRequest("The body is not valid JSON: it is not UTF-8.") from None
    except RecursionError:
        raise InvalidRequest("The body is nested too deeply.") from None


async def _answer_here(
    api: TextApi,
    runtime: Runtime,
    served: Served,
    decision: Local,
    body: SentBody,
    scope: Scope,
    receive: Receive,
    send: Send,
) -> None:
    """Raises NotHere where an upstream could do better."""
    exchange = exchange_of(scope)
    exchange.answered_by(served.backend.name, "local", decision.reason)
    try:
        served.require_ready()
    except Unavailable as why:
        raise NotHere("local-not-ready", why) from None
    caller = Caller(exchange.tenant, exchange.request_id, _deadline_s(scope))
    async with DisconnectGuard(receive):
        try:
            prepared = await _prepare(api, runtime, served, caller, body.decoded)
            _note_prompts(exchange, prepared, runtime)
            await _spill_if_slow(runtime, served, prepared)
            results = await served.backend.prefill(prepared.jobs)
            payload = await _shape(api, runtime, prepared, results, exchange)
        except Exception as failure:
            raise _meaning(failure, api, exchange) from failure
    timing = _timing(results)
    exchange.timing = timing
    cached = sum(result.cached_tokens for result in results)
    exchange.cached_tokens = [result.cached_tokens for result in results]
    runtime.metrics.local_result(served.model_id, timing, sum(exchange.prompt_tokens), cached)
    if prepared.stream:
        content_type, more = sse.CONTENT_TYPE.encode(), _SSE_HEADERS
    else:
        content_type, more = b"application/json", ()
    await send_answer(
        send,
        200,
        payload,
        content_type=content_type,
        headers=[*_local_headers(exchange, timing, cached), *more],
    )


def _meaning(failure: Exception, api: TextApi, exchange: Exchange) -> Exception:
    """NotHere for what an upstream could do better; the client's error for what nobody could."""
    if isinstance(failure, NotHere | ShuttingDown):
        return failure
    error = from_exception(failure, prompt_param=api.prompt_param)
    if isinstance(error, NotLocally):
        return NotHere(error.reason, error)
    if isinstance(failure, ApiError | InvalidInput):
        return error
    if not isinstance(failure, BackendError):
        log.error("request %s failed", exchange.request_id, exc_info=failure)
    return NotHere(
        next((reason for kind, reason in _FALLBACK_REASONS if isinstance(failure, kind)), "local-failed"), error
    )


_SSE_HEADERS = tuple((name.encode(), value.encode()) for name, value in sse.HEADERS.items())


def _deadline_s(scope: Scope) -> float | None:
    value = header(scope["headers"], b"x-onepass-deadline-ms")
    if value is None:
        return None
    try:
        deadline_ms = float(value)
    except ValueError:
        deadline_ms = -1.0
    if not 0 < deadline_ms < float("inf"):
        raise InvalidRequest(
            "x-onepass-deadline-ms must be a positive number of milliseconds.",
            param="x-onepass-deadline-ms",
            code="invalid_value",
        )
    return deadline_ms / 1000


async def _prepare(api: TextApi, runtime: Runtime, served: Served, caller: Caller, body: bytes) -> Prepared:
    size = len(body)
    # The vocabulary's index is built by the first closed set; a thread keeps that off the event loop.
    if not served.indexed and b"choice" in body:
        size = max(size, INLINE_BYTES + 1)
    return await runtime.text.run(size, lambda: api.prepare(body, served, caller))


def _note_prompts(exchange: Exchange, prepared: Prepared, runtime: Runtime) -> None:
    exchange.prompt_tokens = [len(job.token_ids) for job in prepared.jobs]
    if runtime.request_log.enabled:
        exchange.prefix_groups = [runtime.request_log.prefix_group(job.token_ids) for job in prepared.jobs]


async def _spill_if_slow(runtime: Runtime, served: Served, prepared: Prepared) -> None:
    limit_ms = runtime.settings.spill_after_ms
    if limit_ms is None or not runtime.world.upstream:
        return
    wait_ms = served.backend.predicted_wait_s(prepared.jobs) * 1000
    if wait_ms > limit_ms and await _upstream_could(prepared.request.model, runtime):
        raise NotHere("spill", None)


async def _shape(
    api: TextApi, runtime: Runtime, prepared: Prepared, results: Sequence[PrefillResult], exchange: Exchange
) -> bytes:
    prefix = "chatcmpl" if api.route == "chat" else "cmpl"
    head = Head(
        id=f"{prefix}-{exchange.request_id.removeprefix('req-')}",
        created=int(runtime.wall_clock()),
        model=prepared.request.model or prepared.served.model_id,
        fingerprint=prepared.served.info.fingerprint,
    )

    def shape() -> bytes:
        if prepared.stream:
            return sse.stream(api.events(prepared, results, head))
        return encode_json(api.answer(prepared, results, head))

    size = prepared.scored_rows * _BYTES_PER_SCORED_ROW + prepared.choice_entries * _BYTES_PER_ENTRY
    return await runtime.text.run(size, shape)


def _timing(results: Sequence[PrefillResult]) -> Timing:
    """Of several jobs: the longest wait, and the sums of what was predicted and computed."""
    if len(results) == 1:
        return results[0].timing
    return Timing(
        max(result.timing.queue_ms for result in results),
        sum(result.timing.predicted_ms for result in results),
        sum(result.timing.compute_ms for result in results),
    )


def _local_headers(exchange: Exchange, timing: Timing, cached: int) -> Iterable[tuple[bytes, bytes]]:
    return (
        (b"x-onepass-backend", exchange.backend.encode()),
        (b"x-onepass-reason", exchange.reason.encode()),
        (b"x-onepass-queue-ms", b"%.3f" % timing.queue_ms),
        (b"x-onepass-predicted-ms", b"%.3f" % timing.predicted_ms),
        (b"x-onepass-compute-ms", b"%.3f" % timing.compute_ms),
        (b"x-onepass-cached-tokens", b"%d" % cached),
    )


def _upstream_label(name: Any, runtime: Runtime) -> str:
    """For metric labels: a name that somebody serves, or ``other``."""
    if isinstance(name, str) and (name in runtime.world.local_models or runtime.catalog.upstream_lists(name)):
        return name
    return "other"


async def _upstream_could(name: Any, runtime: Runtime) -> bool:
    return isinstance(name, str) and runtime.world.upstream and await runtime.catalog.upstream_serves(name)
