"""A replica under test, and writes of workers and trainers to its store."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from metaban.models.presets import build_learner
from metaban.service.engine.model.replica import Replica
from metaban.service.engine.model.served_model import ServedModel
from metaban.service.engine.model.warm_starts import ServedFusion
from metaban.service.telemetry.metrics import Metrics
from metaban.store.shared.epochs import Epoch
from metaban.store.shared.fusion import FusionStore
from metaban.store.users.logs import NamespaceLogs
from metaban.store.users.records import UserState
from metaban.store.users.users import UserStore
from tests.worker.workshop import CPU, INPUTS, Workshop, small_default, soon


class Watched:
    """A replica of a namespace, with its model and stores."""

    def __init__(self, shop: Workshop, *, pool: int = 100, log_cap: int = 100_000) -> None:
        self.shop = shop
        self.model = ServedModel(build_learner(small_default(), INPUTS), CPU, pool_max=pool, guests_max=10)
        self.users = UserStore(
            shop.redis, shop.keys, shop.record.store_id, samples_kept=shop.samples_kept, update_log_cap=log_cap
        )
        self.logs = NamespaceLogs(shop.redis, shop.keys)
        metrics = Metrics().of("shop")
        self.fusion = ServedFusion(
            FusionStore(shop.redis, shop.keys, shop.record.store_id), self.model.learner, shop.compute, metrics
        )
        self.replica = Replica(
            self.users,
            shop.epochs,
            self.fusion,
            self.model,
            shop.compute,
            metrics,
            self.logs,
            partitions=shop.record.partitions,
        )

    def version(self, user: str) -> int | None:
        held = self.model.holds(user)
        return None if held is None else held.version

    async def serves(self, user: str, version: int, *, epoch: int | None = None) -> None:
        """Wait until a user's state is served."""

        async def holds() -> bool:
            held = self.model.holds(user)
            return held is not None and held.version == version and epoch in (None, held.epoch)

        await soon(holds, f"{user} served at version {version}, epoch {epoch}")


def in_partition(shop: Workshop, partition: int, count: int) -> list[str]:
    """Users of one partition."""
    names = (f"user {number}" for number in range(1_000))
    return [name for name in names if shop.keys.partition_of(name) == partition][:count]


def hold_load(users: UserStore, about: str) -> tuple[asyncio.Event, asyncio.Event]:
    """Delay the answer of the next load of a user: (it was read, let it arrive)."""
    load, come, passing = users.load, asyncio.Event(), asyncio.Event()

    async def late(user_ids: Iterable[str]) -> dict[str, UserState]:
        ids = list(user_ids)
        found = await load(ids)
        if about in ids and not come.is_set():
            come.set()
            async with asyncio.timeout(30):
                await passing.wait()
        return found

    users.load = late  # type: ignore[method-assign]
    return come, passing


async def publish_epoch(shop: Workshop, number: int, events: int, members: tuple[str, ...] = ()) -> None:
    trainer = shop.new_model().trainer
    assert trainer is not None
    tensors = {name: tensor.numpy() for name, tensor in trainer.learner.initial_shared().items()}
    tensors["scale"] = np.full(INPUTS, 1.0 + number, dtype=np.float32)
    assert await shop.epochs.acquire_lease("test", 60_000)
    epoch = Epoch(number, events, tensors, members, 0, refitted=number, follows=await shop.stamp())
    assert await shop.epochs.publish(epoch, lease_token="test")


async def move_to_epoch(shop: Workshop, user: str, number: int, *, refit: int | None = None) -> None:
    """Write a user's state as refitted under an epoch; `refit` is the number of the refit before its publication."""
    state = (await shop.users.load([user]))[user]
    moved = replace(state, epoch=number)
    assert await shop.users.rebase(shop.keys.partition_of(user), [moved], refit=refit) == [True]


async def last_entry(shop: Workshop, user: str) -> tuple[int, str]:
    """Partition and entry id of the newest applied event of a user."""
    partition = shop.keys.partition_of(user)
    lines = await shop.users.tail(partition, "0-0", block_ms=1, count=10_000)
    return partition, [line.entry_ids[-1] for line in lines if line.user_id == user and line.entry_ids][-1]
