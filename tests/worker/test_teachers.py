"""Whom an epoch is derived from: everybody's newest samples, read again only where they changed."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from store.codec import Sample
from store.users import UserStore
from tests.worker.conftest import OpenWorkshop
from tests.worker.workshop import INPUTS, Workshop
from worker import epochs as epochs_module
from worker.epochs import samples_each
from worker.teachers import Teachers


class Watched:
    """A way to the users that takes note of whose samples were read."""

    def __init__(self, users: UserStore) -> None:
        self._users = users
        self.read: list[set[str]] = []

    async def load_samples(self, user_ids: Iterable[str]) -> dict[str, list[Sample]]:
        ids = list(user_ids)
        self.read.append(set(ids))
        return await self._users.load_samples(ids)


async def standings(shop: Workshop) -> dict[str, tuple[int, int]]:
    return await shop.users.versions(0)


async def test_only_what_changed_is_read_again(open_workshop: OpenWorkshop) -> None:
    shop = await open_workshop(samples_kept=5)
    await shop.learn({"ada": 3, "bob": 7})
    watched = Watched(shop.users)
    teachers = Teachers(watched)  # type: ignore[arg-type]
    first = {pupil.user_id: pupil.samples for pupil in await teachers.pupils(await standings(shop), INPUTS)}
    assert {user: len(samples) for user, samples in first.items()} == {"ada": 3, "bob": 5}

    await teachers.pupils(await standings(shop), INPUTS)
    await shop.learn({"bob": 2}, first=10)
    found = {pupil.user_id: pupil.samples for pupil in await teachers.pupils(await standings(shop), INPUTS)}
    assert watched.read == [{"ada", "bob"}, set(), {"bob"}]
    assert [sample.arm_id for sample in found["bob"]] == ["7", "8", "9", "10", "11"]

    del (gone := await standings(shop))["ada"]
    assert [pupil.user_id for pupil in await teachers.pupils(gone, INPUTS)] == ["bob"]


async def test_wide_inputs_leave_fewer_samples_a_teacher(
    open_workshop: OpenWorkshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epochs_module, "TEACHING_NUMBERS_MAX", 12)
    assert [samples_each(2, 3), samples_each(2, 100), samples_each(0, 3)] == [2, 1, 12]
    shop = await open_workshop(samples_kept=5)
    await shop.learn({"ada": 4, "bob": 1})
    found = await Teachers(shop.users).pupils(await standings(shop), INPUTS)
    assert {pupil.user_id: [sample.arm_id for sample in pupil.samples] for pupil in found} == {
        "ada": ["2", "3"],
        "bob": ["4"],
    }
