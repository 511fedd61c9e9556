"""The rules of rewards over HTTP, with a real store and a real worker: ranges, late, deferred, default, repeated."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
import structlog
from redis.asyncio import Redis

from service.app import create_app
from service.engine import Engine
from service.metrics import Metrics
from service.recommenders import Recommenders
from service.settings import Settings, SettingsError, load_settings, reward_rules
from store.decisions import BASELINE, Decision, DecisionStore
from store.errors import StoreUnavailable
from store.keys import NamespaceKeys
from store.namespaces import Namespaces
from store.reward_rules import RewardRules
from store.users import UserStore
from tests.service.test_engine import settings, worker_running
from tests.worker.workshop import soon

ARMS = [{"id": f"a{n}", "features": [n, 1 - n, 0.5]} for n in range(3)]
KEYS = NamespaceKeys("shop", 2)
DEFAULTS: dict[str, Any] = {"default_reward": 0.25, "reward_wait_s": 3_000}
WINDOW_MS = 3_600_000


@asynccontextmanager
async def served(url: str, **changes: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Engine]]:
    """The whole service in this process."""
    configured = settings(reward_window_s=WINDOW_MS // 1_000, late_window_s=600, **changes)
    metrics = Metrics()
    recommenders = Recommenders(configured, url, metrics)
    app = create_app(configured, recommenders, metrics)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://edge") as client,
    ):
        yield client, recommenders.default


@pytest.fixture
async def service(redis: Redis, valkey_url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with served(valkey_url) as (client, _):
        yield client


async def ask(service: httpx.AsyncClient, decision_id: str, **changes: Any) -> dict[str, Any]:
    body = {"user_id": "u", "arms": ARMS, "decision_id": decision_id, **changes}
    answer = await service.post("/recommend", json=body)
    assert answer.status_code == 200, answer.text
    shown: dict[str, Any] = answer.json()
    return shown


async def tell(service: httpx.AsyncClient, decision_id: str, reward: float = 1, **more: Any) -> httpx.Response:
    return await service.post("/feedback", json={"decision_id": decision_id, "reward": reward, **more})


def codes(response: httpx.Response) -> list[str]:
    assert response.status_code == 202, response.text
    return [each["code"] for each in response.json()["rejected"]]


async def change(client: Redis, decision_id: str, **changes: Any) -> Decision:
    """Another past of a decision."""
    stored = await DecisionStore(client, KEYS, ttl_s=60).get(decision_id)
    assert stored is not None
    changed = replace(stored, **changes)
    await client.execute_command("SET", KEYS.decision(decision_id), changed.encode(), "KEEPTTL")
    return changed


async def backdate(client: Redis, decision_id: str, by_ms: int) -> None:
    stored = await DecisionStore(client, KEYS, ttl_s=60).get(decision_id)
    assert stored is not None
    await change(client, decision_id, created_ms=stored.created_ms - by_ms)


async def users(client: Redis) -> UserStore:
    record = await Namespaces(client).load("shop")
    assert record is not None
    return UserStore(client, record.keys, record.store_epoch, samples_kept=20)


async def waiting(client: Redis) -> set[bytes]:
    return {member for each in range(2) for member in await client.zrange(KEYS.awaiting(each), 0, -1)}


async def learned(client: Redis, user: str = "u") -> list[tuple[float, bool]]:
    """Reward and origin of each sample kept."""
    kept = (await (await users(client)).load_samples([user])).get(user, [])
    return [(sample.reward, sample.by_default) for sample in kept]


class TestRange:
    async def test_by_default_from_0_to_1(self, service: httpx.AsyncClient, client: Redis) -> None:
        await ask(service, "d")
        for reward in (-1e-9, 1.01, 5):
            single = await tell(service, "d", reward)
            assert (single.status_code, single.json()["type"]) == (422, "/problems/invalid-input")
            assert [error["field"] for error in single.json()["errors"]] == ["reward"]
            good = {"decision_id": "d", "reward": 1}
            many = await service.post("/feedback", json={"events": [good, {"decision_id": "d", "reward": reward}]})
            assert many.status_code == 422
            assert [error["field"] for error in many.json()["errors"]] == ["events[1].reward"]
            assert many.json()["errors"][0]["detail"] == "must lie between 0 and 1"
        assert (await (await users(client)).counters())["enqueued"] == 0

    async def test_another_one(self, redis: Redis, client: Redis, valkey_url: str) -> None:
        async with served(valkey_url, reward_min=-2, reward_max=6) as (service, _), worker_running(valkey_url):
            for number, reward in enumerate((-2, 0, 6)):
                await ask(service, f"d{number}")
                told = await service.post(
                    "/feedback?wait=applied", json={"decision_id": f"d{number}", "reward": reward}
                )
                assert told.json()["applied"]
            assert await learned(client) == [(0.0, False), (0.25, False), (1.0, False)]
            refused = await tell(service, "d0", 6.5)
            assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "reward")
            assert "-2 and 6" in refused.json()["detail"]


class TestLate:
    async def test_it_is_told_counted_logged_and_not_learned(self, service: httpx.AsyncClient, client: Redis) -> None:
        await ask(service, "d")
        await ask(service, "fresh")
        await backdate(client, "d", WINDOW_MS + 5_000)
        with structlog.testing.capture_logs() as logs:
            single = await tell(service, "d")
            assert codes(single) == ["late"]
            assert single.json()["accepted"] == 0
            many = await service.post(
                "/feedback",
                json={"events": [{"decision_id": name, "reward": 1} for name in ("d", "fresh", "d")]},
            )
            assert codes(many) == ["late", "late"]
            assert many.json()["accepted"] == 1
        counters = await (await users(client)).counters()
        assert (counters["late"], counters["enqueued"]) == (3, 1)
        late = [entry for entry in logs if entry["event"] == "late reward"]
        assert [entry["decision"] for entry in late] == ["d"] * 3
        assert all(entry["late_s"] >= 5 for entry in late)
        assert all("u" not in entry.values() for entry in logs)
        metrics = (await service.get("/metrics")).text
        assert 'metaban_events{namespace="shop",state="late"} 3.0' in metrics

    async def test_the_decision_is_kept_for_the_late_window_and_still_returned(
        self, service: httpx.AsyncClient, client: Redis
    ) -> None:
        first = await ask(service, "d")
        assert WINDOW_MS < await client.pttl(KEYS.decision("d")) <= WINDOW_MS + 600_000
        await backdate(client, "d", WINDOW_MS + 5_000)
        assert (await ask(service, "d"))["items"] == first["items"]
        await client.delete(KEYS.decision("d"))
        assert (await tell(service, "d")).status_code == 404

    async def test_within_the_window_it_is_not(self, service: httpx.AsyncClient, client: Redis) -> None:
        await ask(service, "d")
        await backdate(client, "d", WINDOW_MS - 60_000)
        assert codes(await tell(service, "d")) == []

    async def test_a_wrong_arm_is_wrong_however_late(self, service: httpx.AsyncClient, client: Redis) -> None:
        await ask(service, "d")
        await backdate(client, "d", WINDOW_MS + 5_000)
        assert (await tell(service, "d", arm_id="no such arm")).status_code == 422

    async def test_when_it_cannot_be_counted_the_answer_stands(
        self, redis: Redis, client: Redis, valkey_url: str
    ) -> None:
        async with served(valkey_url) as (service, engine):
            await ask(service, "d")
            await backdate(client, "d", WINDOW_MS + 5_000)

            async def away(*_: Any) -> None:
                raise StoreUnavailable("for a moment")

            engine._users.count_late = away  # type: ignore[method-assign]
            assert codes(await tell(service, "d")) == ["late"]


class TestDeferred:
    async def test_nothing_counts_before_the_activation(self, service: httpx.AsyncClient, client: Redis) -> None:
        await ask(service, "d", deferred=True)
        single = await tell(service, "d")
        assert (single.status_code, single.json()["type"]) == (409, "/problems/not-activated")
        many = await service.post("/feedback", json={"events": [{"decision_id": "d", "reward": 1}]})
        assert codes(many) == ["not-activated"]
        assert (await (await users(client)).counters())["enqueued"] == 0

        activated = await service.post("/decisions/d/activate")
        assert activated.status_code == 200
        again = await service.post("/decisions/d/activate")
        assert again.json() == activated.json()
        told = await tell(service, "d")
        assert (codes(told), told.json()["accepted"]) == ([], 1)

    async def test_the_window_begins_with_the_activation(self, service: httpx.AsyncClient, client: Redis) -> None:
        await ask(service, "d", deferred=True)
        await backdate(client, "d", WINDOW_MS - 60_000)
        assert (await service.post("/decisions/d/activate")).status_code == 200
        await backdate(client, "d", 120_000)
        assert codes(await tell(service, "d")) == []

    async def test_one_that_is_too_old(self, service: httpx.AsyncClient, client: Redis) -> None:
        await ask(service, "d", deferred=True)
        await backdate(client, "d", WINDOW_MS + 1_000)
        gone = await service.post("/decisions/d/activate")
        assert (gone.status_code, gone.json()["type"]) == (404, "/problems/unknown-decision")
        assert codes(await tell(service, "d")) == ["late"]

    async def test_unknown_and_not_deferred(self, service: httpx.AsyncClient, client: Redis) -> None:
        assert (await service.post("/decisions/never/activate")).status_code == 404
        await ask(service, "d")
        stored = await DecisionStore(client, KEYS, ttl_s=60).get("d")
        assert stored is not None
        activated = await service.post("/decisions/d/activate")
        assert activated.json() == {"decision_id": "d", "activated_ms": stored.created_ms}

    async def test_another_kind_of_request_under_the_same_id(self, service: httpx.AsyncClient) -> None:
        await ask(service, "d", deferred=True)
        answer = await service.post("/recommend", json={"user_id": "u", "arms": ARMS, "decision_id": "d"})
        assert answer.status_code == 409

    async def test_who_was_forgotten_meanwhile(self, service: httpx.AsyncClient) -> None:
        await ask(service, "d", deferred=True)
        await service.delete("/admin/users/u")
        assert (await service.post("/decisions/d/activate")).status_code == 404
        assert (await tell(service, "d")).json()["type"] == "/problems/unknown-decision"


async def test_decisions_of_the_baseline_teach_nothing(service: httpx.AsyncClient, client: Redis) -> None:
    await ask(service, "d")
    await change(client, "d", policy=BASELINE)
    assert codes(await tell(service, "d")) == ["not-learned"]
    assert (await (await users(client)).counters())["enqueued"] == 0


class TestIdempotencyKey:
    async def test_it_is_the_event_id(self, service: httpx.AsyncClient) -> None:
        await ask(service, "d", k=2)
        arms = [item["arm_id"] for item in (await ask(service, "d", k=2))["items"]]
        events = [{"decision_id": "d", "arm_id": arm, "reward": 1} for arm in arms]
        for accepted in (2, 0):
            told = await service.post("/feedback", json={"events": events}, headers={"Idempotency-Key": "k"})
            assert told.json()["accepted"] == accepted
        for key, accepted in (("one", 1), ("one", 0), ("k:0", 0), ("other", 1)):
            told = await service.post("/feedback", json=events[0], headers={"Idempotency-Key": key})
            assert told.json()["accepted"] == accepted
        assert (await service.post("/feedback", json=events[0])).json()["accepted"] == 1


class TestDefaults:
    """With a real worker, which makes them."""

    async def overdue(self, client: Redis) -> None:
        """Everything that waits has waited long enough."""
        for partition in range(2):
            for member in await client.zrange(KEYS.awaiting(partition), 0, -1):
                await client.zadd(KEYS.awaiting(partition), {member: 1})

    async def test_a_decision_without_reward_is_learned(self, redis: Redis, client: Redis, valkey_url: str) -> None:
        async with served(valkey_url, **DEFAULTS) as (service, _), worker_running(valkey_url):
            await ask(service, "d", k=2)
            assert await waiting(client) == {b"1:d", b"2:d"}
            await self.overdue(client)

            async def made() -> bool:
                return await learned(client) == [(0.25, True)] * 2

            await soon(made, "the default rewards are learned")
            # One that comes after all, in time: it counts, and the default does not.
            arm = (await ask(service, "d", k=2))["items"][0]["arm_id"]
            told = await service.post("/feedback?wait=applied", json={"decision_id": "d", "arm_id": arm, "reward": 1})
            assert told.json()["applied"]
            assert await learned(client) == [(0.25, True), (0.25, True), (1.0, False)]
            assert await waiting(client) == set()

    async def test_a_reward_ends_the_wait(self, redis: Redis, client: Redis, valkey_url: str) -> None:
        async with served(valkey_url, **DEFAULTS) as (service, _):
            arm = (await ask(service, "d", k=2))["items"][1]["arm_id"]
            await tell(service, "d", arm_id=arm, event_id="e")
            assert await waiting(client) == {b"1:d"}
            # of an event id that was used before nothing is stored, so that the other arm waits on
            other = (await ask(service, "d", k=2))["items"][0]["arm_id"]
            again = await tell(service, "d", arm_id=other, event_id="e")
            assert again.json()["duplicates"] == 1
            assert await waiting(client) == {b"1:d"}
            await service.delete("/admin/users/u")
            assert (await tell(service, "d", arm_id=other)).status_code == 404
            assert await waiting(client) == set()

    async def test_a_reward_is_taken_even_if_the_wait_cannot_be_ended(
        self, redis: Redis, client: Redis, valkey_url: str
    ) -> None:
        async with served(valkey_url, **DEFAULTS) as (service, _):
            await ask(service, "d")
            for partition in range(2):
                await client.delete(KEYS.awaiting(partition))
                await client.set(KEYS.awaiting(partition), "text")
            assert (await tell(service, "d")).json()["accepted"] == 1

    async def test_deferred_ones_wait_from_their_activation_on(
        self, redis: Redis, client: Redis, valkey_url: str
    ) -> None:
        async with served(valkey_url, **DEFAULTS) as (service, _):
            await ask(service, "d", deferred=True)
            assert await waiting(client) == set()
            activated = (await service.post("/decisions/d/activate")).json()["activated_ms"]
            assert await client.zscore(KEYS.awaiting(KEYS.partition_of("d")), "1:d") == activated + 3_000_000
            assert await waiting(client) == {b"1:d"}

    async def test_none_by_default(self, service: httpx.AsyncClient, client: Redis) -> None:
        await ask(service, "d")
        assert await waiting(client) == set()


class TestRules:
    @pytest.mark.parametrize(("repeated", "reward"), [("first", 0.25), ("last", 0.5), ("sum", 0.75)])
    async def test_repeated_rewards(
        self, redis: Redis, client: Redis, valkey_url: str, repeated: str, reward: float
    ) -> None:
        """What is served after several rewards is what one of their meaning teaches."""
        states = []
        async with served(valkey_url, repeated_rewards=repeated) as (service, _), worker_running(valkey_url):
            for user, rewards in (("many", (0.25, 0.5)), ("one", (reward,))):
                await ask(service, user, user_id=user, arms=ARMS[:1])
                for number, part in enumerate(rewards):
                    body = {"decision_id": user, "reward": part, "event_id": str(number)}
                    assert (await service.post("/feedback?wait=applied", json=body)).json()["applied"]
                assert len(await learned(client, user)) == len(rewards)
                stored = await (await users(client)).load([user])
                states.append({name: array.tolist() for name, array in stored[user].tensors.items()})
        assert states[0] == states[1]

    async def test_the_namespace_is_told(self, redis: Redis, client: Redis, valkey_url: str) -> None:
        namespaces = Namespaces(client)
        async with served(valkey_url):
            record = await namespaces.load("shop")
            assert record is not None
            assert record.rewards is None
        wanted = RewardRules("last", -1, 1, 0, 60)
        changes = {
            "repeated_rewards": "last",
            "reward_min": -1,
            "reward_max": 1,
            "default_reward": 0,
            "reward_wait_s": 60,
        }
        for _ in range(2):
            async with served(valkey_url, **changes):
                changed = await namespaces.load("shop")
                assert changed is not None
                assert changed.reward_rules == wanted
                assert changed.revision == record.revision + 1

    @pytest.mark.parametrize(
        ("environment", "word"),
        [
            ({"METABAN_REPEATED_REWARDS": "mean"}, "METABAN_REPEATED_REWARDS"),
            ({"METABAN_REWARD_MIN": "1"}, "below"),
            ({"METABAN_REWARD_MAX": "nan"}, "numbers"),
            ({"METABAN_DEFAULT_REWARD": "0"}, "time to wait"),
            ({"METABAN_DEFAULT_REWARD": "2", "METABAN_REWARD_WAIT_S": "9"}, "between 0 and 1"),
            ({"METABAN_REWARD_WAIT_S": "99999"}, "METABAN_REWARD_WINDOW_S"),
            ({"METABAN_LATE_WINDOW_S": "-1"}, "METABAN_LATE_WINDOW_S"),
            ({"METABAN_DEDUPE_WINDOW_S": "86399"}, "METABAN_DEDUPE_WINDOW_S: is shorter"),
            ({"METABAN_REWARD_WINDOW_S": "604801"}, "METABAN_DEDUPE_WINDOW_S: is shorter"),
        ],
    )
    def test_settings_that_make_no_sense(
        self, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], word: str
    ) -> None:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SettingsError, match=word):
            load_settings()

    def test_settings(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert reward_rules(Settings()) == RewardRules()
        monkeypatch.setenv("METABAN_DEFAULT_REWARD", "0")
        monkeypatch.setenv("METABAN_REWARD_WAIT_S", "86400")
        assert reward_rules(load_settings()) == RewardRules(default_reward=0.0, wait_s=86_400.0)
