"""Snapshots contain warm starts, and restores write them for the new incarnation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from metaban.store.decisions.decisions import DecisionRecord, DecisionStore
from metaban.store.errors import SnapshotError
from metaban.store.shared.fusion import FusionRecord, FusionSource, FusionStore
from metaban.store.shared.transfer import TransferQuestion, TransferStore
from metaban.store.snapshots.records import UserRecord
from metaban.store.users.warm_starts import StoredWarmStart
from tests.service.snapshots import in_place, in_small_parts, kept, learn, put_back, stored, take
from tests.worker.workshop import OpenWorkshop, Workshop


def make_start(number: int) -> StoredWarmStart:
    return StoredWarmStart(0, np.array([0.5 * number, 0.25]), 3, ((f"token {number}", 0.5),), 9)


@pytest.fixture
async def shop(open_workshop: OpenWorkshop, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    """Every other user has a warm start; one more user has a warm start and no rewards."""
    in_small_parts(monkeypatch)
    shop = await open_workshop(partitions=2)
    for number in (0, 2, 4, 6, 99):
        await give(shop, f"user {number}", make_start(number))
    await in_place(shop, names=8)
    return shop


async def give(shop: Workshop, user: str, start: StoredWarmStart) -> None:
    """Store a warm start, as a first decision does."""
    decision = DecisionRecord(
        f"of {user} {start.incarnation}", user, "", (), np.empty((0, 1)), np.empty((0, 0)), "ucb", 0, 0, None, 0
    )
    decisions = DecisionStore(shop.redis, shop.keys, ttl_s=60)
    await decisions.put(replace(decision, incarnation=start.incarnation), start=start)


async def starts(shop: Workshop, *numbers: int) -> dict[int, list[float]]:
    """The valid warm starts."""
    _, found = await shop.users.load_with_warm_starts([f"user {number}" for number in numbers])
    return {number: found[f"user {number}"].values.tolist() for number in numbers if f"user {number}" in found}


async def incarnations_agree(shop: Workshop) -> bool:
    """Whether all warm starts are of their users' incarnations."""
    for number in (*range(12), 99):
        user = f"user {number}"
        held = await shop.redis.hget(shop.keys.start(user), "incarnation")
        stands = await shop.redis.hget(shop.keys.versions(shop.keys.partition_of(user)), user) or b"0:0"
        if held is not None and held != stands.split(b":")[0]:
            return False
    return True


async def test_warm_starts_are_restored(shop: Workshop, tmp_path: Path) -> None:
    before = await starts(shop, *range(8))
    assert list(before) == [0, 2, 4, 6]
    manifest = await take(shop, tmp_path)
    records = kept(tmp_path, manifest)
    assert records == await stored(shop)
    assert [number for number in range(8) if records[f"user {number}"].start] == [0, 2, 4, 6]
    await shop.users.forget("user 4")
    await give(shop, "user 50", make_start(50))
    await learn(shop, {"user 1": 2, "user 50": 1}, first=500)
    await put_back(shop.redis, tmp_path, manifest)
    # A user forgotten on request stays forgotten; a user missing in the snapshot is dropped.
    assert await starts(shop, *range(8), 50) == {number: before[number] for number in (0, 2, 6)}
    assert not await shop.redis.exists(shop.keys.start("user 4"), shop.keys.start("user 50"))
    _, found = await shop.users.load_with_warm_starts(["user 2"])
    assert (found["user 2"].incarnation, found["user 2"].nearest) == (1, (("token 2", 0.5),))
    assert await incarnations_agree(shop)


async def test_restore_leaves_no_warm_start_of_another_incarnation(shop: Workshop, tmp_path: Path) -> None:
    """Users forgotten since the snapshot, dropped by the restore, and restored."""
    manifest = await take(shop, tmp_path)
    for number in (0, 1):
        await shop.users.forget(f"user {number}")
        await give(shop, f"user {number}", replace(make_start(70), incarnation=1))
    await give(shop, "user 11", make_start(11))
    await learn(shop, {"user 11": 1, "user 0": 1}, first=500)
    await put_back(shop.redis, tmp_path, manifest)
    assert list(await starts(shop, *range(12))) == [2, 4, 6]
    assert not await shop.redis.exists(*(shop.keys.start(f"user {number}") for number in (0, 1, 11)))
    # A user without rewards is in no snapshot and keeps the incarnation.
    assert list(await starts(shop, 99)) == [99]
    assert await incarnations_agree(shop)


async def test_restore_into_a_new_store(shop: Workshop, tmp_path: Path) -> None:
    before = await starts(shop, *range(8))
    manifest = await take(shop, tmp_path)
    await shop.redis.flushall()
    await put_back(shop.redis, tmp_path, manifest)
    assert await starts(shop, *range(8)) == before


async def test_damaged_warm_start_is_left_out_without_its_user(shop: Workshop, tmp_path: Path) -> None:
    await shop.redis.hset(shop.keys.start("user 2"), "start", b"damaged")
    await shop.redis.hset(shop.keys.start("user 4"), "incarnation", "8")
    manifest = await take(shop, tmp_path)
    records = kept(tmp_path, manifest)
    assert (manifest.damaged, len(records)) == (0, 8)
    assert [number for number in range(8) if records[f"user {number}"].start] == [0, 6]


async def test_file_with_a_damaged_warm_start_is_refused(
    shop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = UserRecord.__init__

    def spoilt(record: UserRecord, *fields: object, **named: object) -> None:
        make(record, *fields, **named)  # type: ignore[arg-type]
        if record.start:
            object.__setattr__(record, "start", record.start[:-3])

    with monkeypatch.context() as patch:
        patch.setattr("metaban.store.snapshots.create.check_record", lambda *_: None)
        patch.setattr(UserRecord, "__init__", spoilt)
        manifest = await take(shop, tmp_path)
    with pytest.raises(SnapshotError, match="cannot be used"):
        await put_back(shop.redis, tmp_path, manifest)


async def test_fusion_sources_do_not_name_dropped_users(shop: Workshop, tmp_path: Path) -> None:
    manifest = await take(shop, tmp_path)
    await shop.learn({"user 50": 1})
    fusion = FusionStore(shop.redis, shop.keys, shop.record.store_id)
    names = {"t0": "user 0", "t50": "user 50"}
    sources = tuple(FusionSource(token, np.zeros(2)) for token in names)
    assert await fusion.acquire_lease("me", 60_000)
    assert await fusion.publish(FusionRecord(1, {}, sources, {}, 0), names, lease_token="me")
    await put_back(shop.redis, tmp_path, manifest)
    current = await fusion.current()
    assert current is not None
    assert [source.token for source in current.sources] == ["t0"]
    assert await fusion.everyone() == {"t0": "user 0"}


async def test_transfer_jobs_do_not_name_dropped_users(shop: Workshop, tmp_path: Path) -> None:
    manifest = await take(shop, tmp_path)
    await shop.learn({"user 50": 1})
    transfer = TransferStore(shop.redis, shop.keys, shop.record.store_id)
    for user, other in (("user 0", "user 1"), ("user 0", "user 50")):
        assert (await transfer.request(TransferQuestion("mse", user, None, (other,)), {user: 0, other: 0}, 1)).new
    await put_back(shop.redis, tmp_path, manifest)
    assert set(await transfer.named()) == {"user 0", "user 1"}
