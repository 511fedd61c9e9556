"""The HTTP protocol with limits on what a connection may cost, long before any key is looked at.

    connections   at most so many; one more is answered 503 and closed
    head          of bounded size and number of headers, within a bounded time
    body          in pieces that are worth their while; what comes after the answer is thrown away, for a moment
    pipeline      a few requests sent ahead of their answers
    answers       a client that does not read them is cut off

How fast a body has to come, while the service waits for it, is `service.gate`'s to say.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Final, NoReturn, final
from uuid import uuid4

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from service.headers import CONTENT_POLICY, SECURITY_HEADERS
from service.logging import REQUEST_ID_HEADER

#: Request line and headers together; browsers and proxies stay below a tenth of it.
MAX_HEAD_BYTES: Final = 65_536
#: Each header is looked through whenever one of them is looked for.
MAX_HEADERS: Final = 128
#: What is around a name and a value: a colon, a space and the end of the line.
HEADER_MARKS: Final = 4
HEAD_TOO_LONG: Final = f"at most {MAX_HEAD_BYTES} bytes are read"
TOO_MANY_HEADERS: Final = f"at most {MAX_HEADERS} headers are read"
#: Time for a head to arrive, from the connection or its own first byte.
HEAD_TIMEOUT_S: Final = 10.0
#: Requests that wait for the answer of the one before them. A read may hold thousands, and each takes kilobytes.
MAX_PIPELINED: Final = 16
#: Pieces of a body, such as chunks: this many, and one more for every so many bytes. Each is a call of Python's.
FREE_PIECES: Final = 1_024
PIECE_BYTES: Final = 64
#: What is read of a body whose request was answered already, so that its client can see the answer.
DISCARDED_BYTES: Final = 2**20
DISCARD_TIMEOUT_S: Final = 5.0
#: How long a client may read nothing of an answer, and how long one that was given up on may take to leave.
WRITE_TIMEOUT_S: Final = 30.0
CLOSE_TIMEOUT_S: Final = 5.0
#: How long a client that goes on sending may take to read why nobody listens, and how much of it is dropped unparsed
#: meanwhile; then it is kept waiting.
LINGER_S: Final = 1.0
DROPPED_BYTES: Final = 16 * 2**20
REFUSAL_HEADERS: Final = {**SECURITY_HEADERS, "Content-Security-Policy": CONTENT_POLICY}


class BoundedProtocol(HttpToolsProtocol):
    """Answers 431 to a head that is too large, closes on one that does not come, and refuses in problem documents."""

    #: Connections that may be open at once.
    connections_max: int | None = None

    _head_bytes = 0
    _parsed_bytes = 0
    _in_head = True
    _head_timer: asyncio.TimerHandle | None = None
    _headers_seen = 0
    _too_large = ""
    _pieces = 0
    _body_bytes = 0
    _idle_bytes = 0
    _moved_on = False
    _discard_timer: asyncio.TimerHandle | None = None
    _discarded = 0
    _deaf = False
    _lingering = False
    _dropped = 0
    _write_timer: asyncio.TimerHandle | None = None

    @classmethod
    def count_refusal(cls, reason: str) -> None:
        """Told of every connection that is refused, and why."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.connections_max is not None and len(self.connections) > self.connections_max:
            self.count_refusal("connections")
            # The client may not have sent anything yet, and asks nobody else's time.
            self._refuse(503, "Overloaded", "overloaded", "too many connections are open; try again later", retry=True)
            return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_arrived()
        self._stop_discarding()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._deaf or self.transport.is_closing():
            self._dropped += len(data)
            if self._dropped > DROPPED_BYTES:
                self.flow.pause_reading()
            return
        self._unset_keepalive_if_required()
        self._moved_on = False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            # uvicorn would write a line about it, whoever sends it and however often.
            self.send_400_response("the request is not HTTP, or not one that is served here")
            return
        except httptools.HttpParserUpgrade:
            # There is no other protocol here: the request is answered as it is, and what follows is not HTTP.
            self._deaf = True
            if self.cycle is not None:
                self.cycle.keep_alive = False
            return
        self._count(len(data))

    def _count(self, received: int) -> None:
        """Looked at after parsing: one chunk may hold a head and much of its body. A head that is complete by then was
        counted as it was parsed, see `_count_parsed`; this is for one of which the parser tells nothing yet."""
        if self.transport.is_closing():
            return
        if self._in_head:
            self._head_bytes += received
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse_head(HEAD_TOO_LONG)
            return
        # Trailers and extensions of chunks are bytes of a body that lead nowhere, and the parser keeps the former.
        self._idle_bytes = 0 if self._moved_on else self._idle_bytes + received
        if self._discard_timer is not None:
            self._discarded += received
        if self._idle_bytes > MAX_HEAD_BYTES or self._discarded > DISCARDED_BYTES:
            self._linger()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._headers_seen = self._parsed_bytes = self._pieces = self._body_bytes = 0
        self._await_head()

    def on_url(self, url: bytes) -> None:
        self._count_parsed(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers_seen += 1
        if self._headers_seen > MAX_HEADERS:
            self._end_parsing(TOO_MANY_HEADERS)
        self._count_parsed(len(name) + len(value) + HEADER_MARKS)
        # Trailers come when the request was taken for what it is: as headers they would change it under way.
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._head_arrived()
        if len(self.pipeline) >= MAX_PIPELINED:
            self.transport.abort()  # an answer would be taken for that of an earlier request
            raise ValueError("too many requests at once")
        super().on_headers_complete()
        if self.cycle is not None:
            self.cycle.transport = _Lingering(self, self.cycle)  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        self._moved_on = True
        self._pieces += 1
        self._body_bytes += len(body)
        if self._pieces > FREE_PIECES + self._body_bytes // PIECE_BYTES:
            raise ValueError("too many pieces")
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._moved_on = True
        self._stop_discarding()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self._lingering:  # nothing comes after this answer, and nothing more is read
            return
        super().on_response_complete()
        if self.transport.is_closing():
            self._close()
        elif self.cycle.response_complete and self.cycle.more_body:
            self._discarded = 0
            self._discard_timer = self.loop.call_later(DISCARD_TIMEOUT_S, self._close)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(WRITE_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def send_400_response(self, msg: str) -> None:
        if self._too_large:
            self._refuse_head(self._too_large)
        else:
            self._refuse(400, "Bad Request", "bad-request", msg)

    def _count_parsed(self, length: int) -> None:
        """Trailers count as well: the parser keeps them like headers."""
        self._parsed_bytes += length
        if self._parsed_bytes > MAX_HEAD_BYTES:
            self._end_parsing(HEAD_TOO_LONG)

    def _end_parsing(self, reason: str) -> NoReturn:
        self._too_large = reason  # what `send_400_response` will say, which the parser's error leads to
        raise ValueError(reason)

    def _await_head(self) -> None:
        self._head_arrived()
        self._in_head, self._head_bytes = True, 0
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._close)

    def _head_arrived(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_discarding(self) -> None:
        if self._discard_timer is not None:
            self._discard_timer.cancel()
            self._discard_timer = None

    def _refuse_head(self, detail: str) -> None:
        self.count_refusal("head")
        self._refuse(431, "Head Too Large", "head-too-large", detail)

    def _refuse(self, status: int, title: str, slug: str, detail: str, *, retry: bool = False) -> None:
        """Answer a request that never became one, and close."""
        if self.transport.is_closing() or not self._may_answer():
            return
        # Nothing is logged of it; the id is there for those who read problems and know them to have one.
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
            *(["retry-after: 1"] if retry else []),
        ]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        if retry:  # room is what is missing
            self._close()
        else:
            self._linger()

    def _may_answer(self) -> bool:
        """Whether the next answer is that of what is refused; where it is another's, that one is the last."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return True
        if not cycle.more_body:
            self._deaf = True
            cycle.keep_alive = False
            return False
        # It is the body of this one that is wrong: whoever reads it is told that the client has gone.
        cycle.disconnected = True
        cycle.message_event.set()
        if cycle.response_started or self.pipeline:
            self._linger()
            return False
        return True

    def _linger(self) -> None:
        """Listen no more, and close in a moment: the reset that unread bytes lead to may overtake the answer."""
        self._head_arrived()
        self._stop_discarding()
        self._deaf = self._lingering = True
        self.flow.resume_reading()
        self.transport.write_eof()
        self.loop.call_later(LINGER_S, self._close)

    def _close(self) -> None:
        """Close when all is sent, or when that takes too long."""
        self._head_arrived()
        self._stop_discarding()
        self.transport.close()
        self.loop.call_later(CLOSE_TIMEOUT_S, self.transport.abort)


@final
class _Lingering:
    """What a request's answer is written to: closed before its body was read, it lingers."""

    def __init__(self, protocol: BoundedProtocol, cycle: RequestResponseCycle) -> None:
        self._protocol = protocol
        self._cycle = cycle

    def write(self, data: bytes) -> None:
        self._protocol.transport.write(data)

    def is_closing(self) -> bool:
        return self._protocol.transport.is_closing()

    def close(self) -> None:
        if self._cycle.more_body and not self.is_closing():
            self._protocol._linger()
        else:
            self._protocol.transport.close()


def limited_protocol(connections_max: int, count_refusal: Callable[[str], None]) -> type[BoundedProtocol]:
    """The protocol of a server that has room for so many connections."""

    class LimitedProtocol(BoundedProtocol):
        @classmethod
        def count_refusal(cls, reason: str) -> None:
            count_refusal(reason)

    LimitedProtocol.connections_max = connections_max
    return LimitedProtocol
