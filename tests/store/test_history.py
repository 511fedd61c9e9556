"""The append-only file of a private Valkey: what was deleted is gone from it once it was rewritten."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from store.connection import Store, connect
from store.embedded import EmbeddedServer, server_folder
from store.history import History
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


async def test_what_was_deleted_is_gone(private: Redis, tmp_path: Path) -> None:
    history = History(private, server_folder(tmp_path))
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


async def test_those_who_ask_meanwhile_share_the_next(private: Redis, tmp_path: Path) -> None:
    history = History(private, server_folder(tmp_path))
    # Enough that a rewrite takes its time: incompressible, and slowed down.
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
    assert not any(task.done() for task in others), "it began too early for them"
    await asyncio.gather(*others)
    assert await rewrites(private) == before + 2
    assert b"secret-of-ann" not in bytes_in(tmp_path)
    await history.stop()


async def test_one_that_the_server_began_by_itself(private: Redis, tmp_path: Path) -> None:
    history = History(private, server_folder(tmp_path))
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


async def test_nobody_waits_for_ever(private: Redis, tmp_path: Path) -> None:
    """Whoever gives up leaves the rewrite to go on."""
    history = History(private, server_folder(tmp_path))
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


async def test_servers_of_others(private: Redis, redis: Redis, tmp_path: Path) -> None:
    assert not await History(redis, server_folder(tmp_path)).is_ours()
    assert not await History(private, None).is_ours()
    assert not await History(private, tmp_path / "elsewhere").is_ours()
    await private.acl_setuser(
        "limited", enabled=True, nopass=True, categories=["+@all"], commands=["-config"], keys="*"
    )
    socket = next((tmp_path / "run").glob("*.sock"))
    limited = Redis(unix_socket_path=str(socket), username="limited", password="any")
    assert not await History(limited, server_folder(tmp_path)).is_ours()
    await limited.aclose()
