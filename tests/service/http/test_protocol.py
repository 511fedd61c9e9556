"""The limits of connections, request headers, chunks and pipelines, on a real server."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from metaban.service.http import protocol
from metaban.service.http.protocol import (
    MAX_HEADER_BYTES,
    MAX_HEADERS,
    MAX_PIPELINED,
    LimitedProtocol,
    limited_protocol,
)
from tests.service.http.sockets import counting_app, exchange, read_all, serving

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
async def port() -> AsyncIterator[int]:
    async with serving(LimitedProtocol) as port:
        yield port


HEAD = b"POST / HTTP/1.1\r\nhost: x\r\n"


@pytest.mark.parametrize("flood", [b"x-a: b\r\n" * 10_000, b"x-long: " + b"b" * 80_000], ids=["many", "long"])
async def test_endless_request_headers_are_refused(port: int, flood: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD + flood)
    status = await asyncio.wait_for(reader.readline(), 30)
    assert b" 431 " in status
    rest = await asyncio.wait_for(reader.read(), 30)
    assert json.loads(rest.split(b"\r\n\r\n", 1)[1])["status"] == 431
    writer.close()


@pytest.mark.parametrize("piece", [1_000, 200_000], ids=["in pieces", "in one"])
@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nhost: x\r\nx-long: " + b"b" * 70_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nx-long: " + b"b" * 100_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\n" + b"".join(b"x-%d: %s\r\n" % (n, b"b" * 700) for n in range(100)) + b"\r\n",
        b"GET /" + b"u" * 66_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /?" + b"u" * 40_000 + b" HTTP/1.1\r\nhost: x\r\nx-long: " + b"b" * 40_000 + b"\r\n\r\n",
    ],
    ids=["a long header", "a longer one", "a hundred headers", "a long URL", "both"],
)
async def test_too_large_request_headers_are_refused(port: int, head: bytes, piece: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with suppress(ConnectionError):
        for start in range(0, len(head), piece):
            writer.write(head[start : start + piece])
            await writer.drain()
    found = await asyncio.wait_for(reader.read(), 30)
    assert found.startswith(b"HTTP/1.1 431 ")
    problem = json.loads(found.split(b"\r\n\r\n", 1)[1])
    assert problem["detail"] == f"at most {MAX_HEADER_BYTES} bytes are read"
    writer.close()


async def test_one_read_beyond_two_limits_is_refused_once(port: int) -> None:
    found = await exchange(port, HEAD + b"x-a: b\r\n" * 40_000)
    assert found.count(b"HTTP/1.1 431 ") == 1
    assert found.endswith(b"}")


async def test_request_headers_of_the_limit_are_served(port: int) -> None:
    head = b"GET /" + b"u" * 30_000 + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-long: "
    assert b" 200 " in await exchange(port, head + b"b" * (MAX_HEADER_BYTES - len(head) - 4) + b"\r\n\r\n")


async def test_headers_and_a_long_body_in_one_piece_are_served(port: int) -> None:
    body = b"b" * (3 * MAX_HEADER_BYTES)
    found = await exchange(port, HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    assert found.endswith(f"{len(body):08}".encode())


async def test_header_limit_applies_to_each_request_of_a_connection(port: int) -> None:
    large = HEAD + b"x-a: " + b"a" * (MAX_HEADER_BYTES // 2) + b"\r\ncontent-length: 2\r\n\r\nok"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(5):
        writer.write(large)
        assert b" 200 " in await asyncio.wait_for(reader.readuntil(b"\r\n"), 30)
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)) is not None
        assert await asyncio.wait_for(reader.readexactly(8), 30) == b"00000002"
    writer.close()


async def test_invalid_http_is_refused_with_a_problem_document(port: int) -> None:
    found = await exchange(port, b"nonsense\r\n\r\n")
    assert b" 400 " in found
    assert b"application/problem+json" in found


@pytest.mark.parametrize("sent", [b"", HEAD], ids=["nothing", "half a head"])
async def test_slow_request_headers_time_out(port: int, sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEADERS_TIMEOUT_S", 0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    assert await asyncio.wait_for(reader.read(), 30) == b""
    writer.close()


async def test_headers_timeout_does_not_apply_to_bodies(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEADERS_TIMEOUT_S", 0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD + b"connection: close\r\ncontent-length: 2\r\n\r\n")
    await asyncio.sleep(0.3)
    writer.write(b"ok")
    assert (await asyncio.wait_for(reader.read(), 30)).endswith(b"00000002")
    writer.close()


ASK = HEAD + b"content-length: 2\r\n\r\nok"
ASK_SLOWLY = b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n"
PROBE_SLOWLY = b"GET /health/slow HTTP/1.1\r\nhost: x\r\n\r\n"

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class SlowApp:
    """Answers slow requests when `go_on` is set."""

    def __init__(self) -> None:
        self.asked = asyncio.Semaphore(0)
        self.go_on = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked.release()
        if scope["path"].endswith("/slow"):
            await self.go_on.wait()
        await counting_app(scope, receive, send)


async def connect(port: int, address: str = "127.0.0.1") -> Connection:
    return await asyncio.wait_for(asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0)), 30)


async def ask(connection: Connection, request: bytes = ASK) -> bool:
    """Whether a request is answered on this connection."""
    reader, writer = connection
    try:
        writer.write(request)
        return (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n" + b"0" * 7), 30)).startswith(b"HTTP/1.1 200 ")
    except (ConnectionError, asyncio.IncompleteReadError):
        return False
    finally:
        await asyncio.wait_for(reader.read(1), 30)


async def is_closed(connection: Connection) -> bool:
    return await read_all(connection[0]) == b""


async def test_connections_in_use_are_not_closed_for_another_one() -> None:
    refused: list[str] = []
    app = SlowApp()
    async with serving(limited_protocol(2, refused.append), app) as port:
        busy = [await connect(port) for _ in range(2)]
        for _, writer in busy:
            writer.write(ASK_SLOWLY)
            await asyncio.wait_for(app.asked.acquire(), 30)
        reader, writer = await connect(port, "127.0.0.2")
        head, _, body = (await read_all(reader)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in head
        assert json.loads(body)["type"] == "/problems/overloaded"
        writer.close()
        assert refused == ["connections"]
        app.go_on.set()
        for connection in busy:
            assert b" 200 " in await asyncio.wait_for(connection[0].readline(), 30)
        newer = await connect(port, "127.0.0.2")
        assert await ask(newer)
        for _, writer in (*busy, newer):
            writer.close()


@pytest.mark.parametrize(
    "sent",
    [b"", HEAD, HEAD + b"content-length: 2\r\n\r\no", PROBE_SLOWLY],
    ids=["nothing", "half a head", "half a body", "a slow probe"],
)
async def test_longest_idle_connection_is_closed_for_another_one(sent: bytes) -> None:
    app = SlowApp()
    async with serving(limited_protocol(3, lambda reason: None), app) as port:
        idle = [await connect(port) for _ in range(3)]
        for _, writer in idle:
            writer.write(sent)
            if sent.endswith((b"o", PROBE_SLOWLY)):
                await asyncio.wait_for(app.asked.acquire(), 30)
        newer = await connect(port)
        assert await ask(newer)
        assert await is_closed(idle[0])
        another = await connect(port)
        assert await ask(another)
        assert await is_closed(idle[1])
        assert await ask(newer)
        app.go_on.set()
        for _, writer in (*idle, newer, another):
            writer.close()


async def test_address_with_fewer_connections_keeps_them() -> None:
    async with serving(limited_protocol(4, lambda reason: None)) as port:
        first = await connect(port, "127.0.0.2")
        assert await ask(first)
        flood = [await connect(port) for _ in range(20)]
        second = await connect(port, "127.0.0.2")
        assert await ask(second)
        assert await ask(first)
        assert [await is_closed(connection) for connection in flood[:17]] == [True] * 17
        for _, writer in (first, second, *flood):
            writer.close()


async def test_connection_whose_client_does_not_read_is_closed_for_another_one() -> None:
    sending = asyncio.Event()

    async def large_app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/large":
            sending.set()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(100):
                await send({"type": "http.response.body", "body": b"a" * 1_000_000, "more_body": True})
            return
        await counting_app(scope, receive, send)

    async with serving(limited_protocol(1, lambda reason: None), large_app) as port:
        deaf = socket.create_connection(("127.0.0.1", port), timeout=30)
        deaf.sendall(b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.wait_for(sending.wait(), 30)
        async with asyncio.timeout(30):
            while True:  # refused until the buffers are full
                other = await connect(port)
                if await ask(other):
                    break
                other[1].close()
        other[1].close()
        deaf.close()


async def test_too_many_headers_are_refused() -> None:
    refused: list[str] = []
    async with serving(limited_protocol(100, refused.append)) as port:
        few = b"x-a: b\r\n" * (MAX_HEADERS - 3)  # with host, connection and content-length
        rest = b"connection: close\r\ncontent-length: 2\r\n\r\nok"
        assert (await exchange(port, HEAD + few + rest)).endswith(b"00000002")
        answer = await exchange(port, HEAD + few + b"x-a: b\r\n" + rest)
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert b"nosniff" in answer
        assert refused == ["head"]


async def test_trailers_are_dropped_and_limited(port: int) -> None:
    start = HEAD + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n"
    assert (await exchange(port, start + b"x-api-key: late\r\n\r\n")).endswith(b"2 hosts1")
    assert (await exchange(port, start + b"x-a: b\r\n" * (MAX_HEADERS + 1) + b"\r\n")).endswith(b"2 hosts1")
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    status = asyncio.create_task(reader.readline())
    writer.write(start + b"x-long: ")
    while not status.done():
        writer.write(b"a" * 10_000)
        await asyncio.wait([status], timeout=0.01)
    assert b" 431 " in status.result()
    writer.close()


async def test_body_in_tiny_chunks_is_refused(port: int) -> None:
    start = HEAD + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    honest = b"40\r\n" + b"a" * 64 + b"\r\n"
    assert (await exchange(port, start + honest * 5_000 + b"0\r\n\r\n")).endswith(b"%08d" % (64 * 5_000))
    assert b" 400 " in await exchange(port, start + b"1\r\na\r\n" * 5_000 + b"0\r\n\r\n")


async def test_too_many_pipelined_requests_are_refused(port: int) -> None:
    request = HEAD + b"content-length: 2\r\n\r\nok"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request * MAX_PIPELINED)
    for _ in range(MAX_PIPELINED):
        await asyncio.wait_for(reader.readuntil(b"00000002"), 30)
    writer.close()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request * 3_000)
    assert (await read_all(reader)).count(b"00000002") < 3_000
    writer.close()


async def test_refusal_waits_for_the_running_answer() -> None:
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def slow_app(scope: Any, receive: Any, send: Any) -> None:
        asked.set()
        await go_on.wait()
        await counting_app(scope, receive, send)

    async with serving(LimitedProtocol, slow_app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b"content-length: 2\r\n\r\nok")
        await asked.wait()
        writer.write(b"nonsense\r\n\r\n")
        await asyncio.sleep(0.05)
        go_on.set()
        answer = await read_all(reader)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert answer.endswith(b"00000002")
        writer.close()


async def test_app_gets_a_disconnect_for_a_broken_body(caplog: pytest.LogCaptureFixture) -> None:
    found = asyncio.get_running_loop().create_future()

    async def reading_app(scope: Any, receive: Any, send: Any) -> None:
        while (message := await receive())["type"] == "http.request" and message["more_body"]:
            pass
        found.set_result(message["type"])
        await counting_app(scope, receive, send)

    async with serving(LimitedProtocol, reading_app) as port:
        answer = await exchange(port, HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\nok\r\nnonsense\r\n")
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert await asyncio.wait_for(found, 30) == "http.disconnect"
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def early_app(scope: Any, receive: Any, send: Any) -> None:
    """Answers before it reads the body."""
    await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"no"})


async def test_rest_of_a_body_is_dropped_and_the_connection_stays_open() -> None:
    async with serving(LimitedProtocol, early_app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(3):
            writer.write(HEAD + b"content-length: 4000000\r\n\r\n")
            assert b" 413 " in await asyncio.wait_for(reader.readline(), 30)
            writer.write(b"a" * 4_000_000)
            await asyncio.wait_for(writer.drain(), 30)
            await asyncio.wait_for(reader.readuntil(b"no"), 30)
        writer.close()


async def test_rest_of_a_body_is_read_with_pauses() -> None:
    """Between two pieces of it, others are served: reading stops after each piece."""
    paused = []

    class Watched(LimitedProtocol):
        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and self.cycle.response_complete:
                paused.append(self.flow.read_paused)

    async with serving(Watched, early_app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b"content-length: 4000000\r\n\r\n")
        await asyncio.wait_for(reader.readuntil(b"no"), 30)
        writer.write(b"a" * 4_000_000)
        await asyncio.wait_for(writer.drain(), 30)
        writer.close()
    assert paused
    assert all(paused)


async def test_missing_rest_of_a_body_times_out() -> None:
    async with serving(LimitedProtocol, early_app, timeout_keep_alive=1) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b"content-length: 1000\r\n\r\n")
        await asyncio.wait_for(reader.readuntil(b"no"), 30)
        writer.write(b"a")
        assert await asyncio.wait_for(reader.read(), 30) == b""
        writer.close()


#: One forked process for each limit, because a lowered limit cannot be raised again.
ASK_FOR_ROOM = """
import os, resource, sys
from metaban.service.process.server import room_for_connections
for word in sys.argv[1:]:
    if (child := os.fork()) == 0:
        soft, hard, wanted = map(int, word.split(","))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        print(room_for_connections(wanted), resource.getrlimit(resource.RLIMIT_NOFILE)[0], flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def test_descriptors_are_reserved_for_the_store() -> None:
    limits = ["256,4096,2048", "4096,4096,2048", "1024,1024,2048"]
    said = subprocess.check_output([sys.executable, "-c", ASK_FOR_ROOM, *limits], text=True, cwd=ROOT).splitlines()
    assert [said[0], said[1], said[-1]] == ["2048 4096", "2048 4096", "512 1024"]  # the last after a warning
