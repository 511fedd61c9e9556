"""What comes before the body is bounded, in size and in time, on a real server."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from service import protocol
from service.protocol import MAX_HEAD_BYTES, MAX_HEADERS, MAX_PIPELINED, BoundedProtocol, limited_protocol

ROOT = Path(__file__).resolve().parents[2]


async def counting_app(scope: Any, receive: Any, send: Any) -> None:
    """Reads its body and says how long it was; and which headers it has now, when something came after the body."""
    length, more = 0, True
    while more:
        message = await receive()
        length, more = length + len(message.get("body", b"")), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"8")]})
    body = f"{length:08}".encode()
    if any(name == b"transfer-encoding" for name, _ in scope["headers"]) and length == 2:
        body = f"{length} hosts{len(scope['headers']) - 2}".encode()
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
async def port() -> AsyncIterator[int]:
    async with serving(BoundedProtocol) as port:
        yield port


@asynccontextmanager
async def serving(kind: type[BoundedProtocol], app: Any = counting_app) -> AsyncIterator[int]:
    config = uvicorn.Config(app, port=0, http=kind, lifespan="off", log_config=None)
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
        return await asyncio.wait_for(reader.read(), 30)
    except ConnectionError:
        return b""
    finally:
        writer.close()


HEAD = b"POST / HTTP/1.1\r\nhost: x\r\n"


@pytest.mark.parametrize("flood", [b"x-a: b\r\n" * 10_000, b"x-long: " + b"b" * 80_000], ids=["many", "long"])
async def test_a_head_that_never_ends_is_refused(port: int, flood: bytes) -> None:
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
async def test_a_complete_head_that_is_too_large_is_refused(port: int, head: bytes, piece: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with suppress(ConnectionError):
        for start in range(0, len(head), piece):
            writer.write(head[start : start + piece])
            await writer.drain()
    found = await asyncio.wait_for(reader.read(), 30)
    assert found.startswith(b"HTTP/1.1 431 ")
    problem = json.loads(found.split(b"\r\n\r\n", 1)[1])
    assert problem["detail"] == f"at most {MAX_HEAD_BYTES} bytes are read"
    writer.close()


async def test_a_head_of_nearly_the_limit_is_served(port: int) -> None:
    head = b"GET /" + b"u" * 30_000 + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-long: "
    assert b" 200 " in await exchange(port, head + b"b" * (MAX_HEAD_BYTES - len(head) - 4) + b"\r\n\r\n")


async def test_a_head_and_a_long_body_in_one_piece_are_served(port: int) -> None:
    body = b"b" * (3 * MAX_HEAD_BYTES)
    found = await exchange(port, HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    assert found.endswith(f"{len(body):08}".encode())


async def test_requests_on_one_connection_are_counted_one_by_one(port: int) -> None:
    large = HEAD + b"x-a: " + b"a" * (MAX_HEAD_BYTES // 2) + b"\r\ncontent-length: 2\r\n\r\nok"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(5):
        writer.write(large)
        assert b" 200 " in await asyncio.wait_for(reader.readuntil(b"\r\n"), 30)
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)) is not None
        assert await asyncio.wait_for(reader.readexactly(8), 30) == b"00000002"
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
    assert await asyncio.wait_for(reader.read(), 30) == b""
    writer.close()


async def test_a_body_may_take_longer_than_a_head(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD + b"connection: close\r\ncontent-length: 2\r\n\r\n")
    await asyncio.sleep(0.3)
    writer.write(b"ok")
    assert (await asyncio.wait_for(reader.read(), 30)).endswith(b"00000002")
    writer.close()


async def read_all(reader: asyncio.StreamReader) -> bytes:
    """Until the other side closes, be it rudely."""
    found = b""
    try:
        while piece := await asyncio.wait_for(reader.read(65_536), 30):
            found += piece
    except ConnectionError:
        pass
    return found


async def test_more_connections_than_there_is_room_for() -> None:
    refused: list[str] = []
    async with serving(limited_protocol(2, refused.append)) as port:
        kept = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        for reader, writer in kept:  # answered, and so certainly connected
            writer.write(HEAD + b"content-length: 2\r\n\r\nok")
            assert b" 200 " in await asyncio.wait_for(reader.readline(), 30)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head, _, body = (await read_all(reader)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in head
        assert json.loads(body)["type"] == "/problems/overloaded"
        writer.close()
        assert refused == ["connections"]
        kept[0][1].close()
        await read_all(kept[0][0])
        assert (await exchange(port, HEAD + b"connection: close\r\ncontent-length: 2\r\n\r\nok")).endswith(b"00000002")
        for _, writer in kept:
            writer.close()


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


async def test_trailers_are_not_headers_and_do_not_pile_up(port: int) -> None:
    start = HEAD + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n"
    assert (await exchange(port, start + b"x-api-key: late\r\n\r\n")).endswith(b"2 hosts1")
    assert b" 431 " in await exchange(port, start + b"x-a: b\r\n" * (MAX_HEADERS + 1) + b"\r\n")
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(start + b"x-long: ")
    with suppress(ConnectionError):
        for _ in range(1_000):  # 64 MB, if they were taken
            writer.write(b"a" * 65_536)
            await asyncio.wait_for(writer.drain(), 30)
        pytest.fail("an endless trailer was read to its end")
    writer.close()


async def test_a_body_in_crumbs_is_refused(port: int) -> None:
    start = HEAD + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    honest = b"40\r\n" + b"a" * 64 + b"\r\n"
    assert (await exchange(port, start + honest * 5_000 + b"0\r\n\r\n")).endswith(b"%08d" % (64 * 5_000))
    assert b" 400 " in await exchange(port, start + b"1\r\na\r\n" * 5_000 + b"0\r\n\r\n")


async def test_requests_sent_far_ahead_are_cut_off(port: int) -> None:
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


async def test_an_answer_under_way_is_not_overtaken_by_a_refusal() -> None:
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def slow_app(scope: Any, receive: Any, send: Any) -> None:
        asked.set()
        await go_on.wait()
        await counting_app(scope, receive, send)

    async with serving(BoundedProtocol, slow_app) as port:
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


async def test_whoever_reads_a_broken_body_is_told(caplog: pytest.LogCaptureFixture) -> None:
    found = asyncio.get_running_loop().create_future()

    async def reading_app(scope: Any, receive: Any, send: Any) -> None:
        while (message := await receive())["type"] == "http.request" and message["more_body"]:
            pass
        found.set_result(message["type"])
        await counting_app(scope, receive, send)

    async with serving(BoundedProtocol, reading_app) as port:
        answer = await exchange(port, HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\nok\r\nnonsense\r\n")
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert await asyncio.wait_for(found, 30) == "http.disconnect"
    assert not caplog.records


async def early_app(scope: Any, receive: Any, send: Any) -> None:
    """Answers before it has read anything."""
    await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"no"})


async def test_what_comes_after_the_answer_is_not_read_to_its_end() -> None:
    async with serving(BoundedProtocol, early_app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b"content-length: 64000000\r\n\r\n")
        assert b" 413 " in await asyncio.wait_for(reader.readline(), 30)
        with suppress(ConnectionError):
            for _ in range(1_000):
                writer.write(b"a" * 64_000)
                await asyncio.wait_for(writer.drain(), 30)
            pytest.fail("64 MB were read for nothing")
        writer.close()


async def test_a_short_rest_is_read_and_the_connection_kept() -> None:
    async with serving(BoundedProtocol, early_app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(5):
            writer.write(HEAD + b"content-length: 500000\r\n\r\n")
            assert b" 413 " in await asyncio.wait_for(reader.readline(), 30)
            writer.write(b"a" * 500_000)
            await asyncio.wait_for(reader.readuntil(b"no"), 30)
        writer.close()


async def test_a_rest_that_trickles_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "DISCARD_TIMEOUT_S", 0.2)
    async with serving(BoundedProtocol, early_app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b"content-length: 1000\r\n\r\n")
        closed = asyncio.create_task(read_all(reader))
        while not closed.done():  # one byte after the other would keep it open for ever
            with suppress(ConnectionError):
                writer.write(b"a")
            await asyncio.sleep(0.02)
        assert (await closed).endswith(b"no")
        writer.close()


async def test_a_client_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "WRITE_TIMEOUT_S", 0.2)
    sent, ended = 0, asyncio.Event()

    async def streaming_app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal sent
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            for _ in range(10_000):
                await send({"type": "http.response.body", "body": b"a" * 65_536, "more_body": True})
                sent += 65_536
                await asyncio.sleep(0)
                if scope["extensions_gone"]():
                    break
        finally:
            ended.set()

    async def watched(scope: Any, receive: Any, send: Any) -> None:
        gone = asyncio.create_task(_gone(receive))
        await streaming_app({**scope, "extensions_gone": gone.done}, receive, send)
        await gone

    async with serving(BoundedProtocol, watched) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1_024)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.wait_for(ended.wait(), 20)
        assert sent < 64 * 2**20  # what the system's own buffers took, and no more
        writer.close()


async def _gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


#: A process for each: what is lowered cannot be raised again. They are forks, as importing is what takes long.
ASK_FOR_ROOM = """
import os, resource, sys
from service.server import room_for_connections
for word in sys.argv[1:]:
    if (child := os.fork()) == 0:
        soft, hard, wanted = map(int, word.split(","))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        print(room_for_connections(wanted), resource.getrlimit(resource.RLIMIT_NOFILE)[0], flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def test_the_store_is_left_descriptors() -> None:
    limits = ["256,4096,2048", "4096,4096,2048", "1024,1024,2048"]
    said = subprocess.check_output([sys.executable, "-c", ASK_FOR_ROOM, *limits], text=True, cwd=ROOT).splitlines()
    assert [said[0], said[1], said[-1]] == ["2048 4096", "2048 4096", "512 1024"]  # the last after a warning
