"""Settings of learners beyond their limits are refused, wherever they come from, and keep nobody else from being
served."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import replace
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from models.learner import State
from models.posterior import PosteriorLearner
from models.settings import LIMITS, named_settings
from service.settings import LEARNER_SETTINGS, Settings, SettingsError, load_settings
from store.namespaces import NamespaceRecord, Namespaces
from tests.service.apps import ARMS, running_app
from tests.service.test_engine import worker_running

pytestmark = pytest.mark.usefixtures("short_tails")

ASK = {"user_id": "u", "arms": ARMS}
#: As large as a learner may be, or nearly.
LARGE: dict[str, Any] = {"preset": "default", "learner": {"width": 700, "depth": 16, "members": 1}}


async def create(http: httpx.AsyncClient, **fields: object) -> None:
    answer = await http.post("/admin/namespaces", json=fields)
    assert answer.status_code == 201, answer.text


async def record_of(redis: Redis, name: str) -> NamespaceRecord:
    record = await Namespaces(redis).load(name)
    assert record is not None
    return record


async def store_learner(redis: Redis, name: str, **changes: object) -> None:
    """Have a record say what a version without limits may have written."""
    record = await record_of(redis, name)
    overrides = record.overrides if name == "default" else {**record.overrides, "learner": changes}
    learner = {**record.learner, **changes}
    changed = replace(record, learner=learner, overrides=overrides, revision=record.revision + 1)
    await redis.set(record.keys.record, changed.encode())


@pytest.mark.parametrize("preset", ["default", "paper", "pooled"])
async def test_a_namespace_beyond_a_limit_is_refused(redis: Redis, valkey_url: str, preset: str) -> None:
    own = [name for name in named_settings(preset).to_json() if name in LIMITS and name != "seed"]
    # What the deployment has a variable for cannot be said in `learner`, so it says nothing.
    async with running_app(valkey_url, width=None, user_steps=None) as (_, http):
        for name in own:
            most = int(LIMITS[name].most)
            for value in (most + 1, 10**30):
                body = {"name": "shop", "preset": preset, "arm_features": 2, "learner": {name: value}}
                answer = await http.post("/admin/namespaces", json=body)
                assert answer.status_code == 422, answer.text
                assert answer.headers["Content-Type"] == "application/problem+json"
                [error] = answer.json()["errors"]
                assert error["field"] == "learner"
                assert error["detail"].startswith(f"{name} must be at least ")
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
async def test_a_namespace_too_large_altogether_is_refused(
    http: httpx.AsyncClient, learner: dict[str, object], words: str
) -> None:
    body = {"name": "shop", "preset": "default", "arm_features": 100, "learner": learner}
    answer = await http.post("/admin/namespaces", json=body)
    assert answer.status_code == 422, answer.text
    [error] = answer.json()["errors"]
    assert error["field"] == "learner"
    assert error["detail"].startswith(words)
    assert error["detail"].endswith(" allowed")
    assert (await http.get("/admin/namespaces/shop")).status_code == 404


async def test_features_that_make_a_learner_too_large_fix_nothing(http: httpx.AsyncClient) -> None:
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
    async with running_app(valkey_url, width=4_096) as (_, http):
        answer = await http.post("/admin/namespaces", json={"name": "shop", "arm_features": 300})
        assert answer.status_code == 422, answer.text
        [error] = answer.json()["errors"]
        assert error["field"] == "arm_features"
        assert error["detail"].startswith("width, depth, checkpoints, recent_samples and 301 inputs make 2,")
        await create(http, name="shop", arm_features=30)


async def test_others_are_served_while_a_learner_is_built(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await http.post("/recommend", json=ASK)).status_code == 200
    build, builders, longest_s = PosteriorLearner.initial_shared, [], 0.0

    def build_slowly(learner: PosteriorLearner) -> State:
        builders.append(threading.current_thread())
        time.sleep(1.0)
        return build(learner)

    monkeypatch.setattr(PosteriorLearner, "initial_shared", build_slowly)
    creating = asyncio.create_task(create(http, name="large", arm_features=3, **LARGE))
    while not creating.done():
        began = time.perf_counter()
        assert (await http.post("/recommend", json=ASK)).status_code == 200
        longest_s = max(longest_s, time.perf_counter() - began)
    await creating
    assert builders
    assert threading.main_thread() not in builders
    assert longest_s < 0.9
    assert (await http.post("/recommend?namespace=large", json=ASK)).status_code == 200


async def test_a_worker_builds_no_learner_where_it_attends_to_all_namespaces(
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
async def test_a_stored_namespace_beyond_its_limits_is_told_of_and_the_others_are_served(
    redis: Redis, valkey_url: str, changes: dict[str, object], words: str
) -> None:
    async with running_app(valkey_url) as (_, http):
        for name in ("bad", "good"):
            await create(http, name=name, arm_features=3, preset="default")
    await store_learner(redis, "bad", **changes)
    began = time.perf_counter()
    async with running_app(valkey_url) as (_, http), worker_running(valkey_url):
        assert time.perf_counter() - began < 10
        assert (await http.get("/health/ready")).status_code == 200
        for _ in range(2):  # the second is answered without another try
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


async def test_what_the_default_namespace_has_beyond_limits_goes_where_nothing_depends_on_it(
    redis: Redis, valkey_url: str
) -> None:
    async with running_app(valkey_url) as (_, http):
        pass
    await store_learner(redis, "default", width=100_000_000)
    async with running_app(valkey_url) as (_, http):
        assert (await http.post("/recommend", json=ASK)).status_code == 200
    await store_learner(redis, "default", alpha=1e308)
    async with running_app(valkey_url) as (_, http):
        assert (await http.post("/recommend", json=ASK)).status_code == 200
    await store_learner(redis, "default", width=100_000_000)
    with pytest.raises(SettingsError, match=r"namespace default was stored with settings .* width must be at least 1"):
        async with running_app(valkey_url):
            pass


@pytest.mark.parametrize(
    ("learner", "words"),
    [
        ({"depth": 100_000}, "METABAN_LEARNER: depth must be at least 1 and at most 16"),
        ({"members": 10**30}, "METABAN_LEARNER: members must be at least 1 and at most 64"),
        ({"trunk_rate": 1e308}, "METABAN_LEARNER: trunk_rate must be at least 1e-09 and at most 10"),
    ],
)
def test_the_environment_is_refused_in_the_same_words(
    monkeypatch: pytest.MonkeyPatch, learner: dict[str, object], words: str
) -> None:
    monkeypatch.setenv("METABAN_LEARNER", json.dumps(learner))
    with pytest.raises(SettingsError) as refusal:
        load_settings()
    assert str(refusal.value) == words


async def test_an_environment_too_large_altogether_stores_nothing(redis: Redis, valkey_url: str) -> None:
    with pytest.raises(SettingsError, match="METABAN_LEARNER: members, width, depth, codes_max and 1 input make"):
        async with running_app(valkey_url, preset="default", width=4_000, user_steps=None):
            pass
    assert await Namespaces(redis).load("default") is None


@pytest.mark.parametrize("name", [name for name in LEARNER_SETTINGS if name in LIMITS])
def test_variables_have_the_upper_limits_of_the_settings_they_stand_for(name: str) -> None:
    said = [getattr(rule, "le", getattr(rule, "lt", None)) for rule in Settings.model_fields[name].metadata]
    assert [limit for limit in said if limit is not None] == [LIMITS[name].most]
