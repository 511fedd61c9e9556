"""A store that lost its latest writes reuses epoch numbers: processes must not keep anything of the lost epochs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from redis.asyncio import Redis

from metaban.store.shared.epochs import Epoch
from tests.worker.workshop import INPUTS, OpenWorkshop, Workshop


async def publish(shop: Workshop, number: int, mean: float, *, refitted: int = 0, events: int = 0) -> None:
    trainer = shop.new_model().trainer
    assert trainer is not None
    tensors = {name: tensor.numpy() for name, tensor in trainer.learner.initial_shared().items()}
    tensors["mean"] = np.full(INPUTS, mean, dtype=np.float32)
    assert await shop.epochs.acquire_lease("other", 60_000)
    epoch = Epoch(number, events, tensors, (), 0, refitted, follows=await shop.stamp())
    assert await shop.epochs.publish(epoch, lease_token="other")
    await shop.epochs.release_lease("other")


async def picture(redis: Redis) -> dict[bytes, Any]:
    return {key: await redis.dump(key) async for key in redis.scan_iter()}


async def set_back(redis: Redis, kept: dict[bytes, Any]) -> None:
    """Restore an earlier content, as after a crash that lost the latest writes."""
    await redis.flushall()
    for key, value in kept.items():
        await redis.restore(key, 0, value)


def mean(shop: Workshop) -> float:
    return float(shop.model.epoch.tensors["mean"][0])


async def test_another_epoch_with_a_lost_number(shop: Workshop) -> None:
    await publish(shop, 0, 0.0)
    kept = await picture(shop.redis)
    await publish(shop, 1, 1.0)
    await shop.model.refresh_epoch()
    await set_back(shop.redis, kept)
    await publish(shop, 1, 9.0)
    await shop.model.refresh_epoch()
    assert (shop.model.epoch.number, mean(shop)) == (1, 9.0)


async def test_a_store_that_lost_its_only_epoch(shop: Workshop) -> None:
    kept = await picture(shop.redis)
    meta = shop.epoch_trainer()
    await meta.tick()
    assert shop.model.epoch_published
    await set_back(shop.redis, kept)
    await shop.model.refresh_epoch()
    assert not shop.model.epoch_published
    await meta.tick()
    assert await shop.epoch_number() == 0


async def test_nothing_is_derived_from_a_lost_epoch(shop: Workshop) -> None:
    """The store is set back, and the number is used again, while a trainer derives the next epoch."""
    meta = shop.epoch_trainer()
    await meta.tick()
    kept = await picture(shop.redis)
    await publish(shop, 1, 1.0)
    await shop.learn({"a": 16})
    advance = meta.advance

    async def late(*arguments: Any) -> None:
        await set_back(shop.redis, kept)
        await publish(shop, 1, 9.0)
        assert await shop.epochs.acquire_lease("m1", 60_000)
        await advance(*arguments)

    meta.advance = late
    await meta.tick()
    assert await shop.epoch_number() == 1
    await shop.model.refresh_epoch()
    assert (shop.model.epoch.number, mean(shop)) == (1, 9.0)


@pytest.mark.parametrize("ahead", [1, 2])
async def test_a_sweep_under_a_lost_epoch_does_not_count(open_workshop: OpenWorkshop, ahead: int) -> None:
    """The trainer of the other epoch may have died before its sweep, or may be at a later epoch."""
    shop = await open_workshop(samples_kept=50)
    meta = shop.epoch_trainer()
    await meta.tick()
    await shop.learn({"a": 8})
    kept = await picture(shop.redis)
    await publish(shop, 1, 1.0, refitted=1, events=16)
    await meta.tick()
    assert (await shop.users.fitted_under(["a"])) == {"a": 1}
    await set_back(shop.redis, kept)
    assert (await shop.users.fitted_under(["a"])) == {"a": 0}
    for number in range(1, ahead + 1):
        await publish(shop, number, 9.0, refitted=1, events=16)
    await meta.tick()
    assert (await shop.users.fitted_under(["a"])) == {"a": ahead}


async def test_samples_of_lost_events_are_not_used(open_workshop: OpenWorkshop) -> None:
    shop = await open_workshop(samples_kept=50)
    meta = shop.epoch_trainer()
    await meta.tick()
    kept = await picture(shop.redis)
    await shop.learn({"a": 16})
    await meta.tick()
    assert await shop.epoch_number() == 1
    await set_back(shop.redis, kept)
    await shop.model.refresh_epoch()
    await shop.learn({"a": 16}, first=100)  # the same version, by other events
    await meta.tick()
    epoch = await shop.epochs.current()
    assert epoch is not None
    assert epoch.number == 1
    rows = [sample.features for sample in (await shop.users.load_samples(["a"]))["a"]]
    np.testing.assert_allclose(epoch.tensors["mean"], np.mean(rows, axis=0), rtol=1e-5)


async def test_consecutive_epochs_keep_caches_and_sweep(shop: Workshop) -> None:
    """Only then may cached samples and the sweep be kept."""
    for number in range(4):
        await publish(shop, number, float(number))
        await shop.model.refresh_epoch()
    assert shop.model.breaks == 0
    await publish(shop, 4, 4.0)
    await publish(shop, 5, 5.0)
    await shop.model.refresh_epoch()
    assert shop.model.breaks == 1, "the missed epoch may not follow the known one"
