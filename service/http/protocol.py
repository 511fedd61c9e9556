"""uvicorn's HTTP protocol with the limits that neither uvicorn nor ASGI code can set.

    connections      a maximum number; for one more, the one that has waited longest for its client is closed
    request headers  limited in bytes, number and time; more is answered 431, too slow is closed
    body             a chunked body of tiny chunks is answered 400; `admission.py` limits its size and speed
    pipeline         a limited number of requests sent ahead of their answers

Time limits for slow readers and for unread bodies are left to the reverse proxy, see docs/operations.md.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Final, final
from uuid import uuid4

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from metaban.service.http.admission import PROBES, network_of
from metaban.service.http.response_headers import CONTENT_POLICY, SECURITY_HEADERS
from metaban.service.telemetry.logging import REQUEST_ID_HEADER

#: Request line and headers together.
MAX_HEADER_BYTES: Final = 65_536

MAX_HEADERS: Final = 128

#: Bytes of a header line that are neither name nor value: colon, space, end of line.
HEADER_MARKS: Final = 4

HEADERS_TOO_LONG: Final = f"at most {MAX_HEADER_BYTES} bytes are read"

TOO_MANY_HEADERS: Final = f"at most {MAX_HEADERS} headers are read"

#: Time for request headers to arrive, from the start of the connection or from their first byte.
HEADERS_TIMEOUT_S: Final = 10.0

#: Requests that wait for the answer to an earlier one. One read may hold thousands.
MAX_PIPELINED: Final = 16

#: Pieces of a body, such as chunks: this many, and one more for every `PIECE_BYTES`. Each costs a Python call.
FREE_PIECES: Final = 1_024

PIECE_BYTES: Final = 64

#: Time a refused client has to finish sending and read the refusal: closing earlier resets the connection, and the
#: reset may come before the refusal.
LINGER_S: Final = 1.0

#: Pause after each piece of a body that was answered early.
DROP_PAUSE_S: Final = 0.001

REFUSAL_HEADERS: Final = {**SECURITY_HEADERS, "Content-Security-Policy": CONTENT_POLICY}


@final
@dataclass(slots=True)
class _Network:
    """The open connections of one address, or of one IPv6 network."""

    open: int = 0
    #: Those that wait for their client, to send or to read; the longest waiting first.
    waiting: dict[LimitedProtocol, None] = field(default_factory=dict)


class LimitedProtocol(HttpToolsProtocol):
    """Refuses with problem documents what never becomes an ASGI request."""

    connections_max: int | None = None
    #: The networks of all clients of a server, by `network_of`.
    networks: ClassVar[dict[str, _Network]] = {}

    #: Bytes of the headers parsed so far, and bytes received since the parser last reported headers or body.
    _header_bytes = 0
    _unreported_bytes = 0
    _pieces = 0
    _body_bytes = 0
    _refusal = ""
    #: Whether everything received from now on is dropped.
    _ignoring = False
    _header_timer: asyncio.TimerHandle | None = None

    @classmethod
    def count_refusal(cls, reason: str) -> None:
        """Called for every refused connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._network = self.networks.setdefault(network_of(self.client), _Network())
        self._network.open += 1
        if self.connections_max is not None and len(self.connections) > self.connections_max:
            self.count_refusal("connections")
            if not self._close_longest_waiting():
                self._answer(503, "Overloaded", "overloaded", "too many connections are open; try again later")
                transport.close()
                return
        self._network.waiting[self] = None
        self._header_timer = self.loop.call_later(HEADERS_TIMEOUT_S, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        self._network.waiting.pop(self, None)
        self._network.open -= 1
        if not self._network.open:
            del self.networks[network_of(self.client)]
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._ignoring or self.transport.is_closing():
            return
        self._unreported_bytes += len(data)
        super().data_received(data)
        if self._ignoring:
            return  # refused by the parser: one refusal is enough
        if self._unreported_bytes > MAX_HEADER_BYTES:
            # Headers that are not complete yet, trailers or chunk extensions: the parser keeps these in memory.
            self._refusal = HEADERS_TOO_LONG
            self.send_400_response("")
        elif not self._has_headers():
            if self._header_timer is None:
                self._header_timer = self.loop.call_later(HEADERS_TIMEOUT_S, self.transport.close)
        elif self.cycle.response_complete:
            # The rest of a body that was answered early: dropped, and not waited for longer than a new request.
            if self.timeout_keep_alive_task is None:
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )
            # Read with pauses: the event loop would take dozens of such pieces in a row before it serves others.
            self.flow.pause_reading()
            self.loop.call_later(DROP_PAUSE_S, self._read_on)
        # A connection is judged by its latest request. Admission limits how many wait for us; it does not limit probes.
        cycle = self.cycle
        if cycle is not None and not (
            cycle.response_complete or cycle.more_body or cycle.scope["path"].startswith(PROBES)
        ):
            self._network.waiting.pop(self, None)

    def _read_on(self) -> None:
        if not self.transport.is_closing():
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        waiting = self._network.waiting
        waiting.pop(self, None)
        if self.cycle.response_complete or self.cycle.more_body:
            waiting[self] = None

    def pause_writing(self) -> None:
        super().pause_writing()
        if not self.transport.is_closing():
            self._network.waiting[self] = None  # until this answer is sent, since the client does not read it

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._has_headers():
            return  # a trailer: as a header it would change a request that is in progress
        self._header_bytes += len(name) + len(value) + HEADER_MARKS
        if len(self.headers) >= MAX_HEADERS:
            self._refusal = TOO_MANY_HEADERS
        elif len(self.url) + self._header_bytes > MAX_HEADER_BYTES:
            self._refusal = HEADERS_TOO_LONG
        if self._refusal:
            raise ValueError(self._refusal)  # stops the parser, which leads to `send_400_response`
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._header_timer is not None:
            self._stop_header_timer()
        self._header_bytes = self._unreported_bytes = self._pieces = self._body_bytes = 0
        if len(self.pipeline) >= MAX_PIPELINED:
            self.transport.abort()  # a refusal would be read as the answer to an earlier request
            raise ValueError("too many pipelined requests")
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unreported_bytes = 0
        self._pieces += 1
        self._body_bytes += len(body)
        if self._pieces > FREE_PIECES + self._body_bytes // PIECE_BYTES:
            raise ValueError("too many pieces")
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        """Refuse what the parser refused, in the place of the answer that is due, if it is due now."""
        cycle = self.cycle
        if self.transport.is_closing():
            return
        if cycle is not None and not cycle.response_complete and not cycle.more_body:
            # The refused request follows one that is being answered: its answer is the last.
            self._ignoring = True
            cycle.keep_alive = False
            return
        if cycle is not None and cycle.more_body:
            # The body is refused: the application gets a disconnect message.
            cycle.disconnected = True
            cycle.message_event.set()
            if cycle.response_started or self.pipeline:
                self.transport.close()
                return
        if self._refusal:
            self.count_refusal("head")
            self._answer(431, "Head Too Large", "head-too-large", self._refusal)
        else:
            self._answer(400, "Bad Request", "bad-request", "the request is not HTTP, or not one that is served here")
        self._ignoring = True
        self._stop_header_timer()
        self.flow.resume_reading()
        self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)

    def _has_headers(self) -> bool:
        """Whether the headers of the latest request are complete."""
        return self.cycle is not None and self.cycle.scope is self.scope

    def _close_longest_waiting(self) -> bool:
        """Close one connection that waits for its client, of the network that has most of them; False if none waits.

        A client with few connections keeps them, whatever another one opens. Those behind one proxy share one network.
        """
        waiting = max((network.waiting for network in self.networks.values()), key=len)
        longest = next(iter(waiting), None)
        if longest is None:
            return False
        del waiting[longest]
        longest.transport.abort()  # close() would wait for a client that does not read
        return True

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _answer(self, status: int, title: str, slug: str, detail: str) -> None:
        instance = uuid4().hex
        problem = {
            "type": f"/problems/{slug}",
            "title": title,
            "status": status,
            "detail": detail,
            "instance": instance,
        }
        body = json.dumps(problem).encode()
        lines = [
            f"HTTP/1.1 {status} {title}",
            "content-type: application/problem+json",
            f"content-length: {len(body)}",
            f"{REQUEST_ID_HEADER}: {instance}",
            "connection: close",
            *(f"{name}: {value}" for name, value in REFUSAL_HEADERS.items()),
            *(["retry-after: 1"] if status == 503 else []),
        ]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)


def limited_protocol(connections_max: int, count_refusal: Callable[[str], None]) -> type[LimitedProtocol]:
    """The protocol class of a server with this many connections at most."""

    class ServerProtocol(LimitedProtocol):
        @classmethod
        def count_refusal(cls, reason: str) -> None:
            count_refusal(reason)

    ServerProtocol.connections_max = connections_max
    ServerProtocol.networks = {}
    return ServerProtocol
