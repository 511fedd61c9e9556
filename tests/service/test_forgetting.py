# ruff: noqa: F811 (fixtures of the neighbours, imported, are named again as arguments)
"""Forgetting as the service does it: what is served is dropped, what was decided before is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from redis.asyncio import Redis

from service import replica as replica_module
from service import served as served_module
from service.contracts import Features
from service.engine import Engine
from service.served import ScoreRequest
from store.decisions import Decision, DecisionStore
from store.errors import StoreUnavailable
from store.keys import NamespaceKeys
from store.traces import Traces
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


async def _true(holds: bool) -> bool:
    return holds


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

    async def test_lines_that_were_deleted_before_they_were_read(
        self, shop: Workshop, redis: Redis, watch: Callable[..., Watched]
    ) -> None:
        """They named events: versions are compared, and whoever waits for a neighbour's event is told of it."""
        gone, busy = in_partition(shop, 0, 2)
        await shop.learn({gone: 1, busy: 1})
        watched = watch()
        await watched.replica.start()
        await watched.serves(gone, 1)
        come, passing = hold_load(watched.users, busy)
        await shop.learn({busy: 1}, first=10)  # the replica has read this line, and is held up
        await come.wait()
        await shop.learn({gone: 2}, first=20)
        await shop.learn({busy: 1}, first=30)
        await self.forget_with_lines(shop, redis, gone, lines=2)
        await shop.learn({busy: 1}, first=40)
        passing.set()
        await watched.serves(busy, 4)
        await self.gone(watched, gone)
        applied = sum((await shop.users.applied()).values())
        await soon(lambda: _true(sum(watched.replica._applied.values()) == applied))
        assert watched.replica.healthy

    async def test_the_place_itself_was_deleted(
        self, shop: Workshop, redis: Redis, watch: Callable[..., Watched]
    ) -> None:
        """While the replica could not read; its place was a line of the user who is forgotten."""
        gone, busy = in_partition(shop, 0, 2)
        watched = watch()
        await watched.replica.start()
        await shop.learn({busy: 1})
        await shop.learn({gone: 1}, first=10)
        await watched.serves(gone, 1)
        place = watched.replica._cursors[0]
        reach_again = await cut_off(watched)
        await self.forget_with_lines(shop, redis, gone, lines=1)
        assert not await shop.users.logged(0, place)
        await shop.learn({busy: 2}, first=20)
        reach_again()
        await watched.serves(busy, 3)
        await self.gone(watched, gone)
        await soon(lambda: _true(watched.replica.healthy))

    async def forget_with_lines(self, shop: Workshop, redis: Redis, user: str, *, lines: int) -> None:
        forgotten = await shop.users.forget(user)
        traces = Traces(redis, shop.keys)
        assert await traces.delete_lines(user, forgotten.incarnation, before=forgotten.line) >= lines
        left = await shop.users.tail(0, "0-0", block_ms=1, count=10_000)
        assert [line.cursor for line in left if line.user_id == user] == [forgotten.line]

    async def gone(self, watched: Watched, user: str) -> None:
        async def holds() -> bool:
            return watched.version(user) is None

        await soon(holds, f"{user} dropped")


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
            async with asyncio.timeout(10):
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
