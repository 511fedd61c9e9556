"""The stop of the HTTP server, step by step, on a real socket."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn

from service import drain
from service.drain import DrainingServer, turn_away
from service.protocol import BoundedProtocol

WAIT_S = 30.0
ASK = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
ASK_SLOWLY = b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n"


class Site:
    """A server that stops when told to, and the app behind it."""

    def __init__(self, drain_s: float) -> None:
        self.told = asyncio.Event()
        self.slow_one_came = asyncio.Event()
        self.slow_one_may_go = asyncio.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        self.port = self.listener.getsockname()[1]
        config = uvicorn.Config(
            self.app,
            interface="asgi3",
            http=BoundedProtocol,
            lifespan="off",
            log_config=None,
            timeout_graceful_shutdown=10,
        )
        self.server = DrainingServer(config, drain_s=drain_s, on_drain=self.told.set)
        self.running = asyncio.create_task(self.server.serve(sockets=[self.listener]))

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/slow":
            self.slow_one_came.set()
            await self.slow_one_may_go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    def stop(self) -> None:
        self.server.handle_exit(signal.SIGTERM, None)

    async def stopped(self) -> None:
        await asyncio.wait_for(asyncio.shield(self.running), WAIT_S)


@pytest.fixture
async def sites() -> AsyncIterator[Any]:
    """Makes sites; uvicorn raises the signals it took again, and nobody here shall die of them."""
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    made: list[Site] = []

    async def make(drain_s: float) -> Site:
        site = Site(drain_s)
        made.append(site)
        while not site.server.started:  # noqa: ASYNC110 - uvicorn has no event to wait for
            await asyncio.sleep(0.01)
        return site

    yield make
    for site in made:
        site.slow_one_may_go.set()
        for _ in range(3):
            site.stop()
        await site.stopped()
    for number, handler in before.items():
        signal.signal(number, handler)


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(site: Site) -> Connection:
    return await asyncio.wait_for(asyncio.open_connection("127.0.0.1", site.port), WAIT_S)


async def answer(connection: Connection) -> bytes:
    """The head of the next answer, whose body has to be complete."""
    head = await asyncio.wait_for(connection[0].readuntil(b"\r\n\r\n"), WAIT_S)
    assert await asyncio.wait_for(connection[0].readexactly(2), WAIT_S) == b"ok"
    return head


async def closed(connection: Connection) -> bool:
    found = await asyncio.wait_for(connection[0].read(), WAIT_S) == b""
    connection[1].close()
    return found


async def refused(site: Site) -> None:
    """Wait until nobody is taken any more; the only way to be turned away is at once."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                _, writer = await connect(site)
            except ConnectionRefusedError:
                return
            writer.close()
            await asyncio.sleep(0.01)


async def test_while_draining_all_is_served_and_every_answer_says_that_it_is_the_last(sites: Any) -> None:
    site = await sites(drain_s=60)
    old = await connect(site)
    old[1].write(ASK)
    assert b"connection: close" not in await answer(old)
    slow = await connect(site)
    slow[1].write(ASK_SLOWLY)
    await asyncio.wait_for(site.slow_one_came.wait(), WAIT_S)
    assert not site.told.is_set()
    site.stop()
    await asyncio.wait_for(site.told.wait(), WAIT_S)
    old[1].write(ASK)
    fresh = await connect(site)
    fresh[1].write(ASK)
    site.slow_one_may_go.set()
    for connection in (old, fresh, slow):
        assert b"connection: close" in await answer(connection)
        assert await closed(connection)
    assert not site.running.done()
    site.stop()  # once more: the sixty seconds are not waited for
    await site.stopped()
    await refused(site)


async def test_a_request_under_way_is_finished(sites: Any) -> None:
    site = await sites(drain_s=0)
    slow = await connect(site)
    slow[1].write(ASK_SLOWLY)
    await asyncio.wait_for(site.slow_one_came.wait(), WAIT_S)
    site.stop()
    site.stop()  # hurried
    await refused(site)
    assert not site.running.done()
    site.slow_one_may_go.set()
    assert b"connection: close" in await answer(slow)
    assert await closed(slow)
    await site.stopped()


async def test_the_third_signal_waits_for_nobody(sites: Any) -> None:
    site = await sites(drain_s=60)
    slow = await connect(site)
    slow[1].write(ASK_SLOWLY)
    await asyncio.wait_for(site.slow_one_came.wait(), WAIT_S)
    for _ in range(3):
        site.stop()
    await site.stopped()
    assert not site.slow_one_may_go.is_set()
    slow[1].close()


async def test_a_connection_may_send_its_request_when_nobody_is_accepted_any_more(
    sites: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "LAST_REQUESTS_S", 60.0)
    site = await sites(drain_s=0)
    used = await connect(site)
    used[1].write(ASK)
    await answer(used)
    unused = await connect(site)
    site.stop()
    await refused(site)
    for connection in (used, unused):
        connection[1].write(ASK)
        assert b"connection: close" in await answer(connection)
        assert await closed(connection)
    await site.stopped()


async def test_who_says_nothing_is_not_waited_for(sites: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "LAST_REQUESTS_S", 0.05)
    site = await sites(drain_s=0)
    silent = await connect(site)
    site.stop()
    assert await closed(silent)
    await site.stopped()


def test_who_is_in_the_queue_is_accepted_and_who_comes_later_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        queued = [socket.create_connection(address) for _ in range(5)]
        turn_away(listener)
        with socket.socket() as late:
            late.settimeout(0.1)
            with pytest.raises(TimeoutError):
                late.connect(address)
        for client in queued:
            client.sendall(b"hello")
            accepted, _ = listener.accept()
            assert accepted.recv(5) == b"hello"
            accepted.sendall(b"world")
            assert client.recv(5) == b"world"
            accepted.close()
            client.close()
        listener.settimeout(0.1)
        with pytest.raises(TimeoutError):
            listener.accept()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)
