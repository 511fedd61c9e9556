"""What tests of the meta-trainer ask of epochs and of users fitted under them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from store.epochs import Epoch
from tests.worker.workshop import Workshop
from worker.trainer import Pupil


async def current(shop: Workshop) -> Epoch:
    epoch = await shop.epochs.current()
    assert epoch is not None
    return epoch


async def epochs_of_users(shop: Workshop) -> dict[str, int]:
    return {user: state.epoch for user, state in (await shop.users.load(await shop.versions())).items()}


async def everyone_is_fitted(shop: Workshop, number: int) -> None:
    """All states are what epoch `number` makes of the samples kept."""
    epoch = await current(shop)
    assert epoch.number == number
    model = shop.new_model()
    await model.refresh_epoch()
    trainer = model.trainer
    assert trainer is not None
    states = await shop.users.load(await shop.versions())
    samples = await shop.users.load_samples(states)
    pupils = [Pupil(user, state.version, samples[user], None) for user, state in states.items()]
    again = trainer.fit(model.epoch.tensors, pupils).states
    for pupil, fitted in zip(pupils, again, strict=True):
        state = states[pupil.user_id]
        assert state.epoch == number, f"{pupil.user_id} is fitted under epoch {state.epoch}"
        np.testing.assert_allclose(state.tensors["theta"], fitted["theta"], rtol=1e-4, atol=1e-5)


def before_first(store: Any, name: str, happening: Callable[[], Any]) -> None:
    """Have something happen before the first call of a method."""
    method = getattr(store, name)
    happened = False

    async def after(*arguments: Any, **options: Any) -> Any:
        nonlocal happened
        if not happened:
            happened = True
            await happening()
        return await method(*arguments, **options)

    setattr(store, name, after)


async def published(shop: Workshop) -> list[int]:
    """The numbers of all epochs ever published, in order."""
    return [number for _, number in await shop.epochs.tail("0-0", 0)]
