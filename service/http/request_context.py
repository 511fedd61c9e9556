"""Request context: the id, log line, span and latency of every request, the headers of its response, HEAD as GET."""

from __future__ import annotations

import re
import time
from contextlib import nullcontext
from typing import Final, final
from uuid import uuid4

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from metaban.service.http.admission import PROBES, TokenBuckets
from metaban.service.http.problems import unexpected_problem
from metaban.service.http.response_headers import CONTENT_POLICY, DOCS_PATH, DOCS_POLICY, SCHEMA_PATH, SECURITY_HEADERS
from metaban.service.telemetry.logging import REQUEST_ID_HEADER
from metaban.service.telemetry.metrics import REFUSED_STATUSES, Metrics
from metaban.service.telemetry.tracing import TRACE_PARENT_HEADER, RequestSpan, Tracing, request_span, trace_id_in

#: The status nginx logs when the client disconnects; never sent.
CLIENT_CLOSED_REQUEST: Final = 499

METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

REQUEST_ID_PATTERN: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")

UNMATCHED: Final = "unmatched"

#: Pages of the framework, whose routes are not in the scope.
PAGES: Final = frozenset({DOCS_PATH, SCHEMA_PATH})

#: Refusals that cost a client next to nothing. Only so many of them are logged per second, and at once.
CHEAP_STATUSES: Final = frozenset({401, 408, 413, 421, 429, 503})

CHEAP_LINES_PER_S: Final = 20.0

CHEAP_LINES_AT_ONCE: Final = 200

_log = structlog.stdlib.get_logger(__name__)


@final
class RequestContext:
    """The outermost ASGI middleware."""

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
        headers = Headers(scope=scope)
        exchange = _Exchange(scope, send, begin_request(headers.get(REQUEST_ID_HEADER)))
        trace_parent = headers.get(TRACE_PARENT_HEADER)
        span = None
        if trace_parent is not None or self._tracing is not None:
            span = self._begin_span(scope, trace_parent)
        try:
            with nullcontext() if span is None else request_span(span):
                await self._app(exchange.scope, receive, exchange.send)
        except ClientDisconnect:
            exchange.status = CLIENT_CLOSED_REQUEST
        except Exception:
            _log.exception("unexpected_error", method=exchange.method, route=_route(exchange.scope))
            if exchange.status is not None:
                # Half an answer is sent; only a broken connection can tell the client.
                raise
            await unexpected_problem()(exchange.scope, receive, exchange.send)
        finally:
            self._record(exchange, span)

    def _begin_span(self, scope: Scope, trace_parent: str | None) -> RequestSpan | None:
        """The request's span, if tracing is on and it is no probe; log lines name the trace in any case."""
        span = None
        if self._tracing is not None and not scope["path"].startswith(PROBES):
            span = self._tracing.begin(trace_parent)
        trace_id = span.trace_id if span is not None else trace_id_in(trace_parent)
        if trace_id is not None:
            structlog.contextvars.bind_contextvars(trace_id=trace_id)
        return span

    def _record(self, exchange: _Exchange, span: RequestSpan | None) -> None:
        elapsed_s = time.perf_counter() - exchange.began_s
        route, method = _route(exchange.scope), exchange.method
        status = exchange.status if exchange.status is not None else CLIENT_CLOSED_REQUEST
        state = exchange.scope["state"]
        namespace = state.get("namespace")
        self._metrics.request_seconds.labels(method, route, str(status)).observe(elapsed_s)
        if status in REFUSED_STATUSES:
            self._metrics.rejected.labels(REFUSED_STATUSES[status]).inc()
        if span is not None:
            span.finish(method=method, route=route, status=status, namespace=namespace)
        if (status in CHEAP_STATUSES or route == UNMATCHED) and self._lines.take(""):
            self._unwritten += 1
            return
        fields = {
            "method": method,
            "route": route,
            "status": status,
            "took_ms": round(elapsed_s * 1e3, 3),
            "bytes_in": state.get("bytes_in", 0),
            "bytes_out": exchange.bytes_out,
        }
        for name in ("key", "namespace", "problem"):
            if name in state:
                fields[name] = state[name]
        if self._unwritten:
            fields["unwritten"] = self._unwritten
            self._unwritten = 0
        # Successful probes come every few seconds and say nothing new.
        write = _log.debug if route.startswith(PROBES) and status < 400 else _log.info
        write("request", **fields)


@final
class _Exchange:
    """One request and its answer."""

    __slots__ = ("_request_id", "_send", "_without_body", "began_s", "bytes_out", "method", "scope", "status")

    def __init__(self, scope: Scope, send: Send, request_id: str) -> None:
        self.began_s = time.perf_counter()
        # The log and metric label must not take any value a client can invent.
        self.method = scope["method"] if scope["method"] in METHODS else "other"
        # FastAPI's routes do not know HEAD (RFC 9110, 9.3.2): it is answered as GET, without the body. A copy, since
        # uvicorn reads the method of its own scope.
        self._without_body = scope["method"] == "HEAD"
        scope.setdefault("state", {})
        self.scope: Scope = {**scope, "method": "GET"} if self._without_body else scope
        self._send = send
        self._request_id = request_id
        self.status: int | None = None
        self.bytes_out = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers[REQUEST_ID_HEADER] = self._request_id
            headers.update(SECURITY_HEADERS)
            policy = DOCS_POLICY if self.scope["path"] == DOCS_PATH else CONTENT_POLICY
            headers.setdefault("Content-Security-Policy", policy)
        elif message["type"] == "http.response.body":
            if self._without_body:
                message = {**message, "body": b""}
            self.bytes_out += len(message.get("body", b""))
        await self._send(message)


def begin_request(offered: str | None) -> str:
    """Start the log context of one request; returns its id: the offered one if it is well-formed, or a new one."""
    chosen = offered if offered is not None and REQUEST_ID_PATTERN.fullmatch(offered) else uuid4().hex
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(request_id=chosen)
    return chosen


def _route(scope: Scope) -> str:
    """The route's pattern, not the path: paths are unbounded as label values, and hold ids."""
    if scope["path"] in PAGES:
        return str(scope["path"])
    return getattr(scope.get("route"), "path", UNMATCHED)
