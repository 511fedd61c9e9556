"""Killed restores and snapshots: readiness shows them, and the next run repairs them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from metaban.service.engine.admin.snapshots import SnapshotAdmin
from metaban.service.settings.environment import Settings
from metaban.store.snapshots.restore_intent import RestoreStore
from tests.service.snapshots import in_place, learn, learned, put_back, stored, take
from tests.worker.workshop import NAME, OpenWorkshop, Workshop, soon


@pytest.fixture
async def shop(open_workshop: OpenWorkshop) -> Workshop:
    shop = await open_workshop(partitions=3)
    await in_place(shop)
    return shop


async def metaban(url: str, data_dir: Path, *words: str, die_at: str = "") -> int:
    """The exit status of the command, which kills itself at the given place."""
    command = [sys.executable, "-m", "metaban.service.cli.main", "snapshot", *words]
    environment = {
        **os.environ,
        "REDIS_URL": url,
        "METABAN_NAMESPACE": NAME,
        "METABAN_DATA_DIR": str(data_dir),
        "METABAN_FAILPOINTS": die_at,
        "OMP_NUM_THREADS": "1",
    }
    done = await asyncio.to_thread(subprocess.run, command, env=environment, capture_output=True, text=True)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    [
        "restore-after-intent=1",
        "restore-after-chunk=1",
        "restore-after-chunk=3",
        "restore-before-publish=1",
        "restore-after-publish=1",
    ],
)
async def test_a_killed_restore(shop: Workshop, tmp_path: Path, valkey_url: str, place: str) -> None:
    folder = tmp_path / "snapshots"
    wanted = await stored(shop)
    manifest = await take(shop, folder)
    await learn(shop, {**{f"user {n}": 2 for n in range(12)}, "late": 1}, first=600)
    meta = shop.epoch_trainer()
    await meta.tick()
    number = await shop.epoch_number()
    assert number is not None
    desk = SnapshotAdmin(shop.redis, Settings(data_dir=tmp_path), shop.record)
    restores = RestoreStore(shop.redis, shop.keys, shop.record.store_id)

    assert await metaban(valkey_url, tmp_path, "restore", manifest.id, "--yes", die_at=place) == -signal.SIGKILL

    async def lease_is_over() -> bool:
        return not await shop.redis.exists(shop.keys.lease)

    await soon(lease_is_over)
    check = await desk.check()
    if place.startswith("restore-after-publish"):
        assert check is None
        assert await shop.epoch_number() == number + 1
    else:
        assert check is not None
        assert not check.ok
        assert f"metaban snapshot restore {manifest.id}" in check.detail
        # No epoch is derived from partly restored users.
        await learn(shop, {f"user {n}": 20 for n in range(12)}, first=10_000)
        states = await stored(shop)
        await meta.tick()
        assert await shop.epoch_number() == number
        assert await stored(shop) == states
        await put_back(shop.redis, folder, manifest)
        assert await desk.check() is None
        assert await restores.unfinished() is None
        assert await shop.epoch_number() == number + 1
    assert learned(await stored(shop)) == learned(wanted)
    # The epoch trainer continues: all users are fitted, and the next epoch comes when it is due.
    await meta.tick()
    assert learned(await stored(shop)) == learned(wanted)
    await learn(shop, {f"user {n}": 60 for n in range(12)}, first=20_000)
    await meta.tick()
    assert await shop.epoch_number() == number + 2


@pytest.mark.slow
@pytest.mark.parametrize("place", ["snapshot-after-chunk=2", "snapshot-before-rename=1"])
async def test_a_killed_snapshot(shop: Workshop, tmp_path: Path, valkey_url: str, place: str) -> None:
    before = await stored(shop)
    assert await metaban(valkey_url, tmp_path, "create", die_at=place) == -signal.SIGKILL
    desk = SnapshotAdmin(shop.redis, Settings(data_dir=tmp_path), shop.record)
    assert await desk.list(verify=False) == ()
    assert len(os.listdir(tmp_path / "snapshots")) == 1
    assert await stored(shop) == before
    assert await metaban(valkey_url, tmp_path, "create") == 0
    [entry] = await desk.list(verify=True)
    assert entry.manifest is not None
    assert os.listdir(tmp_path / "snapshots") == [f"{entry.id}.tar"]
