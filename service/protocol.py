"""The HTTP protocol with a limit on what comes before the body: a head of bounded size within a bounded time.

The parser keeps an unfinished head in memory and waits for the rest of it for ever; both are a client's to abuse long
before any key is looked at.
"""

from __future__ import annotations

import asyncio
import json
from typing import Final, final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

#: Request line and headers together; browsers and proxies stay below a tenth of it.
MAX_HEAD_BYTES: Final = 65_536
#: Time for a head to arrive, from the connection or the end of the request before.
HEAD_TIMEOUT_S: Final = 30.0


@final
class BoundedHeadProtocol(HttpToolsProtocol):
    """Answers 431 to a head that is too large, closes on one that does not come, and refuses in problem documents."""

    _in_head = True
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_arrived()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # Looked at after parsing: one chunk may hold a head and much of its body.
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self._refuse(431, "Head Too Large", "head-too-large", f"at most {MAX_HEAD_BYTES} bytes are read")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        self._head_arrived()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "Bad Request", "bad-request", msg)

    def _await_head(self) -> None:
        self._head_arrived()
        self._in_head, self._head_bytes = True, 0
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _head_arrived(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, status: int, title: str, slug: str, detail: str) -> None:
        """Answer a request that never became one, and close."""
        problem = {"type": f"/problems/{slug}", "title": title, "status": status, "detail": detail}
        body = json.dumps(problem).encode()
        head = (
            f"HTTP/1.1 {status} {title}\r\ncontent-type: application/problem+json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
