"""Users are fitted from their warm start: at the first reward, after a new epoch, and in every refit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from metaban.models.settings import named_settings
from metaban.store.decisions.decisions import DecisionRecord, DecisionStore
from metaban.store.users.records import UserState
from metaban.store.users.warm_starts import StoredWarmStart
from metaban.worker.learning.trainer import FitInput
from tests.worker.workshop import OpenWorkshop, Workshop, make_event

WARM, COLD = "warm", "cold"


@pytest.fixture
async def shop(open_workshop: OpenWorkshop) -> Workshop:
    shop = await open_workshop(settings=named_settings("default"), samples_kept=50)
    await shop.epoch_trainer().tick()
    await shop.model.refresh_epoch()
    await give(shop, WARM)
    return shop


def start_of(shop: Workshop, *, incarnation: int = 0) -> StoredWarmStart:
    learner = shop.model.trainer
    assert learner is not None
    assert learner.learner.start_size > 2
    values = np.random.default_rng(5).normal(size=learner.learner.start_size)
    values[-1] = 0.5
    return StoredWarmStart(incarnation, values, 1, (), 0)


async def give(shop: Workshop, user: str, *, incarnation: int = 0) -> None:
    """Store a first decision with a warm start."""
    made = DecisionRecord(
        f"{user} {incarnation}", user, "", (), np.empty((0, 1)), np.empty((0, 0)), "ucb", 0, 0, None, 0
    )
    start = start_of(shop, incarnation=incarnation)
    decisions = DecisionStore(shop.redis, shop.keys, ttl_s=60)
    await decisions.put(replace(made, incarnation=incarnation), start=start)


async def reward(shop: Workshop, user: str, *numbers: int, incarnation: int = 0) -> None:
    learner = shop.model.trainer
    assert learner is not None
    phi = np.zeros(learner.learner.noted, dtype=np.float32)
    events = [make_event(user, number, phi=phi, incarnation=incarnation) for number in numbers]
    await shop.publisher().publish(0, await shop.give(events))


async def stored(shop: Workshop, user: str) -> UserState:
    return (await shop.users.load([user]))[user]


async def fitted(shop: Workshop, user: str, start: StoredWarmStart | None) -> dict[str, np.ndarray]:
    """State of a user under the current epoch, fitted from the stored samples and a warm start."""
    await shop.model.refresh_epoch()
    learner, state = shop.model.trainer, await stored(shop, user)
    assert learner is not None
    samples = (await shop.users.load_samples([user]))[user]
    fit_input = FitInput(user, state.version, samples, None, None if start is None else start.values)
    return learner.fit(shop.model.epoch.tensors, [fit_input]).states[0]


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


async def test_at_the_first_and_second_reward(shop: Workshop) -> None:
    for numbers in ((1,), (2, 3)):
        await reward(shop, WARM, *numbers)
        await reward(shop, COLD, *numbers)
        assert same((await stored(shop, WARM)).tensors, await fitted(shop, WARM, start_of(shop)))
        assert same((await stored(shop, COLD)).tensors, await fitted(shop, COLD, None))
        assert not same(await fitted(shop, WARM, start_of(shop)), await fitted(shop, WARM, None))


async def test_in_a_refit(shop: Workshop) -> None:
    await reward(shop, WARM, *range(60))
    await reward(shop, COLD, *range(60))
    before = await stored(shop, WARM)
    meta = shop.epoch_trainer("m2", model=shop.new_model())
    for _ in range(2):
        await meta.tick()
    after = await stored(shop, WARM)
    assert after.epoch > before.epoch
    assert same(after.tensors, await fitted(shop, WARM, start_of(shop)))
    assert same((await stored(shop, COLD)).tensors, await fitted(shop, COLD, None))


async def test_after_a_new_epoch(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    await reward(shop, WARM, *range(60))
    store = shop.user_store()
    apply = store.apply

    async def overtaken(*arguments: object) -> int:
        await shop.epoch_trainer("m2", model=shop.new_model()).tick()
        return await apply(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "apply", overtaken)
    learner = shop.model.trainer
    assert learner is not None
    late = make_event(WARM, 99, phi=np.zeros(learner.learner.noted, dtype=np.float32))
    # Fitted under the previous epoch, which is not their final state.
    await shop.publisher(users=store).publish(0, await shop.give([late]))
    state = await stored(shop, WARM)
    assert (state.version, state.epoch) == (61, await shop.epoch_number())
    assert state.epoch > 0
    assert same(state.tensors, await fitted(shop, WARM, start_of(shop)))


async def test_not_in_another_incarnation(shop: Workshop) -> None:
    await reward(shop, WARM, 1)
    await shop.users.forget(WARM)
    await reward(shop, WARM, 2, incarnation=1)
    assert same((await stored(shop, WARM)).tensors, await fitted(shop, WARM, None))
    await shop.users.forget(WARM)
    await give(shop, WARM, incarnation=2)
    await reward(shop, WARM, 3, incarnation=2)
    assert same((await stored(shop, WARM)).tensors, await fitted(shop, WARM, start_of(shop, incarnation=2)))


@pytest.mark.parametrize("size", [0, 3])
async def test_a_start_of_another_learner_is_ignored(shop: Workshop, size: int) -> None:
    odd = replace(start_of(shop), values=np.ones(size))
    await shop.redis.hset(shop.keys.start(WARM), "start", odd.encode())
    await reward(shop, WARM, 1)
    assert same((await stored(shop, WARM)).tensors, await fitted(shop, WARM, None))


async def test_epochs_are_derived_from_rewards_alone(shop: Workshop, open_workshop: OpenWorkshop) -> None:
    """Epochs ignore warm starts: the same rewards give the same epoch."""
    other = await open_workshop(settings=named_settings("default"), samples_kept=50, name="other")
    await other.epoch_trainer().tick()
    await other.model.refresh_epoch()
    epochs = []
    for each in (shop, other):
        await reward(each, WARM, *range(60))
        meta = each.epoch_trainer("m2", model=each.new_model())
        await meta.tick()
        await each.model.refresh_epoch()
        epochs.append(each.model.epoch)
    assert epochs[0].number == epochs[1].number > 0
    for name, tensor in epochs[0].tensors.items():
        assert tensor.equal(epochs[1].tensors[name]), name
