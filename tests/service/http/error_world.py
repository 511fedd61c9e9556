"""The type of the cases in `error_cases`, the service they run on, and checks of answers."""

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

from metaban.service.engine.engine import Engine
from metaban.service.engine.registry import EngineRegistry
from metaban.service.http.app import create_app
from metaban.service.http.app_state import state_of
from metaban.service.http.problems import MAX_DETAIL_CHARS
from metaban.service.settings.environment import Settings
from metaban.service.telemetry.metrics import Metrics
from metaban.store.keys import NamespaceKeys
from tests.own_valkey import OwnValkey
from tests.service.apps import ARMS, running_app

KEYS = NamespaceKeys("default", 2)
#: A user whose id no error may contain.
USER = "Zoë-7"
ASK: dict[str, Any] = {"user_id": USER, "arms": ARMS}
JSON = "application/json"
#: Short probes of the store.
QUICK = {"metaban.service.engine.store_guard.PROBE_BUDGET_S": 1.0, "metaban.service.engine.store_guard.DOUBT_S": 0.05}
OWN_MEMBERS = {"type", "title", "status", "detail", "instance"}
#: Repetitions of a step of a case that is answered 503, and the pause before each.
TRIES, PAUSE_S = 40, 0.25
#: Value and expiry of each key.
Dump: TypeAlias = dict[bytes, tuple[bytes, int]]


@final
@dataclass
class World:
    """A running service, its store, and the contexts kept open while a request is refused."""

    app: FastAPI
    http: httpx.AsyncClient
    store: Redis
    data_dir: Path
    valkey: OwnValkey | None
    monkeypatch: pytest.MonkeyPatch
    held: AsyncExitStack = field(default_factory=AsyncExitStack)
    #: Values for the placeholders in the path.
    names: dict[str, object] = field(default_factory=dict)

    @property
    def engine(self) -> Engine:
        return state_of(self.app).recommenders.default

    @property
    def own_valkey(self) -> OwnValkey:
        assert self.valkey is not None, "the case has no store of its own"
        return self.valkey

    async def ok(self, method: str, path: str, json: Any = None, **more: Any) -> Any:
        """The JSON of an answer that must be successful; repeated after a 503, which a busy machine may answer."""
        for _ in range(TRIES):
            answer = await self.http.request(method, path, json=json, **more)
            if answer.status_code != 503:
                break
            await asyncio.sleep(PAUSE_S)
        assert answer.is_success, answer.text
        return answer.json()

    async def hold(self, method: str, path: str, **more: Any) -> None:
        """Start a request and cancel it when the case is over."""
        task = asyncio.create_task(self.http.request(method, path, **more))

        async def release() -> None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        self.held.push_async_callback(release)


Step: TypeAlias = Callable[[World], Awaitable[None]]


async def nothing(world: World) -> None:
    """Do nothing."""


@final
@dataclass(frozen=True)
class Case:
    """A request, the steps before and during it, and the expected refusal."""

    name: str
    status: int
    slug: str
    #: Method and path.
    call: str
    #: Bytes, a function that returns a stream of bytes, or a value to send as JSON.
    body: Any = None
    #: The field named in the error, if any; an empty name means the whole body.
    blames: str | None = None
    #: Steps before the store is dumped, and while the request is made.
    given: Step = nothing
    during: Step = nothing
    headers: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    #: Module constants replaced for the case.
    patches: Mapping[str, Any] = field(default_factory=dict)
    #: The store error that causes it.
    cause: type[Exception] | None = None
    retry_after: int | None = None
    #: The case has its own store, which it may stop.
    own_store: bool = False
    #: Keys, by the last part of their name, that the refused request may write.
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
    """Bytes on a connection, and the expected refusal."""

    name: str
    status: int
    slug: str
    sent: bytes
    patches: Mapping[str, Any] = field(default_factory=dict)


@asynccontextmanager
async def world_of(
    case: Case, url: str, store: Redis, data_dir: Path, monkeypatch: pytest.MonkeyPatch, valkey: OwnValkey | None
) -> AsyncIterator[World]:
    """The service of a case, after the step `given`."""
    for name, value in {"metaban.service.engine.model.replica.TAIL_BLOCK_MS": 100, **case.patches}.items():
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
    """All keys of the store."""
    found = {}
    async for key in store.scan_iter(count=1_000):
        value, expires = await asyncio.gather(store.dump(key), store.execute_command("PEXPIRETIME", key))
        found[key] = (value, expires)
    return found


def differences(before: Dump, after: Dump) -> set[str]:
    """Names of changed keys, without slots and ids."""
    keys = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    return {key.decode().partition("}:")[2].partition(":")[0] for key in keys}


def check_problem(response: httpx.Response, status: int, slug: str, field: str | None, request_id: str) -> None:
    """Check all parts of a problem answer."""
    assert response.status_code == status, response.text
    assert response.headers["Content-Type"] == "application/problem+json"
    assert response.headers["X-Request-ID"] == request_id
    check_document(response.json(), status, slug, field, request_id)
    check_headers(response.headers, status)


def check_document(problem: Any, status: int, slug: str, field: str | None, request_id: str) -> None:
    """Check a problem document."""
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
    """Check the headers that depend on the status."""
    assert ("Retry-After" in headers) == (status in {429, 503})
    if status in {429, 503}:
        assert int(headers["Retry-After"]) >= 1
    assert headers.get("WWW-Authenticate") == ("ApiKey" if status == 401 else None)
    assert ("Allow" in headers) == (status == 405)
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"


@cache
def description() -> dict[str, Any]:
    """The OpenAPI document, made once because it is slow."""
    settings, metrics = Settings(), Metrics()
    app = create_app(settings, EngineRegistry(settings, "unix:///nowhere.sock", metrics), metrics)
    document: dict[str, Any] = app.openapi()
    return document


def operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """All operations: method, path and description."""
    for path, methods in description()["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def described(path: str) -> dict[str, set[str]]:
    """The described methods of a path, and the statuses of each."""
    found: dict[str, set[str]] = {}
    for method, template, operation in operations():
        if re.fullmatch(re.sub(r"{(\w+)}", "[^/]+", template), path.partition("?")[0]):
            found.setdefault(method, set(operation["responses"]))
    return found
