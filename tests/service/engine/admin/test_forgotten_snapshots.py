"""Users forgotten before, during and after a snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from metaban.store.shared.epochs import Epoch
from metaban.store.snapshots.create import _Snapshotter
from metaban.store.snapshots.records import UserRecord
from metaban.store.snapshots.restore_intent import RestoreStore, Restoring
from metaban.store.users.forgetting import RemnantStore
from tests.service.snapshots import in_place, in_small_parts, kept, kept_epoch, put_back, stored, take
from tests.worker.workshop import OpenWorkshop, Workshop


@pytest.fixture
async def shop(open_workshop: OpenWorkshop, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    """Users of an epoch whose pool has only some of them."""
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
    """Forget a user as the service does."""
    forgotten = await shop.users.forget(user)
    await RemnantStore(shop.redis, shop.keys).delete_lines(user, forgotten.incarnation, before=forgotten.line)
    await shop.epochs.strike([user])


async def test_later_snapshot_does_not_name_forgotten_users(shop: Workshop, tmp_path: Path) -> None:
    await forget(shop, "user 2")
    manifest = await take(shop, tmp_path)
    content = (tmp_path / f"{manifest.id}.tar").read_bytes()
    assert b"user 2" not in content
    assert b"user 3" in content
    assert kept_epoch(tmp_path, manifest).members == ("user 0", "user 1", "user 3")


async def test_earlier_snapshot_does_not_restore_them_to_the_pool(shop: Workshop, tmp_path: Path) -> None:
    manifest = await take(shop, tmp_path)
    assert kept_epoch(tmp_path, manifest).members == tuple(f"user {number}" for number in range(4))
    await forget(shop, "user 2")
    await put_back(shop.redis, tmp_path, manifest)
    assert await shop.epochs.members() == ("user 0", "user 1", "user 3")


async def test_user_forgotten_during_the_restore(
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


async def test_log_position_deleted_during_a_snapshot(
    shop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The position was a line of the forgotten user."""
    lines = await shop.users.tail(0, "0-0", block_ms=1, count=10_000)
    last = lines[-1].user_id
    load = _Snapshotter._load
    forgotten = False

    async def late(self: _Snapshotter, users: Sequence[str]) -> list[UserRecord]:
        nonlocal forgotten
        records = await load(self, users)
        if last in users and not forgotten:
            forgotten = True
            await forget(shop, last)
        return records

    monkeypatch.setattr(_Snapshotter, "_load", late)
    manifest = await take(shop, tmp_path)
    assert forgotten
    assert not await shop.users.logged(0, lines[-1].cursor)
    assert kept(tmp_path, manifest) == await stored(shop)
    assert last not in kept(tmp_path, manifest)
    assert last not in kept_epoch(tmp_path, manifest).members
