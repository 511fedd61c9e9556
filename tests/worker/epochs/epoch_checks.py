"""Checks of epochs and of users fitted under them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from metaban.store.shared.epochs import Epoch
from metaban.worker.learning.trainer import FitInput
from tests.worker.workshop import Workshop


async def current(shop: Workshop) -> Epoch:
    epoch = await shop.epochs.current()
    assert epoch is not None
    return epoch


async def epochs_of_users(shop: Workshop) -> dict[str, int]:
    return {user: state.epoch for user, state in (await shop.users.load(await shop.versions())).items()}


async def all_users_are_fitted(shop: Workshop, number: int) -> None:
    """Check that all states equal a fit of the kept samples under epoch `number`."""
    epoch = await current(shop)
    assert epoch.number == number
    model = shop.new_model()
    await model.refresh_epoch()
    trainer = model.trainer
    assert trainer is not None
    states = await shop.users.load(await shop.versions())
    samples = await shop.users.load_samples(states)
    fit_inputs = [FitInput(user, state.version, samples[user], None) for user, state in states.items()]
    again = trainer.fit(model.epoch.tensors, fit_inputs).states
    for fit_input, fitted in zip(fit_inputs, again, strict=True):
        state = states[fit_input.user_id]
        assert state.epoch == number, f"{fit_input.user_id} is fitted under epoch {state.epoch}"
        np.testing.assert_allclose(state.tensors["head"], fitted["head"], rtol=1e-4, atol=1e-5)


def before_first(store: Any, name: str, happening: Callable[[], Any]) -> None:
    """Call `happening` before the first call of a method."""
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
    """Numbers of all published epochs, in order."""
    return [int(fields[b"n"]) for _, fields in await shop.redis.xrange(shop.keys.epoch_log)]
