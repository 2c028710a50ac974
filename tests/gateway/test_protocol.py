"""A request's head: how long it may take, how large it may be, and what is said when it is neither."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

import gateway.protocol
from gateway.protocol import MAX_HEAD_BYTES, Protocol

GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


@asynccontextmanager
async def connection(delay_s: float = 0.0) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """To an application that takes ``delay_s`` to answer ``ok``."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(delay_s)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    config = uvicorn.Config(app, lifespan="off", log_config=None)
    config.load()
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(
        lambda: Protocol(config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        try:
            yield reader, writer
        finally:
            writer.close()


def refusal(raw: bytes) -> tuple[int, str]:
    head, _, body = raw.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["type"]


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway.protocol, "HEAD_S", 0.2)


@pytest.mark.parametrize("before", [b"", GET], ids=["first", "kept alive"])
@pytest.mark.usefixtures("hurried")
async def test_a_head_that_never_ends_is_refused(before: bytes) -> None:
    async with connection() as (reader, writer):
        if before:
            writer.write(before)
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        writer.write(GET[:-10])
        assert refusal(await reader.read()) == (408, "invalid_request_error")


@pytest.mark.usefixtures("hurried")
async def test_a_connection_that_says_nothing_is_closed_without_a_word() -> None:
    async with connection() as (reader, _):
        assert await reader.read() == b""


@pytest.mark.usefixtures("hurried")
async def test_an_answer_may_take_longer_than_a_head() -> None:
    async with connection(delay_s=0.5) as (reader, writer):
        writer.write(GET + GET[:-10])
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        writer.write(GET[-10:])
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")


async def test_an_endless_head_is_cut() -> None:
    async with connection() as (reader, writer):
        writer.write(GET[:-2])
        writer.write(b"x: " + b"y" * (MAX_HEAD_BYTES + 1))
        assert refusal(await reader.read()) == (431, "invalid_request_error")


async def test_large_heads_within_the_bound_and_large_bodies_pass() -> None:
    async with connection() as (reader, writer):
        writer.write(GET[:-2] + b"x: " + b"y" * (MAX_HEAD_BYTES // 2) + b"\r\n\r\n")
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        body = bytes(3 * MAX_HEAD_BYTES)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")


async def test_what_is_not_http_is_refused() -> None:
    async with connection() as (reader, writer):
        writer.write(b"\x16\x03\x01\x02\x00" + bytes(20))
        assert refusal(await reader.read()) == (400, "invalid_request_error")
