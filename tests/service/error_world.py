"""What a case of `error_cases` is, and the service that it happens to."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias, final

import httpx
import pytest
from fastapi import FastAPI
from redis.asyncio import Redis

from service.app import create_app
from service.edge import edge_in
from service.engine import Engine
from service.metrics import Metrics
from service.problems import MAX_DETAIL_CHARS
from service.recommenders import Recommenders
from service.settings import Settings
from store.keys import NamespaceKeys
from tests.own_valkey import OwnValkey
from tests.service.apps import ARMS, running_app

KEYS = NamespaceKeys("default", 2)
#: Nobody whom an answer may name.
USER = "Zoë-7"
ASK: dict[str, Any] = {"user_id": USER, "arms": ARMS}
JSON = "application/json"
#: A probe that fails says so at once.
QUICK = {"service.breaker.PROBE_BUDGET_S": 0.2, "service.breaker.DOUBT_S": 0.05}
OWN_MEMBERS = {"type", "title", "status", "detail", "instance"}
#: Everything of a key that a request may have changed: its value, and when it expires.
Dump: TypeAlias = dict[bytes, tuple[bytes, int]]


@final
@dataclass
class World:
    """A running service, its store, and what is kept up while a request is refused."""

    app: FastAPI
    http: httpx.AsyncClient
    store: Redis
    data_dir: Path
    valkey: OwnValkey | None
    monkeypatch: pytest.MonkeyPatch
    held: AsyncExitStack = field(default_factory=AsyncExitStack)
    #: Put into the path of the request.
    names: dict[str, object] = field(default_factory=dict)

    @property
    def engine(self) -> Engine:
        return edge_in(self.app).recommenders.default

    @property
    def own_valkey(self) -> OwnValkey:
        assert self.valkey is not None, "the case has no store of its own"
        return self.valkey

    async def ok(self, method: str, path: str, json: Any = None, **more: Any) -> Any:
        """An answer that has to be good."""
        answer = await self.http.request(method, path, json=json, **more)
        assert answer.is_success, answer.text
        return answer.json()

    async def hold(self, method: str, path: str, **more: Any) -> None:
        """A request that is under way until the case is over."""
        task = asyncio.create_task(self.http.request(method, path, **more))

        async def release() -> None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        self.held.push_async_callback(release)


Step: TypeAlias = Callable[[World], Awaitable[None]]


async def nothing(world: World) -> None:
    """Nothing has to be done."""


@final
@dataclass(frozen=True)
class Case:
    """A request, what comes before it, and how it is refused."""

    name: str
    status: int
    slug: str
    #: Method and path.
    call: str
    #: Bytes as they are, a function that makes a stream of them, or anything else as JSON.
    body: Any = None
    #: The field to blame, if one is; the empty one is the body as a whole.
    blames: str | None = None
    #: What is done before anybody looks at the store, and what is kept up while the request is made.
    given: Step = nothing
    during: Step = nothing
    headers: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    #: Constants of ours, most of them times, that are other ones here.
    patches: Mapping[str, Any] = field(default_factory=dict)
    #: The error of the store that is behind it.
    cause: type[Exception] | None = None
    retry_after: int | None = None
    #: The store is one that may be stopped.
    own_store: bool = False
    #: Keys, by the last part of their name, that are written all the same.
    writes: frozenset[str] = frozenset()

    @property
    def method(self) -> str:
        return self.call.partition(" ")[0]

    @property
    def path(self) -> str:
        return self.call.partition(" ")[2]


@final
@dataclass(frozen=True)
class WireCase:
    """Bytes on a connection, and how they are refused."""

    name: str
    status: int
    slug: str
    sent: bytes
    patches: Mapping[str, Any] = field(default_factory=dict)
    #: Connections that are open already, of as many as may be.
    others: int = 0


@asynccontextmanager
async def world_of(
    case: Case, url: str, store: Redis, data_dir: Path, monkeypatch: pytest.MonkeyPatch, valkey: OwnValkey | None
) -> AsyncIterator[World]:
    """The service of a case, in which everything that it is given is done."""
    for name, value in {"service.replica.TAIL_BLOCK_MS": 100, **case.patches}.items():
        monkeypatch.setattr(name, value)
    changes = {"data_dir": data_dir, "backlog_limit": 1_000, **case.settings}
    async with running_app(url, **changes) as (app, http):
        world = World(app, http, store, data_dir, valkey, monkeypatch)
        async with world.held:
            await case.given(world)
            yield world


def request_of(case: Case, world: World, request_id: str) -> httpx.Request:
    """The request of a case."""
    headers = {"X-Request-ID": request_id, **case.headers}
    path = case.path.format_map(world.names)
    if case.body is None:
        return world.http.build_request(case.method, path, headers=headers)
    if isinstance(case.body, bytes) or callable(case.body):
        content = case.body() if callable(case.body) else case.body
        return world.http.build_request(case.method, path, content=content, headers={"Content-Type": JSON, **headers})
    return world.http.build_request(case.method, path, json=case.body, headers=headers)


async def dump(store: Redis) -> Dump:
    """All that the store holds."""
    found = {}
    async for key in store.scan_iter(count=1_000):
        value, expires = await asyncio.gather(store.dump(key), store.execute_command("PEXPIRETIME", key))
        found[key] = (value, expires)
    return found


def differences(before: Dump, after: Dump) -> set[str]:
    """Names of keys that are not as they were, without their slots and ids."""
    keys = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    return {key.decode().partition("}:")[2].partition(":")[0] for key in keys}


def check_problem(response: httpx.Response, status: int, slug: str, field: str | None, request_id: str) -> None:
    """Whether an answer is the problem it has to be, in every part."""
    assert response.status_code == status, response.text
    assert response.headers["Content-Type"] == "application/problem+json"
    assert response.headers["X-Request-ID"] == request_id
    check_document(response.json(), status, slug, field, request_id)
    check_headers(response.headers, status)


def check_document(problem: Any, status: int, slug: str, field: str | None, request_id: str) -> None:
    """The same of a problem document alone."""
    assert set(problem) == OWN_MEMBERS | ({"errors"} if field is not None else set()), problem
    assert (problem["type"], problem["status"]) == (f"/problems/{slug}", status), problem
    assert problem["instance"] == request_id
    assert problem["title"]
    assert 0 < len(problem["detail"]) <= MAX_DETAIL_CHARS
    if field is not None:
        assert [error["field"] for error in problem["errors"]] == [field], problem
        assert problem["errors"][0]["detail"]
    assert USER not in str(problem)


def check_headers(headers: Mapping[str, str], status: int) -> None:
    """Headers that belong to a status, and to no other."""
    assert ("Retry-After" in headers) == (status in {429, 503})
    if status in {429, 503}:
        assert int(headers["Retry-After"]) >= 1
    assert headers.get("WWW-Authenticate") == ("ApiKey" if status == 401 else None)
    assert ("Allow" in headers) == (status == 405)
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"


@cache
def description() -> dict[str, Any]:
    """What the app says of itself; made once, since that takes longer than most cases do."""
    settings, metrics = Settings(), Metrics()
    app = create_app(settings, Recommenders(settings, "unix:///nowhere.sock", metrics), metrics)
    document: dict[str, Any] = app.openapi()
    return document


def operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Every call that the app answers: method, path and description."""
    for path, methods in description()["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def described(path: str) -> dict[str, set[str]]:
    """The methods that the description has for a path, and the statuses of each."""
    found: dict[str, set[str]] = {}
    for method, template, operation in operations():
        if re.fullmatch(re.sub(r"{(\w+)}", "[^/]+", template), path.partition("?")[0]):
            found.setdefault(method, set(operation["responses"]))
    return found
