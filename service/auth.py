"""Keys: clients send one in X-API-Key, the service knows only SHA-256 digests of those it accepts.

A key is good for one namespace or for all of them, and for a client or an admin; where it is set says which. Keys are
256 random bits, so a plain hash hides them: there is nothing to guess, and no need for a slow one.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, final

from fastapi import Depends, Query, Request, Security
from fastapi.security import APIKeyHeader

from service.edge import edge_of
from service.errors import Forbidden, Unauthorized
from store.keys import NAMESPACE_PATTERN

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


@final
@dataclass(frozen=True, slots=True)
class Grant:
    """What whoever asks may do: the namespaces as a client, and those as an admin; None among them stands for all."""

    client: frozenset[str | None]
    admin: frozenset[str | None]

    def covers(self, namespace: str | None, *, admin: bool) -> bool:
        """Whether a namespace is among them; None asks for all."""
        granted = self.admin if admin else self.client
        return None in granted or namespace in granted


#: Where no keys are set, anyone who can reach the service may do everything.
EVERYTHING: Final = Grant(frozenset({None}), frozenset({None}))


def grant_of(key: str, client_keys: Iterable[str], admin_keys: Iterable[str]) -> Grant | None:
    """What a key is good for, None for an unknown one; takes the same time whichever it is, or none."""
    offered = digest_of(key)
    client, admin = _bound(offered, client_keys), _bound(offered, admin_keys)
    if not client | admin:
        return None
    return Grant(client | admin, admin)


def _bound(offered: str, keys: Iterable[str]) -> frozenset[str | None]:
    found: set[str | None] = set()
    for entry in keys:
        namespace, _, digest = entry.rpartition(":")
        if hmac.compare_digest(offered, digest):
            found.add(namespace or None)
    return frozenset(found)


async def authenticate(request: Request, key: Annotated[str | None, Security(_header)]) -> Grant:
    """What whoever asks may do; refuses a request without a known key, if keys are configured."""
    settings = edge_of(request).settings
    if not settings.has_keys:
        return EVERYTHING
    if key is None:
        raise Unauthorized(f"Send a key in the {KEY_HEADER} header.")
    grant = grant_of(key, settings.client_keys, settings.admin_keys)
    if grant is None:
        raise Unauthorized(f"The key in the {KEY_HEADER} header is not known here.")
    return grant


Granted = Annotated[Grant, Depends(authenticate)]
NamespaceName = Annotated[
    str | None,
    Query(
        alias="namespace",
        pattern=f"^{NAMESPACE_PATTERN.pattern}$",
        description="Which of the recommenders; left out, the one of METABAN_NAMESPACE.",
        examples=["shop"],
    ),
]


async def require_client(request: Request, grant: Granted, namespace: NamespaceName = None) -> Engine:
    """The engine of the namespace asked for; refuses a key that is not for it."""
    return await _engine(request, grant, namespace, admin=False)


async def require_admin(request: Request, grant: Granted, namespace: NamespaceName = None) -> Engine:
    """The same for what needs an admin's key."""
    return await _engine(request, grant, namespace, admin=True)


async def require_observer(grant: Granted) -> None:
    """Refuse a key that is for one namespace where all of them show."""
    if not grant.covers(None, admin=False):
        raise Forbidden("This shows all namespaces, and the key is for one.")


async def require_operator(grant: Granted) -> None:
    """Refuse all but an admin's key for all namespaces."""
    if not grant.covers(None, admin=True):
        raise Forbidden("This needs an admin's key for all namespaces: a digest alone in METABAN_ADMIN_KEYS.")


async def _engine(request: Request, grant: Grant, namespace: str | None, *, admin: bool) -> Engine:
    edge = edge_of(request)
    name = namespace or edge.settings.namespace
    # Whether there is such a namespace is not told to whom it is none of their business.
    if not grant.covers(name, admin=False):
        raise Forbidden("The key is not for this namespace: name its own with ?namespace=.")
    if admin and not grant.covers(name, admin=True):
        raise Forbidden("This needs an admin's key: one whose digest is in METABAN_ADMIN_KEYS.")
    engine = await edge.recommenders.engine(name)
    request.state.engine, request.state.namespace = engine, name  # for the log line, and the audit's
    return engine


#: The engine of the namespace asked for, for routes that a client may call, and for those that only an admin may.
ClientEngine = Annotated[Engine, Depends(require_client)]
AdminEngine = Annotated[Engine, Depends(require_admin)]
