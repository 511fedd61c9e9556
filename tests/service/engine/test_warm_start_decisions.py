"""Decisions for new users with a profile: their answers, and the stored warm start."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from redis.asyncio import Redis

from metaban.models.learner import Query
from metaban.models.numerics.slates import Slates
from metaban.store.decisions.decisions import DecisionRecord
from metaban.store.keys import NamespaceKeys
from metaban.store.users.users import UserStore
from metaban.store.users.warm_starts import StoredWarmStart
from tests.service.apps import PAPER, running_app
from tests.service.engine.fusion_models import fusion_store, learner, publish, trained
from tests.service.engines import worker_running
from tests.worker.workshop import soon

KEYS = NamespaceKeys("default", 2)
ARMS = [{"id": f"arm {n}", "features": [float(n), 1.0 - n, 0.5]} for n in range(4)]
ANN = [0.7, -1.1]


def asked(user: str = "ann", profile: Any = None, **more: Any) -> dict[str, Any]:
    told = {} if profile is None else {"user_features": profile}
    return {"user_id": user, "arms": ARMS, "k": 4, **told, **more}


async def answered(http: httpx.AsyncClient, user: str = "ann", profile: Any = None, **more: Any) -> dict[str, Any]:
    answer = await http.post("/recommend", json=asked(user, profile, **more))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def means(answer: dict[str, Any]) -> dict[str, float]:
    return {item["arm_id"]: item["mean"] for item in answer["items"]}


async def start_of(redis: Redis, user: str) -> StoredWarmStart | None:
    incarnation, blob = await redis.hmget(KEYS.start(user), "incarnation", "start")
    return None if blob is None else StoredWarmStart.decode(incarnation, blob)


def expected_means(start: np.ndarray | None) -> dict[str, float]:
    """The means of all arms by the learner, for a user without others."""
    model = learner()
    shared = model.initial_shared()
    arms = torch.tensor([[*arm["features"], 1.0] for arm in ARMS], dtype=model.dtype)
    starts = torch.zeros(1, model.start_size, dtype=torch.float64) if start is None else torch.from_numpy(start)[None]
    query = Query(arms, Slates([len(ARMS)]), model.warm_started(shared, starts), torch.tensor([-1]), torch.tensor([0]))
    nobody = {name: torch.zeros(0, *shape, dtype=model.dtype) for name, shape in model.fields.items()}
    scores = model.score(shared, nobody, query)
    return {arm["id"]: float(mean) for arm, mean in zip(ARMS, scores.mean, strict=True)}


@pytest.fixture
async def http(redis: Redis, valkey_url: str, short_tails: None) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an app that serves a fusion model."""
    async with running_app(valkey_url) as (_, client):
        await answered(client, "somebody")
        await publish(redis)
        await served(client, 1)
        yield client


async def served(http: httpx.AsyncClient, version: int | None) -> None:
    """Wait until a version of the fusion model is served."""

    async def is_served() -> bool:
        return bool((await http.get("/admin/fusion")).json()["served"] == version)

    await soon(is_served)


async def test_first_decision_uses_a_warm_start(http: httpx.AsyncClient, redis: Redis) -> None:
    answer = await answered(http, profile=ANN, decision_id="d")
    assert answer["cold_start"] == "fusion"
    start = await start_of(redis, "ann")
    assert start is not None
    assert (start.incarnation, start.version) == (0, 1)
    assert means(answer) == pytest.approx(expected_means(start.values), rel=1e-3, abs=1e-5)
    assert means(answer) != pytest.approx(expected_means(None), abs=1e-2), "it makes a difference"
    stored = DecisionRecord.decode(await redis.get(KEYS.decision("d")))
    assert stored.cold_start == "fusion"
    without = await answered(http, "bob")
    assert without["cold_start"] == "meta"
    assert means(without) == pytest.approx(expected_means(None), rel=1e-3, abs=1e-5)
    assert await start_of(redis, "bob") is None


async def test_nearest_sources_are_shown(http: httpx.AsyncClient) -> None:
    await answered(http, profile=ANN)
    user = (await http.get("/admin/users/ann")).json()
    assert (user["cold_start"], user["version"], user["profile"]) == ("fusion", 0, ANN)
    profiles = trained().profiles
    apart = np.linalg.norm((profiles - np.float32(ANN).astype(np.float64)) / profiles.std(0), axis=1)
    nearest = np.argsort(apart)[:5]
    told = user["warm_start"]
    assert (told["fusion_version"], 0 < told["trust"] <= 0.6) == (1, True)
    assert [each["user_id"] for each in told["nearest"]] == [f"source {row}" for row in nearest]
    assert [each["distance"] for each in told["nearest"]] == pytest.approx(apart[nearest].tolist())
    await answered(http, "bob")
    bob = (await http.get("/admin/users/bob")).json()
    assert (bob["cold_start"], bob["warm_start"]) == ("meta", None)


async def test_warm_start_is_kept(http: httpx.AsyncClient, redis: Redis, valkey_url: str) -> None:
    """The warm start stays: without a profile, with another one, in another process, under a later fusion model."""
    first = await answered(http, profile=ANN)
    start = await start_of(redis, "ann")
    assert start is not None
    await publish(redis, 2, trust=np.array(0.3))
    await served(http, 2)
    async with running_app(valkey_url) as (_, other):
        for client in (http, other):
            for profile in (None, ANN, [5.0, 5.0]):
                again = await answered(client, profile=profile)
                assert (again["cold_start"], means(again)) == ("fusion", means(first))
    kept = await start_of(redis, "ann")
    assert kept is not None
    assert (kept.version, kept.created_ms) == (1, start.created_ms)


async def test_rewards_add_to_the_warm_start(http: httpx.AsyncClient, redis: Redis, valkey_url: str) -> None:
    """Rewards add to the warm start; users with rewards get no new one."""
    first = await answered(http, profile=ANN, decision_id="d1")
    await answered(http, "bob", decision_id="d2")
    async with worker_running(valkey_url):
        for decision in ("d1", "d2"):
            reward = {"decision_id": decision, "arm_id": "arm 3", "reward": 1}
            told = await http.post("/feedback?wait=applied", json=reward)
            assert told.json()["applied"] is True
    again, bob = await answered(http), await answered(http, "bob", ANN)
    assert (again["cold_start"], again["user_version"]) == (None, 1)
    assert (bob["cold_start"], bob["user_version"]) == (None, 1)
    assert means(again)["arm 3"] > means(first)["arm 3"]
    assert await start_of(redis, "bob") is None
    kinds = [(await http.get(f"/admin/users/{user}")).json()["cold_start"] for user in ("ann", "bob")]
    assert kinds == ["fusion", "meta"]


async def test_profile_before_there_is_a_fusion_model(redis: Redis, valkey_url: str, short_tails: None) -> None:
    async with running_app(valkey_url) as (_, http):
        assert (await answered(http, profile=ANN))["cold_start"] == "meta"
        assert await start_of(redis, "ann") is None
        await publish(redis)
        await served(http, 1)
        # The profile is stored and not sent again; there are no rewards yet.
        assert (await answered(http))["cold_start"] == "meta"
        assert (await answered(http, profile=ANN))["cold_start"] == "fusion"


async def test_guard_verdict_prior(http: httpx.AsyncClient, redis: Redis) -> None:
    report = {**trained().report, "verdict": "prior", "blend": 0.0, "trust": 0.0, "gain": -0.25}
    await publish(redis, 2, report=report, blend=np.array(0.0), trust=np.array(0.0))
    await served(http, 2)
    assert (await answered(http, profile=ANN))["cold_start"] == "meta"
    assert await start_of(redis, "ann") is None
    shown = (await http.get("/admin/fusion")).json()
    assert shown["guard"]["verdict"] == "prior"
    assert "0.25" in shown["guard"]["summary"]
    assert "worse" in shown["guard"]["summary"]


async def test_fusion_switched_off(http: httpx.AsyncClient, redis: Redis) -> None:
    await answered(http, profile=ANN)
    assert (await http.patch("/admin/config", json={"fusion": "off"})).json()["settings"]["fusion"] == "off"
    assert (await answered(http, "bob", [1.0, 1.0]))["cold_start"] == "meta"
    assert await start_of(redis, "bob") is None
    assert (await answered(http))["cold_start"] == "fusion", "the stored warm start stays"
    assert (await http.patch("/admin/config", json={"fusion": None})).json()["overridden"] == []
    assert (await answered(http, "bob", [1.0, 1.0]))["cold_start"] == "fusion"


async def test_learner_without_warm_starts(redis: Redis, valkey_url: str, short_tails: None) -> None:
    """A fusion model that does not fit the learner is refused, and a warm start of another learner ignored."""
    async with running_app(valkey_url, **PAPER) as (_, http):
        await answered(http, "somebody")
        await publish(redis)
        start = StoredWarmStart(0, np.full(17, 0.5), 1, (), 0)
        await redis.hset(KEYS.start("ann"), mapping={"incarnation": 0, "start": start.encode()})
        assert (await answered(http, profile=ANN))["cold_start"] == "meta"
        shown = (await http.get("/admin/fusion")).json()
        assert (shown["available"], shown["version"], shown["served"]) == (False, 1, None)


async def test_forgotten_user_returns_without_a_warm_start(http: httpx.AsyncClient, redis: Redis) -> None:
    await answered(http, profile=ANN)
    await http.delete("/admin/users/ann")
    assert await start_of(redis, "ann") is None
    gone = (await http.get("/admin/users/ann")).json()
    assert (gone["cold_start"], gone["warm_start"], gone["forgotten"]) == ("meta", None, True)
    assert (await answered(http))["cold_start"] == "meta"
    assert (await answered(http, profile=ANN))["cold_start"] == "fusion"
    start = await start_of(redis, "ann")
    assert start is not None
    assert start.incarnation == 1
    assert (await answered(http))["cold_start"] == "fusion"


async def test_forgotten_source_has_no_name(http: httpx.AsyncClient, redis: Redis) -> None:
    await answered(http, profile=ANN)
    before = (await http.get("/admin/users/ann")).json()["warm_start"]["nearest"]
    await http.delete(f"/admin/users/{before[0]['user_id']}")
    after = (await http.get("/admin/users/ann")).json()["warm_start"]["nearest"]
    assert after == [{**before[0], "user_id": None}, *before[1:]]
    assert before[0]["user_id"] not in (await (await fusion_store(redis)).everyone()).values()
    assert (await http.get("/admin/fusion")).json()["sources"] == len(trained().profiles) - 1

    async def followed() -> bool:
        return 'metaban_fusion_sources{namespace="default"} 39.0' in (await http.get("/metrics")).text

    await soon(followed)
    await answered(http, "bob", ANN)
    near = (await http.get("/admin/users/bob")).json()["warm_start"]["nearest"]
    assert [each["user_id"] for each in near[:4]] == [each["user_id"] for each in before[1:]]


async def test_cold_starts_are_counted(http: httpx.AsyncClient) -> None:
    for user, profile in (("ann", ANN), ("bob", None), ("eve", [0.0, 0.0]), ("ann", None)):
        await answered(http, user, profile)
    shown = (await http.get("/metrics")).text
    assert 'metaban_cold_starts_total{kind="fusion",namespace="default"} 3.0' in shown
    assert 'metaban_cold_starts_total{kind="meta",namespace="default"} 2.0' in shown  # one is of the fixture
    assert 'metaban_fusion_version{namespace="default"} 1.0' in shown
    assert 'metaban_stage_seconds_count{namespace="default",stage="fusion"} 2.0' in shown


async def test_groups_and_explanations_use_the_warm_start(http: httpx.AsyncClient) -> None:
    """Groups and explanations use the warm start too."""
    first = await answered(http, profile=ANN, decision_id="d", explain=True)
    again = await answered(http, profile=ANN, decision_id="d", explain=True)
    assert [item["explanation"] for item in again["items"]] == [item["explanation"] for item in first["items"]]
    assert first["items"][0]["explanation"]["mean"] == first["items"][0]["mean"]
    group = (await http.post("/admin/groups", json={"user_id": "ann", "features": ARMS[3]["features"]})).json()
    assert group["cold_start"] == "fusion"
    assert group["prediction"] == pytest.approx(means(first)["arm 3"], abs=1e-4)
    stranger = (await http.post("/admin/groups", json={"user_id": "bob", "features": ARMS[3]["features"]})).json()
    assert (stranger["cold_start"], stranger["prediction"] != group["prediction"]) == ("meta", True)


async def test_damaged_warm_start_is_ignored(http: httpx.AsyncClient, redis: Redis) -> None:
    await answered(http, profile=ANN)
    await redis.hset(KEYS.start("ann"), "start", b"nonsense")
    assert (await answered(http))["cold_start"] == "meta"
    assert (await answered(http, profile=ANN))["cold_start"] == "fusion"
    assert (await http.get("/admin/users/ann")).json()["warm_start"] is None


async def test_many_first_decisions_in_one_batch(http: httpx.AsyncClient, redis: Redis) -> None:
    """Many users in one call, one of them with two profiles: the first stored warm start counts."""
    requests = [asked(f"u{n % 20}", [n / 10, 1.0]) for n in range(40)]
    results = (await http.post("/recommend/batch", json={"requests": requests})).json()["results"]
    assert [each["decision"]["cold_start"] for each in results] == ["fusion"] * 40
    users = UserStore(redis, KEYS, "", samples_kept=1)
    _, starts = await users.load_with_warm_starts(f"u{n}" for n in range(20))
    assert len(starts) == 20
    for n in range(20):
        again = await answered(http, f"u{n}")
        assert means(again) in (means(results[n]["decision"]), means(results[n + 20]["decision"]))
