"""POST /v1/chat/completions, /v1/completions, /tokenize, /detokenize. Bare ASGI: raw bytes are what is passed on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from litestar import asgi
from litestar.handlers import ASGIRouteHandler
from litestar.types import Guard

from gateway.answering import answer, decode_peek, forward
from gateway.catalog import Served
from gateway.errors import ModelNotFound, Unavailable
from gateway.exchange import CLIENT_GONE_STATUS, ClientGone, Receive, Scope, Send, exchange_of
from gateway.http import check_json_content_type, decoded_body, encode_json, read_body, send_answer
from gateway.routes.elsewhere import elsewhere
from gateway.runtime import Runtime
from gateway.wire.api import TextApi
from gateway.wire.chat import ChatApi
from gateway.wire.completions import CompletionsApi
from gateway.wire.tokenization import detokenized, tokenized

__all__ = ["text_routes"]

Handler = Callable[[Scope, Receive, Send], Awaitable[None]]


def text_routes(runtime: Runtime, guards: Sequence[Guard]) -> list[ASGIRouteHandler]:
    return [
        _post("/v1/chat/completions", _text(ChatApi(), runtime), runtime, guards),
        _post("/v1/completions", _text(CompletionsApi(), runtime), runtime, guards),
        _post("/tokenize", _tokens("tokenize", tokenized, runtime), runtime, guards),
        _post("/detokenize", _tokens("detokenize", detokenized, runtime), runtime, guards),
    ]


def _post(path: str, handle: Handler, runtime: Runtime, guards: Sequence[Guard]) -> ASGIRouteHandler:
    """Other methods of a path that has only POST here are the upstream's."""

    @asgi(path, copy_scope=False, guards=list(guards))
    async def post(scope: Any, receive: Any, send: Any) -> None:
        try:
            if scope["type"] == "http" and scope["method"] == "POST":
                await handle(scope, receive, send)
            else:
                await elsewhere(runtime, scope, receive, send, allowed=("POST",))
        except ClientGone:
            exchange_of(scope).status = CLIENT_GONE_STATUS

    return post


def _text(api: TextApi, runtime: Runtime) -> Handler:
    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(api, runtime, scope, receive, send)

    return handle


def _tokens(route: str, work: Callable[[bytes, Served], dict[str, Any]], runtime: Runtime) -> Handler:
    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        exchange.route = route
        check_json_content_type(scope["headers"])
        limit = runtime.settings.max_body_bytes
        raw = await read_body(receive, scope["headers"], limit)
        body = decoded_body(raw, scope["headers"], limit)
        model = decode_peek(body).model
        served = runtime.catalog.find(model) if model is None or isinstance(model, str) else None
        if served is None:
            if runtime.world.upstream:
                await forward(runtime, scope, receive, send, raw, "unknown-model")
                return
            raise ModelNotFound(str(model))
        if not served.backend.status().ready:
            raise Unavailable(f"The model is not ready: {served.backend.status().message}.", retry_after_s=2.0)
        exchange.model = served.model_id
        exchange.answered_by(served.backend.name, "local", route)
        answer = await runtime.text.run(len(body), lambda: encode_json(work(body, served)))
        headers = [(b"x-onepass-backend", exchange.backend.encode()), (b"x-onepass-reason", route.encode())]
        await send_answer(send, 200, answer, headers=headers)

    return handle
