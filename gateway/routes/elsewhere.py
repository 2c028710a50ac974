"""What is not answered here: passed on to the upstream, or an error that says what would be needed."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.answering import forward
from gateway.errors import MethodNotAllowed, NoUpstream, RouteNotFound
from gateway.exchange import Receive, Scope, Send, exchange_of
from gateway.runtime import Runtime

__all__ = ["elsewhere"]

# Routes that exist on OpenAI-compatible servers: without an upstream, "not found" would mislead.
_GENERATING_SERVERS = (
    "/v1/assistants",
    "/v1/audio",
    "/v1/batches",
    "/v1/chat/completions",
    "/v1/classify",
    "/v1/containers",
    "/v1/conversations",
    "/v1/decisions",
    "/v1/embeddings",
    "/v1/evals",
    "/v1/files",
    "/v1/fine_tuning",
    "/v1/images",
    "/v1/messages",
    "/v1/moderations",
    "/v1/realtime",
    "/v1/rerank",
    "/v1/responses",
    "/v1/score",
    "/v1/systemone",
    "/v1/threads",
    "/v1/uploads",
    "/v1/vector_stores",
    "/v1/videos",
    "/v2/rerank",
    "/classify",
    "/embeddings",
    "/generative_scoring",
    "/pooling",
    "/rerank",
    "/score",
)


async def elsewhere(runtime: Runtime, scope: Scope, receive: Receive, send: Send, allowed: Sequence[str] = ()) -> None:
    """``allowed``: methods that the path has here. Raises ApiError when there is no upstream."""
    if runtime.world.upstream:
        await forward(runtime, scope, receive, send, None, "other-route")
        return
    if allowed:
        raise MethodNotAllowed(scope["method"], tuple(allowed))
    path = exchange_of(scope).asked_path.rstrip("/")
    if any(path == known or path.startswith(f"{known}/") for known in _GENERATING_SERVERS):
        raise NoUpstream(f"{path[:200]} is not answered by the local engine.")
    raise RouteNotFound(f"There is no route {scope['method']} {path[:200] or '/'} here.")
