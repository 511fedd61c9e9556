"""SampleCache: the newest samples of users, read again only after a change."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from metaban.store.codec import Sample
from metaban.store.users.users import UserStore
from metaban.worker.epochs import derive_shared as epochs_module
from metaban.worker.epochs.derive_shared import samples_per_user
from metaban.worker.epochs.sample_cache import SampleCache
from metaban.worker.learning.trainer import FitInput
from tests.worker.workshop import INPUTS, OpenWorkshop, Workshop


class Watched:
    """A user store that records whose samples were read."""

    def __init__(self, users: UserStore) -> None:
        self._users = users
        self.read: list[set[str]] = []

    async def load_samples(self, user_ids: Iterable[str]) -> dict[str, list[Sample]]:
        ids = list(user_ids)
        self.read.append(set(ids))
        return await self._users.load_samples(ids)


def arms(fit_inputs: Iterable[FitInput]) -> dict[str, list[str]]:
    return {fit_input.user_id: [sample.arm_id for sample in fit_input.samples] for fit_input in fit_inputs}


async def versions(shop: Workshop) -> dict[str, tuple[int, int]]:
    return await shop.users.versions(0)


async def test_only_changed_users_are_read_again(open_workshop: OpenWorkshop) -> None:
    shop = await open_workshop(samples_kept=5)
    await shop.learn({"ada": 3, "bob": 7})
    watched = Watched(shop.users)
    cache = SampleCache(watched)  # type: ignore[arg-type]
    first = {fit_input.user_id: fit_input.samples for fit_input in await cache.load(await versions(shop), INPUTS)}
    assert {user: len(samples) for user, samples in first.items()} == {"ada": 3, "bob": 5}

    await cache.load(await versions(shop), INPUTS)
    await shop.learn({"bob": 2}, first=10)
    found = {fit_input.user_id: fit_input.samples for fit_input in await cache.load(await versions(shop), INPUTS)}
    assert watched.read == [{"ada", "bob"}, {"bob"}]
    assert [sample.arm_id for sample in found["bob"]] == ["7", "8", "9", "10", "11"]

    del (gone := await versions(shop))["ada"]
    assert [fit_input.user_id for fit_input in await cache.load(gone, INPUTS)] == ["bob"]


async def test_wide_inputs_leave_fewer_samples_per_user(
    open_workshop: OpenWorkshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epochs_module, "EPOCH_NUMBERS_MAX", 12)
    assert [samples_per_user(2, 3), samples_per_user(2, 100), samples_per_user(0, 3)] == [2, 1, 12]
    shop = await open_workshop(samples_kept=5)
    await shop.learn({"ada": 4, "bob": 1})
    found = await SampleCache(shop.users).load(await versions(shop), INPUTS)
    assert {fit_input.user_id: [sample.arm_id for sample in fit_input.samples] for fit_input in found} == {
        "ada": ["2", "3"],
        "bob": ["4"],
    }


async def test_samples_that_were_cut_are_read_again_when_there_is_room(
    open_workshop: OpenWorkshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fewer users, or narrower inputs, each contributes more samples."""
    monkeypatch.setattr(epochs_module, "EPOCH_NUMBERS_MAX", 24)
    shop = await open_workshop(samples_kept=5)
    await shop.learn({"ada": 5, "bob": 2, "cyd": 5, "dan": 5})
    watched = Watched(shop.users)
    cache = SampleCache(watched)  # type: ignore[arg-type]
    everyone = await versions(shop)
    two = {user: everyone[user] for user in ("ada", "bob")}
    one = {"ada": everyone["ada"]}
    for users, inputs in ((everyone, INPUTS), (two, INPUTS), (everyone, INPUTS), (everyone, 1), (one, INPUTS)):
        found, uncached = await cache.load(users, inputs), await SampleCache(shop.users).load(users, inputs)
        assert arms(found) == arms(uncached)
    assert watched.read == [set(everyone), {"ada", "bob"}, {"cyd", "dan"}, {"ada", "cyd", "dan"}]
