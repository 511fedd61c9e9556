"""A real HTTP server with scripted answers, for answers that a healthy service does not give, and calls to it."""

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

from metaban.client import Decision, Metaban


@final
@dataclass(frozen=True)
class Received:
    """A received request."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@final
@dataclass(frozen=True)
class Answer:
    """An answer. Status 0 resets the connection after the request; -1 sends nothing until the server closes."""

    status: int
    body: Any = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def content(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


HANG_UP = Answer(0)
SILENCE = Answer(-1)


@final
class ScriptedServer:
    """Sends the given answers in turn, then the last one again and again, and records the requests."""

    def __init__(self, answers: Iterable[Answer]) -> None:
        self._answers = list(answers)
        self.received: list[Received] = []
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
        # Names of headers are case-insensitive.
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.received.append(Received(request.command, request.path, headers, body))
        answer = self._answers[min(len(self.received), len(self._answers)) - 1]
        if answer.status == SILENCE.status:
            self._closed.wait()
        if answer.status <= 0:
            request.close_connection = True
            # A reset, as from a killed process.
            request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            request.connection.close()
            return
        request.send_response(answer.status)
        for name, value in {"Content-Length": str(len(answer.content)), **answer.headers}.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(answer.content)


KEY = "k3y-that-must-not-be-seen"
ITEM = {"arm_id": "a", "rank": 1, "score": 0.75, "mean": 0.5, "bonus": 0.25, "propensity": 1, "group_size": 2}
DECISION = {
    "decision_id": "d",
    "items": [ITEM],
    "policy": "ucb-floor",
    "model_version": 3,
    "user_version": 7,
    "cold_start": None,
    "logged": True,
    "took_ms": 2,
}
OK = Answer(200, DECISION)
ARMS = {"a": [1.0, 0.0], "b": [0.0, 1.0]}
PROBLEM = {
    "type": "/problems/invalid-input",
    "title": "Invalid input",
    "status": 422,
    "detail": "k: is 3",
    "instance": "request-1",
    "errors": [{"field": "k", "detail": "is 3"}],
}


def ask(server: ScriptedServer, **options: Any) -> Decision:
    """A repeatable call."""
    with Metaban(server.url, **options) as metaban:
        return metaban.recommend("u", ARMS)


def create_snapshot(server: ScriptedServer, **options: Any) -> None:
    """A call that must not be repeated."""
    with Metaban(server.url, **options) as metaban:
        metaban.admin.snapshots.create()


def unused_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port
