"""The append-only file of a private Valkey: a rewrite removes deleted data from it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from metaban.store.client.connection import Store, connect
from metaban.store.valkey.aof_rewrite import AofRewriter
from metaban.store.valkey.server import EmbeddedServer, server_folder
from tests.worker.workshop import soon

pytestmark = pytest.mark.single_node("a private Valkey is one server")


def bytes_in(folder: Path) -> bytes:
    return b"\n".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


async def rewrites(client: Redis) -> int:
    return int((await client.info("persistence"))["aof_rewrites"])


@pytest.fixture
async def private(tmp_path: Path) -> AsyncIterator[Redis]:
    with EmbeddedServer(tmp_path) as server:
        client: Store = connect(server.url)
        assert isinstance(client, Redis)
        yield client
        await client.aclose()


async def test_deleted_data_is_gone_after_a_rewrite(private: Redis, tmp_path: Path) -> None:
    history = AofRewriter(private, server_folder(tmp_path))
    assert await history.is_ours()
    await private.set("secret-of-ann", "told-once")
    await private.set("kept", "told-as-well")
    await private.delete("secret-of-ann")
    assert b"secret-of-ann" in bytes_in(tmp_path)
    await history.rewrite()
    found = bytes_in(tmp_path)
    assert b"secret-of-ann" not in found
    assert b"told-once" not in found
    assert b"kept" in found
    await history.stop()


async def test_requests_during_a_rewrite_share_the_next_one(private: Redis, tmp_path: Path) -> None:
    history = AofRewriter(private, server_folder(tmp_path))
    # Enough incompressible data that a rewrite takes a while.
    await private.config_set("rdb-key-save-delay", 200)
    for number in range(300):
        await private.set(f"key {number}", os.urandom(64))
    before = await rewrites(private)
    first = asyncio.create_task(history.rewrite())

    async def under_way() -> bool:
        return bool((await private.info("persistence"))["aof_rewrite_in_progress"])

    await soon(under_way)
    await private.set("secret-of-ann", "told-once")
    await private.delete("secret-of-ann")
    others = [asyncio.create_task(history.rewrite()) for _ in range(5)]
    await first
    assert not any(task.done() for task in others), "it started before their request"
    await asyncio.gather(*others)
    assert await rewrites(private) == before + 2
    assert b"secret-of-ann" not in bytes_in(tmp_path)
    await history.stop()


async def test_a_rewrite_started_by_the_server(private: Redis, tmp_path: Path) -> None:
    history = AofRewriter(private, server_folder(tmp_path))
    await private.config_set("rdb-key-save-delay", 200)
    for number in range(300):
        await private.set(f"key {number}", os.urandom(64))
    before = await rewrites(private)
    await private.bgrewriteaof()
    await private.set("secret-of-ann", "told-once")
    await private.delete("secret-of-ann")
    await history.rewrite()
    assert await rewrites(private) == before + 2
    assert b"secret-of-ann" not in bytes_in(tmp_path)
    await history.stop()


async def test_waiting_has_a_time_limit(private: Redis, tmp_path: Path) -> None:
    """After a time-out the rewrite continues."""
    history = AofRewriter(private, server_folder(tmp_path))
    await private.config_set("rdb-key-save-delay", 200)
    for number in range(300):
        await private.set(f"key {number}", os.urandom(64))
    before = await rewrites(private)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await history.rewrite()

    async def done() -> bool:
        return await rewrites(private) == before + 1

    await soon(done)
    await history.stop()


async def test_servers_that_are_not_private(private: Redis, redis: Redis, tmp_path: Path) -> None:
    assert not await AofRewriter(redis, server_folder(tmp_path)).is_ours()
    assert not await AofRewriter(private, None).is_ours()
    assert not await AofRewriter(private, tmp_path / "elsewhere").is_ours()
    await private.acl_setuser(
        "limited", enabled=True, nopass=True, categories=["+@all"], commands=["-config"], keys="*"
    )
    socket = next((tmp_path / "run").glob("*.sock"))
    limited = Redis(unix_socket_path=str(socket), username="limited", password="any")
    assert not await AofRewriter(limited, server_folder(tmp_path)).is_ours()
    await limited.aclose()
