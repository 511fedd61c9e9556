"""API keys: clients send one in X-API-Key, the service stores SHA-256 digests of the keys it accepts.

A key is for one namespace or for all, and for clients or admins. Keys are 256 random bits: they cannot be guessed, so
a fast hash is enough.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, final

from fastapi import Depends, Query, Request, Security
from fastapi.dependencies.models import Dependant
from fastapi.security import APIKeyHeader

from metaban.service.errors import Forbidden, InvalidInput, Unauthorized
from metaban.service.http.app_state import state_of
from metaban.store.keys import NAMESPACE_PATTERN

if TYPE_CHECKING:
    from metaban.service.engine.engine import Engine
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
    """A new key and the digest that the service stores."""

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
    """Namespaces a key may use as a client and as an admin; None means all."""

    client: frozenset[str | None]
    admin: frozenset[str | None]

    def covers(self, namespace: str | None, *, admin: bool) -> bool:
        """Whether the key may use a namespace; None asks for all of them."""
        granted = self.admin if admin else self.client
        return None in granted or namespace in granted


#: Without keys, anyone who can reach the service may do everything.
EVERYTHING: Final = Grant(frozenset({None}), frozenset({None}))


def grant_of(key: str, client_keys: Iterable[str], admin_keys: Iterable[str]) -> Grant | None:
    """What a key may do, None for an unknown key. Takes the same time for every key."""
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
    """What the request's key may do; refuses a request without a known key, if keys are configured."""
    state = state_of(request.app)
    if not state.has_keys:
        return EVERYTHING
    if key is None:
        raise Unauthorized(f"Send a key in the {KEY_HEADER} header.")
    grant = grant_of(key, state.settings.client_keys, state.settings.admin_keys)
    if grant is None:
        raise Unauthorized(f"The key in the {KEY_HEADER} header is not known here.")
    return grant


def check_parameters(request: Request) -> None:
    """Refuse unknown query parameters: with a misspelt `namespace`, a request would be for another one."""
    known = sorted(_query_parameters(request.scope["route"].dependant))
    for name in request.query_params:
        if name not in known:
            parameters = f"the parameters are {', '.join(known)}" if known else "there are none"
            raise InvalidInput((name,), f"is not a parameter here; {parameters}")


def _query_parameters(dependant: Dependant) -> set[str]:
    """Names of the query parameters of a route and its dependencies."""
    names = {field.alias for field in dependant.query_params}
    return names.union(*map(_query_parameters, dependant.dependencies))


Granted = Annotated[Grant, Depends(authenticate)]

NamespaceName = Annotated[
    str | None,
    Query(
        alias="namespace",
        pattern=f"^{NAMESPACE_PATTERN.pattern}$",
        description="The namespace; METABAN_NAMESPACE when left out.",
        examples=["shop"],
    ),
]


async def require_client(request: Request, grant: Granted, namespace: NamespaceName = None) -> Engine:
    """The engine of the request's namespace; refuses a key that is not for it."""
    app_state = state_of(request.app)
    name = namespace or app_state.settings.namespace
    # Checked before the namespace is looked up: a key must not reveal which other namespaces exist.
    if grant is not EVERYTHING and not grant.covers(name, admin=False):
        raise Forbidden("The key is not for this namespace: name its own with ?namespace=.")
    if request.scope["query_string"]:
        check_parameters(request)
    engine = await app_state.recommenders.engine(name)
    request.state.engine, request.state.namespace = engine, name  # for the log line and the audit line
    return engine


async def require_admin(request: Request, grant: Granted, namespace: NamespaceName = None) -> Engine:
    """The same; refuses a key that is not an admin's."""
    name = namespace or state_of(request.app).settings.namespace
    if grant.covers(name, admin=False) and not grant.covers(name, admin=True):
        raise Forbidden("This needs an admin's key: one whose digest is in METABAN_ADMIN_KEYS.")
    return await require_client(request, grant, namespace)


async def require_observer(request: Request, grant: Granted) -> None:
    """Refuse a key for one namespace on routes about all namespaces."""
    if not grant.covers(None, admin=False):
        raise Forbidden("This shows all namespaces, and the key is for one.")
    check_parameters(request)


async def require_operator(request: Request, grant: Granted) -> None:
    """Refuse every key but an admin's for all namespaces."""
    if not grant.covers(None, admin=True):
        raise Forbidden("This needs an admin's key for all namespaces: a digest alone in METABAN_ADMIN_KEYS.")
    check_parameters(request)


#: The engine of the request's namespace: for routes of clients, and for routes of admins.
ClientEngine = Annotated[Engine, Depends(require_client)]

AdminEngine = Annotated[Engine, Depends(require_admin)]
