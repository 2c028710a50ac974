"""An application around a formula for a model, with clients that reach it without a socket."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import openai
import pytest

from gateway.app import Application
from tests.gateway.double import DoublePrefill, double_app


@pytest.fixture
def backend() -> DoublePrefill:
    return DoublePrefill()


@pytest.fixture
def app(backend: DoublePrefill) -> Application:
    return double_app([backend])


@pytest.fixture
async def http(app: Application) -> AsyncIterator[httpx.AsyncClient]:
    await app.runtime.start()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://double") as client:
        yield client
    await app.runtime.stop(0.0)


@pytest.fixture
async def client(http: httpx.AsyncClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url="http://double/v1", api_key="unused", http_client=http, max_retries=0)
