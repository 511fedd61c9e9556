"""Rules of rewards over HTTP, with a store and a worker: ranges, late, deferred, default and repeated rewards."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import structlog
from redis.asyncio import Redis

from metaban.service.settings.environment import Settings, SettingsError, load_settings, reward_rules
from metaban.store.decisions.decisions import BASELINE, DecisionStore
from metaban.store.errors import StoreUnavailable
from metaban.store.namespaces import NamespaceStore
from metaban.store.reward_rules import RewardRules
from tests.service.engine.reward_calls import (
    ARMS,
    KEYS,
    WINDOW_MS,
    ask,
    backdate,
    change,
    codes,
    learned,
    served,
    tell,
    users,
    waiting,
)
from tests.service.engines import worker_running
from tests.worker.workshop import soon

DEFAULTS: dict[str, Any] = {"default_reward": 0.25, "reward_wait_s": 3_000}


@pytest.fixture
async def service(redis: Redis, valkey_url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with served(valkey_url) as (client, _):
        yield client


class TestRange:
    async def test_default_range_is_0_to_1(self, service: httpx.AsyncClient, client: Redis) -> None:
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

    async def test_other_range_is_rescaled(self, redis: Redis, client: Redis, valkey_url: str) -> None:
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


@pytest.mark.single_node("it counts the connections of one server")
async def test_lookups_of_a_long_batch_share_a_connection(service: httpx.AsyncClient, redis: Redis) -> None:
    await ask(service, "d")
    await tell(service, "d")
    events = [{"decision_id": f"unknown-{number}", "reward": 1} for number in range(999)]
    before, calls_before = await redis.info("stats"), await redis.info("commandstats")
    answer = await service.post("/feedback", json={"events": [*events, {"decision_id": "d", "reward": 1}]})
    assert (answer.json()["duplicates"], len(answer.json()["rejected"])) == (1, 999)
    after, calls_after = await redis.info("stats"), await redis.info("commandstats")
    assert after["total_connections_received"] - before["total_connections_received"] < 10
    assert calls_after["cmdstat_get"]["calls"] - calls_before["cmdstat_get"]["calls"] >= 1_000


async def test_damaged_decision_is_unknown_and_does_not_fail_others(service: httpx.AsyncClient, redis: Redis) -> None:
    await ask(service, "d")
    await ask(service, "damaged")
    await redis.set(KEYS.decision("damaged"), "text")
    events = [{"decision_id": name, "reward": 1} for name in ("damaged", "d")]
    with structlog.testing.capture_logs() as logs:
        answer = await service.post("/feedback", json={"events": events})
    assert (answer.json()["accepted"], codes(answer)) == (1, ["unknown-decision"])
    assert [line["namespace"] for line in logs if line["event"] == "decision_damaged"] == ["shop"]


class TestLate:
    async def test_late_reward_is_reported_counted_logged_and_not_learned(
        self, service: httpx.AsyncClient, client: Redis
    ) -> None:
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
        late = [entry for entry in logs if entry["event"] == "rewards_late"]
        assert [entry["rewards"] for entry in late] == [1, 2]
        assert all(entry["longest_s"] >= 5 for entry in late)
        assert all("u" not in entry.values() for entry in logs)
        metrics = (await service.get("/metrics")).text
        assert 'metaban_events{namespace="shop",state="late"} 3.0' in metrics

    async def test_decision_is_stored_for_the_late_window(self, service: httpx.AsyncClient, client: Redis) -> None:
        first = await ask(service, "d")
        assert WINDOW_MS < await client.pttl(KEYS.decision("d")) <= WINDOW_MS + 600_000
        await backdate(client, "d", WINDOW_MS + 5_000)
        assert (await ask(service, "d"))["items"] == first["items"]
        await client.delete(KEYS.decision("d"))
        assert (await tell(service, "d")).status_code == 404

    async def test_reward_within_the_window_is_not_late(self, service: httpx.AsyncClient, client: Redis) -> None:
        await ask(service, "d")
        await backdate(client, "d", WINDOW_MS - 60_000)
        assert codes(await tell(service, "d")) == []

    async def test_late_reward_of_an_unknown_arm_is_refused(self, service: httpx.AsyncClient, client: Redis) -> None:
        await ask(service, "d")
        await backdate(client, "d", WINDOW_MS + 5_000)
        assert (await tell(service, "d", arm_id="no such arm")).status_code == 422

    async def test_failed_count_does_not_change_the_answer(self, redis: Redis, client: Redis, valkey_url: str) -> None:
        async with served(valkey_url) as (service, engine):
            await ask(service, "d")
            await backdate(client, "d", WINDOW_MS + 5_000)

            async def away(*_: Any) -> None:
                raise StoreUnavailable("for a moment")

            engine._users.count_late = away  # type: ignore[method-assign]
            assert codes(await tell(service, "d")) == ["late"]


class TestDeferred:
    async def test_rewards_are_refused_before_the_activation(self, service: httpx.AsyncClient, client: Redis) -> None:
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

    async def test_window_begins_with_the_activation(self, service: httpx.AsyncClient, client: Redis) -> None:
        await ask(service, "d", deferred=True)
        await backdate(client, "d", WINDOW_MS - 60_000)
        assert (await service.post("/decisions/d/activate")).status_code == 200
        await backdate(client, "d", 120_000)
        assert codes(await tell(service, "d")) == []

    async def test_expired_decision_cannot_be_activated(self, service: httpx.AsyncClient, client: Redis) -> None:
        await ask(service, "d", deferred=True)
        await backdate(client, "d", WINDOW_MS + 1_000)
        gone = await service.post("/decisions/d/activate")
        assert (gone.status_code, gone.json()["type"]) == (404, "/problems/unknown-decision")
        assert codes(await tell(service, "d")) == ["late"]

    async def test_activation_of_unknown_and_undeferred_decisions(
        self, service: httpx.AsyncClient, client: Redis
    ) -> None:
        assert (await service.post("/decisions/never/activate")).status_code == 404
        await ask(service, "d")
        stored = await DecisionStore(client, KEYS, ttl_s=60).get("d")
        assert stored is not None
        activated = await service.post("/decisions/d/activate")
        assert activated.json() == {"decision_id": "d", "activated_ms": stored.created_ms}

    async def test_deferred_and_undeferred_requests_with_one_id_conflict(self, service: httpx.AsyncClient) -> None:
        await ask(service, "d", deferred=True)
        answer = await service.post("/recommend", json={"user_id": "u", "arms": ARMS, "decision_id": "d"})
        assert answer.status_code == 409

    async def test_decision_of_a_forgotten_user_cannot_be_activated(self, service: httpx.AsyncClient) -> None:
        await ask(service, "d", deferred=True)
        await service.delete("/admin/users/u")
        assert (await service.post("/decisions/d/activate")).status_code == 404
        assert (await tell(service, "d")).json()["type"] == "/problems/unknown-decision"


async def test_baseline_decisions_are_not_learned(service: httpx.AsyncClient, client: Redis) -> None:
    await ask(service, "d")
    await change(client, "d", policy=BASELINE)
    assert codes(await tell(service, "d")) == ["not-learned"]
    assert (await (await users(client)).counters())["enqueued"] == 0


async def test_the_place_of_an_arm_is_stored_with_its_reward(redis: Redis, client: Redis, valkey_url: str) -> None:
    async with served(valkey_url) as (service, _), worker_running(valkey_url):
        shown = [item["arm_id"] for item in (await ask(service, "d", k=3))["items"]]
        events = [{"decision_id": "d", "arm_id": arm, "reward": 1} for arm in reversed(shown)]
        again = {"decision_id": "d", "arm_id": shown[1], "reward": 0.5, "event_id": "again"}
        for body in ({"events": events}, again):
            assert (await service.post("/feedback?wait=applied", json=body)).json()["applied"]
        kept = (await (await users(client)).load_samples(["u"]))["u"]
        assert {sample.arm_id: sample.place for sample in kept} == {arm: place for place, arm in enumerate(shown)}


class TestIdempotencyKey:
    async def test_idempotency_key_is_the_event_id(self, service: httpx.AsyncClient) -> None:
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
    """Default rewards, made by a real worker."""

    async def overdue(self, client: Redis) -> None:
        """Make all waiting decisions due."""
        for partition in range(2):
            for member in await client.zrange(KEYS.awaiting(partition), 0, -1):
                await client.zadd(KEYS.awaiting(partition), {member: 1})

    async def test_decision_without_reward_is_learned_with_the_default(
        self, redis: Redis, client: Redis, valkey_url: str
    ) -> None:
        async with served(valkey_url, **DEFAULTS) as (service, _), worker_running(valkey_url):
            await ask(service, "d", k=2)
            assert await waiting(client) == {b"1:d", b"2:d"}
            await self.overdue(client)

            async def made() -> bool:
                return await learned(client) == [(0.25, True)] * 2

            await soon(made, "the default rewards are learned")
            # A reward within the window replaces the default.
            arm = (await ask(service, "d", k=2))["items"][0]["arm_id"]
            told = await service.post("/feedback?wait=applied", json={"decision_id": "d", "arm_id": arm, "reward": 1})
            assert told.json()["applied"]
            assert sorted(await learned(client)) == [(0.25, True), (1.0, False)]
            assert await waiting(client) == set()

    async def test_reward_replaces_the_default(self, redis: Redis, client: Redis, valkey_url: str) -> None:
        async with served(valkey_url, **DEFAULTS) as (service, _), worker_running(valkey_url):
            arm = (await ask(service, "d", k=2))["items"][1]["arm_id"]
            await tell(service, "d", arm_id=arm, event_id="e")

            async def settled() -> bool:
                return await waiting(client) == {b"1:d"}

            await soon(settled, "the rewarded arm does not wait")
            # a repeated event id stores nothing, so the other arm keeps waiting
            other = (await ask(service, "d", k=2))["items"][0]["arm_id"]
            again = await tell(service, "d", arm_id=other, event_id="e")
            assert again.json()["duplicates"] == 1
            assert await waiting(client) == {b"1:d"}
            await service.delete("/admin/users/u")
            assert (await tell(service, "d", arm_id=other)).status_code == 404
            assert await waiting(client) == set()

    async def test_reward_is_accepted_if_the_wait_cannot_be_removed(
        self, redis: Redis, client: Redis, valkey_url: str
    ) -> None:
        async with served(valkey_url, **DEFAULTS) as (service, _), worker_running(valkey_url):
            await ask(service, "d")
            for partition in range(2):
                await client.delete(KEYS.awaiting(partition))
                await client.set(KEYS.awaiting(partition), "text")
            told = await service.post("/feedback?wait=applied", json={"decision_id": "d", "reward": 1})
            assert (told.json()["accepted"], told.json()["applied"]) == (1, True)

    async def test_deferred_decisions_wait_from_their_activation(
        self, redis: Redis, client: Redis, valkey_url: str
    ) -> None:
        async with served(valkey_url, **DEFAULTS) as (service, _):
            await ask(service, "d", deferred=True)
            assert await waiting(client) == set()
            activated = (await service.post("/decisions/d/activate")).json()["activated_ms"]
            assert await client.zscore(KEYS.awaiting(KEYS.partition_of("d")), "1:d") == activated + 3_000_000
            assert await waiting(client) == {b"1:d"}

    async def test_unless_changed_silence_is_0_after_10_minutes(
        self, redis: Redis, client: Redis, valkey_url: str
    ) -> None:
        async with served(valkey_url) as (service, _), worker_running(valkey_url):
            shown = [item["arm_id"] for item in (await ask(service, "d", k=3))["items"]]
            stored = await DecisionStore(client, KEYS, ttl_s=60).get("d")
            assert stored is not None
            overdue_ms = await client.zscore(KEYS.awaiting(KEYS.partition_of("d")), "3:d")
            assert overdue_ms == stored.created_ms + 600_000
            body = {"decision_id": "d", "arm_id": shown[1], "reward": 1, "event_id": "own"}
            assert (await service.post("/feedback?wait=applied", json=body)).json()["applied"]
            await self.overdue(client)

            async def made() -> bool:
                return len(await learned(client)) == 3

            await soon(made, "the other arms are learned")
            kept = (await (await users(client)).load_samples(["u"]))["u"]
            found = {sample.place: (sample.arm_id, sample.reward, sample.by_default) for sample in kept}
            assert found == {0: (shown[0], 0.0, True), 1: (shown[1], 1.0, False), 2: (shown[2], 0.0, True)}

    async def test_off(self, redis: Redis, client: Redis, valkey_url: str) -> None:
        async with served(valkey_url, default_reward="off") as (service, _):
            await ask(service, "d")
            assert await waiting(client) == set()

    async def test_decisions_of_the_baseline_do_not_wait(self, redis: Redis, client: Redis, valkey_url: str) -> None:
        async with served(valkey_url, serving="baseline") as (service, _):
            assert (await ask(service, "d"))["policy"] == BASELINE
            assert await waiting(client) == set()

    async def test_deferred_decisions_do_not_wait_before_their_activation(
        self, service: httpx.AsyncClient, client: Redis
    ) -> None:
        await ask(service, "d", deferred=True)
        assert await waiting(client) == set()
        await service.post("/decisions/d/activate")
        assert await waiting(client) == {b"1:d"}


class TestRules:
    @pytest.mark.parametrize(("repeated", "reward"), [("first", 0.25), ("last", 0.5), ("sum", 0.75)])
    async def test_repeated_rewards(
        self, redis: Redis, client: Redis, valkey_url: str, repeated: str, reward: float
    ) -> None:
        """Several rewards teach the same as the one reward they combine to."""
        states = []
        async with served(valkey_url, repeated_rewards=repeated) as (service, _), worker_running(valkey_url):
            for user, rewards in (("many", (0.25, 0.5)), ("one", (reward,))):
                await ask(service, user, user_id=user, arms=ARMS[:1])
                for number, part in enumerate(rewards):
                    body = {"decision_id": user, "reward": part, "event_id": str(number)}
                    assert (await service.post("/feedback?wait=applied", json=body)).json()["applied"]
                assert await learned(client, user) == [(rewards[-1], False)]
                stored = await (await users(client)).load([user])
                assert stored[user].version == len(rewards)
                states.append({name: array.tolist() for name, array in stored[user].tensors.items()})
        assert states[0] == states[1]

    async def test_reward_rules_are_stored_in_the_namespace(self, redis: Redis, client: Redis, valkey_url: str) -> None:
        changes = {
            "repeated_rewards": "last",
            "reward_min": -1,
            "reward_max": 1,
            "default_reward": 0,
            "reward_wait_s": 60,
            "dedupe_window_s": 700_000,
        }
        async with served(valkey_url, **changes):
            record = await NamespaceStore(client).load("shop")
            assert record is not None
            assert record.reward_rules == RewardRules("last", -1, 1, 0, 60, WINDOW_MS // 1_000, 700_000)
        async with served(valkey_url):
            assert await NamespaceStore(client).load("shop") == record

    @pytest.mark.parametrize(
        ("environment", "word"),
        [
            ({"METABAN_REPEATED_REWARDS": "mean"}, "METABAN_REPEATED_REWARDS"),
            ({"METABAN_REWARD_MIN": "1"}, "below"),
            ({"METABAN_REWARD_MAX": "nan"}, "numbers"),
            ({"METABAN_DEFAULT_REWARD": "none"}, "METABAN_DEFAULT_REWARD: .* valid number"),
            ({"METABAN_DEFAULT_REWARD": "2", "METABAN_REWARD_WAIT_S": "9"}, "between 0 and 1"),
            ({"METABAN_REWARD_WAIT_S": "99999"}, "METABAN_REWARD_WAIT_S: .* longer than the reward window"),
            ({"METABAN_LATE_WINDOW_S": "-1"}, "METABAN_LATE_WINDOW_S"),
            ({"METABAN_DEDUPE_WINDOW_S": "86399"}, "METABAN_DEDUPE_WINDOW_S: .* shorter than the reward window"),
            ({"METABAN_REWARD_WINDOW_S": "604801"}, "METABAN_REWARD_WINDOW_S: .* shorter than the reward window"),
        ],
    )
    def test_contradicting_settings_are_refused(
        self, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], word: str
    ) -> None:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SettingsError, match=word):
            load_settings()

    def test_settings(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert reward_rules(Settings()) == RewardRules(default_reward=0.0)
        assert reward_rules(Settings()).waited_s == 600
        for changes in ({"REWARD_MIN": "1", "REWARD_MAX": "5"}, {"REWARD_WINDOW_S": "60"}):
            with monkeypatch.context() as patch:
                for name, value in changes.items():
                    patch.setenv(f"METABAN_{name}", value)
                assert reward_rules(load_settings()).default_reward == 0
        for off in ("off", "Off"):
            monkeypatch.setenv("METABAN_DEFAULT_REWARD", off)
            assert reward_rules(load_settings()) == RewardRules()
        monkeypatch.setenv("METABAN_DEFAULT_REWARD", "")
        assert reward_rules(load_settings()).default_reward == 0, "an empty variable is as good as none"
        monkeypatch.setenv("METABAN_DEFAULT_REWARD", "0")
        monkeypatch.setenv("METABAN_REWARD_WAIT_S", "86400")
        assert reward_rules(load_settings()) == RewardRules(default_reward=0.0, wait_s=86_400.0)
