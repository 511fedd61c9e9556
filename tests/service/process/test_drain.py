"""The stop of the HTTP server, step by step, on a real socket."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import structlog
import uvicorn

from metaban.service.http.protocol import LimitedProtocol
from metaban.service.process import drain
from metaban.service.process.drain import DrainingServer

WAIT_S = 30.0
ASK = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
ASK_SLOWLY = b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n"


class Site:
    """A running server with its app, and the signal that stops it."""

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
            http=LimitedProtocol,
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
    """Makes sites, and ignores the signals that uvicorn raises again after it stopped."""
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
    """The headers of the next answer; its body must be complete."""
    head = await asyncio.wait_for(connection[0].readuntil(b"\r\n\r\n"), WAIT_S)
    assert await asyncio.wait_for(connection[0].readexactly(2), WAIT_S) == b"ok"
    return head


async def closed(connection: Connection) -> bool:
    found = await asyncio.wait_for(connection[0].read(), WAIT_S) == b""
    connection[1].close()
    return found


async def refused(site: Site) -> None:
    """Wait until the listener is closed; a connection made at that moment may be reset."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                _, writer = await connect(site)
            except ConnectionRefusedError:
                return
            except ConnectionResetError:
                continue
            writer.close()
            await asyncio.sleep(0.01)


async def test_draining_server_answers_with_connection_close(sites: Any) -> None:
    site = await sites(drain_s=60)
    old = await connect(site)
    old[1].write(ASK)
    assert b"connection: close" not in await answer(old)
    slow = await connect(site)
    slow[1].write(ASK_SLOWLY)
    await asyncio.wait_for(site.slow_one_came.wait(), WAIT_S)
    assert not site.told.is_set()
    with structlog.testing.capture_logs() as logs:
        site.stop()
        await asyncio.wait_for(site.told.wait(), WAIT_S)
    assert {"event": "service_draining", "seconds": 60, "log_level": "info"} in logs
    old[1].write(ASK)
    fresh = await connect(site)
    fresh[1].write(ASK)
    site.slow_one_may_go.set()
    for connection in (old, fresh, slow):
        assert b"connection: close" in await answer(connection)
        assert await closed(connection)
    assert not site.running.done()
    site.stop()  # the second signal ends the wait of sixty seconds
    await site.stopped()
    await refused(site)


async def test_running_request_is_finished(sites: Any) -> None:
    site = await sites(drain_s=0)
    slow = await connect(site)
    slow[1].write(ASK_SLOWLY)
    await asyncio.wait_for(site.slow_one_came.wait(), WAIT_S)
    site.stop()
    site.stop()  # the second signal
    await refused(site)
    assert not site.running.done()
    site.slow_one_may_go.set()
    assert b"connection: close" in await answer(slow)
    assert await closed(slow)
    await site.stopped()


async def test_third_signal_stops_at_once(sites: Any) -> None:
    site = await sites(drain_s=60)
    slow = await connect(site)
    slow[1].write(ASK_SLOWLY)
    await asyncio.wait_for(site.slow_one_came.wait(), WAIT_S)
    for _ in range(3):
        site.stop()
    await site.stopped()
    assert not site.slow_one_may_go.is_set()
    slow[1].close()


async def test_open_connection_may_send_a_request_after_the_listener_closed(
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


async def test_idle_connection_does_not_delay_the_stop(sites: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "LAST_REQUESTS_S", 0.05)
    site = await sites(drain_s=0)
    silent = await connect(site)
    site.stop()
    assert await closed(silent)
    await site.stopped()
