"""Stops serving without losing a request that reached us.

    told to stop      /health/ready says 503, every answer says `Connection: close`; all is served for the drain time
    drained           the system drops new connections, those it has taken already are accepted; the listener closes
    last requests     connections that are open may still send one request, for a moment
    under way         requests begun are finished, within uvicorn's time limit

A second signal skips the waiting of the first three, a third one that for requests under way too.
"""

from __future__ import annotations

import asyncio
import ctypes
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import FrameType
from typing import Any, Final, final

import uvicorn

#: Time for a handshake that was begun to be completed by the other side.
HANDSHAKE_S: Final = 0.1
#: Longest time for accepting what waits to be accepted.
ACCEPT_REST_S: Final = 5.0
#: Time for open connections to send one more request, which a client may have on its way.
LAST_REQUESTS_S: Final = 1.0
POLL_S: Final = 0.02
#: Of Linux, on all but a few forgotten architectures; Python does not name it.
SO_ATTACH_FILTER: Final = 26
#: A program for the system's packet filter: drop a segment with the SYN flag, let every other one pass.
DROP_SYN: Final = (
    (0x30, 0, 0, 13),  # load the byte of flags in the TCP header
    (0x45, 0, 1, 0x02),  # SYN?
    (0x06, 0, 0, 0),  # drop
    (0x06, 0, 0, 0xFFFFFFFF),  # pass
)


@final
class DrainingServer(uvicorn.Server):
    """uvicorn, which stops more gently."""

    def __init__(self, config: uvicorn.Config, *, drain_s: float, on_drain: Callable[[], None]) -> None:
        super().__init__(config)
        self._drain_s = drain_s
        self._on_drain = on_drain
        self._signals = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal begins the stop, the others hurry it."""
        self._signals += 1
        # uvicorn takes a second SIGINT for the third of ours.
        super().handle_exit(signal.SIGINT if self._signals > 2 else signal.SIGTERM, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain, then stop as uvicorn does."""
        listeners = sockets or []
        self._on_drain()
        self._close_after_answers()
        await self._wait(self._drain_s, lambda: True)
        await self._stop_accepting(listeners)
        await self._wait(LAST_REQUESTS_S, lambda: any(map(_is_idle, self.server_state.connections)))
        # Closed with a request unread, a connection would be reset, and the client not know what became of it.
        await self._wait(LAST_REQUESTS_S, self._unread, even_hurried=True)
        await super().shutdown(sockets)

    def _close_after_answers(self) -> None:
        # Requests keep the list of headers that was there when they began; it was exchanged every second until now.
        self.server_state.default_headers.append((b"connection", b"close"))
        for connection in self.server_state.connections:
            if not _is_idle(connection):
                connection.cycle.keep_alive = False  # type: ignore[union-attr]

    async def _stop_accepting(self, listeners: Iterable[socket.socket]) -> None:
        for listener in listeners:
            turn_away(listener)
        await self._wait(HANDSHAKE_S, lambda: True)
        await self._wait(
            ACCEPT_REST_S, lambda: _readable(listener.fileno() for listener in listeners), even_hurried=True
        )
        for server in self.servers:
            server.close()
        for listener in listeners:
            listener.close()

    def _unread(self) -> bool:
        """Whether a connection that looks idle has a request waiting to be read."""
        idle = [connection for connection in self.server_state.connections if _is_idle(connection)]
        return _readable(
            connection.transport.get_extra_info("socket").fileno()
            for connection in idle
            if not connection.transport.is_closing()
        )

    async def _wait(self, longest_s: float, needed: Callable[[], bool], *, even_hurried: bool = False) -> None:
        """Wait while it is needed; polling, since neither uvicorn nor a signal handler can set an event safely."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + longest_s
        while needed() and loop.time() < end_s and (even_hurried or self._signals < 2):  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)


def turn_away(listener: socket.socket) -> None:
    """Have no new connection begun, while those that are begun can still be accepted.

    Closing a listener resets what it has not accepted yet. With new ones dropped before they count as connected, the
    queue can be emptied first; their clients try again after a second, and find the port closed or a new owner. Where
    the system has no such filter, a connection made in the very moment of closing may be reset.
    """
    if sys.platform != "linux":
        return
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in DROP_SYN))
    with suppress(OSError):
        listener.setsockopt(
            socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", len(DROP_SYN), ctypes.addressof(program))
        )


def _is_idle(connection: Any) -> bool:
    """Whether a connection has no request under way."""
    return connection.cycle is None or connection.cycle.response_complete


def _readable(descriptors: Iterable[int]) -> bool:
    poll = select.poll()
    for descriptor in descriptors:
        if descriptor >= 0:
            poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))
