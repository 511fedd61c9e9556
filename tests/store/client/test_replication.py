"""Replicated durability: an enqueued event, also a duplicate, is on the replicas, however the primary ends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from traceback import format_exception

import pytest
from redis.crc import key_slot

from metaban.store.client.connection import (
    check_server,
    command,
    connect,
    pipeline,
    pipeline_with_errors,
    waitaof_refusal,
)
from metaban.store.client.node import Confirmation
from metaban.store.errors import NotReplicated, StoreError, StoreUnavailable
from metaban.store.events.stream import EventStream
from metaban.store.namespaces import NamespaceRecord, NamespaceStore
from tests.valkeys import DURABLE, WITHOUT_WAITAOF, Valkey, eventually, running, running_cluster, running_pair

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
    """A stream with its own connections, which have written nothing yet."""
    client = connect(url)
    try:
        record = await NamespaceStore(client).open_or_create("shop", partitions=2, seed=0, learner={})
        yield EventStream(client, record.keys, dedupe_window_s=60, backlog_limit=100, confirm=confirm), record
    finally:
        await client.aclose()


async def test_the_server_reports_its_number_of_replicas(pair: Pair):
    client = connect(pair.primary.url)
    try:
        info = await check_server(client)
        assert (info.replicas, info.aof) == (1, pair.on_disk)
    finally:
        await client.aclose()


async def test_an_enqueued_event_is_on_the_replica(pair: Pair, make_event):
    async with stream_of(pair.primary.url, pair.confirm) as (stream, record):
        for n in range(20):
            [answer] = await stream.enqueue([make_event("ann", f"e{n}")])
            assert answer.status == "accepted"
            assert pair.replica.ask("XLEN", record.keys.events(answer.partition)) == n + 1
        pair.primary.ask("SCRIPT", "FLUSH")  # sent again with its source, and confirmed again
        [answer] = await stream.enqueue([make_event("ann", "last")])
        assert pair.replica.ask("XLEN", record.keys.events(answer.partition)) == 21


async def test_without_the_replica_no_event_is_confirmed_or_stored_twice(pair: Pair, make_event):
    async with stream_of(pair.primary.url, pair.confirm) as (stream, record):
        await stream.enqueue([make_event("ann", "before")])
        pair.replica.pause()
        try:
            with pytest.raises(NotReplicated):
                await stream.enqueue([make_event("ann", "e")])
            for event_ids in (["e"], ["before", "e"], ["f", "e"]):
                # With a connection that has written nothing: it must wait for the writes of others too.
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


async def test_a_forgotten_script_is_sent_again_though_an_earlier_write_is_not_confirmed(pair: Pair, make_event):
    async with stream_of(pair.primary.url, pair.confirm) as (stream, record):
        [first] = await stream.enqueue([make_event("ann", "first")])
        pair.replica.pause()
        try:
            with pytest.raises(NotReplicated):
                await stream.enqueue([make_event("ann", "second")])  # WAIT on this connection waits for it from now on
            pair.primary.ask("SCRIPT", "FLUSH")
            with pytest.raises(NotReplicated):
                await stream.enqueue([make_event("ann", "third")])
            assert pair.primary.ask("XLEN", record.keys.events(first.partition)) == 3
        finally:
            pair.replica.resume()


async def test_without_replicas_a_refused_batch_fails_with_its_own_error(tmp_path: Path):
    alone = Valkey(tmp_path)
    with running(alone):
        client = connect(alone.url)
        try:
            confirm = Confirmation(1, 50, on_disk=False)
            refused = [("LPUSH", "text", 1), ("EVALSHA", "0" * 40, 0)]
            await command(client, "SET", "text", "a")
            replies = await pipeline_with_errors(client, refused, confirm=confirm)
            assert [str(reply).split()[0] for reply in replies] == ["WRONGTYPE", "No"]
            with pytest.raises(NotReplicated):
                await pipeline_with_errors(client, [*refused, ("SET", "other", 1)], confirm=confirm)
        finally:
            await client.aclose()


async def test_a_promoted_replica_has_all_confirmed_events(pair: Pair, make_event):
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
            delivery for partition in (0, 1) for delivery in await stream.read([partition], "c", count=99, block_ms=0)
        ]
        assert claimed <= {delivery.event.event_id for delivery in found}
        [again] = await stream.enqueue([make_event("user 0", "e0")])
        assert again.status == "duplicate"


async def test_a_server_that_became_a_replica_is_reconnected(pair: Pair):
    """Behind an address that moves, old connections would keep leading to it."""
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


async def test_a_server_without_waitaof_confirms_nothing(tmp_path: Path, make_event):
    alone = Valkey(tmp_path)
    with running(alone):
        async with stream_of(alone.url, Confirmation(1, 100, on_disk=True)) as (stream, _):
            with pytest.raises(NotReplicated, match="refused to report"):
                await stream.enqueue([make_event("ann", "e")])


async def test_a_server_without_waitaof_is_named(tmp_path: Path):
    new, old = Valkey(tmp_path / "new", *DURABLE), Valkey(tmp_path / "old", *DURABLE, *WITHOUT_WAITAOF)
    ids = ["somebody"]
    with running(new, old):
        for server, named in ((new, ""), (old, str(old.port))):
            client = connect(server.url)
            try:
                refusal = await waitaof_refusal(client)
                with pytest.raises(StoreError) as refused:
                    await command(client, "WAITAOF", *ids)
            finally:
                await client.aclose()
            assert (bool(refusal), named in refusal) == (bool(named), True)
            assert "somebody" not in "".join(format_exception(refused.value))


async def test_in_a_cluster_each_server_waits_for_its_own_replicas(tmp_path: Path, make_event):
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
