"""Keys: clients send one in X-API-Key, the service knows only SHA-256 digests of those it accepts.

Keys are 256 random bits, so a plain hash hides them: there is nothing to guess, and no need for a slow one.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, final

from fastapi import Depends, Request, Security
from fastapi.security import APIKeyHeader

from service.edge import edge_of
from service.errors import Forbidden, Unauthorized

if TYPE_CHECKING:
    from service.engine import Engine
else:
    # FastAPI reads the types of what it injects, and the engine's module would import torch.
    Engine = Any

KEY_HEADER: Final = "X-API-Key"
KEY_BYTES: Final = 32

_header = APIKeyHeader(
    name=KEY_HEADER,
    auto_error=False,
    description="A client key; not needed when the service has none (then it listens on loopback only).",
)


@final
@dataclass(frozen=True, slots=True)
class FreshKey:
    """A new key, and what the service is told of it."""

    key: str
    digest: str

    @classmethod
    def generate(cls) -> FreshKey:
        """256 random bits."""
        key = secrets.token_urlsafe(KEY_BYTES)
        return cls(key, digest_of(key))


def digest_of(key: str) -> str:
    """SHA-256 of a key, in hex."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def is_known(key: str, digests: Iterable[str]) -> bool:
    """Whether the key has one of the digests; takes the same time whichever it is, or none."""
    offered = digest_of(key)
    known = False
    for digest in digests:
        known |= hmac.compare_digest(offered, digest)
    return known


async def require_client(request: Request, key: Annotated[str | None, Security(_header)]) -> Engine:
    """The engine that answers; refuses a request without a client's or an admin's key, if keys are configured."""
    edge = edge_of(request)
    settings = edge.settings
    if settings.has_keys:
        if key is None:
            raise Unauthorized(f"Send a key in the {KEY_HEADER} header.")
        if not is_known(key, [*settings.client_keys, *settings.admin_keys]):
            raise Unauthorized(f"The key in the {KEY_HEADER} header is not known here.")
    request.state.namespace = edge.engine.namespace  # for the log line
    return edge.engine


async def require_admin(request: Request, key: Annotated[str | None, Security(_header)]) -> Engine:
    """The same for what needs an admin's key."""
    engine = await require_client(request, key)
    settings = edge_of(request).settings
    if settings.has_keys and not is_known(key or "", settings.admin_keys):
        raise Forbidden("This needs an admin's key: one whose digest is in METABAN_ADMIN_KEYS.")
    return engine


#: The engine of whoever asks, for routes that a client may call, and for those that only an admin may.
ClientEngine = Annotated[Engine, Depends(require_client)]
AdminEngine = Annotated[Engine, Depends(require_admin)]
