"""A cluster whose replica replaces its failed primary."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest
from redis.crc import key_slot

from metaban.store.client.connection import check_server, command, connect, pipeline
from metaban.store.errors import StoreError, StoreUnavailable
from tests.store.helpers import CLUSTER_KEYS, retry_until_available
from tests.valkeys import Valkey, eventually, running, running_cluster


def knows_replica(node: Valkey, follower: Valkey) -> bool:
    """Whether a server knows that another one is a replica."""
    ranges = node.ask("CLUSTER", "SLOTS")
    assert isinstance(ranges, list)
    return follower.port in [each[1] for _, _, _, *followers in ranges for each in followers]


async def test_a_failover_is_followed(tmp_path: Path):
    flags = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000")
    follower = Valkey(tmp_path / "replica", *flags)
    with running_cluster(tmp_path, "--cluster-require-full-coverage", "no") as servers, running(follower):
        key = CLUSTER_KEYS[0]
        old = servers.node_of(key_slot(key.encode()))
        old.ask("CLUSTER", "MEET", "127.0.0.1", follower.port, follower.bus)
        primary_id = old.ask("CLUSTER", "MYID")
        eventually(lambda: primary_id in follower.ask("CLUSTER", "NODES"), "they know each other")
        follower.ask("CLUSTER", "REPLICATE", primary_id)
        eventually(lambda: b"state=online" in old.ask("INFO", "replication"), "it follows")
        old.ask("SET", key, "a replica that has got nothing yet is not told of")
        eventually(lambda: all(knows_replica(node, follower) for node in servers.nodes), "everyone knows of it")
        store = connect(servers.url, socket_timeout_s=4.0)
        try:
            info = await check_server(store)
            assert (info.primaries, info.replicas) == (3, 0)  # two servers have no replica
            follower.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
            with pytest.raises(StoreError, match="noeviction"):
                await check_server(store)
            follower.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")

            await pipeline(store, [("SET", name, "before") for name in CLUSTER_KEYS])
            assert old.ask("WAIT", 1, 5_000) == 1
            read = asyncio.create_task(command(store, "XREAD", "BLOCK", 1_900, "STREAMS", f"{{{key}}}log", "$"))
            await asyncio.sleep(0.1)
            follower.ask("CLUSTER", "FAILOVER")
            eventually(lambda: b"role:master" in follower.ask("INFO", "replication"), "it takes over")
            with suppress(StoreUnavailable):  # it has learned that its primary is a replica now
                assert await read is None
            await retry_until_available(lambda: command(store, "SET", key, "after"))
            assert follower.ask("GET", key) == b"after"

            old.kill()
            for n in range(5):
                await retry_until_available(lambda n=n: pipeline(store, [("SET", name, n) for name in CLUSTER_KEYS]))
            assert follower.ask("GET", key) == b"4"
            assert await pipeline(store, [("GET", name) for name in CLUSTER_KEYS]) == [b"4"] * 3
        finally:
            await store.aclose()
