"""Learner settings beyond their limits are refused, and other namespaces are still served."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from metaban.models.default.learner import PosteriorLearner
from metaban.models.learner import State
from metaban.models.settings import LIMITS, named_settings
from metaban.service.settings.environment import LEARNER_SETTINGS, SettingsError, learner_settings, load_settings
from metaban.store.namespaces import NamespaceRecord, NamespaceStore
from tests.service.apps import ARMS, PAPER, running_app
from tests.service.engines import worker_running

pytestmark = pytest.mark.usefixtures("short_tails")

ASK = {"user_id": "u", "arms": ARMS}
#: A learner of nearly the largest size.
LARGE: dict[str, Any] = {"preset": "default", "learner": {"width": 700, "depth": 16, "members": 1}}


@pytest.fixture
async def http(redis: Redis, valkey_url: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an app that sets no `width`, so that namespaces may set it in `learner`."""
    async with running_app(valkey_url, width=None) as (_, client):
        yield client


async def create(http: httpx.AsyncClient, **fields: object) -> None:
    answer = await http.post("/admin/namespaces", json=fields)
    assert answer.status_code == 201, answer.text


async def record_of(redis: Redis, name: str) -> NamespaceRecord:
    record = await NamespaceStore(redis).load(name)
    assert record is not None
    return record


async def store_learner(redis: Redis, name: str, **changes: object) -> None:
    """Write learner settings into a record, as a version without limits could."""
    record = await record_of(redis, name)
    overrides = record.overrides if name == "default" else {**record.overrides, "learner": changes}
    learner = {**record.learner, **changes}
    changed = replace(record, learner=learner, overrides=overrides, revision=record.revision + 1)
    await redis.set(record.keys.record, changed.encode())


@pytest.mark.parametrize("preset", ["default", "paper", "pooled"])
async def test_namespace_beyond_a_limit_is_refused(redis: Redis, valkey_url: str, preset: str) -> None:
    own = [name for name in named_settings(preset).to_json() if name in LIMITS and name != "seed"]
    async with running_app(valkey_url) as (_, http):
        for name in own:
            most = int(LIMITS[name].most)
            for value in (most + 1, 10**30):
                body = {"name": "shop", "preset": preset, "arm_features": 2, "learner": {name: value}}
                answer = await http.post("/admin/namespaces", json=body)
                assert answer.status_code == 422, answer.text
                assert answer.headers["Content-Type"] == "application/problem+json"
                [error] = answer.json()["errors"]
                assert error["field"] == "learner"
                assert error["detail"].startswith((f"{name} must be at least ", f"{name} must be above "))
                assert error["detail"].endswith((f" and at most {most}", f" and below {most}"))
        assert (await http.get("/admin/namespaces/shop")).status_code == 404


@pytest.mark.parametrize(
    ("learner", "words"),
    [
        ({"width": 4_000}, "members, width, depth, codes_max and 1 input make 64,"),
        ({"members": 64, "width": 600}, "members, width, depth, codes_max and 1 input make"),
        ({"bins": 1_024, "codes_max": 65_536}, "members, width, depth, codes_max and 101 inputs make"),
        ({"replayed": 16_384, "members": 64, "width": 64}, "replayed, members, width and depth make"),
    ],
)
async def test_too_large_namespace_is_refused(http: httpx.AsyncClient, learner: dict[str, object], words: str) -> None:
    body = {"name": "shop", "preset": "default", "arm_features": 100, "learner": learner}
    answer = await http.post("/admin/namespaces", json=body)
    assert answer.status_code == 422, answer.text
    [error] = answer.json()["errors"]
    assert error["field"] == "learner"
    assert error["detail"].startswith(words)
    assert error["detail"].endswith(" allowed")
    assert (await http.get("/admin/namespaces/shop")).status_code == 404


async def test_too_many_features_fix_no_layout(http: httpx.AsyncClient) -> None:
    wide = {"preset": "pooled", "learner": {"width": 4_096, "recent_samples": 1, "meta_steps": 1, "user_steps": 1}}
    refused = await http.post("/admin/namespaces", json={"name": "shop", **wide, "arm_features": 300})
    assert refused.status_code == 422, refused.text
    await create(http, name="shop", **wide)
    ask = {"user_id": "u", "arms": [{"id": "a", "features": [1.0] * 300}]}
    answer = await http.post("/recommend?namespace=shop", json=ask)
    assert answer.status_code == 422, answer.text
    [error] = answer.json()["errors"]
    assert error["field"] == "arms[0].features"
    assert error["detail"].startswith("width, depth, checkpoints, recent_samples and 301 inputs make 1,")
    assert (await http.get("/admin/namespaces/shop")).json()["dimension"] is None
    ask = {"user_id": "u", "arms": [{"id": "a", "features": [1.0] * 30}]}
    assert (await http.post("/recommend?namespace=shop", json=ask)).status_code == 200


async def test_too_many_features_for_the_learner_of_the_deployment(redis: Redis, valkey_url: str) -> None:
    async with running_app(valkey_url, **{**PAPER, "width": 4_096}) as (_, http):
        answer = await http.post("/admin/namespaces", json={"name": "shop", "arm_features": 300})
        assert answer.status_code == 422, answer.text
        [error] = answer.json()["errors"]
        assert error["field"] == "arm_features"
        assert error["detail"].startswith("width, depth, checkpoints, recent_samples and 301 inputs make 2,")
        await create(http, name="shop", arm_features=30)


async def test_other_namespaces_are_served_while_a_learner_is_built(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await http.post("/recommend", json=ASK)).status_code == 200
    build, builders = PosteriorLearner.initial_shared, []
    has_begun, may_end = threading.Event(), threading.Event()

    def build_slowly(learner: PosteriorLearner) -> State:
        builders.append(threading.current_thread())
        has_begun.set()
        may_end.wait(20)
        return build(learner)

    monkeypatch.setattr(PosteriorLearner, "initial_shared", build_slowly)
    creating = asyncio.create_task(create(http, name="large", arm_features=3, **LARGE))
    assert await asyncio.to_thread(has_begun.wait, 60)
    for _ in range(3):
        assert (await http.post("/recommend", json=ASK)).status_code == 200
    assert not creating.done(), "the requests waited for the learner"
    may_end.set()
    await creating
    assert threading.main_thread() not in builders
    assert (await http.post("/recommend?namespace=large", json=ASK)).status_code == 200


async def test_worker_builds_learners_outside_the_event_loop(
    http: httpx.AsyncClient, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create(http, name="large", arm_features=3, **LARGE)
    build, builders = PosteriorLearner.initial_shared, []

    def build_told(learner: PosteriorLearner) -> State:
        builders.append(threading.current_thread())
        return build(learner)

    monkeypatch.setattr(PosteriorLearner, "initial_shared", build_told)
    async with worker_running(valkey_url):
        await http.post("/recommend?namespace=large", json={**ASK, "decision_id": "d"})
        told = await http.post("/feedback?namespace=large&wait=applied", json={"decision_id": "d", "reward": 1})
        assert told.status_code in {200, 202}
    assert builders
    assert threading.main_thread() not in builders


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"depth": 100_000}, "depth must be at least 1 and at most 16"),
        ({"width": 100_000_000}, "width must be at least 1 and at most 4096"),
        ({"members": 1_000_000_000}, "members must be at least 1 and at most 64"),
        ({"alpha": 1e308}, "alpha must be at least 0 and at most 1000000"),
        ({"width": 4_000}, "members, width, depth, codes_max and 1 input make"),
    ],
)
async def test_stored_namespace_beyond_its_limits_does_not_affect_others(
    redis: Redis, valkey_url: str, changes: dict[str, object], words: str
) -> None:
    async with running_app(valkey_url, width=None) as (_, http):
        for name in ("bad", "good"):
            await create(http, name=name, arm_features=3, preset="default")
    await store_learner(redis, "bad", **changes)
    async with running_app(valkey_url, width=None) as (_, http), worker_running(valkey_url):
        assert (await http.get("/health/ready")).status_code == 200
        for _ in range(2):  # the second is answered without another attempt
            answer = await http.post("/recommend?namespace=bad", json=ASK)
            assert (answer.status_code, answer.json()["type"]) == (503, "/problems/unavailable")
            assert words in answer.json()["detail"]
        assert (await http.post("/recommend", json=ASK)).status_code == 200
        assert (await http.post("/recommend?namespace=good", json={**ASK, "decision_id": "d"})).status_code == 200
        told = await http.post("/feedback?namespace=good&wait=applied", json={"decision_id": "d", "reward": 1})
        assert told.json()["applied"] is True
        listed = (await http.get("/admin/namespaces")).json()["namespaces"]
        assert [each["name"] for each in listed] == ["bad", "default", "good"]
        assert (await http.delete("/admin/namespaces/bad")).status_code == 200
        await create(http, name="bad", arm_features=3)
        assert (await http.post("/recommend?namespace=bad", json=ASK)).status_code == 200


async def test_default_namespace_beyond_limits_is_replaced_if_unused(redis: Redis, valkey_url: str) -> None:
    async with running_app(valkey_url) as (_, http):
        pass
    await store_learner(redis, "default", width=100_000_000)
    async with running_app(valkey_url) as (_, http):
        assert (await http.post("/recommend", json=ASK)).status_code == 200
    await store_learner(redis, "default", alpha=1e308)
    async with running_app(valkey_url) as (_, http):
        assert (await http.post("/recommend", json=ASK)).status_code == 200
    await store_learner(redis, "default", width=100_000_000)
    with pytest.raises(
        SettingsError, match=r"namespace default was stored with learner settings .* width must be at least 1"
    ):
        async with running_app(valkey_url):
            pass


@pytest.mark.parametrize(
    ("learner", "words"),
    [
        ({"depth": 100_000}, "METABAN_LEARNER: depth has a variable of its own, METABAN_DEPTH"),
        ({"members": 10**30}, "METABAN_LEARNER: members must be at least 1 and at most 64"),
        ({"trunk_rate": 1e308}, "METABAN_LEARNER: trunk_rate must be at least 1e-09 and at most 10"),
    ],
)
def test_environment_beyond_a_limit_is_refused(
    monkeypatch: pytest.MonkeyPatch, learner: dict[str, object], words: str
) -> None:
    monkeypatch.setenv("METABAN_LEARNER", json.dumps(learner))
    with pytest.raises(SettingsError) as refusal:
        load_settings()
    assert str(refusal.value) == words


async def test_too_large_environment_stores_nothing(redis: Redis, valkey_url: str) -> None:
    with pytest.raises(SettingsError, match="METABAN_LEARNER: members, width, depth, codes_max and 1 input make"):
        async with running_app(valkey_url, width=4_000):
            pass
    assert await NamespaceStore(redis).load("default") is None


@pytest.mark.parametrize("preset", ["default", "paper", "pooled"])
@pytest.mark.parametrize("name", [name for name in LEARNER_SETTINGS if name in LIMITS])
def test_variables_have_the_limits_of_their_settings(preset: str, name: str) -> None:
    """Each limit of the preset is accepted, the number beyond it is refused by the name of the variable."""
    learner = named_settings(preset)
    if name not in learner.to_json():
        with pytest.raises(SettingsError, match=f"METABAN_{name.upper()}: the preset {preset} has no such setting"):
            load_settings(preset=preset, **{name: LIMITS[name].most / 2})
        return
    limits = learner.NARROWER.get(name, LIMITS[name])
    whole = isinstance(getattr(learner, name), int)
    lowest = limits.least if not limits.above else math.nextafter(limits.least, math.inf)
    highest = limits.most if not limits.below else math.nextafter(limits.most, -math.inf)
    for value in (lowest, highest):
        assert getattr(learner_settings(load_settings(preset=preset, **{name: value})), name) == value
    for value in (lowest - 1, highest + 1) if whole else (math.nextafter(lowest, -1), math.nextafter(highest, 1e9)):
        with pytest.raises(SettingsError, match=f"METABAN_{name.upper()}: "):
            load_settings(preset=preset, **{name: value})
