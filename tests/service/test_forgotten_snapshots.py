"""Snapshots and users who are forgotten before, while and after they are taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from store.epochs import Epoch
from store.restores import RestoreStore, Restoring
from store.snapshot_records import UserRecord
from store.snapshots import _Photographer
from store.traces import Traces
from tests.service.snapshooting import in_place, in_small_parts, kept, kept_epoch, put_back, stored, take
from tests.worker.conftest import OpenWorkshop, open_workshop  # noqa: F401 (a fixture)
from tests.worker.workshop import Workshop


@pytest.fixture
async def shop(open_workshop: OpenWorkshop, monkeypatch: pytest.MonkeyPatch) -> Workshop:  # noqa: F811
    """Users whose epoch has a pool that not everyone is in."""
    in_small_parts(monkeypatch)
    shop = await open_workshop(partitions=2)
    await in_place(shop)
    current = await shop.epochs.current()
    assert current is not None
    assert await shop.epochs.acquire_lease("test", 60_000)
    members = tuple(f"user {number}" for number in range(4))
    following = replace(current, number=current.number + 1, members=members, follows=current.stamp)
    assert await shop.epochs.publish(following, lease_token="test")
    await shop.epochs.release_lease("test")
    return shop


async def forget(shop: Workshop, user: str) -> None:
    """As the service does it."""
    forgotten = await shop.users.forget(user)
    await Traces(shop.redis, shop.keys).delete_lines(user, forgotten.incarnation, before=forgotten.line)
    await shop.epochs.strike([user])


async def test_one_taken_afterwards_does_not_name_them(shop: Workshop, tmp_path: Path) -> None:
    await forget(shop, "user 2")
    manifest = await take(shop, tmp_path)
    content = (tmp_path / f"{manifest.id}.tar").read_bytes()
    assert b"user 2" not in content
    assert b"user 3" in content
    assert kept_epoch(tmp_path, manifest).members == ("user 0", "user 1", "user 3")


async def test_one_from_before_does_not_bring_them_back_into_the_pool(shop: Workshop, tmp_path: Path) -> None:
    manifest = await take(shop, tmp_path)
    assert kept_epoch(tmp_path, manifest).members == tuple(f"user {number}" for number in range(4))
    await forget(shop, "user 2")
    await put_back(shop.redis, tmp_path, manifest)
    assert await shop.epochs.members() == ("user 0", "user 1", "user 3")


async def test_not_even_when_they_are_forgotten_right_then(
    shop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = await take(shop, tmp_path)
    finish = RestoreStore.finish

    async def late(self: RestoreStore, restoring: Restoring, epoch: Epoch, *, lease_token: str) -> None:
        await forget(shop, "user 1")
        await finish(self, restoring, epoch, lease_token=lease_token)

    monkeypatch.setattr(RestoreStore, "finish", late)
    await put_back(shop.redis, tmp_path, manifest)
    assert await shop.epochs.members() == ("user 0", "user 2", "user 3")
    assert (await shop.users.load(["user 1"]))["user 1"].forgotten


async def test_our_place_in_the_log_goes_while_one_is_taken(
    shop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a line of the user who is forgotten."""
    lines = await shop.users.tail(0, "0-0", block_ms=1, count=10_000)
    last = lines[-1].user_id
    load = _Photographer._load
    forgotten = False

    async def late(self: _Photographer, users: Sequence[str]) -> list[UserRecord]:
        nonlocal forgotten
        records = await load(self, users)
        if last in users and not forgotten:
            forgotten = True
            await forget(shop, last)
        return records

    monkeypatch.setattr(_Photographer, "_load", late)
    manifest = await take(shop, tmp_path)
    assert forgotten
    assert not await shop.users.logged(0, lines[-1].cursor)
    assert kept(tmp_path, manifest) == await stored(shop)
    assert last not in kept(tmp_path, manifest)
    assert last not in kept_epoch(tmp_path, manifest).members
