"""Stops the HTTP server without losing accepted requests.

    signal            for `drain_s`: requests are served, with `Connection: close`, and /health/ready answers 503
    drained           the listener closes
    last requests     connections that are open may send one more request, for up to a second
    in progress       started requests are finished, within uvicorn's time limit

A second signal skips the first three waits, a third one also the wait for requests in progress.
"""

from __future__ import annotations

import asyncio
import select
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, final

import structlog
import uvicorn

#: Time for open connections to send one more request, which may be on its way already.
LAST_REQUESTS_S: Final = 1.0

POLL_S: Final = 0.02

log = structlog.get_logger()


@final
class DrainingServer(uvicorn.Server):
    """uvicorn's server with a readiness delay before the listener closes."""

    def __init__(self, config: uvicorn.Config, *, drain_s: float, on_drain: Callable[[], None]) -> None:
        super().__init__(config)
        self._drain_s = drain_s
        self._on_drain = on_drain
        self._signals = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal starts the shutdown, the next ones shorten it."""
        self._signals += 1
        # uvicorn skips the wait for requests in progress at its second SIGINT; here that is the third signal.
        super().handle_exit(signal.SIGINT if self._signals > 2 else signal.SIGTERM, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain, then shut down as uvicorn does."""
        log.info("service_draining", seconds=self._drain_s)
        self._on_drain()
        self._close_after_answers()
        await self._wait(self._drain_s, lambda: True)
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            listener.close()
        await self._wait(LAST_REQUESTS_S, lambda: any(map(_is_idle, self.server_state.connections)))
        # Closing a connection with an unread request resets it: the client cannot know whether it was handled.
        await self._wait(LAST_REQUESTS_S, self._unread, even_hurried=True)
        await super().shutdown(sockets)

    def _close_after_answers(self) -> None:
        # Append, not replace: requests in progress hold this list. uvicorn stopped replacing it when the loop ended.
        self.server_state.default_headers.append((b"connection", b"close"))
        for connection in self.server_state.connections:
            if not _is_idle(connection):
                connection.cycle.keep_alive = False  # type: ignore[union-attr]

    def _unread(self) -> bool:
        """Whether an idle connection has a request that is not read yet."""
        poll = select.poll()
        for connection in self.server_state.connections:
            if _is_idle(connection) and not connection.transport.is_closing():
                poll.register(connection.transport.get_extra_info("socket").fileno(), select.POLLIN)
        return bool(poll.poll(0))

    async def _wait(self, longest_s: float, needed: Callable[[], bool], *, even_hurried: bool = False) -> None:
        """Wait while `needed`. Polls, because neither uvicorn nor a signal handler can set an event safely."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + longest_s
        while needed() and loop.time() < end_s and (even_hurried or self._signals < 2):  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)


def _is_idle(connection: Any) -> bool:
    """Whether a connection has no request in progress."""
    return connection.cycle is None or connection.cycle.response_complete
