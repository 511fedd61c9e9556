"""What comes before the body is bounded, in size and in time, on a real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn

from service import protocol
from service.protocol import MAX_HEAD_BYTES, BoundedProtocol


async def counting_app(scope: Any, receive: Any, send: Any) -> None:
    """Reads its body and says how long it was."""
    length, more = 0, True
    while more:
        message = await receive()
        length, more = length + len(message.get("body", b"")), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"8")]})
    await send({"type": "http.response.body", "body": f"{length:08}".encode()})


@pytest.fixture
async def port() -> AsyncIterator[int]:
    config = uvicorn.Config(counting_app, port=0, http=BoundedProtocol, lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event to wait for
        await asyncio.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await task


async def exchange(port: int, *parts: bytes) -> bytes:
    """Send, and read until the server closes or an answer of the app is complete."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.01)
        writer.write_eof()
        return await asyncio.wait_for(reader.read(), 10)
    except ConnectionError:
        return b""
    finally:
        writer.close()


HEAD = b"POST / HTTP/1.1\r\nhost: x\r\n"


@pytest.mark.parametrize("flood", [b"x-a: b\r\n" * 10_000, b"x-long: " + b"b" * 80_000], ids=["many", "long"])
async def test_a_head_that_never_ends_is_refused(port: int, flood: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD + flood)
    status = await asyncio.wait_for(reader.readline(), 10)
    assert b" 431 " in status
    rest = await asyncio.wait_for(reader.read(), 10)
    assert json.loads(rest.split(b"\r\n\r\n", 1)[1])["status"] == 431
    writer.close()


async def test_a_head_and_a_long_body_in_one_piece_are_served(port: int) -> None:
    body = b"b" * (3 * MAX_HEAD_BYTES)
    found = await exchange(port, HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    assert found.endswith(f"{len(body):08}".encode())


async def test_requests_on_one_connection_are_counted_one_by_one(port: int) -> None:
    large = HEAD + b"x-a: " + b"a" * (MAX_HEAD_BYTES // 2) + b"\r\ncontent-length: 2\r\n\r\nok"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(5):
        writer.write(large)
        assert b" 200 " in await asyncio.wait_for(reader.readuntil(b"\r\n"), 10)
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)) is not None
        assert await asyncio.wait_for(reader.readexactly(8), 10) == b"00000002"
    writer.close()


async def test_what_is_no_http_is_refused_in_a_problem_document(port: int) -> None:
    found = await exchange(port, b"nonsense\r\n\r\n")
    assert b" 400 " in found
    assert b"application/problem+json" in found


@pytest.mark.parametrize("sent", [b"", HEAD], ids=["nothing", "half a head"])
async def test_a_head_that_does_not_come_is_not_waited_for(
    port: int, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    assert await asyncio.wait_for(reader.read(), 10) == b""
    writer.close()


async def test_a_body_may_take_longer_than_a_head(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD + b"connection: close\r\ncontent-length: 2\r\n\r\n")
    await asyncio.sleep(0.3)
    writer.write(b"ok")
    assert (await asyncio.wait_for(reader.read(), 10)).endswith(b"00000002")
    writer.close()
