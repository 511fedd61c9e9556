"""A real HTTP server that answers as it is told, for what a healthy service does not do."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self, final


@final
@dataclass(frozen=True)
class Heard:
    """A request that arrived."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@final
@dataclass(frozen=True)
class Say:
    """An answer. Status 0 hangs up instead, after the request was read; -1 says nothing until the server is closed."""

    status: int
    body: Any = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def content(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


HANG_UP = Say(0)
SILENCE = Say(-1)


@final
class Answering:
    """Says one thing after the other, the last one for ever, and remembers what it heard."""

    def __init__(self, answers: Iterable[Say]) -> None:
        self._answers = list(answers)
        self.heard: list[Heard] = []
        self._closed = threading.Event()
        listener = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one(self) -> None:
                listener._handle(self)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_one

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handle(self, request: BaseHTTPRequestHandler) -> None:
        if request.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(request.rfile.readline(), 16):
                body += request.rfile.read(size)
                request.rfile.readline()
            request.rfile.readline()
        else:
            body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        # Names of headers are the same however they are written.
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.heard.append(Heard(request.command, request.path, headers, body))
        say = self._answers[min(len(self.heard), len(self._answers)) - 1]
        if say.status == SILENCE.status:
            self._closed.wait()
        if say.status <= 0:
            request.close_connection = True
            # With a reset, as from a process that was killed.
            request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            request.connection.close()
            return
        request.send_response(say.status)
        for name, value in {"Content-Length": str(len(say.content)), **say.headers}.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(say.content)
