"""Warnings that nothing can be learned: raised and cleared once, exposed, and not raised where learning works."""

from __future__ import annotations

import httpx
import pytest
import structlog
from redis.asyncio import Redis

from metaban.service.engine import reward_watch
from metaban.service.engine.engine import Engine
from metaban.service.engine.reward_watch import DECISIONS_MIN, DEFAULT_REWARD_S, EQUAL_LOWEST_MIN, EQUAL_MIN
from tests.service.engine.reward_calls import KEYS, served
from tests.service.engine.reward_calls import ask as ask_http
from tests.service.engines import MakeEngine, ask, reward, worker_running
from tests.worker.workshop import soon

#: By then a decision made at 0 s has its reward, or its default reward.
LATER_S = 600 + DEFAULT_REWARD_S


def codes(engine: Engine) -> list[str]:
    return [each.code for each in engine.watch.warnings]


async def decide(engine: Engine, count: int) -> str:
    """Make decisions; returns the id of the last."""
    for _ in range(count):
        decision_id = (await engine.decider.recommend(ask())).decision.decision_id
    return decision_id


async def tell(engine: Engine, decision_id: str, value: float, count: int = 1) -> None:
    """Send equal rewards for one arm of a decision."""
    first = engine.feedback.accepted
    for start in range(0, count, 500):
        events = [str(first + number) for number in range(start, min(start + 500, count))]
        told = await engine.feedback.accept(
            [reward(decision_id, value, event=event) for event in events], wait_applied=False
        )
        assert told.accepted == len(events)


class TestMissing:
    async def test_decisions_without_any_reward(self, engine: Engine) -> None:
        with structlog.testing.capture_logs() as lines:
            last = await decide(engine, DECISIONS_MIN)
            await engine.watch.check(0)
            await engine.watch.check(LATER_S - 1)
            assert codes(engine) == [], "they may still get one"
            for at_s in (LATER_S, LATER_S + 10):
                await engine.watch.check(at_s)
                assert codes(engine) == ["rewards-missing"]
            await tell(engine, last, 1.0)
            await engine.watch.check(LATER_S + 20)
            assert codes(engine) == []
        told = [(line["event"], line["code"], line["namespace"]) for line in lines if "code" in line]
        assert told == [
            ("learning_warning_raised", "rewards-missing", "shop"),
            ("learning_warning_cleared", "rewards-missing", "shop"),
        ]

    async def test_few_decisions(self, engine: Engine) -> None:
        await decide(engine, DECISIONS_MIN - 1)
        for at_s in (0, LATER_S, 2 * LATER_S):
            await engine.watch.check(at_s)
        assert codes(engine) == []

    async def test_decisions_after_the_last_reward_count(self, engine: Engine) -> None:
        last = await decide(engine, DECISIONS_MIN)
        await tell(engine, last, 1.0)
        await engine.watch.check(0)
        await engine.watch.check(LATER_S)
        assert codes(engine) == []
        await decide(engine, DECISIONS_MIN)
        await engine.watch.check(2 * LATER_S)
        assert codes(engine) == [], "they were made just now"
        await engine.watch.check(3 * LATER_S)
        assert codes(engine) == [], "the store has a reward, which may have come meanwhile"
        await decide(engine, DECISIONS_MIN)
        await engine.watch.check(4 * LATER_S)
        await engine.watch.check(5 * LATER_S)
        assert codes(engine) == ["rewards-missing"]

    async def test_rewards_of_other_processes_count(self, make_engine: MakeEngine) -> None:
        here, there = make_engine(), make_engine()
        for each in (here, there):
            await each.start()
        for turn in range(4):
            last = await decide(here, DECISIONS_MIN)
            await here.watch.check(turn * LATER_S)
            assert codes(here) == []
            await tell(there, last, 0.5)

    async def test_what_is_not_learned_does_not_count(self, redis: Redis, valkey_url: str) -> None:
        async with served(valkey_url) as (service, engine):
            for number in range(3):
                await ask_http(service, f"deferred {number}".replace(" ", "-"), deferred=True)
            assert engine.decider.decided == 0
            for _ in range(2):
                await service.post("/decisions/deferred-0/activate")
            assert engine.decider.decided == 1
            await ask_http(service, "d")
            await ask_http(service, "d")
            assert engine.decider.decided == 2, "a repeated request is one decision"
            await service.patch("/admin/config", json={"serving": "baseline"})
            await ask_http(service, "baseline")
            assert engine.decider.decided == 2

    async def test_no_warning_while_a_baseline_serves(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        await engine.start()
        await decide(engine, DECISIONS_MIN)
        await engine.watch.check(0)
        await engine.watch.check(LATER_S)
        assert codes(engine) == ["rewards-missing"]
        await engine.change_settings({"serving": "baseline"})
        await engine.watch.check(LATER_S + 10)
        assert codes(engine) == []


class TestEqual:
    async def test_equal_rewards(self, make_engine: MakeEngine) -> None:
        engine = make_engine(default_reward="off", reward_min=-1)
        await engine.start()
        last = await decide(engine, 1)
        await tell(engine, last, 0.5, EQUAL_MIN - 1)
        await engine.watch.check(0)
        assert codes(engine) == []
        await tell(engine, last, 0.5)
        await engine.watch.check(10)
        assert codes(engine) == ["rewards-equal"]
        assert f"the latest {EQUAL_MIN} rewards are all 0.5" in engine.watch.warnings[0].detail
        await tell(engine, last, 1)
        await engine.watch.check(20)
        assert codes(engine) == []

    async def test_rare_clicks_are_no_cause(self, engine: Engine) -> None:
        last = await decide(engine, 1)
        await tell(engine, last, 0.0, EQUAL_LOWEST_MIN - 1)
        await engine.watch.check(0)
        assert codes(engine) == []
        await tell(engine, await decide(engine, 1), 0.0)
        await engine.watch.check(10)
        assert codes(engine) == ["rewards-equal"], "the default reward is the same"

    async def test_every_decision_gets_the_same_reward(self, engine: Engine) -> None:
        last = await decide(engine, 1)
        await tell(engine, last, 1.0, EQUAL_MIN)
        await engine.watch.check(0)
        await tell(engine, last, 1.0, EQUAL_MIN)
        await engine.watch.check(40)
        assert codes(engine) == [], "default rewards may still be made for other decisions"
        await engine.watch.check(LATER_S + 40)
        assert codes(engine) == ["rewards-equal"]

    async def test_only_clicks_are_sent(self, redis: Redis, client: Redis, valkey_url: str) -> None:
        async with served(valkey_url) as (service, engine), worker_running(valkey_url):
            await ask_http(service, "clicked", k=1)
            await ask_http(service, "ignored", k=1)
            await tell(engine, "clicked", 1.0, EQUAL_MIN)
            await engine.watch.check(0)
            await tell(engine, "clicked", 1.0, EQUAL_MIN)
            await engine.watch.check(40)
            for partition in range(2):
                for member in await client.zrange(KEYS.awaiting(partition), 0, -1):
                    await client.zadd(KEYS.awaiting(partition), {member: 1})

            async def defaulted() -> bool:
                return (await engine._users.counters())["defaulted"] == 1

            await soon(defaulted, "the default reward is made")
            await engine.watch.check(LATER_S + 40)
            assert codes(engine) == []


async def test_health_and_metrics(redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_watch, "CHECK_EVERY_S", 0.02)
    async with served(valkey_url, default_reward="off") as (service, engine):
        assert (await service.get("/health/ready")).json()["warnings"] == []
        assert 'metaban_learning_warning{code="rewards-equal",namespace="shop"} 0.0' in await metrics(service)
        await tell(engine, await decide(engine, 1), 1.0, EQUAL_MIN)

        async def warned() -> bool:
            return bool((await service.get("/health/ready")).json()["warnings"])

        await soon(warned, "the running check finds it")
        answer = await service.get("/health/ready")
        assert (answer.status_code, answer.json()["status"]) == (200, "ready")
        (warning,) = answer.json()["warnings"]
        assert (warning["namespace"], warning["code"]) == ("shop", "rewards-equal")
        assert "default_reward" in warning["detail"]
        assert 'metaban_learning_warning{code="rewards-equal",namespace="shop"} 1.0' in await metrics(service)
        assert 'metaban_learning_warning{code="rewards-missing",namespace="shop"} 0.0' in await metrics(service)


async def metrics(service: httpx.AsyncClient) -> list[str]:
    return (await service.get("/metrics")).text.splitlines()
