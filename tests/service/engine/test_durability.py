"""METABAN_DURABILITY=replicated on servers that cannot confirm that a reward is on disk."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from metaban.service.settings.environment import SettingsError
from tests.service.apps import SHOP_ARMS, served
from tests.valkeys import DURABLE, WITHOUT_WAITAOF, Valkey, running
from tests.worker.workshop import soon

pytestmark = pytest.mark.single_node("it has servers of its own")


def replicated(store: Valkey) -> dict[str, Any]:
    return {"durability": "replicated", "redis_url": store.url, "replica_wait_ms": 1}


async def check_refused(store: Valkey, tmp_path: Path) -> None:
    """The start is refused before anything is written, and says what to do."""
    with pytest.raises(SettingsError) as refused:
        async with served(store.url, tmp_path, **replicated(store)):
            pass
    for part in ("METABAN_DURABILITY", "WAITAOF", "Redis 7.2", "Valkey"):
        assert part in str(refused.value)
    assert store.ask("DBSIZE") == 0


async def test_start_is_refused_without_waitaof(tmp_path: Path) -> None:
    store = Valkey(tmp_path / "store", *DURABLE, *WITHOUT_WAITAOF)
    with running(store):
        await check_refused(store, tmp_path)
        async with served(store.url, tmp_path, redis_url=store.url) as client:
            assert (await client.get("/health/ready")).status_code == 200


async def test_start_is_refused_on_redis_before_7_2(tmp_path: Path) -> None:
    program = shutil.which("redis-server")
    version = "" if program is None else subprocess.run([program, "--version"], capture_output=True, text=True).stdout  # noqa: ASYNC221
    if not version.startswith("Redis server v=7.0."):
        pytest.skip("no redis-server 7.0 is installed")
    store = Valkey(tmp_path / "store", *DURABLE, program=program)
    with running(store):
        await check_refused(store, tmp_path)


async def test_without_an_append_only_file_waitaof_is_not_needed(tmp_path: Path) -> None:
    store = Valkey(tmp_path / "store", *WITHOUT_WAITAOF)
    with running(store):
        async with served(store.url, tmp_path, **replicated(store)) as client:
            ready = (await client.get("/health/ready")).json()
            assert (ready["status"], ready["checks"].keys()) == ("ready", {"store"})


@pytest.mark.usefixtures("short_tails")
async def test_readiness_reports_a_server_that_cannot_confirm_any_more(tmp_path: Path) -> None:
    store = Valkey(tmp_path / "store", *DURABLE)
    with running(store):
        async with served(store.url, tmp_path, **replicated(store)) as client:
            await client.post("/recommend", json={"user_id": "ann", "arms": SHOP_ARMS})
            assert (await client.get("/health/ready")).json()["status"] == "ready"
            store.kill()
            store.start(*WITHOUT_WAITAOF)
            found: dict[str, Any] = {}

            async def reported() -> bool:
                found.update((await client.get("/health/ready")).json())
                return "durability" in found["checks"]

            await soon(reported)
            assert found["status"] == "degraded"
            assert "Redis 7.2" in found["checks"]["durability"]["detail"]
