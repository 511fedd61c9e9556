"""Serving while a refit runs: users already fitted under the epoch to come are served under the present one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from metaban.service.engine.engine import Engine
from metaban.store.decisions.decisions import DecisionRecord
from tests.service.engine.model.replicas import in_partition
from tests.service.engines import MakeEngine, ask, reward
from tests.worker.epochs.epoch_checks import all_users_are_fitted, epochs_of_users
from tests.worker.workshop import Workshop, soon


@pytest.fixture
async def known(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Two users of epoch 0, whose 16 events make a refit due. A service with a pool of one does not load the first,
    who is refitted first: users are refitted in the order of their first rewards, and loaded in that of their names.
    """
    monkeypatch.setattr("metaban.worker.epochs.epoch_trainer.REFIT_USERS", 1)
    monkeypatch.setattr("metaban.service.engine.model.replica.LOAD_USERS", 1)
    assert await shop.namespaces.change(shop.record, learner={**shop.record.learner, "candidate_pool": 1})
    await shop.epoch_trainer().tick()
    second, first = sorted(in_partition(shop, 0, 2))
    await shop.learn({first: 8, second: 8})
    return first, second


@asynccontextmanager
async def refitting(shop: Workshop) -> AsyncIterator[asyncio.Task[None]]:
    """A trainer that waits in the middle of its refit, when the first user is written."""
    written, going_on = asyncio.Event(), asyncio.Event()
    users = shop.user_store()
    rebase = users.rebase

    async def stopping(*arguments: Any, **options: Any) -> list[bool]:
        done = await rebase(*arguments, **options)
        written.set()
        await going_on.wait()
        return done

    users.rebase = stopping  # type: ignore[method-assign]
    training = asyncio.create_task(shop.epoch_trainer(users=users).tick())
    try:
        async with asyncio.timeout(30):
            await written.wait()
        assert await shop.epoch_number() == 0
        yield training
    finally:
        going_on.set()
        await training


@asynccontextmanager
async def learning(shop: Workshop) -> AsyncIterator[None]:
    """The consumers of a worker."""
    consumers = [asyncio.create_task(shop.consumer(f"c{each}", each).run()) for each in range(shop.record.partitions)]
    try:
        yield
    finally:
        shop.stopping.set()
        await asyncio.gather(*consumers)


async def started(make_engine: MakeEngine) -> Engine:
    """A service just started, whose pool is too small for the users."""
    engine = make_engine(wait_applied_timeout_s=30)
    await engine.start()
    return engine


async def decided(engine: Engine, user: str, **changes: Any) -> DecisionRecord:
    """A decision on all arms."""
    return (await engine.decider.recommend(replace(ask(user, k=4), **changes))).decision


def scores(decision: DecisionRecord) -> dict[str, tuple[float, float]]:
    return {item.arm_id: (item.mean, item.bonus) for item in decision.items}


async def test_a_known_user_is_served_from_their_rewards(
    shop: Workshop, known: tuple[str, str], make_engine: MakeEngine
) -> None:
    engine = await started(make_engine)
    before = {user: await decided(engine, user) for user in known}
    async with refitting(shop):
        assert await epochs_of_users(shop) == {known[0]: 1, known[1]: 0}
        restarted = await started(make_engine)
        assert restarted.serving is not None
        assert known[0] not in restarted.serving.model
        for user, earlier in before.items():
            for each in (engine, restarted):
                now = await decided(each, user)
                assert (now.epoch, now.user_version, now.cold_start) == (0, 8, None)
                assert scores(now) == scores(earlier)
    await all_users_are_fitted(shop, 1)
    fresh = await started(make_engine)
    for user, earlier in before.items():
        after = await decided(fresh, user)
        assert (after.epoch, after.user_version, after.cold_start) == (1, 8, None)
        assert scores(after) != scores(earlier)
        for each in (engine, restarted):
            assert scores(await decided(each, user, min_version=1)) == scores(after)


async def test_a_reward_is_applied_before_the_refit_ends(
    shop: Workshop, known: tuple[str, str], make_engine: MakeEngine
) -> None:
    engine, user = await started(make_engine), known[0]
    async with learning(shop):
        async with refitting(shop) as training:
            before = await decided(engine, user)
            told = await engine.feedback.accept([reward(before.decision_id, arm="arm 1")], wait_applied=True)
            assert (told.accepted, told.applied) == (1, True)
            after = await decided(engine, user)
            assert not training.done()
            assert (after.epoch, after.user_version, after.cold_start) == (0, 9, None)
            assert scores(after) != scores(before)
        await all_users_are_fitted(shop, 1)

        async def is_served() -> bool:
            served = await decided(engine, user, min_version=1)
            return scores(served) == scores(await decided(await started(make_engine), user))

        await soon(is_served, "the state under the new epoch")


async def test_a_reward_that_is_refitted_before_it_is_served(
    shop: Workshop, known: tuple[str, str], make_engine: MakeEngine
) -> None:
    """The state with the reward is under the epoch to come when the service reads it."""
    engine, user = await started(make_engine), known[0]
    before = await decided(engine, user)
    serving = engine.serving
    assert serving is not None
    await serving.replica._loading.acquire()  # the service reads no state
    waiting = asyncio.create_task(engine.feedback.accept([reward(before.decision_id, arm="arm 1")], wait_applied=True))

    async def is_applied() -> bool:
        await shop.learn({})
        return (await shop.versions())[user] == 9

    await soon(is_applied)
    async with refitting(shop):
        assert (await epochs_of_users(shop))[user] == 1
        serving.replica._loading.release()
        assert (await waiting).applied is True
        after = await decided(engine, user)
        assert (after.epoch, after.user_version) == (0, 9)


async def test_a_user_forgotten_during_the_refit(
    shop: Workshop, known: tuple[str, str], make_engine: MakeEngine
) -> None:
    engine, user = await started(make_engine), known[0]
    async with refitting(shop):
        assert (await decided(engine, user)).user_version == 8
        await engine.users.forget(user)
        assert await shop.redis.hkeys(shop.keys.replaced(shop.keys.partition_of(user))) == []
        for each in (engine, restarted := await started(make_engine)):
            assert (await decided(each, user)).cold_start == "meta"
    for each in (engine, restarted):
        forgotten = await decided(each, user, min_version=1)
        assert (forgotten.incarnation, forgotten.cold_start) == (1, "meta")
