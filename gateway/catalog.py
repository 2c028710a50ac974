"""Which backends there are and which models they serve. Finds backends by entry point; imports none by name."""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

import msgspec

from backends.base import (
    Backend,
    BackendError,
    BackendFactory,
    ModelInfo,
    PrefillBackend,
    ProxyBackend,
    ProxyRequest,
    Tokenizer,
)
from gateway.errors import Unavailable
from gateway.settings import Settings, SettingsError
from gateway.wire.logprobs import TokenNames
from gateway.wire.vocabulary import VocabularyIndex

__all__ = ["Catalog", "Served", "load_backends"]

ENTRY_POINT_GROUP = "onepass.backends"
_UPSTREAM = "upstream"  # the one backend that is left out when its variable is unset
_UPSTREAM_MODELS_TTL_S = 30.0
_UPSTREAM_MODELS_RETRY_S = 5.0  # after a failure
_UPSTREAM_MODELS_TIMEOUT_S = 2.0

log = logging.getLogger("onepass.gateway")


class Served:
    """A local model and the backend that computes it."""

    def __init__(self, backend: PrefillBackend, model_id: str) -> None:
        self.backend = backend
        self.model_id = model_id
        self._info: ModelInfo | None = None

    @property
    def info(self) -> ModelInfo:
        """Length limit and fingerprint are known once the model is loaded; they do not change after that."""
        if self._info is not None:
            return self._info
        info = next(info for info in self.backend.models() if info.id == self.model_id)
        if self.backend.status().ready:
            self._info = info
        return info

    @property
    def names(self) -> tuple[str, ...]:
        """What clients may call it, its id first."""
        return (self.model_id, *self.info.aliases)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Raises what the backend raises while it is not ready."""
        return self.backend.tokenizer(self.model_id)

    @cached_property
    def chat_names(self) -> TokenNames:
        return TokenNames(self.tokenizer, byte_prefix="")

    @cached_property
    def completion_names(self) -> TokenNames:
        return TokenNames(self.tokenizer, byte_prefix="bytes:")

    @cached_property
    def vocabulary(self) -> VocabularyIndex:
        """Slow to build: off the event loop at first."""
        return VocabularyIndex(self.tokenizer)

    def require_ready(self) -> None:
        """Raises Unavailable."""
        status = self.backend.status()
        if not status.alive:
            raise Unavailable(f"The engine is down: {status.message}", retry_after_s=30.0)
        if not status.ready:
            raise Unavailable(f"The model is not ready: {status.message}.", retry_after_s=2.0)

    @property
    def indexed(self) -> bool:
        return "vocabulary" in self.__dict__


def load_backends(settings: Settings, env: Mapping[str, str]) -> list[Backend]:
    """Calls the factories that ``ONEPASS_BACKENDS`` names, in order. Raises SettingsError with a one-line message."""
    found = {point.name: point for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}
    backends: list[Backend] = []
    for name in settings.backends:
        if name == _UPSTREAM and not settings.upstream_configured:
            continue
        if name not in found:
            known = ", ".join(sorted(found)) or "none"
            hint = "install the distribution first (pip install -e .)" if not found else f"installed ones: {known}"
            raise SettingsError(f"ONEPASS_BACKENDS names {name!r}, which no installed package provides; {hint}")
        try:
            factory: BackendFactory = found[name].load()
            backend = factory(env)
        except (BackendError, ValueError, ImportError, OSError) as exc:
            raise SettingsError(f"backend {name!r}: {_one_line(exc)}") from exc
        if not isinstance(backend, PrefillBackend | ProxyBackend):
            raise SettingsError(f"backend {name!r} is neither a PrefillBackend nor a ProxyBackend")
        backends.append(backend)
    if not backends:
        raise SettingsError("ONEPASS_BACKENDS leaves no backend to serve with")
    return backends


def _one_line(exc: BaseException) -> str:
    return " ".join(str(exc).split()) or type(exc).__name__


class Catalog:
    """Looks models up by name. ``clock`` returns monotonic seconds and ages the upstream's model list."""

    def __init__(self, backends: Iterable[Backend], clock: Callable[[], float] = time.monotonic) -> None:
        self.backends = list(backends)
        self.local = [b for b in self.backends if isinstance(b, PrefillBackend)]
        self.upstream = next((b for b in self.backends if isinstance(b, ProxyBackend)), None)
        self._by_name: dict[str, Served] = {}
        self.models: list[Served] = []
        for backend in self.local:
            for info in backend.models():
                served = Served(backend, info.id)
                self.models.append(served)
                for name in (info.id, *info.aliases):
                    self._by_name.setdefault(name, served)
        self.names = frozenset(self._by_name)
        self._clock = clock
        self._upstream_models: list[dict[str, Any]] = []
        self._upstream_fresh_until_s = float("-inf")
        self._upstream_lock = asyncio.Lock()

    def find(self, name: str | None) -> Served | None:
        """An absent name means the first local model."""
        if name is None:
            return self.models[0] if self.models else None
        return self._by_name.get(name)

    async def upstream_models(self) -> list[dict[str, Any]]:
        """The upstream's own ``/v1/models`` entries, at most 30 s old; empty when there is none or it does not say."""
        if self.upstream is None:
            return []
        async with self._upstream_lock:
            if self._clock() >= self._upstream_fresh_until_s:
                good_for_s = _UPSTREAM_MODELS_TTL_S
                try:
                    async with asyncio.timeout(_UPSTREAM_MODELS_TIMEOUT_S):
                        self._upstream_models = await self._read_upstream_models(self.upstream)
                except (BackendError, TimeoutError, msgspec.DecodeError, UnicodeDecodeError) as exc:
                    log.info("the upstream's model list is not available: %s", _one_line(exc))
                    self._upstream_models = []
                    good_for_s = _UPSTREAM_MODELS_RETRY_S
                self._upstream_fresh_until_s = self._clock() + good_for_s
        return self._upstream_models

    def upstream_lists(self, name: str) -> bool:
        """As far as has been read, without asking."""
        return any(model["id"] == name for model in self._upstream_models)

    async def upstream_serves(self, name: str) -> bool:
        return any(model["id"] == name for model in await self.upstream_models())

    async def _read_upstream_models(self, upstream: ProxyBackend) -> list[dict[str, Any]]:
        request = ProxyRequest(
            method="GET", raw_path=b"/v1/models", raw_query=b"", headers=[(b"accept", b"application/json")], body=b""
        )
        async with await upstream.forward(request) as response:
            if response.status != 200:
                return []
            payload = b"".join([chunk async for chunk in response.body()])
        answer = msgspec.json.decode(payload)
        data = answer.get("data") if isinstance(answer, dict) else None
        entries = data if isinstance(data, list) else []
        return [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)]
