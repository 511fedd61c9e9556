"""Around every request: its id, its log line, its span, its latency, the headers of its response, the last resort."""

from __future__ import annotations

import time
from http import HTTPStatus
from typing import Any, Final, final

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.buckets import TokenBuckets
from service.headers import DOCS_PATH, SCHEMA_PATH, secure
from service.logging import REQUEST_ID_HEADER, begin_request
from service.metrics import REFUSED_STATUSES, Metrics
from service.problems import unexpected_problem
from service.protocol import DISCARDED_BYTES
from service.tracing import TRACE_PARENT_HEADER, RequestSpan, Tracing, request_span, trace_id_in

#: What nginx logs when the client hangs up; never sent.
CLIENT_CLOSED_REQUEST: Final = 499
METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
PROBES: Final = "/health/"
UNMATCHED: Final = "unmatched"
#: The framework's own, of whose routes the scope tells nothing.
PAGES: Final = frozenset({DOCS_PATH, SCHEMA_PATH})
#: Answers that cost next to nothing to get. Of these so many have a line a second, and so many at once.
CHEAP_STATUSES: Final = frozenset({401, 408, 413, 421, 429, 503})
CHEAP_LINES_PER_S: Final = 20.0
CHEAP_LINES_AT_ONCE: Final = 200

_log = structlog.stdlib.get_logger("service.access")


@final
class RequestContext:
    """ASGI middleware, the outermost of ours."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics, tracing: Tracing | None = None) -> None:
        self._app = app
        self._metrics = metrics
        self._tracing = tracing
        self._lines = TokenBuckets(CHEAP_LINES_PER_S, CHEAP_LINES_AT_ONCE)
        self._unwritten = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send)
        headers = Headers(scope=scope)
        exchange.request_id = begin_request(headers.get(REQUEST_ID_HEADER))
        span = self._begin_span(scope, headers.get(TRACE_PARENT_HEADER))
        try:
            with request_span(span):
                await self._app(scope, exchange.receive, exchange.send)
        except ClientDisconnect:
            exchange.status = CLIENT_CLOSED_REQUEST
        except Exception:
            _log.exception("unexpected_error", method=_method(scope), route=_route(scope))
            if exchange.status is not None:
                # Half an answer is out; only a broken connection can tell the client so.
                raise
            await unexpected_problem()(scope, exchange.receive, exchange.send)
        finally:
            self._record(scope, exchange, span)

    def _begin_span(self, scope: Scope, trace_parent: str | None) -> RequestSpan | None:
        """The request's span, if spans are made, and not of probes; lines of the log name the trace in any case."""
        span = None
        if self._tracing is not None and not scope["path"].startswith(PROBES):
            span = self._tracing.begin(trace_parent)
        trace_id = span.trace_id if span is not None else trace_id_in(trace_parent)
        if trace_id is not None:
            structlog.contextvars.bind_contextvars(trace_id=trace_id)
        return span

    def _record(self, scope: Scope, exchange: _Exchange, span: RequestSpan | None) -> None:
        elapsed_s = time.perf_counter() - exchange.began_s
        route, method = _route(scope), _method(scope)
        status = exchange.status if exchange.status is not None else CLIENT_CLOSED_REQUEST
        state = scope["state"]
        namespace = state.get("namespace")
        self._metrics.request_seconds.labels(method, route, str(status)).observe(elapsed_s)
        if status in REFUSED_STATUSES:
            self._metrics.rejected.labels(REFUSED_STATUSES[status]).inc()
        if span is not None:
            span.finish(method=method, route=route, status=status, namespace=namespace)
        if (status in CHEAP_STATUSES or route == UNMATCHED) and self._lines.take(""):
            self._unwritten += 1
            return
        told: dict[str, Any] = {"key": state.get("key"), "namespace": namespace, "unwritten": self._unwritten or None}
        self._unwritten = 0
        # Probes come every few seconds and say something only when they fail.
        write = _log.debug if route.startswith(PROBES) and status < 400 else _log.info
        write(
            "request",
            method=method,
            route=route,
            status=status,
            took_ms=round(elapsed_s * 1e3, 3),
            bytes_in=exchange.bytes_in,
            bytes_out=exchange.bytes_out,
            **{name: value for name, value in told.items() if value is not None},
        )


@final
class _Exchange:
    """One request and its answer, as they pass."""

    __slots__ = ("_complete", "_receive", "_scope", "_send", "began_s", "bytes_in", "bytes_out", "request_id", "status")

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})
        self._scope = scope
        self._receive = receive
        self._send = send
        self._complete = False
        self.began_s = time.perf_counter()
        self.request_id = ""
        self.status: int | None = None
        self.bytes_in = 0
        self.bytes_out = 0

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self.bytes_in += len(message.get("body", b""))
            self._complete = not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers[REQUEST_ID_HEADER] = self.request_id
            secure(headers, self._scope)
            if not self._complete and (self.status == HTTPStatus.REQUEST_TIMEOUT or _may_be_long(self._scope)):
                # Its rest is not waited for or read to the end, and the client should not use the connection again.
                headers["Connection"] = "close"
        elif message["type"] == "http.response.body":
            self.bytes_out += len(message.get("body", b""))
        await self._send(message)


def _may_be_long(scope: Scope) -> bool:
    """Whether a body is announced that is more than what is read for politeness."""
    for name, value in scope["headers"]:
        if name == b"transfer-encoding":
            return True
        if name == b"content-length":
            return not (value.isdigit() and len(value) < 19 and int(value) <= DISCARDED_BYTES)
    return False


def _route(scope: Scope) -> str:
    """The pattern, not the path: a label must not take as many values as clients can think of, nor a log hold ids."""
    if scope["path"] in PAGES:
        return str(scope["path"])
    return getattr(scope.get("route"), "path", UNMATCHED)


def _method(scope: Scope) -> str:
    return scope["method"] if scope["method"] in METHODS else "other"
