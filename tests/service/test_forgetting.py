# ruff: noqa: F811 (fixtures of the neighbours, imported, are named again as arguments)
"""Forgetting as the service does it: what is served is dropped, what was decided before is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from redis.asyncio import Redis

from service import replica as replica_module
from service import served as served_module
from service.engine import Engine
from service.served import ScoreRequest
from store.decisions import Decision, DecisionStore
from store.errors import StoreUnavailable
from store.keys import NamespaceKeys
from store.users import UpdateEntry, UserState
from tests.service.replicas import Watched, hold_load, in_partition, move_to_epoch, publish_epoch
from tests.service.serving import adopt, ask, make_model, state
from tests.service.test_engine import ask as asking
from tests.service.test_engine import engine, make_engine, reward, worker_running  # noqa: F401 (fixtures)
from tests.service.test_replica import hurry, shop, watch  # noqa: F401 (fixtures)
from tests.worker.workshop import Workshop, make_event, soon

MakeEngine = Callable[..., Engine]


def tombstone(user: str, incarnation: int) -> UserState:
    return UserState(user, incarnation, 0, 0, {})


class TestServedModel:
    @pytest.mark.parametrize("pool", [10, 1], ids=["pool", "guest"])
    def test_a_tombstone_drops_what_is_held(self, pool: int) -> None:
        model = make_model(pool=pool)
        model.put([state(model, "b", 2)])
        model.put([state(model, "a", 3)])
        stranger = model.score([ask("nobody")])[0]
        assert model.score([ask("a")])[0].user_events == 3
        model.put([tombstone("a", 1)])
        assert model.users() == ["b"]
        scores = model.score([ask("a")])[0]
        assert (scores.user_events, scores.incarnation) == (0, 1)
        np.testing.assert_array_equal(scores.mean, model.score([ask("nobody")])[0].mean)
        assert model.refresh(100) == 0
        assert stranger.incarnation == 0

    def test_an_old_state_that_arrives_later_is_refused(self) -> None:
        model = make_model()
        old = state(model, "a", 3)
        model.put([tombstone("a", 2), old, state(model, "a", 9, incarnation=1)])
        assert "a" not in model
        late = model.score([ScoreRequest("a", ask("a").inputs, loaded=old)])[0]
        assert (late.user_events, late.incarnation) == (0, 2)

    def test_who_came_back_is_served_and_not_dropped_by_an_old_tombstone(self) -> None:
        model = make_model()
        model.put([tombstone("a", 1), state(model, "a", 1, incarnation=1)])
        model.put([tombstone("a", 1)])
        scores = model.score([ask("a")])[0]
        assert (scores.user_events, scores.incarnation) == (1, 1)
        model.put([tombstone("a", 2)])
        model.put([tombstone("a", 1)])
        assert model.score([ask("a")])[0].incarnation == 2

    def test_incarnations_of_users_held_loaded_and_unknown(self) -> None:
        model = make_model()
        model.put([state(model, "held", 1, incarnation=4)])
        loaded = state(model, "loaded", 1, incarnation=3)
        scores = model.score(
            [
                ask("held"),
                ScoreRequest("loaded", ask("loaded").inputs, loaded=loaded),
                ScoreRequest("gone", ask("gone").inputs, loaded=tombstone("gone", 7)),
                ask("nobody"),
            ]
        )
        assert [score.incarnation for score in scores] == [4, 3, 7, 0]
        assert [score.user_events for score in scores] == [1, 1, 0, 0]

    def test_a_member_of_the_pool_that_is_forgotten(self) -> None:
        model = make_model()
        adopt(model, 1, ["a", "b"])
        model.put([state(model, "a"), state(model, "b")])
        model.put([tombstone("a", 1)])
        assert model.users() == ["b"]
        adopt(model, 2, ["a", "b"])
        assert model.users() == ["b"]

    def test_what_is_remembered_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(served_module, "BEGAN_MAX", 3)
        model = make_model()
        model.begin([(f"user {number}", 1) for number in range(10)])
        assert model.score([ask("user 9")])[0].incarnation == 1
        assert len(model._began) == 3


async def cut_off(watched: Watched) -> Callable[[], None]:
    """Have a replica unable to read the logs, until the answer is called."""
    tail = watched.users.tail

    async def away(*arguments: object, **options: object) -> list[UpdateEntry]:
        raise StoreUnavailable("away")

    def reach_again() -> None:
        watched.users.tail = tail  # type: ignore[method-assign]

    watched.users.tail = away  # type: ignore[method-assign,assignment]

    async def failing() -> bool:
        return {"partition 0", "partition 1"} <= watched.replica._failing

    await soon(failing)
    return reach_again


class TestReplica:
    async def test_a_forgotten_user_is_dropped_at_once(self, shop: Workshop, watch: Callable[..., Watched]) -> None:
        watched = watch()
        await watched.replica.start()
        await shop.learn({"a": 2, "b": 1})
        await watched.serves("a", 2)
        await shop.users.forget("a")
        await self.gone(watched, "a")
        await watched.serves("b", 1)
        assert watched.replica.healthy

    async def test_and_comes_back_as_a_new_one(self, shop: Workshop, watch: Callable[..., Watched]) -> None:
        watched = watch()
        await watched.replica.start()
        await shop.learn({"a": 5})
        await shop.users.forget("a")
        [answer] = await shop.streams.enqueue([make_event("a", 50, incarnation=1)])
        given = await shop.streams.read(answer.partition, "c1", count=9, block_ms=10)
        await shop.publisher().publish(answer.partition, given)
        await watched.serves("a", 1)
        held = watched.model.holds("a")
        assert held is not None
        assert held.incarnation == 1

    async def test_a_load_that_was_under_way(self, shop: Workshop, watch: Callable[..., Watched]) -> None:
        """The old state was read before the user was forgotten, and arrives after the log has told it."""
        [first] = in_partition(shop, 0, 1)
        await shop.learn({first: 3})
        watched = watch(pool=0)
        await watched.replica.start()
        come, passing = hold_load(watched.users, first)
        asking = asyncio.create_task(watched.replica.refresh(first))
        await come.wait()
        await shop.users.forget(first)
        head = await shop.users.log_head(0)

        async def told() -> bool:
            return watched.replica._cursors[0] == head

        await soon(told)
        passing.set()
        await asking
        assert watched.version(first) is None

    async def test_one_who_waits_for_an_epoch(self, shop: Workshop, watch: Callable[..., Watched]) -> None:
        """Their new state cannot be served yet; that is no reason to serve the old one."""
        await publish_epoch(shop, 0, 0)
        await shop.learn({"a": 2})
        watched = watch()
        await watched.replica.start()
        await watched.serves("a", 2)
        reach_again = await cut_off(watched)
        await shop.users.forget("a")
        [answer] = await shop.streams.enqueue([make_event("a", 50, incarnation=1)])
        given = await shop.streams.read(answer.partition, "c1", count=9, block_ms=10)
        await shop.publisher().publish(answer.partition, given)
        await move_to_epoch(shop, "a", 1)
        await watched.replica.refresh("a")
        assert watched.version("a") is None
        reach_again()
        await publish_epoch(shop, 1, 16)
        await watched.serves("a", 1, epoch=1)

    async def test_tombstones_at_the_start(self, shop: Workshop, watch: Callable[..., Watched]) -> None:
        await shop.learn({"a": 2, "b": 1})
        await shop.users.forget("a")
        await shop.users.forget("never seen")
        watched = watch()
        await watched.replica.start()
        assert watched.model.users() == ["b"]
        await watched.replica.refresh("a")
        assert watched.model.users() == ["b"]
        assert watched.model.score([ask("a")])[0].incarnation == 1

    async def test_a_line_that_was_trimmed_away(
        self,
        shop: Workshop,
        watch: Callable[..., Watched],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """No event was applied meanwhile: only the log itself tells that lines are missing."""
        monkeypatch.setattr(replica_module, "TAIL_ENTRIES", 1)  # every read is a full one
        gone, first, busy = in_partition(shop, 0, 3)
        await shop.learn({gone: 1, first: 1, busy: 1})
        watched = watch(log_cap=100)
        await watched.replica.start()
        await watched.serves(gone, 1)
        come, passing = hold_load(watched.users, first)
        await shop.learn({first: 1}, first=10)
        await come.wait()
        await watched.users.forget(gone)
        state_of_busy = (await shop.users.load([busy]))[busy]
        for _ in range(4):
            await watched.users.rebase(0, [state_of_busy] * 100)
        lines = await shop.users.tail(0, "0-0", block_ms=1, count=10_000)
        assert gone not in {line.user_id for line in lines}, "the line is no longer there"
        passing.set()
        await self.gone(watched, gone)

    async def test_after_an_outage(self, shop: Workshop, redis: Redis, watch: Callable[..., Watched]) -> None:
        gone, busy = in_partition(shop, 0, 2)
        await shop.learn({gone: 1, busy: 1})
        watched = watch()
        await watched.replica.start()
        await watched.serves(gone, 1)
        reach_again = await cut_off(watched)
        await shop.users.forget(gone)
        await redis.delete(shop.keys.update_log(0))  # as good as trimmed
        reach_again()
        await self.gone(watched, gone)

    async def gone(self, watched: Watched, user: str) -> None:
        async def holds() -> bool:
            return watched.version(user) is None

        await soon(holds, f"{user} dropped")


async def stored(client: Redis, decision_id: str) -> Decision:
    decision = await DecisionStore(client, NamespaceKeys("shop", 2), ttl_s=60).get(decision_id)
    assert decision is not None
    return decision


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
            assert await engine.forget_user("u") == 1
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
        assert (outcome.accepted, outcome.duplicates) == (2, 1)
        assert [(rejection.index, rejection.code) for rejection in outcome.rejected] == [
            (0, "user-reset"),
            (1, "unknown-decision"),
        ]

    async def test_nobody_waits_for_what_has_no_effect(self, engine: Engine, valkey_url: str) -> None:
        for name in ("told", "not told"):
            await engine.recommend(asking("u", decision_id=name))
        await engine.feedback([reward("told")], wait_applied=False)
        await engine.forget_user("u")
        async with asyncio.timeout(4):  # below the time-out of a wait
            refused = await engine.feedback([reward("not told")], wait_applied=True)
        assert (refused.accepted, refused.applied) == (0, False)
        async with worker_running(valkey_url):

            async def voided() -> bool:
                return (await engine._users.counters())["voided"] == 1

            await soon(voided)
            async with asyncio.timeout(4):
                again = await engine.feedback([reward("told")], wait_applied=True)
            assert (again.duplicates, again.applied) == (1, False)

    async def test_a_decision_under_way_when_its_user_is_forgotten(self, engine: Engine, client: Redis) -> None:
        """Loaded before, stored after: it names the incarnation that it was made for, and is refused later."""
        await engine.recommend(asking("other"))
        come, passing = asyncio.Event(), asyncio.Event()
        put = engine._decisions.put

        async def late(decision: Decision, **waiting: Any) -> Decision:
            come.set()
            async with asyncio.timeout(10):
                await passing.wait()
            return await put(decision, **waiting)

        engine._decisions.put = late  # type: ignore[method-assign]
        deciding = asyncio.create_task(engine.recommend(asking("u", decision_id="d")))
        await come.wait()
        await engine.forget_user("u")
        passing.set()
        await deciding
        assert (await stored(client, "d")).incarnation == 0
        [rejection] = (await engine.feedback([reward("d")], wait_applied=False)).rejected
        assert rejection.code == "user-reset"

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
    assert await engine.forget_user("nobody") == 1
    found = await engine.describe_user("nobody")
    assert found is not None
    assert (found.stored.forgotten, found.resident) == (True, False)
