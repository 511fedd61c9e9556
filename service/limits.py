"""Bodies are counted while they stream in, so that no request makes the service hold more than the cap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import BodyTooLarge
from service.problems import service_problem

#: Its body is not held in memory, and may be longer than others.
IMPORT_PATH: Final = "/admin/arms/import"


@final
@dataclass(frozen=True, slots=True)
class Cap:
    """How long a body may be, and by which setting."""

    size: int
    setting: str

    def refusal(self) -> BodyTooLarge:
        """What is said of a longer one."""
        return BodyTooLarge(f"The body is longer than {self.size} bytes ({self.setting}).")


@final
class BodyLimit:
    """ASGI middleware: 413 for a body over the cap, announced or not; files of arms have a cap of their own."""

    def __init__(self, app: ASGIApp, *, max_body_bytes: int, max_import_bytes: int) -> None:
        self._app = app
        self._body = Cap(max_body_bytes, "METABAN_MAX_BODY_BYTES")
        self._import = Cap(max_import_bytes, "METABAN_MAX_IMPORT_BYTES")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        imports = scope["method"] == "POST" and scope["path"] == IMPORT_PATH
        cap = self._import if imports else self._body
        if _announced_bytes(scope) > cap.size:
            await service_problem(cap.refusal())(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > cap.size:
                    # Raised inside whoever reads the body, and answered like every other error of ours.
                    raise cap.refusal()
            return message

        await self._app(scope, counted, send)


def _announced_bytes(scope: Scope) -> int:
    for name, value in scope["headers"]:
        # What is not a number is the server's to refuse; the bytes that come are counted anyway.
        if name == b"content-length" and value.isdigit():
            # A number of thousands of digits would be refused by int(); this many say enough.
            return int(value[:19])
    return 0
