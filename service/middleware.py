"""Around every request: its id, its log line, its latency, the headers of its response, and the last resort."""

from __future__ import annotations

import time
from typing import Final, final

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.logging import REQUEST_ID_HEADER, begin_request
from service.metrics import Metrics
from service.problems import unexpected_problem

#: Answers hold decisions about people: no cache may keep them, no browser may guess what they are.
SECURITY_HEADERS: Final = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
#: What nginx logs when the client hangs up; never sent.
CLIENT_CLOSED_REQUEST: Final = 499
METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

_log = structlog.stdlib.get_logger("service.access")


@final
class RequestContext:
    """ASGI middleware, the outermost of ours."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s = time.perf_counter()
        request_id = begin_request(Headers(scope=scope).get(REQUEST_ID_HEADER))
        status: int | None = None

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID_HEADER] = request_id
                headers.update(SECURITY_HEADERS)
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except ClientDisconnect:
            status = CLIENT_CLOSED_REQUEST
        except Exception:
            _log.exception("unexpected_error", method=_method(scope), path=_route(scope))
            if status is not None:
                # Half an answer is out; only a broken connection can tell the client so.
                raise
            await unexpected_problem()(scope, receive, send_with_headers)
        finally:
            self._record(scope, status, time.perf_counter() - started_s)

    def _record(self, scope: Scope, status: int | None, elapsed_s: float) -> None:
        route, method = _route(scope), _method(scope)
        shown = status if status is not None else CLIENT_CLOSED_REQUEST
        self._metrics.request_seconds.labels(method, route, str(shown)).observe(elapsed_s)
        # Probes come every few seconds and say something only when they fail.
        write = _log.debug if route.startswith("/health/") and shown < 400 else _log.info
        write("request", method=method, path=route, status=shown, took_ms=round(elapsed_s * 1e3, 3))


def _route(scope: Scope) -> str:
    """The pattern of the path, not the path: that may name a user, whom no log line may hold, and a label must not take
    as many values as clients can think of."""
    return getattr(scope.get("route"), "path", "unmatched")


def _method(scope: Scope) -> str:
    return scope["method"] if scope["method"] in METHODS else "other"
