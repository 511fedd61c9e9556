"""All refusals in `error_cases`: the answer, and that the request changed nothing.

Errors of the service, the store and the documentation are compared with the cases.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from redis.asyncio import Redis

from metaban.service.errors import ServiceError
from metaban.service.http.problems import as_service_error
from metaban.service.http.protocol import limited_protocol
from metaban.store.errors import ArmConflict, BacklogFull, FenceLost, StoreError
from tests.own_valkey import own_valkey
from tests.service.apps import running_app
from tests.service.http.error_cases import CASES, WIRE
from tests.service.http.error_steps import decided
from tests.service.http.error_world import (
    ASK,
    USER,
    Case,
    WireCase,
    check_document,
    check_headers,
    check_problem,
    described,
    differences,
    dump,
    request_of,
    world_of,
)
from tests.service.http.sockets import read_all, serving

DOCUMENTATION = Path(__file__).resolve().parents[3] / "docs" / "api.md"
ROW = re.compile(r"^\| (\d{3}) \| `/problems/([a-z-]+)` \| .+ \|$", re.MULTILINE)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_request_is_refused(
    case: Case, redis: Redis, valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with own_valkey() if case.own_store else nullcontext() as valkey, structlog.testing.capture_logs() as logs:
        store = redis if valkey is None else Redis(unix_socket_path=valkey.url.removeprefix("unix://"))
        url = valkey_url if valkey is None else valkey.url
        async with world_of(case, url, store, tmp_path, monkeypatch, valkey) as world:
            before = await dump(store)
            async with world.held:
                await case.during(world)
                async with asyncio.timeout(5):
                    response = await world.http.send(request_of(case, world, "case-1"))
            check_problem(response, case.status, case.slug, case.blames, "case-1")
            if case.retry_after is not None:
                assert response.headers["Retry-After"] == str(case.retry_after)
            assert differences(before, await dump(store)) == case.writes
        if store is not redis:
            await store.aclose()
    methods = described(case.path)
    if case.status == 405:
        heads = {"HEAD"} if "GET" in methods else set()
        assert set(response.headers["Allow"].split(", ")) == methods.keys() | heads
    elif methods and case.status != 500:
        assert str(case.status) in methods[case.method]
    assert USER not in str(logs)


@pytest.mark.parametrize("case", WIRE, ids=lambda case: case.name)
async def test_connection_is_refused(
    case: WireCase, redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in case.patches.items():
        monkeypatch.setattr(name, value)
    refused: list[str] = []
    room = limited_protocol(99, refused.append)
    async with running_app(valkey_url) as (app, _), serving(room, app) as port:
        before = await dump(redis)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(case.sent)
        head, _, body = (await read_all(reader)).partition(b"\r\n\r\n")
        writer.close()
        status, *lines = head.decode().split("\r\n")
        headers = httpx.Headers([tuple(line.split(": ", 1)) for line in lines])  # type: ignore[misc]
        assert status.split()[:2] == ["HTTP/1.1", str(case.status)]
        assert headers["Content-Type"] == "application/problem+json"
        # The rest of a long body is dropped, and the connection stays open.
        if case.status != 413:
            assert headers["Connection"] == "close"
        assert headers["X-Request-ID"]
        check_document(json.loads(body), case.status, case.slug, None, headers["X-Request-ID"])
        check_headers(headers, case.status)
        assert await dump(redis) == before


async def test_refusals_within_a_batch(
    redis: Redis, valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request is answered as if alone, and the others are decided."""
    parts: list[tuple[Any, int, str, str | None]] = [
        ({**ASK, "decision_id": "d", "k": 2}, 409, "decision-conflict", "decision_id"),
        ({**ASK, "decision_id": "n"}, 200, "", None),
        ({**ASK, "min_version": 1}, 503, "version-not-reached", "min_version"),
        ({**ASK, "colour": 1}, 422, "invalid-input", "colour"),
        ({"user_id": USER}, 422, "invalid-input", "arms"),
        ([], 422, "invalid-input", ""),
        ({**ASK, "explain": True}, 503, "overloaded", None),
    ]
    case = Case(
        "a batch", 200, "", "POST /recommend/batch", {"requests": [body for body, *_ in parts]}, given=decided,
        settings={"wait_applied_timeout_s": 0.05}, patches={"metaban.service.engine.model.explain.EXPLAINING_MAX": 0},
    )  # fmt: skip
    async with world_of(case, valkey_url, redis, tmp_path, monkeypatch, None) as world:
        before = await dump(redis)
        response = await world.http.send(request_of(case, world, "case-1"))
        assert response.status_code == 200
        for (_, status, slug, blames), result in zip(parts, response.json()["results"], strict=True):
            assert result["status"] == status
            if status != 200:
                assert set(result) == {"status", "problem"}
                check_document(result["problem"], status, slug, blames, "case-1")
        assert differences(before, await dump(redis)) == {"decision", "decided", "awaiting"}


async def test_one_of_two_racing_creations_is_refused(redis: Redis, valkey_url: str) -> None:
    async with running_app(valkey_url) as (_, here), running_app(valkey_url) as (_, there):
        for turn in range(5):
            answers = await asyncio.gather(
                *(
                    client.post(
                        "/admin/namespaces",
                        json={"name": f"shop{turn}", **own},
                        headers={"X-Request-ID": "case-1"},
                    )
                    for client, own in ((here, {"partitions": 3}), (there, {"partitions": 4 - turn % 2, "seed": 1}))
                )
            )
            good, refused = sorted(answers, key=lambda answer: answer.status_code)
            assert good.status_code == 201, good.text
            check_problem(refused, 409, "namespace-exists", None, "case-1")
            shown = await here.get(f"/admin/namespaces/shop{turn}")
            assert shown.json()["overridden"] == good.json()["overridden"]


# Completeness of the cases


def kinds_of(base: type[Any]) -> Iterator[type[Any]]:
    yield base
    for kind in base.__subclasses__():
        yield from kinds_of(kind)


def made(kind: type[StoreError]) -> StoreError:
    """An error of the store, with any arguments it needs."""
    arguments: dict[type[StoreError], tuple[tuple[Any, ...], dict[str, Any]]] = {
        BacklogFull: (("full",), {"retry_after_s": 1.0}),
        FenceLost: (("version",), {}),
        ArmConflict: (("arm", 1), {}),
    }
    words, more = arguments.get(kind, (("why",), {}))
    return kind(*words, **more)


def documented() -> list[tuple[int, str]]:
    return [(int(status), slug) for status, slug in ROW.findall(DOCUMENTATION.read_text())]


def in_cases() -> set[tuple[int, str]]:
    return {(case.status, case.slug) for case in [*CASES, *WIRE]}


def test_every_error_of_the_service_has_a_case() -> None:
    known = {(kind.status, kind.slug) for kind in kinds_of(ServiceError)}
    assert len(known) > 20
    assert known - in_cases() == set()


def test_every_store_error_shown_to_clients_has_a_case() -> None:
    told = {kind: as_service_error(made(kind), None) for kind in kinds_of(StoreError)}
    foreseen = {kind: (answer.status, answer.slug) for kind, answer in told.items() if answer is not None}
    assert foreseen
    behind = {case.cause: (case.status, case.slug) for case in CASES if case.cause is not None}
    assert behind == foreseen


def test_documentation_lists_every_error_once() -> None:
    rows = documented()
    assert len(rows) == len(set(rows))
    assert set(rows) == in_cases()


def test_error_tree_in_the_docstring_is_complete() -> None:
    """The tree in the docstring of `metaban.service.errors` lists all errors."""
    module = __import__("metaban.service.errors", fromlist=["errors"])
    listed = re.findall(r"[├└]── (\w+) +(\d{3})  /problems/([a-z-]+) ", module.__doc__)
    assert len(listed) == len(set(listed))
    assert {(name, int(status), slug) for name, status, slug in listed} == {
        (kind.__name__, kind.status, kind.slug) for kind in kinds_of(ServiceError) if kind is not ServiceError
    }


def test_case_names_are_unique() -> None:
    for cases in (CASES, WIRE):
        names = [case.name for case in cases]
        assert len(names) == len(set(names))
