"""`user_features`: the first profile fixes the layout of a namespace."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from metaban.store.namespaces import NamespaceStore
from tests.own_valkey import OwnValkey, own_valkey
from tests.service.apps import ARMS, running_app
from tests.worker.workshop import soon

LAYOUT = {"context": 0, "context_named": False, "products": False, "intercept": False}


async def told(http: httpx.AsyncClient, profile: Any, user: str = "u", **more: Any) -> httpx.Response:
    return await http.post("/recommend", json={"user_id": user, "arms": ARMS, "user_features": profile, **more})


def assert_refused(answer: httpx.Response) -> None:
    assert (answer.status_code, answer.json()["type"]) == (422, "/problems/invalid-input")
    assert [error["field"] for error in answer.json()["errors"]] == ["user_features"]


async def profile_layout(redis: Redis) -> Any:
    record = await NamespaceStore(redis).load("default")
    assert record is not None
    return record.profile_layout


@pytest.mark.parametrize(
    ("first", "same", "others"),
    [
        ([1, 2.5], [[0, 0], [-7, 1e30]], [[1], [1, 2, 3], {"a": 1}]),
        ({"a": 1, "b": "x"}, [{"a": 2}, {"c": True}], [[1], [1, 2]]),
    ],
    ids=["list", "object"],
)
async def test_first_profile_fixes_the_layout(
    http: httpx.AsyncClient, redis: Redis, first: Any, same: list[Any], others: list[Any]
) -> None:
    assert await profile_layout(redis) is None
    assert (await told(http, first)).status_code == 200
    named = isinstance(first, dict)
    assert await profile_layout(redis) == {**LAYOUT, "arm": 32 if named else 2, "arm_named": named}
    for profile in same:
        assert (await told(http, profile)).status_code == 200
    for profile in others:
        assert_refused(await told(http, profile, user="other", decision_id="d"))
    results = (
        await http.post(
            "/recommend/batch",
            json={"requests": [{"user_id": "u", "arms": ARMS, "user_features": each} for each in (same[0], others[0])]},
        )
    ).json()["results"]
    assert [each["status"] for each in results] == [200, 422]
    assert results[1]["problem"]["errors"][0]["field"] == "user_features"
    assert (await http.get("/admin/users/other")).status_code == 404, "nothing is kept of what was refused"
    assert (await http.get("/admin/users/u")).json()["profile"] == same[0]


async def test_layout_is_checked_while_fusion_is_off_or_the_baseline_serves(
    http: httpx.AsyncClient, redis: Redis
) -> None:
    """Stored profiles follow the layout."""
    await http.patch("/admin/config", json={"serving": "baseline", "fusion": "off"})
    assert (await told(http, [1, 2])).json()["policy"] == "baseline"
    assert_refused(await told(http, [1]))
    assert (await http.get("/admin/users/u")).json()["profile"] == [1, 2]


@pytest.mark.parametrize("profile", [[0] * 257, {"a": 3e29, "b": 1e300}], ids=["too long", "too large"])
async def test_invalid_profile_fixes_nothing(http: httpx.AsyncClient, redis: Redis, profile: Any) -> None:
    answer = await told(http, profile)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"].startswith("user_features")
    assert await profile_layout(redis) is None


async def test_racing_first_profiles(redis: Redis, valkey_url: str, short_tails: None) -> None:
    """One of many first requests wins, in any process, and the others must match it."""
    async with running_app(valkey_url) as (_, one), running_app(valkey_url) as (_, other):
        for http in (one, other):
            assert (await http.post("/recommend", json={"user_id": "u", "arms": ARMS})).status_code == 200
        sizes = [1, 2, 3] * 6
        answers = await asyncio.gather(*(told(http, [1] * size, f"u{size}") for size in sizes for http in (one, other)))
        fixed = (await profile_layout(redis))["arm"]
        for size, answer in zip([size for size in sizes for _ in range(2)], answers, strict=True):
            assert (answer.status_code == 200) == (size == fixed), answer.text
            if size != fixed:
                assert_refused(answer)


async def test_decision_from_before_profile_layouts(http: httpx.AsyncClient) -> None:
    """A decision stored before profile layouts existed is found, and another body under its id is a conflict."""
    assert (await told(http, [1, 2], decision_id="d")).status_code == 200
    assert (await told(http, [1, 2], decision_id="d")).status_code == 200
    assert (await told(http, [1], decision_id="d")).json()["type"] == "/problems/decision-conflict"


async def test_recreated_namespace_has_no_profile_layout(http: httpx.AsyncClient, redis: Redis) -> None:
    await http.post("/admin/namespaces", json={"name": "shop"})
    ask = {"user_id": "u", "arms": ARMS}
    for profile in ([1, 2], [1]):
        body = {**ask, "user_features": profile}
        assert (await http.post("/recommend?namespace=shop", json=body)).status_code == 200
        await http.delete("/admin/namespaces/shop")
        await http.post("/admin/namespaces", json={"name": "shop"})


@pytest.fixture
def valkey() -> Iterator[OwnValkey]:
    with own_valkey() as server:
        yield server


async def test_first_profile_during_an_outage(
    valkey: OwnValkey, short_tails: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is answered and fixes no layout."""
    monkeypatch.setattr("metaban.service.engine.store_guard.PROBE_EVERY_S", 0.05)
    async with running_app(valkey.url) as (_, http):
        assert (await http.post("/recommend", json={"user_id": "u", "arms": ARMS})).status_code == 200
        valkey.kill()
        away, long = await told(http, [1, 2, 3]), await told(http, [1] * 257)
        assert (away.status_code, away.json()["logged"], long.status_code) == (200, False, 422)
        valkey.start()

        async def logged() -> bool:
            return bool((await told(http, [1, 2])).json()["logged"])

        await soon(logged)
        assert_refused(await told(http, [1, 2, 3]))
