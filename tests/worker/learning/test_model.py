"""NamespaceModel: record and epoch change together, and an older epoch never replaces a newer one."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from metaban.models.settings import PosteriorSettings
from metaban.store.errors import StoreReset
from metaban.store.shared.epochs import Epoch
from tests.worker.workshop import INPUTS, OpenWorkshop, Workshop, layout, small_default


async def publish(shop: Workshop, number: int) -> None:
    """An epoch whose mean is its number."""
    trainer = shop.new_model().trainer
    assert trainer is not None
    tensors = {name: tensor.numpy() for name, tensor in trainer.learner.initial_shared().items()}
    tensors["mean"] = np.full(INPUTS, number, dtype=np.float32)
    assert await shop.epochs.acquire_lease("m", 60_000)
    epoch = Epoch(number, number, tensors, (), 0, follows=await shop.stamp())
    assert await shop.epochs.publish(epoch, lease_token="m")


async def test_before_any_epoch_the_initial_state_is_used(shop: Workshop) -> None:
    await shop.model.refresh_epoch()
    assert shop.model.epoch.number == 0
    assert not shop.model.epoch_published
    await publish(shop, 0)
    await shop.model.refresh_epoch()
    assert shop.model.epoch_published


async def test_a_layout_set_later(open_workshop: OpenWorkshop) -> None:
    shop = await open_workshop(fixed=False)
    await shop.model.refresh_record()
    assert shop.model.trainer is None
    with pytest.raises(RuntimeError, match="layout"):
        _ = shop.model.epoch
    await shop.namespaces.set_layout(shop.record, layout().to_json())
    await shop.model.refresh_record()
    assert shop.model.trainer is not None
    assert shop.model.trainer.learner.input_size == INPUTS


async def test_changed_settings_are_adopted_with_the_current_epoch(shop: Workshop) -> None:
    """Fits go on while the new record is read: they must not fall back to the initial state."""
    for number in range(3):
        await publish(shop, number)
    await shop.model.refresh_epoch()
    await shop.namespaces.replace_learner(shop.record, small_default(width=7).to_json())
    seen: set[int] = set()

    async def watch() -> None:
        while True:
            seen.add(shop.model.epoch.number)
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    await shop.model.refresh_record()
    await asyncio.sleep(0)
    watching.cancel()
    assert seen == {2}
    assert shop.model.epoch_published
    assert float(shop.model.epoch.tensors["mean"][0]) == 2
    trainer = shop.model.trainer
    assert trainer is not None
    settings: PosteriorSettings = trainer.learner.settings  # type: ignore[attr-defined]
    assert settings.width == 7


async def test_an_epoch_that_arrives_late_does_not_replace_a_newer_one(shop: Workshop) -> None:
    await publish(shop, 0)
    current = shop.epochs.current
    first, answer = asyncio.Event(), asyncio.Event()

    async def slow_once() -> Epoch | None:
        found = await current()
        if not first.is_set():
            first.set()
            await answer.wait()
        return found

    shop.epochs.current = slow_once  # type: ignore[method-assign]
    late = asyncio.create_task(shop.model.refresh_epoch())
    await first.wait()
    await publish(shop, 1)
    newer = asyncio.create_task(shop.model.refresh_epoch())
    await asyncio.sleep(0.05)
    answer.set()
    async with asyncio.timeout(30):
        await asyncio.gather(late, newer)
    assert shop.model.epoch.number == 1


async def test_a_deleted_record_raises_store_reset(shop: Workshop) -> None:
    await shop.redis.delete(shop.keys.record)
    with pytest.raises(StoreReset):
        await shop.model.refresh_record()
