"""Forgetting in the engine: earlier decisions become unknown, decisions under way are made again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from redis.asyncio import Redis

from metaban.service.engine.commands import Features
from metaban.service.engine.engine import Engine
from metaban.service.engine.store_guard import DECISION_BUDGET_S
from metaban.store.decisions.decisions import DecisionRecord, DecisionStore
from metaban.store.keys import NamespaceKeys
from tests.service.engines import ask as asking
from tests.service.engines import hold_puts, reward, worker_running
from tests.worker.workshop import soon

MakeEngine = Callable[..., Engine]


async def stored(client: Redis, decision_id: str) -> DecisionRecord:
    decision = await DecisionStore(client, NamespaceKeys("shop", 2), ttl_s=60).get(decision_id)
    assert decision is not None
    return decision


class TestEngine:
    async def test_decisions_name_the_incarnation(
        self, engine: Engine, make_engine: MakeEngine, client: Redis, valkey_url: str
    ) -> None:
        other = make_engine(candidate_pool=1, active_users_max=1)
        await engine.decider.recommend(asking("u", decision_id="before"))
        await other.start()
        async with worker_running(valkey_url):
            await engine.feedback.accept([reward("before")], wait_applied=True)
            assert (await stored(client, "before")).incarnation == 0
            assert (await engine.users.forget("u")).incarnation == 1
            for number, each in enumerate((engine, other)):
                answer = await each.decider.recommend(asking("u", decision_id=f"after {number}"))
                assert answer.decision.cold_start == "meta"
                assert (await stored(client, f"after {number}")).incarnation == 1
            outcome = await engine.feedback.accept([reward("after 0")], wait_applied=True)
            assert (outcome.accepted, outcome.applied) == (1, True)
            learned = await engine.decider.recommend(asking("u", decision_id="learned"))
            assert learned.decision.cold_start is None
            decision = await stored(client, "learned")
            assert (decision.incarnation, decision.user_version) == (1, 1)

    async def test_rewards_of_earlier_decisions_are_refused(self, engine: Engine) -> None:
        for name in ("told", "not told"):
            await engine.decider.recommend(asking("u", decision_id=name))
        await engine.decider.recommend(asking("v", decision_id="of another"))
        await engine.feedback.accept([reward("told")], wait_applied=False)
        await engine.users.forget("u")
        await engine.decider.recommend(asking("u", decision_id="since"))
        outcome = await engine.feedback.accept(
            [reward("not told"), reward("nowhere"), reward("told"), reward("since"), reward("of another")],
            wait_applied=False,
        )
        assert (outcome.accepted, outcome.duplicates) == (2, 0)
        assert [(each.index, each.code) for each in outcome.rejected] == [
            (place, "unknown-decision") for place in range(3)
        ]

    async def test_wait_ends_for_an_event_without_effect(self, engine: Engine, valkey_url: str) -> None:
        for name in ("told", "not told"):
            await engine.decider.recommend(asking("u", decision_id=name))
        await engine.feedback.accept([reward("told")], wait_applied=False)
        await engine._users.forget("u")  # decisions remain, as when a restore drops a user
        async with asyncio.timeout(30):  # below the time-out of a wait
            refused = await engine.feedback.accept([reward("not told")], wait_applied=True)
        assert (refused.accepted, refused.applied) == (0, False)
        assert [rejection.code for rejection in refused.rejected] == ["user-reset"]
        async with worker_running(valkey_url):

            async def voided() -> bool:
                return (await engine._users.counters())["voided"] == 1

            await soon(voided)
            async with asyncio.timeout(30):
                again = await engine.feedback.accept([reward("told")], wait_applied=True)
            assert (again.duplicates, again.applied) == (1, False)

    async def test_decision_under_way_is_made_again(self, engine: Engine, client: Redis) -> None:
        """Scored before the user is forgotten, stored after: the decision is made again for the new incarnation."""
        await engine.decider.recommend(asking("other"))
        held = hold_puts(engine, times=1)
        command = replace(asking("u", decision_id="d"), user_features=[1.0, 2.0])
        deciding = asyncio.create_task(engine.decider.recommend(command))
        await held.come.wait()
        assert (await engine.users.forget("u")).removed.decisions == 0
        held.passing.set()
        answer = await deciding
        assert (answer.logged, answer.replayed) == (True, False)
        assert held.incarnations == [0, 1]
        assert (await stored(client, "d")).incarnation == 1
        assert (await engine.feedback.accept([reward("d")], wait_applied=False)).accepted == 1
        found = await engine.users.describe("u")
        assert found is not None
        assert ([each.decision_id for each in found.decisions], found.profile) == (["d"], [1.0, 2.0])

    async def test_user_forgotten_repeatedly_during_a_decision(self, engine: Engine, client: Redis) -> None:
        """The decision is not stored, and the answer says so."""
        await engine.decider.recommend(asking("other"))
        held = hold_puts(engine, times=2)
        command = replace(asking("u", decision_id="d"), user_features=[1.0, 2.0])
        deciding = asyncio.create_task(engine.decider.recommend(command))
        for incarnation in (1, 2):
            await held.come.wait()
            held.come.clear()
            assert (await engine.users.forget("u")).incarnation == incarnation
            held.passing.set()
        answer = await deciding
        assert not answer.logged
        assert held.incarnations == [0, 1]
        keys = NamespaceKeys("shop", 2)
        assert not await client.exists(keys.decision("d"))
        assert not await client.exists(keys.decided("u"))
        assert not await client.exists(keys.profile("u"))

    async def test_busy_model_during_a_decision_made_again(self, engine: Engine) -> None:
        """The new state waits for the model longer than a call to the store may take; the store is not blamed."""
        await engine.decider.recommend(asking("other"))
        held = hold_puts(engine, times=1)
        deciding = asyncio.create_task(engine.decider.recommend(asking("u")))
        async with asyncio.timeout(30):
            await held.come.wait()
        await engine._users.forget("u")
        engine._compute.submit(time.sleep, DECISION_BUDGET_S + 1.0)
        held.passing.set()
        assert (await deciding).logged
        assert held.incarnations == [0, 1]

    async def test_decision_id_of_a_forgotten_user_is_decided_again(self, engine: Engine, client: Redis) -> None:
        await engine.decider.recommend(asking("u", decision_id="d"))
        assert (await engine.decider.recommend(asking("u", decision_id="d"))).replayed
        assert (await engine.users.forget("u")).removed.decisions == 1
        again = await engine.decider.recommend(asking("u", decision_id="d", body="another"))
        assert (again.replayed, again.logged) == (False, True)
        assert (await stored(client, "d")).incarnation == 1

    async def test_user_forgotten_by_another_process(
        self, engine: Engine, make_engine: MakeEngine, client: Redis, valkey_url: str
    ) -> None:
        """Another process forgot the user; decisions here are for the new incarnation."""
        other = make_engine()
        await engine.decider.recommend(asking("u", decision_id="before"))
        async with worker_running(valkey_url):
            await engine.feedback.accept([reward("before")], wait_applied=True)
        await other.start()
        serving = engine.serving
        assert serving is not None
        await serving.replica.stop()
        await other.users.forget("u")
        assert "u" in serving.model
        answer = await engine.decider.recommend(asking("u", decision_id="d"))
        assert (answer.logged, answer.decision.cold_start) == (True, "meta")
        assert (await stored(client, "d")).incarnation == 1

    async def test_profile_is_written_when_it_changed(self, engine: Engine, client: Redis) -> None:
        key = NamespaceKeys("shop", 2).profile("u")

        async def told(features: Features) -> None:
            await engine.decider.recommend(replace(asking("u"), user_features=features))

        await told({"b": 1.0, "a": "x"})
        assert await client.get(key) == b'{"a":"x","b":1.0}'
        await client.delete(key)
        await told({"a": "x", "b": 1.0})
        assert not await client.exists(key), "nothing new, nothing written"
        await told({"a": "y"})
        assert await client.get(key) == b'{"a":"y"}'
        await engine.decider.recommend(asking("u"))
        assert await client.get(key) == b'{"a":"y"}', "a request without a profile leaves it"
        await engine.users.forget("u")
        assert not await client.exists(key)
        await told({"a": "y"})
        assert await client.get(key) == b'{"a":"y"}', "it is new for the new incarnation"

    async def test_decisions_without_an_incarnation(self, engine: Engine, client: Redis) -> None:
        await engine.decider.recommend(asking("u", decision_id="d"))
        key = NamespaceKeys("shop", 2).decision("d")
        blob = await client.get(key)
        older = blob.replace(b', \\"incarnation\\": 0', b"")
        assert len(older) < len(blob)
        padded = _with_header_length(older, len(blob) - len(older))
        await client.set(key, padded)
        assert (await stored(client, "d")).incarnation == 0
        assert (await engine.feedback.accept([reward("d")], wait_applied=False)).accepted == 1


def _with_header_length(blob: bytes, cut: int) -> bytes:
    """A safetensors blob whose header was cut: padded with spaces, as the format allows."""
    length = int.from_bytes(blob[:8], "little")
    header, tensors = blob[8 : 8 + length - cut], blob[8 + length - cut :]
    return blob[:8] + header + b" " * cut + tensors


async def test_forgetting_an_unknown_user(engine: Engine) -> None:
    assert await engine.users.describe("nobody") is None
    assert (await engine.users.forget("nobody")).incarnation == 1
    found = await engine.users.describe("nobody")
    assert found is not None
    assert (found.stored.forgotten, found.resident) == (True, False)
