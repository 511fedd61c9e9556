"""Replicas drop forgotten users, also after a delay or an outage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest
from redis.asyncio import Redis

from metaban.service.engine.model import replica as replica_module
from metaban.service.engine.model import served_model as served_module
from metaban.service.engine.model.types import ScoreRequest
from metaban.store.errors import StoreUnavailable
from metaban.store.users.forgetting import RemnantStore
from metaban.store.users.logs import NewLines
from metaban.store.users.records import UserState
from tests.service.engine.model.replicas import Watched, hold_load, in_partition, move_to_epoch, publish_epoch
from tests.service.engine.model.served_models import adopt, ask, make_model, state
from tests.worker.workshop import Workshop, make_event, soon

pytestmark = pytest.mark.usefixtures("fast_replicas")


def tombstone(user: str, incarnation: int) -> UserState:
    return UserState(user, incarnation, 0, 0, {})


class TestServedModel:
    @pytest.mark.parametrize("pool", [10, 1], ids=["pool", "guest"])
    def test_tombstone_drops_the_held_state(self, pool: int) -> None:
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

    def test_state_of_an_older_incarnation_is_refused(self) -> None:
        model = make_model()
        old = state(model, "a", 3)
        model.put([tombstone("a", 2), old, state(model, "a", 9, incarnation=1)])
        assert "a" not in model
        late = model.score([ScoreRequest("a", ask("a").inputs, loaded=old)])[0]
        assert (late.user_events, late.incarnation) == (0, 2)

    def test_old_tombstone_does_not_drop_the_new_incarnation(self) -> None:
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

    def test_forgotten_pool_member(self) -> None:
        model = make_model()
        adopt(model, 1, ["a", "b"])
        model.put([state(model, "a"), state(model, "b")])
        model.put([tombstone("a", 1)])
        assert model.users() == ["b"]
        adopt(model, 2, ["a", "b"])
        assert model.users() == ["b"]

    def test_remembered_incarnations_are_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(served_module, "INCARNATIONS_MAX", 3)
        model = make_model()
        model.begin_incarnations([(f"user {number}", 1) for number in range(10)])
        assert model.score([ask("user 9")])[0].incarnation == 1
        assert len(model._incarnations) == 3


async def _true(holds: bool) -> bool:
    return holds


async def cut_off(watched: Watched) -> Callable[[], None]:
    """Make the logs unreadable for a replica until the returned function is called."""
    read = watched.logs.read

    async def away(*arguments: object, **options: object) -> NewLines:
        raise StoreUnavailable("away")

    def reach_again() -> None:
        watched.logs.read = read  # type: ignore[method-assign]

    watched.logs.read = away  # type: ignore[method-assign,assignment]

    async def failing() -> bool:
        return not watched.replica.healthy

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

    async def test_forgotten_user_returns_with_a_new_incarnation(
        self, shop: Workshop, watch: Callable[..., Watched]
    ) -> None:
        watched = watch()
        await watched.replica.start()
        await shop.learn({"a": 5})
        await shop.users.forget("a")
        [answer] = await shop.streams.enqueue([make_event("a", 50, incarnation=1)])
        given = await shop.streams.read([answer.partition], "c1", count=9, block_ms=10)
        await shop.publisher().publish(answer.partition, given)
        await watched.serves("a", 1)
        held = watched.model.holds("a")
        assert held is not None
        assert held.incarnation == 1

    async def test_load_under_way_when_the_user_is_forgotten(
        self, shop: Workshop, watch: Callable[..., Watched]
    ) -> None:
        """The old state is read before the user is forgotten, and arrives after the log line of that."""
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

    async def test_new_incarnation_that_waits_for_an_epoch(self, shop: Workshop, watch: Callable[..., Watched]) -> None:
        """The new state needs an epoch that is missing; the old state must not be served meanwhile."""
        await publish_epoch(shop, 0, 0)
        await shop.learn({"a": 2})
        watched = watch()
        await watched.replica.start()
        await watched.serves("a", 2)
        reach_again = await cut_off(watched)
        await shop.users.forget("a")
        [answer] = await shop.streams.enqueue([make_event("a", 50, incarnation=1)])
        given = await shop.streams.read([answer.partition], "c1", count=9, block_ms=10)
        await shop.publisher().publish(answer.partition, given)
        await move_to_epoch(shop, "a", 1)
        await watched.replica.refresh("a")
        held = watched.model.holds("a")
        # The state of the old epoch may have been read in between; it may be served.
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

    async def test_trimmed_log_line(
        self,
        shop: Workshop,
        watch: Callable[..., Watched],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """No event was applied meanwhile: only the log shows that lines are missing."""
        monkeypatch.setattr(replica_module, "TAIL_ENTRIES", 1)  # each read returns one full page
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
        await redis.delete(shop.keys.update_log(0))  # same effect as trimming
        reach_again()
        await self.gone(watched, gone)

    async def test_log_lines_deleted_before_they_were_read(
        self, shop: Workshop, redis: Redis, watch: Callable[..., Watched]
    ) -> None:
        """The deleted lines named events: the replica compares versions, and waiters of other users are notified."""
        gone, busy = in_partition(shop, 0, 2)
        await shop.learn({gone: 1, busy: 1})
        watched = watch()
        await watched.replica.start()
        await watched.serves(gone, 1)
        come, passing = hold_load(watched.users, busy)
        await shop.learn({busy: 1}, first=10)  # the replica has read this line and is blocked
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

    async def test_log_position_deleted(self, shop: Workshop, redis: Redis, watch: Callable[..., Watched]) -> None:
        """The replica's position was a line of the forgotten user, deleted while it could not read."""
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
        traces = RemnantStore(redis, shop.keys)
        assert await traces.delete_lines(user, forgotten.incarnation, before=forgotten.line) >= lines
        left = await shop.users.tail(0, "0-0", block_ms=1, count=10_000)
        assert [line.cursor for line in left if line.user_id == user] == [forgotten.line]

    async def gone(self, watched: Watched, user: str) -> None:
        async def holds() -> bool:
            return watched.version(user) is None

        await soon(holds, f"{user} dropped")
