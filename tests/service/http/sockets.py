"""Real servers with the service's HTTP protocol, and raw connections to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn

from metaban.service.http.protocol import LimitedProtocol


async def counting_app(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the length of the body; for a chunked body of 2 bytes, also with its number of headers less two."""
    length, more = 0, True
    while more:
        message = await receive()
        length, more = length + len(message.get("body", b"")), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"8")]})
    body = f"{length:08}".encode()
    if any(name == b"transfer-encoding" for name, _ in scope["headers"]) and length == 2:
        body = f"{length} hosts{len(scope['headers']) - 2}".encode()
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def serving(kind: type[LimitedProtocol], app: Any = counting_app, **options: Any) -> AsyncIterator[int]:
    """The port of a real server."""
    config = uvicorn.Config(app, port=0, http=kind, lifespan="off", log_config=None, **options)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event to wait for
        await asyncio.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await task


async def exchange(port: int, *parts: bytes) -> bytes:
    """Send the parts, close for writing, and read the whole answer; empty if the server resets the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.01)
        writer.write_eof()
        return await asyncio.wait_for(reader.read(), 30)
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def read_all(reader: asyncio.StreamReader) -> bytes:
    """Read until the server closes or resets the connection."""
    found = b""
    try:
        while piece := await asyncio.wait_for(reader.read(65_536), 30):
            found += piece
    except ConnectionError:
        pass
    return found
