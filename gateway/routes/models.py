"""GET /v1/models and /v1/models/{id}: the local models first, then the upstream's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from litestar import get, route
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp, Guard

from backends.base import ModelInfo
from gateway.errors import ModelNotFound
from gateway.routes.elsewhere import elsewhere
from gateway.runtime import Runtime
from gateway.wire.tokenization import tokenizer_info

__all__ = ["model_routes"]


def _entry(info: ModelInfo, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": info.created,
        "owned_by": info.owned_by,
        "max_model_len": info.max_model_len or None,
    }


def model_routes(guards: Sequence[Guard]) -> list[HTTPRouteHandler]:
    guarded = list(guards)

    @get("/v1/models", guards=guarded)
    async def models(runtime: Runtime) -> dict[str, Any]:
        local = [_entry(served.info, name) for served in runtime.catalog.models for name in served.names]
        mine = {entry["id"] for entry in local}
        theirs = [entry for entry in await runtime.catalog.upstream_models() if entry["id"] not in mine]
        return {"object": "list", "data": [*local, *theirs]}

    @get("/v1/models/{name:path}", guards=guarded)
    async def model(runtime: Runtime, name: str) -> dict[str, Any]:
        name = name.removeprefix("/")
        served = runtime.catalog.find(name)
        if served is not None:
            return _entry(served.info, name)
        for entry in await runtime.catalog.upstream_models():
            if entry["id"] == name:
                return entry
        raise ModelNotFound(name)

    @route("/v1/models/{name:path}", http_method=["DELETE", "PATCH", "POST", "PUT"], guards=guarded)
    async def change_model(runtime: Runtime, name: str) -> ASGIApp:
        """Fine-tuned models are the upstream's to delete."""

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await elsewhere(runtime, scope, receive, send, allowed=("GET",))

        return app

    @get("/tokenizer_info", guards=guarded, sync_to_thread=False)
    def info(runtime: Runtime) -> dict[str, Any]:
        if not runtime.catalog.models:
            raise ModelNotFound("")
        return tokenizer_info(runtime.catalog.models[0])

    return [models, model, change_model, info]
