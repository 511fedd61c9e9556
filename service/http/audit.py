"""The audit log: one line for each admin request that changed something, stored before the request is answered.

Lines hold no secrets and no user ids.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from hashlib import blake2b
from typing import Any, Final

import structlog
from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from metaban.service.http.app_state import state_of
from metaban.service.telemetry.logging import request_id
from metaban.store.audit import AuditRecord
from metaban.store.errors import StoreError

READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})

#: Path parameters that name a person. The line holds a digest, which may outlive a forgotten user.
PERSONAL: Final = frozenset({"user_id"})

#: Longest list that is stored in full, and values stored of a longer one.
LIST_MAX: Final = 20
LIST_SHOWN: Final = 5

_log = structlog.stdlib.get_logger(__name__)


class AuditedRoute(APIRoute):
    """A route of /admin: writes a line before a request that is not GET, HEAD or OPTIONS is answered below 400."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        if not (self.methods or set()) - READING:
            return handler

        async def handle(request: Request) -> Response:
            response = await handler(request)
            if response.status_code < 400 and not getattr(request.state, "audit_nothing", False):
                await self._write(request)
            return response

        return handle

    async def _write(self, request: Request) -> None:
        state = request.scope["state"]
        engine = state.get("engine") or state_of(request.app).recommenders.default
        line = AuditRecord(
            actor=state.get("key", ""),
            action=f"{request.method} {self.path.replace(':path', '')}",
            target=", ".join(f"{name}={_parameter(name, value)}" for name, value in request.path_params.items()),
            request_id=request_id(),
            detail=state.get("audit_detail", {}),
        )
        try:
            await engine.audit(line)
        except StoreError as error:
            # The change is made, so the client is answered. The service log has the line instead.
            _log.error(
                "audit_line_lost", namespace=engine.namespace, action=line.action, actor=line.actor, reason=str(error)
            )


def note_detail(request: Request, **detail: Any) -> None:
    """Add details to the line of this request."""
    request.state.audit_detail = {name: _shortened(value) for name, value in detail.items()}


def note_nothing(request: Request) -> None:
    """Write no line: this request changes nothing."""
    request.state.audit_nothing = True


def _shortened(value: Any) -> Any:
    """A value as it is stored; a long list becomes its beginning and a digest."""
    if isinstance(value, dict):
        return {name: _shortened(part) for name, part in value.items()}
    if isinstance(value, list) and len(value) > LIST_MAX:
        digest = blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()
        return {"values": len(value), "first": value[:LIST_SHOWN], "digest": digest}
    return value


def _parameter(name: str, value: object) -> str:
    text = str(value)
    return blake2b(text.encode("utf-8", "replace"), digest_size=8).hexdigest() if name in PERSONAL else text
