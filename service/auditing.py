"""Writes down what admins do, before they are told that it is done; without secrets and without users."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any, Final, final

import structlog
from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.edge import edge_in
from service.logging import request_id
from store.audit import AuditLine
from store.errors import StoreError

READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})
#: Path parameters that name a person; told apart by a digest, which a forgotten user may leave behind.
PERSONAL: Final = frozenset({"user_id"})
#: Values of a list that are written down, and of a longer one.
LIST_MAX: Final = 20
LIST_TOLD: Final = 5

_log = structlog.stdlib.get_logger(__name__)


def note_detail(request: Request, **detail: Any) -> None:
    """Have more written down of what this request does."""
    request.state.audit_detail = {name: _told(value) for name, value in detail.items()}


def note_nothing(request: Request) -> None:
    """Have no line written: this request changes nothing."""
    request.state.audit_nothing = True


def _told(value: Any) -> Any:
    """A value as it is written down; of a long list its beginning, and a digest that tells it from others."""
    if isinstance(value, dict):
        return {name: _told(part) for name, part in value.items()}
    if isinstance(value, list) and len(value) > LIST_MAX:
        digest = blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()
        return {"values": len(value), "first": value[:LIST_TOLD], "digest": digest}
    return value


@final
class AuditTrail:
    """ASGI middleware: one line for each request that changed something under /admin."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in READING or not scope["path"].startswith("/admin"):
            await self._app(scope, receive, send)
            return

        async def send_when_written(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] < 400 and not _changes_nothing(scope):
                await _write(scope)
            await send(message)

        await self._app(scope, receive, send_when_written)


def _changes_nothing(scope: Scope) -> bool:
    return bool(scope.get("state", {}).get("audit_nothing"))


async def _write(scope: Scope) -> None:
    state = scope.get("state", {})
    engine = state.get("engine") or edge_in(scope["app"]).recommenders.default
    route = getattr(scope.get("route"), "path", "unmatched").replace(":path", "")
    line = AuditLine(
        actor=state.get("key", ""),
        action=f"{scope['method']} {route}",
        target=", ".join(f"{name}={_shown(name, value)}" for name, value in scope.get("path_params", {}).items()),
        request_id=request_id(),
        detail=state.get("audit_detail", {}),
    )
    try:
        await engine.audit(line)
    except StoreError as error:
        # It is done, and whoever did it is to be told so; the log has what the store did not take.
        _log.error("not_audited", action=line.action, actor=line.actor, reason=str(error))


def _shown(name: str, value: object) -> str:
    text = str(value)
    return blake2b(text.encode("utf-8", "replace"), digest_size=8).hexdigest() if name in PERSONAL else text
