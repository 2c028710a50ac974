"""POST /v1/chat/completions, /v1/completions, /tokenize, /detokenize. Bare ASGI: raw bytes are what is passed on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from litestar.handlers import ASGIRouteHandler

from gateway.answering import answer, forward, read_json
from gateway.catalog import Served
from gateway.errors import ModelNotFound
from gateway.exchange import Receive, Scope, Send, exchange_of
from gateway.http import check_json_content_type, encode_json, read_body, send_answer
from gateway.routes.bare import Handler, bare_route
from gateway.runtime import Runtime
from gateway.wire.api import TextApi
from gateway.wire.chat import ChatApi
from gateway.wire.completions import CompletionsApi
from gateway.wire.tokenization import detokenized, tokenized

__all__ = ["text_routes"]


def text_routes(runtime: Runtime) -> list[ASGIRouteHandler]:
    return [
        bare_route("/v1/chat/completions", "POST", _text(ChatApi(), runtime), runtime),
        bare_route("/v1/completions", "POST", _text(CompletionsApi(), runtime), runtime),
        bare_route("/tokenize", "POST", _tokens("tokenize", tokenized, runtime), runtime),
        bare_route("/detokenize", "POST", _tokens("detokenize", detokenized, runtime), runtime),
    ]


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
        body, peek = await read_json(runtime, raw, scope["headers"])
        model = peek.model
        served = runtime.catalog.find(model) if model is None or isinstance(model, str) else None
        if served is None:
            if runtime.world.upstream:
                await forward(runtime, scope, receive, send, raw, "unknown-model")
                return
            raise ModelNotFound(str(model))
        served.require_ready()
        exchange.model = served.model_id
        exchange.answered_by(served.backend.name, "local", route)
        answer = await runtime.text.run(len(body), lambda: encode_json(work(body, served)))
        headers = [(b"x-onepass-backend", exchange.backend.encode()), (b"x-onepass-reason", route.encode())]
        await send_answer(send, 200, answer, headers=headers)

    return handle
