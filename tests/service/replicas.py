"""Replicas to watch: one over a namespace of two partitions, and what workers and trainers do to its users."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from models.presets import build_learner
from service.metrics import Metrics
from service.replica import Replica
from service.served import ServedModel
from service.warm_starts import ServedFusion
from store.epochs import Epoch
from store.fusion import FusionStore
from store.users import UserState, UserStore
from tests.worker.workshop import CPU, INPUTS, Workshop, small, soon


class Watched:
    """A replica of a namespace, and the store as it sees it."""

    def __init__(self, shop: Workshop, *, pool: int = 100, log_cap: int = 100_000) -> None:
        self.shop = shop
        self.model = ServedModel(build_learner(small(), INPUTS), CPU, pool_max=pool, guests_max=10)
        self.users = UserStore(
            shop.redis, shop.keys, shop.record.store_epoch, samples_kept=shop.samples_kept, update_log_cap=log_cap
        )
        metrics = Metrics().of("shop")
        self.fusion = ServedFusion(
            FusionStore(shop.redis, shop.keys, shop.record.store_epoch), self.model.learner, shop.compute, metrics
        )
        self.replica = Replica(
            self.users,
            shop.epochs,
            self.fusion,
            self.model,
            shop.compute,
            metrics,
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


async def move_to_epoch(shop: Workshop, user: str, number: int) -> None:
    """What a refit does to a user."""
    state = (await shop.users.load([user]))[user]
    moved = replace(state, epoch=number)
    assert await shop.users.rebase(shop.keys.partition_of(user), [moved]) == [True]


async def last_entry(shop: Workshop, user: str) -> tuple[int, str]:
    """The newest applied event of a user, as its sender knows it."""
    partition = shop.keys.partition_of(user)
    lines = await shop.users.tail(partition, "0-0", block_ms=1, count=10_000)
    return partition, [line.entry_ids[-1] for line in lines if line.user_id == user and line.entry_ids][-1]
