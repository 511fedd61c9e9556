"""A store that lost its latest writes in a crash: the replica returns to what the store holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Executor

import numpy as np
import pytest
from redis.asyncio import Redis

from metaban.service.engine.model import replica as replica_module
from metaban.service.engine.model.types import StateVersion
from metaban.store.client.connection import connect, drop_idle
from metaban.store.shared.epochs import Epoch
from metaban.store.users.records import UserState
from tests.own_valkey import OwnValkey, own_valkey
from tests.service.engine.model.replicas import (
    Watched,
    hold_load,
    in_partition,
    last_entry,
    move_to_epoch,
    publish_epoch,
)
from tests.service.engine.model.served_models import ask, make_model
from tests.service.engine.model.served_models import state as state_of
from tests.worker.workshop import SOON_S, Workshop, soon


@pytest.fixture
def valkey() -> Iterator[OwnValkey]:
    with own_valkey() as server:
        yield server


@pytest.fixture
async def client(valkey: OwnValkey) -> AsyncIterator[Redis]:
    client = connect(valkey.url)
    yield client
    await client.aclose()


@pytest.fixture
async def shop(client: Redis, compute: Executor) -> Workshop:
    return await Workshop.open(client, compute, partitions=2)


@pytest.fixture
async def watched(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watched]:
    monkeypatch.setattr(replica_module, "UNAVAILABLE_PAUSE_S", 0.02)
    monkeypatch.setattr(replica_module, "TAIL_BLOCK_MS", 100)
    watched = Watched(shop)
    await watched.replica.start()
    yield watched
    async with asyncio.timeout(30):
        await watched.replica.stop()


async def set_back(shop: Workshop, valkey: OwnValkey) -> None:
    valkey.set_back()
    await drop_idle(shop.redis)  # the test must not use dead connections


async def same_as_stored(watched: Watched, *users: str) -> None:
    """Wait until the served states of these users equal the stored ones exactly."""

    async def same() -> bool:
        stored = await watched.shop.users.load(users)
        if not watched.replica.healthy or set(stored) != {user for user in users if user in watched.model}:
            return False
        for user, state in stored.items():
            if watched.model.holds(user) != StateVersion.of(state):
                return False
            held = watched.model._own(user)
            if any(not np.array_equal(held[name], tensor) for name, tensor in state.tensors.items()):
                return False
        return True

    await soon(same, f"{users} served as stored")


async def test_lost_version(shop: Workshop, valkey: OwnValkey, watched: Watched) -> None:
    await shop.learn({"a": 5, "b": 2})
    valkey.keep()
    await shop.learn({"a": 2, "new": 1}, first=20)
    await watched.serves("a", 7)
    await watched.serves("new", 1)
    lost = await last_entry(shop, "a")
    assert watched.replica.saw(*lost)
    await set_back(shop, valkey)
    await same_as_stored(watched, "a", "b", "new")
    assert (watched.version("a"), watched.version("new")) == (5, None)
    assert not watched.replica.saw(*lost)
    # Learning continues from there.
    await shop.learn({"a": 1, "new": 3}, first=30)
    await watched.serves("a", 6)
    await watched.serves("new", 3)
    await same_as_stored(watched, "a", "b", "new")


async def test_other_events_with_the_same_version(
    shop: Workshop, valkey: OwnValkey, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    await shop.learn({"a": 1})
    valkey.keep()
    await shop.learn({"a": 2}, first=20)
    await watched.serves("a", 3)
    # The replica reconnects after a worker has applied other events.
    monkeypatch.setattr(replica_module, "UNAVAILABLE_PAUSE_S", 1.0)
    await set_back(shop, valkey)
    await shop.learn({"a": 2}, first=50)
    await same_as_stored(watched, "a")
    assert watched.version("a") == 3


async def test_user_loaded_ahead_of_the_log(shop: Workshop, valkey: OwnValkey, watched: Watched) -> None:
    first, second = in_partition(shop, 0, 2)
    await shop.learn({first: 1, second: 1})
    await watched.serves(first, 1)
    await watched.serves(second, 1)
    valkey.keep()
    cursor = watched.replica._cursors[0]
    ahead = state_of(watched.model, first, 4)
    watched.model.put([ahead])  # as `refresh` does, just before the crash
    await set_back(shop, valkey)
    await same_as_stored(watched, first, second)
    assert watched.replica._cursors[0] == cursor, "the position in the log still exists"


async def test_forget_ahead_of_the_log(shop: Workshop, valkey: OwnValkey, watched: Watched) -> None:
    gone, other = in_partition(shop, 0, 2)
    await shop.learn({gone: 2, other: 1})
    await watched.serves(gone, 2)
    await watched.serves(other, 1)
    valkey.keep()
    cursor = watched.replica._cursors[0]
    # As after a DELETE that was answered, before its log line was read and the store crashed.
    await watched.replica.put([UserState(gone, 1, 0, 0, {})])
    assert gone not in watched.model
    await set_back(shop, valkey)
    await watched.serves(gone, 2)
    assert watched.replica._cursors[0] == cursor, "the position in the log still exists"
    [scores] = watched.model.score([ask(gone)])
    assert scores.incarnation == 0, "the incarnation of the store"


async def test_restart_without_loss(shop: Workshop, valkey: OwnValkey, watched: Watched) -> None:
    await shop.learn({"a": 2})
    await watched.serves("a", 2)
    entry = await last_entry(shop, "a")
    valkey.kill()

    async def behind() -> bool:
        return not watched.replica.healthy

    await soon(behind)
    valkey.start()
    await drop_idle(shop.redis)
    await same_as_stored(watched, "a")
    assert watched.replica.saw(*entry)


async def test_restart_between_two_reads(shop: Workshop, valkey: OwnValkey, watched: Watched) -> None:
    """No command fails: the connection of the next one is opened after the restart."""
    await publish_epoch(shop, 0, 0)
    await publish_epoch(shop, 1, 16)
    await shop.learn({"a": 1})
    await watched.serves("a", 1)
    valkey.keep()
    await publish_epoch(shop, 2, 32)
    assert await watched.replica.wait_epoch(2, SOON_S)
    read, answer = hold_load(watched.users, "a")
    await shop.learn({"a": 2}, first=20)
    async with asyncio.timeout(SOON_S):
        await read.wait()
    await set_back(shop, valkey)
    answer.set()

    async def earlier_epoch() -> bool:
        return watched.model.epoch_number == 1

    await soon(earlier_epoch)
    await same_as_stored(watched, "a")
    assert watched.version("a") == 1
    await shop.model.refresh_epoch()  # the worker's
    await shop.learn({"a": 1}, first=30)
    await watched.serves("a", 2)


async def test_lost_epoch(shop: Workshop, valkey: OwnValkey, watched: Watched) -> None:
    [moved], [looked_up] = in_partition(shop, 0, 1), in_partition(shop, 1, 1)
    await publish_epoch(shop, 0, 0)
    await publish_epoch(shop, 1, 16)
    await shop.learn({moved: 1, looked_up: 1})
    await watched.serves(moved, 1)
    await watched.serves(looked_up, 1)

    async def serves_epoch(number: int, scale: float) -> bool:
        shared = watched.model._shared["scale"].numpy()
        return watched.model.epoch_number == number and bool((shared == scale).all())

    await soon(lambda: serves_epoch(1, 2.0))
    valkey.keep()
    await publish_epoch(shop, 2, 32)
    await move_to_epoch(shop, moved, 2)
    await watched.serves(moved, 1, epoch=2)
    watched.model.put([state_of(watched.model, looked_up, 1, epoch=2)])  # ahead of the log, just before the crash
    await set_back(shop, valkey)
    await soon(lambda: serves_epoch(1, 2.0))
    await same_as_stored(watched, moved, looked_up)
    assert watched.model.holds(moved) == watched.model.holds(looked_up) == StateVersion(0, 1, 1)
    # Another epoch with the lost number.
    tensors = {name: tensor.numpy() for name, tensor in watched.model.learner.initial_shared().items()}
    tensors["scale"] = np.full_like(tensors["scale"], 9.0)
    assert await shop.epochs.acquire_lease("test", 60_000)
    another = Epoch(2, 30, tensors, (), 7, follows=await shop.stamp())
    assert await shop.epochs.publish(another, lease_token="test")
    await soon(lambda: serves_epoch(2, 9.0))


async def test_another_epoch_with_the_same_number(
    shop: Workshop, valkey: OwnValkey, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    await publish_epoch(shop, 0, 0)
    valkey.keep()
    await publish_epoch(shop, 1, 16)

    async def serves_scale(scale: float) -> bool:
        return bool((watched.model._shared["scale"].numpy() == scale).all())

    await soon(lambda: serves_scale(2.0))
    monkeypatch.setattr(replica_module, "UNAVAILABLE_PAUSE_S", 1.0)
    await set_back(shop, valkey)
    tensors = {name: tensor.numpy() for name, tensor in watched.model.learner.initial_shared().items()}
    tensors["scale"] = np.full_like(tensors["scale"], 9.0)
    assert await shop.epochs.acquire_lease("test", 60_000)
    another = Epoch(1, 16, tensors, (), 7, follows=await shop.stamp())
    assert await shop.epochs.publish(another, lease_token="test")
    await soon(lambda: serves_scale(9.0))

    async def numbered() -> bool:  # the thread that swaps the epoch sets its number last
        return watched.model.epoch_number == 1

    await soon(numbered)


class TestDoubted:
    """A state older than the held one."""

    def test_older_state_replaces_only_the_doubted_version(self) -> None:
        model = make_model()
        model.put([state_of(model, "a", 5)])
        model.put([state_of(model, "a", 3)])
        assert model.holds("a") == StateVersion(0, 5, 0)
        model.put([state_of(model, "a", 3)], {"a": StateVersion(0, 4, 0)})
        assert model.holds("a") == StateVersion(0, 5, 0), "it has moved since it was doubted"
        model.put([state_of(model, "a", 3)], {"a": StateVersion(0, 5, 0)})
        assert model.holds("a") == StateVersion(0, 3, 0)
