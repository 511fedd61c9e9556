# ruff: noqa: F811 (fixtures of the neighbours, imported, are named again as arguments)
"""Forgetting as the engine does it: what was decided before is unknown, what is under way is decided anew."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from redis.asyncio import Redis

from service.contracts import Features
from service.engine import Engine
from store.decisions import Decision, DecisionStore
from store.keys import NamespaceKeys
from tests.service.test_engine import ask as asking
from tests.service.test_engine import engine, make_engine, reward, worker_running  # noqa: F401 (fixtures)
from tests.worker.workshop import soon

MakeEngine = Callable[..., Engine]


async def stored(client: Redis, decision_id: str) -> Decision:
    decision = await DecisionStore(client, NamespaceKeys("shop", 2), ttl_s=60).get(decision_id)
    assert decision is not None
    return decision


@dataclass
class Held:
    """Decisions that wait before they are stored, and the incarnations they were made for."""

    come: asyncio.Event = field(default_factory=asyncio.Event)
    passing: asyncio.Event = field(default_factory=asyncio.Event)
    incarnations: list[int] = field(default_factory=list)


def hold_puts(engine: Engine, *, times: int) -> Held:
    """Have the next decisions of an engine wait until they are let pass, one by one."""
    held, put = Held(), engine._decisions.put

    async def late(decision: Decision, **more: Any) -> Decision:
        held.incarnations.append(decision.incarnation)
        if len(held.incarnations) <= times:
            held.come.set()
            async with asyncio.timeout(30):
                await held.passing.wait()
            held.passing.clear()
        return await put(decision, **more)

    engine._decisions.put = late  # type: ignore[method-assign]
    return held


class TestEngine:
    async def test_decisions_name_the_incarnation(
        self, engine: Engine, make_engine: MakeEngine, client: Redis, valkey_url: str
    ) -> None:
        other = make_engine(candidate_pool=1, active_users_max=1)
        await engine.recommend(asking("u", decision_id="before"))
        await other.start()
        async with worker_running(valkey_url):
            await engine.feedback([reward("before")], wait_applied=True)
            assert (await stored(client, "before")).incarnation == 0
            assert (await engine.forget_user("u")).incarnation == 1
            for number, each in enumerate((engine, other)):
                answer = await each.recommend(asking("u", decision_id=f"after {number}"))
                assert answer.cold_start == "meta"
                assert (await stored(client, f"after {number}")).incarnation == 1
            outcome = await engine.feedback([reward("after 0")], wait_applied=True)
            assert (outcome.accepted, outcome.applied) == (1, True)
            learned = await engine.recommend(asking("u", decision_id="learned"))
            assert learned.cold_start is None
            decision = await stored(client, "learned")
            assert (decision.incarnation, decision.user_version) == (1, 1)

    async def test_what_was_decided_before_is_refused(self, engine: Engine) -> None:
        for name in ("told", "not told"):
            await engine.recommend(asking("u", decision_id=name))
        await engine.recommend(asking("v", decision_id="of another"))
        await engine.feedback([reward("told")], wait_applied=False)
        await engine.forget_user("u")
        await engine.recommend(asking("u", decision_id="since"))
        outcome = await engine.feedback(
            [reward("not told"), reward("nowhere"), reward("told"), reward("since"), reward("of another")],
            wait_applied=False,
        )
        assert (outcome.accepted, outcome.duplicates) == (2, 0)
        assert [(each.index, each.code) for each in outcome.rejected] == [
            (place, "unknown-decision") for place in range(3)
        ]

    async def test_nobody_waits_for_what_has_no_effect(self, engine: Engine, valkey_url: str) -> None:
        for name in ("told", "not told"):
            await engine.recommend(asking("u", decision_id=name))
        await engine.feedback([reward("told")], wait_applied=False)
        await engine._users.forget("u")  # decisions stay, as they do when a restore drops a user
        async with asyncio.timeout(4):  # below the time-out of a wait
            refused = await engine.feedback([reward("not told")], wait_applied=True)
        assert (refused.accepted, refused.applied) == (0, False)
        assert [rejection.code for rejection in refused.rejected] == ["user-reset"]
        async with worker_running(valkey_url):

            async def voided() -> bool:
                return (await engine._users.counters())["voided"] == 1

            await soon(voided)
            async with asyncio.timeout(4):
                again = await engine.feedback([reward("told")], wait_applied=True)
            assert (again.duplicates, again.applied) == (1, False)

    async def test_a_decision_under_way_when_its_user_is_forgotten(self, engine: Engine, client: Redis) -> None:
        """Scored before, stored after: it is taken back, and decided anew for whom the user is now."""
        await engine.recommend(asking("other"))
        held = hold_puts(engine, times=1)
        command = replace(asking("u", decision_id="d"), user_features=[1.0, 2.0])
        deciding = asyncio.create_task(engine.recommend(command))
        await held.come.wait()
        assert (await engine.forget_user("u")).removed.decisions == 0
        held.passing.set()
        answer = await deciding
        assert (answer.logged, answer.replayed) == (True, False)
        assert held.incarnations == [0, 1]
        assert (await stored(client, "d")).incarnation == 1
        assert (await engine.feedback([reward("d")], wait_applied=False)).accepted == 1
        found = await engine.describe_user("u")
        assert found is not None
        assert ([each.decision_id for each in found.decisions], found.profile) == (["d"], [1.0, 2.0])

    async def test_one_who_is_forgotten_again_and_again(self, engine: Engine, client: Redis) -> None:
        """Nothing is stored of what was decided for nobody; the answer says so."""
        await engine.recommend(asking("other"))
        held = hold_puts(engine, times=2)
        command = replace(asking("u", decision_id="d"), user_features=[1.0, 2.0])
        deciding = asyncio.create_task(engine.recommend(command))
        for incarnation in (1, 2):
            await held.come.wait()
            held.come.clear()
            assert (await engine.forget_user("u")).incarnation == incarnation
            held.passing.set()
        answer = await deciding
        assert not answer.logged
        assert held.incarnations == [0, 1]
        keys = NamespaceKeys("shop", 2)
        assert not await client.exists(keys.decision("d"))
        assert not await client.exists(keys.decided("u"))
        assert not await client.exists(keys.profile("u"))

    async def test_a_decision_id_of_one_who_was_forgotten_decides_anew(self, engine: Engine, client: Redis) -> None:
        await engine.recommend(asking("u", decision_id="d"))
        assert (await engine.recommend(asking("u", decision_id="d"))).replayed
        assert (await engine.forget_user("u")).removed.decisions == 1
        again = await engine.recommend(asking("u", decision_id="d", body="another"))
        assert (again.replayed, again.logged) == (False, True)
        assert (await stored(client, "d")).incarnation == 1

    async def test_a_service_that_has_not_heard_of_it(
        self, engine: Engine, make_engine: MakeEngine, client: Redis, valkey_url: str
    ) -> None:
        """Another one forgot the user; what is decided here meanwhile is for whom they are now."""
        other = make_engine()
        await engine.recommend(asking("u", decision_id="before"))
        async with worker_running(valkey_url):
            await engine.feedback([reward("before")], wait_applied=True)
        await other.start()
        serving = engine._serving
        assert serving is not None
        await serving.replica.stop()
        await other.forget_user("u")
        assert "u" in serving.replica
        answer = await engine.recommend(asking("u", decision_id="d"))
        assert (answer.logged, answer.cold_start) == (True, "meta")
        assert (await stored(client, "d")).incarnation == 1

    async def test_a_profile_is_written_when_it_is_news(self, engine: Engine, client: Redis) -> None:
        key = NamespaceKeys("shop", 2).profile("u")

        async def told(features: Features) -> None:
            await engine.recommend(replace(asking("u"), user_features=features))

        await told({"b": 1.0, "a": "x"})
        assert await client.get(key) == b'{"a":"x","b":1.0}'
        await client.delete(key)
        await told({"a": "x", "b": 1.0})
        assert not await client.exists(key), "nothing new, nothing written"
        await told({"a": "y"})
        assert await client.get(key) == b'{"a":"y"}'
        await engine.recommend(asking("u"))
        assert await client.get(key) == b'{"a":"y"}', "a request without a profile leaves it"
        await engine.forget_user("u")
        assert not await client.exists(key)
        await told({"a": "y"})
        assert await client.get(key) == b'{"a":"y"}', "to whom they are now it is news"

    async def test_decisions_stored_before_there_were_incarnations(self, engine: Engine, client: Redis) -> None:
        await engine.recommend(asking("u", decision_id="d"))
        key = NamespaceKeys("shop", 2).decision("d")
        blob = await client.get(key)
        older = blob.replace(b', \\"incarnation\\": 0', b"")
        assert len(older) < len(blob)
        padded = _with_header_length(older, len(blob) - len(older))
        await client.set(key, padded)
        assert (await stored(client, "d")).incarnation == 0
        assert (await engine.feedback([reward("d")], wait_applied=False)).accepted == 1


def _with_header_length(blob: bytes, cut: int) -> bytes:
    """A safetensors blob whose header was cut: padded with spaces, as the format allows."""
    length = int.from_bytes(blob[:8], "little")
    header, tensors = blob[8 : 8 + length - cut], blob[8 + length - cut :]
    return blob[:8] + header + b" " * cut + tensors


async def test_a_user_nobody_knows(engine: Engine) -> None:
    assert await engine.describe_user("nobody") is None
    assert (await engine.forget_user("nobody")).incarnation == 1
    found = await engine.describe_user("nobody")
    assert found is not None
    assert (found.stored.forgotten, found.resident) == (True, False)
