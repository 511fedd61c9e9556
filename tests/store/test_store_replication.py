"""Enqueued means that replicas have it: with every answer, a duplicate's too, and however the primary ends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from redis.crc import key_slot

from store.connection import Confirmation, check_server, command, connect, pipeline
from store.errors import NotReplicated, StoreUnavailable
from store.events import EventStream
from store.namespaces import NamespaceRecord, Namespaces
from tests.valkeys import DURABLE, Valkey, eventually, running, running_cluster, running_pair

pytestmark = pytest.mark.single_node("it has servers and clusters of its own")


@dataclass
class Pair:
    primary: Valkey
    replica: Valkey
    on_disk: bool

    @property
    def confirm(self) -> Confirmation:
        return Confirmation(1, 500, on_disk=self.on_disk)


@pytest.fixture(params=["memory", "disk"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    options = DURABLE if request.param == "disk" else ()
    with running_pair(tmp_path, *options) as (primary, replica):
        yield Pair(primary, replica, request.param == "disk")


@asynccontextmanager
async def stream_of(url: str, confirm: Confirmation | None) -> AsyncIterator[tuple[EventStream, NamespaceRecord]]:
    """A stream by connections of its own, which have written nothing yet."""
    client = connect(url)
    try:
        record = await Namespaces(client).open_or_create("shop", partitions=2, seed=0, learner={})
        yield EventStream(client, record.keys, dedupe_window_s=60, backlog_limit=100, confirm=confirm), record
    finally:
        await client.aclose()


async def test_the_server_says_how_many_follow(pair: Pair):
    client = connect(pair.primary.url)
    try:
        info = await check_server(client)
        assert (info.replicas, info.aof) == (1, pair.on_disk)
    finally:
        await client.aclose()


async def test_enqueued_means_that_the_replica_has_it(pair: Pair, make_event):
    async with stream_of(pair.primary.url, pair.confirm) as (stream, record):
        for n in range(20):
            [answer] = await stream.enqueue([make_event("ann", f"e{n}")])
            assert answer.status == "accepted"
            assert pair.replica.ask("XLEN", record.keys.events(answer.partition)) == n + 1
        pair.primary.ask("SCRIPT", "FLUSH")  # sent again with its source, and confirmed again
        [answer] = await stream.enqueue([make_event("ann", "last")])
        assert pair.replica.ask("XLEN", record.keys.events(answer.partition)) == 21


async def test_without_the_replica_nothing_is_claimed_and_nothing_is_doubled(pair: Pair, make_event):
    async with stream_of(pair.primary.url, pair.confirm) as (stream, record):
        await stream.enqueue([make_event("ann", "before")])
        pair.replica.pause()
        try:
            with pytest.raises(NotReplicated):
                await stream.enqueue([make_event("ann", "e")])
            for event_ids in (["e"], ["before", "e"], ["f", "e"]):
                # By a connection that has not written: what it waits for must be more than its own past.
                async with stream_of(pair.primary.url, pair.confirm) as (again, _):
                    with pytest.raises(NotReplicated):
                        await again.enqueue([make_event("ann", event_id) for event_id in event_ids])
            pair.primary.ask("SCRIPT", "FLUSH")
            async with stream_of(pair.primary.url, pair.confirm) as (again, _):
                with pytest.raises(NotReplicated):
                    await again.enqueue([make_event("ann", "g")])
        finally:
            pair.replica.resume()
        answers = await stream.enqueue([make_event("ann", event_id) for event_id in ("e", "f", "g")])
        assert {answer.status for answer in answers} == {"duplicate"}
        assert pair.primary.ask("XLEN", record.keys.events(answers[0].partition)) == 4


async def test_a_promoted_replica_has_all_that_was_claimed(pair: Pair, make_event):
    claimed: set[str] = set()
    async with stream_of(pair.primary.url, pair.confirm) as (stream, _):
        for n in range(40):
            if n == 30:
                pair.replica.pause()
            try:
                await stream.enqueue([make_event(f"user {n}", f"e{n}")])
                claimed.add(f"e{n}")
            except NotReplicated:
                break
        pair.primary.kill()
        pair.replica.resume()
    assert len(claimed) == 30
    pair.replica.ask("REPLICAOF", "NO", "ONE")
    async with stream_of(pair.replica.url, None) as (stream, _):
        found = [
            delivery for partition in (0, 1) for delivery in await stream.read(partition, "c", count=99, block_ms=0)
        ]
        assert claimed <= {delivery.event.event_id for delivery in found}
        [again] = await stream.enqueue([make_event("user 0", "e0")])
        assert again.status == "duplicate"


async def test_a_server_that_became_a_replica_is_connected_to_anew(pair: Pair):
    """Behind an address that moves, the old connections would lead to it for ever."""
    client = connect(pair.replica.url)
    try:
        first = await command(client, "CLIENT", "ID")
        assert await command(client, "CLIENT", "ID") == first
        with pytest.raises(StoreUnavailable):
            await pipeline(client, [("SET", "a", 1)])
        assert await command(client, "CLIENT", "ID") != first
    finally:
        await client.aclose()


async def test_a_replica_without_a_file_cannot_confirm_that_it_synced(tmp_path: Path, make_event):
    primary = Valkey(tmp_path / "primary", "--repl-diskless-sync-delay", "0", *DURABLE)
    replica = Valkey(tmp_path / "replica", "--replicaof", "127.0.0.1", str(primary.port))
    with running(primary, replica):
        eventually(lambda: b"state=online" in primary.ask("INFO", "replication"), "the replica follows")
        async with stream_of(primary.url, Confirmation(1, 300, on_disk=True)) as (stream, _):
            with pytest.raises(NotReplicated, match="0 of 1"):
                await stream.enqueue([make_event("ann", "e")])


async def test_a_server_that_cannot_tell_confirms_nothing(tmp_path: Path, make_event):
    alone = Valkey(tmp_path)
    with running(alone):
        async with stream_of(alone.url, Confirmation(1, 100, on_disk=True)) as (stream, _):
            with pytest.raises(NotReplicated, match="cannot tell"):
                await stream.enqueue([make_event("ann", "e")])


async def test_in_a_cluster_each_server_waits_for_its_own(tmp_path: Path, make_event):
    flags = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000", "--repl-diskless-sync-delay", "0")
    follower = Valkey(tmp_path / "replica", *flags)
    with running_cluster(tmp_path, "--repl-diskless-sync-delay", "0") as servers, running(follower):
        async with stream_of(servers.url, Confirmation(1, 1_000, on_disk=False)) as (stream, record):
            owners = [servers.node_of(key_slot(record.keys.events(partition).encode())) for partition in (0, 1)]
            assert owners[0] is not owners[1]
            users = [next(f"u{n}" for n in range(99) if record.keys.partition_of(f"u{n}") == p) for p in (0, 1)]
            owners[0].ask("CLUSTER", "MEET", "127.0.0.1", follower.port, follower.bus)
            primary_id = owners[0].ask("CLUSTER", "MYID")
            eventually(lambda: primary_id in follower.ask("CLUSTER", "NODES"), "they know each other")
            follower.ask("CLUSTER", "REPLICATE", primary_id)
            eventually(lambda: b"master_link_status:up" in follower.ask("INFO", "replication"), "it follows")
            [answer] = await stream.enqueue([make_event(users[0], "e")])
            assert answer.status == "accepted"
            with pytest.raises(NotReplicated):
                await stream.enqueue([make_event(user, "f") for user in users])
            [answer] = await stream.enqueue([make_event(users[0], "f")])
            assert answer.status == "duplicate"
