"""A server whose every byte a test decides and records: it plays the upstream, well-behaved or not."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple, TypeVar

T = TypeVar("T")

WAIT_S = 20.0  # bounds waits for what must happen; nothing is measured by it


async def within(awaitable: Awaitable[T]) -> T:
    return await asyncio.wait_for(awaitable, WAIT_S)


class RawRequest(NamedTuple):
    """``head`` with its blank line, ``raw_body`` as on the wire, ``body`` with chunked framing undone."""

    head: bytes
    raw_body: bytes
    body: bytes

    @property
    def line(self) -> bytes:
        return self.head.split(b"\r\n", 1)[0]

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        lines = self.head.removesuffix(b"\r\n\r\n").split(b"\r\n")[1:]
        return [(name, value) for name, _, value in (line.partition(b": ") for line in lines)]

    def values(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key.lower() == name]


class Peer:
    """One accepted connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def head(self) -> bytes:
        return await self._reader.readuntil(b"\r\n\r\n")

    async def request(self) -> RawRequest:
        head = await self.head()
        request = RawRequest(head, b"", b"")
        length = request.values(b"content-length")
        if request.values(b"transfer-encoding") == [b"chunked"]:
            raw, body = await self._chunked()
        else:
            raw = body = await self._reader.readexactly(int(length[0]) if length else 0)
        return RawRequest(head, raw, body)

    async def _chunked(self) -> tuple[bytes, bytes]:
        raw, body = b"", b""
        while True:
            line = await self._reader.readuntil(b"\r\n")
            size = int(line, 16)
            chunk = await self._reader.readexactly(size + 2)
            raw += line + chunk
            body += chunk[:-2]
            if size == 0:
                return raw, body

    async def read(self, size: int) -> bytes:
        return await self._reader.readexactly(size)

    async def rest(self) -> bytes:
        """Until the other side closes or resets."""
        out = b""
        try:
            while piece := await self._reader.read(65536):
                out += piece
        except ConnectionError:
            pass
        return out

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def answer(self, body: bytes = b"{}", *headers: bytes, status: bytes = b"200 OK") -> None:
        lines = [b"HTTP/1.1 " + status, b"Content-Length: %d" % len(body), *headers, b"", body]
        await self.send(b"\r\n".join(lines))

    async def chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n%s\r\n" % (len(data), data))

    def reset(self) -> None:
        """Not a FIN but an RST, as when a process is killed."""
        sock: socket.socket = self._writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    def close(self) -> None:
        self._writer.close()


class RawUpstream:
    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.port = port
        self.connections = 0
        self.failures: list[BaseException] = []


@asynccontextmanager
async def raw_upstream(handler: Callable[[Peer], Awaitable[None]]) -> AsyncIterator[RawUpstream]:
    """``handler`` runs for each connection, which is closed when it returns. What it raises fails the test."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        upstream.connections += 1
        try:
            await handler(Peer(reader, writer))
        except asyncio.IncompleteReadError as exc:
            if exc.partial:
                upstream.failures.append(exc)
        except (asyncio.CancelledError, ConnectionError):
            pass
        except BaseException as exc:
            upstream.failures.append(exc)
        finally:
            tasks.discard(task)
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 20)
    upstream = RawUpstream(server.sockets[0].getsockname()[1])
    try:
        yield upstream
    finally:
        server.close()
        pending = list(tasks)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        await asyncio.sleep(0.01)  # closed transports let go of their sockets in the loop's next rounds
    assert not upstream.failures, upstream.failures
