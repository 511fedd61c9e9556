# ruff: noqa: F811 (fixtures of the neighbours, imported, are named again as arguments)
"""Forgetting as replicas see it: what is served is dropped, also by one that was behind or cut off."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest
from redis.asyncio import Redis

from service import replica as replica_module
from service import served as served_module
from service.scoring import ScoreRequest
from store.errors import StoreUnavailable
from store.traces import Traces
from store.users import UpdateEntry, UserState
from tests.service.replicas import Watched, hold_load, in_partition, move_to_epoch, publish_epoch
from tests.service.serving import adopt, ask, make_model, state
from tests.service.test_replica import hurry, shop, watch  # noqa: F401 (fixtures)
from tests.worker.workshop import Workshop, make_event, soon


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
        held = watched.model.holds("a")
        # What was fitted under the old epoch may have been seen in between, and would be served.
        assert held is None or held.incarnation == 1
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
