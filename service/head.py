"""HEAD wherever there is GET (RFC 9110, 9.1): probes and proxies ask with it, and FastAPI's routes do not know it."""

from __future__ import annotations

from typing import final

from starlette.types import ASGIApp, Message, Receive, Scope, Send


@final
class HeadAsGet:
    """ASGI middleware, the innermost: a HEAD is answered as the same GET, without its body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        asked: Scope = {**scope, "method": "GET"}

        async def send_without_body(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        try:
            await self._app(asked, receive, send_without_body)
        finally:
            # The router says in the scope which route it was, for the log and the metrics of the request as it came.
            if "route" in asked:
                scope["route"] = asked["route"]
