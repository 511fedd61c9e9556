"""Bodies are counted while they stream in, so that no request makes the service hold more than the cap."""

from __future__ import annotations

from typing import final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import BodyTooLarge
from service.problems import service_problem


@final
class BodyLimit:
    """ASGI middleware: 413 for a body over the cap, announced or not."""

    def __init__(self, app: ASGIApp, *, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if _announced_bytes(scope) > self._max_body_bytes:
            await service_problem(self._refusal())(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > self._max_body_bytes:
                    # Raised inside whoever reads the body, and answered like every other error of ours.
                    raise self._refusal()
            return message

        await self._app(scope, counted, send)

    def _refusal(self) -> BodyTooLarge:
        return BodyTooLarge(f"The body is longer than {self._max_body_bytes} bytes (METABAN_MAX_BODY_BYTES).")


def _announced_bytes(scope: Scope) -> int:
    for name, value in scope["headers"]:
        # What is not a number is the server's to refuse; the bytes that come are counted anyway.
        if name == b"content-length" and value.isdigit():
            # A number of thousands of digits would be refused by int(); this many say enough.
            return int(value[:19])
    return 0
