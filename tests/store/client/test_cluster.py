"""A cluster client: every command reaches the server of its key once, while slots move and servers hang or die."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from redis import Redis
from redis.crc import key_slot

from metaban.store.client.cluster import Cluster, slot_of
from metaban.store.client.connection import Store, check_server, command, connect, pipeline
from metaban.store.client.node import Command
from metaban.store.client.scripts import Script
from metaban.store.errors import StoreError, StoreUnavailable
from tests.store.helpers import CLUSTER_KEYS, retry_until_available
from tests.valkeys import Valkey, ValkeyCluster, eventually, owned_ranges, running, running_cluster

Open = Callable[..., Store]
NODES = 3


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyCluster]:
    options = ("--cluster-require-full-coverage", "no")
    with running_cluster(tmp_path_factory.mktemp("cluster"), *options, nodes=NODES) as cluster:
        yield cluster


@pytest.fixture
async def open_store(servers: ValkeyCluster) -> AsyncIterator[Open]:
    """Make clients of an empty cluster, and close them at the end."""
    for node in servers.nodes:
        node.ask("FLUSHALL")
    opened: list[Store] = []

    def open_one(url: str | None = None, **options: float) -> Store:
        opened.append(connect(url or servers.url, **options))
        return opened[-1]

    yield open_one
    for store in opened:
        await store.aclose()


@pytest.fixture
def store(open_store: Open) -> Store:
    return open_store()


async def test_a_pipeline_over_all_servers_keeps_its_order(store: Store, servers: ValkeyCluster):
    keys = [f"k{n}" for n in range(60)]
    writes: list[Command] = [("SET", key, n) for n, key in enumerate(keys)]
    assert await pipeline(store, [*writes, *[("GET", key) for key in keys]]) == [b"OK"] * 60 + [
        str(n).encode() for n in range(60)
    ]
    assert all(int(str(node.ask("DBSIZE"))) > 5 for node in servers.nodes)


async def test_a_script_goes_to_each_server_once(store: Store):
    script = Script(store, "lease")
    tokens = [f"token of {key}" for key in CLUSTER_KEYS]
    calls = [([key], ["acquire", token, 60_000]) for key, token in zip(CLUSTER_KEYS, tokens, strict=True)]
    assert await script.call_many(calls) == [1, 1, 1]  # no server knew it
    assert await script.call_many(([key], ["acquire", "another", 60_000]) for key in CLUSTER_KEYS) == [0, 0, 0]
    assert await pipeline(store, [("GET", key) for key in CLUSTER_KEYS]) == [token.encode() for token in tokens]


@pytest.mark.parametrize(
    "words",
    [
        ("GET", "k"),
        ("set", b"k\xff", "v", "NX", "GET", "PX", 5),
        ("HMGET", "{a}k", "incarnation"),
        ("XADD", "k", "*", "f", "v"),
        ("XINFO", "STREAM", "k"),
        ("XGROUP", "CREATE", "k", "learners", "0", "MKSTREAM"),
        ("XREAD", "COUNT", 1, "BLOCK", 5, "STREAMS", "k", "0"),
        ("XREADGROUP", "GROUP", "g", "streams of mine", "COUNT", 1, "STREAMS", "k", ">"),
        ("XAUTOCLAIM", "k", "g", "c", 0, "0-0"),
        ("EVAL", "return 1", 2, "{a}1", "{a}2", "argument"),
        ("EVALSHA", "e0e1f9fabfc9d4800c877a703b823ac0578ff8db", 1, "k"),
        ("LRANGE", 7, 0, -1),
    ],
)
async def test_the_key_is_where_the_server_says(servers: ValkeyCluster, words: Command):
    [key, *_] = servers.nodes[0].ask("COMMAND", "GETKEYS", *words)
    assert slot_of(words) == key_slot(key)


async def test_commands_without_a_key(store: Store):
    assert await command(store, "ECHO", "x") == b"x"
    for words in [("INFO",), ("SCAN", 0), ("FLUSHALL",), ("EVAL", "return 1", 0), ("XREAD", "COUNT", 1), ("GET",)]:
        with pytest.raises(ValueError, match="names no key"):
            await command(store, *words)


async def test_errors_are_those_of_a_single_server(store: Store):
    await pipeline(store, [("SET", key, "text") for key in CLUSTER_KEYS])
    with pytest.raises(StoreError, match="WRONGTYPE"):
        await pipeline(store, [("GET", CLUSTER_KEYS[0]), ("HGET", CLUSTER_KEYS[1], "f"), ("GET", CLUSTER_KEYS[2])])
    with pytest.raises(StoreError, match="WRONGTYPE"):
        await command(store, "HGET", CLUSTER_KEYS[0], "f")


@asynccontextmanager
async def slot_moves(servers: ValkeyCluster, key: str) -> AsyncIterator[tuple[Valkey, Valkey]]:
    """Start to move the slot of a key to another server; the slot is given back empty at the end."""
    slot = key_slot(key.encode())
    source = servers.node_of(slot)
    target = servers.nodes[(servers.nodes.index(source) + 1) % NODES]
    target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", source.ask("CLUSTER", "MYID"))
    source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", target.ask("CLUSTER", "MYID"))
    try:
        yield source, target
    finally:
        for node in servers.nodes:
            node.ask("FLUSHALL")
        servers.give(slot, source)
        servers.agree()


async def test_a_slot_that_moved_is_followed(open_store: Open, servers: ValkeyCluster):
    store = open_store()
    key = CLUSTER_KEYS[0]
    await pipeline(store, [("DEL", name) for name in CLUSTER_KEYS])
    async with slot_moves(servers, key) as (_, target):
        servers.give(key_slot(key.encode()), target)
        # The client knows the old owner, which refuses the batch: it is neither lost nor sent twice.
        commands: list[Command] = [("XADD", key, f"{n}-0", "f", "v") for n in range(1, 30)]
        assert await pipeline(store, commands) == [f"{n}-0".encode() for n in range(1, 30)]
        assert target.ask("XLEN", key) == 29
        await command(store, "XADD", key, "*", "f", "v")
        assert target.ask("XLEN", key) == 30


async def test_a_slot_in_migration_is_asked_for(store: Store, servers: ValkeyCluster):
    stays, new = "{k3}stays", "{k3}new"
    await command(store, "XADD", stays, "*", "f", "v")
    async with slot_moves(servers, stays) as (source, target):
        commands: list[Command] = [("XADD", stays, "*", "f", "v"), ("XADD", new, "*", "f", "v"), ("XLEN", new)]
        first, second, length = await pipeline(store, commands)
        assert (first, second) != (None, None)
        assert length == 1
        assert source.ask("XLEN", stays) == 2
        servers.give(key_slot(b"k3"), target)  # keys left at the source are dropped
        assert target.ask("XLEN", new) == 1


async def test_a_script_waits_while_its_keys_are_on_two_servers(store: Store, servers: ValkeyCluster):
    await command(store, "SET", "{k3}here", 1)
    async with slot_moves(servers, "{k3}here"):
        with pytest.raises(StoreUnavailable):
            await command(store, "EVAL", "return redis.call('INCR', KEYS[1])", 2, "{k3}here", "{k3}not yet")
        assert await command(store, "GET", "{k3}here") == b"1"


def slot_is_at(servers: ValkeyCluster, slot: int, node: Valkey) -> bool:
    """Whether all servers know a slot at this server."""
    return all(
        any(first <= slot <= last and port == node.port for first, last, port in owned_ranges(each))
        for each in servers.nodes
    )


async def test_a_slot_moved_under_load_loses_and_repeats_no_command(store: Store, servers: ValkeyCluster):
    """By the server's own migration, which moves a slot with its keys at once."""
    key = CLUSTER_KEYS[1]
    slot = key_slot(key.encode())
    source = servers.node_of(slot)
    target = servers.nodes[(servers.nodes.index(source) + 1) % NODES]
    moved = asyncio.Event()

    async def load() -> int:
        added = 0
        while not moved.is_set() or added % 50:
            await command(store, "XADD", key, "*", "f", "v")
            added += 1
        return added

    loads = [asyncio.create_task(load()) for _ in range(4)]
    try:
        for giver, taker in ((source, target), (target, source)):
            start = ("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", taker.ask("CLUSTER", "MYID"))
            await asyncio.to_thread(giver.ask, *start)
            arrived = partial(slot_is_at, servers, slot, taker)
            await asyncio.to_thread(eventually, arrived, "the slot moves")
    finally:
        moved.set()
        added = await asyncio.gather(*loads)
    assert source.ask("XLEN", key) == sum(added) > 0


async def test_a_lost_reply_never_repeats_a_command(open_store: Open, servers: ValkeyCluster):
    store = open_store(socket_timeout_s=1.0)
    key, other, _ = CLUSTER_KEYS
    await command(store, "GET", key)
    node = servers.node_of(key_slot(key.encode()))
    node.pause()
    try:
        # Back in time for a second attempt, if there were one.
        asyncio.get_running_loop().call_later(1.5, node.resume)
        with pytest.raises(StoreUnavailable):
            await pipeline(store, [("XADD", key, "*", "f", "v"), ("XADD", other, "*", "f", "v")])
        # The other commands have their replies, and the other servers are used while the topology is read again.
        assert await command(store, "XLEN", other) == 1
    finally:
        await asyncio.sleep(0.6)
    # The bytes in its socket were executed once.
    assert node.ask("XLEN", key) == 1
    await retry_until_available(lambda: command(store, "XADD", key, "*", "f", "v"))
    assert node.ask("XLEN", key) == 2


async def test_only_commands_of_a_dead_server_fail_until_it_is_back(open_store: Open, servers: ValkeyCluster):
    store = open_store(socket_timeout_s=1.0)
    key, *others = CLUSTER_KEYS
    await pipeline(store, [("SET", name, 1) for name in CLUSTER_KEYS])
    node = servers.node_of(key_slot(key.encode()))
    node.kill()
    try:
        for _ in range(3):
            with pytest.raises(StoreUnavailable):
                await pipeline(store, [("INCR", name) for name in CLUSTER_KEYS])
        assert await pipeline(store, [("GET", name) for name in others]) == [b"4", b"4"]
        assert await command(store, "PING") == b"PONG"
    finally:
        node.start()
        servers.agree()
    await retry_until_available(lambda: command(store, "SET", key, 1))
    assert await pipeline(store, [("INCR", name) for name in CLUSTER_KEYS]) == [2, 5, 5]


async def test_no_server_answers(open_store: Open):
    nowhere = open_store("redis+cluster://127.0.0.1:1,127.0.0.1:2")
    with pytest.raises(StoreUnavailable, match="no server"):
        await command(nowhere, "GET", "k")
    with pytest.raises(StoreUnavailable, match="no server"):
        await check_server(nowhere)


async def test_callers_of_a_hanging_cluster_time_out_together(
    open_store: Open, servers: ValkeyCluster, monkeypatch: pytest.MonkeyPatch
):
    store = open_store(socket_timeout_s=0.3)
    asked: list[str] = []
    refresh = Cluster.refresh

    async def counted(self: Cluster) -> None:
        asked.append("refresh")
        await refresh(self)

    monkeypatch.setattr(Cluster, "refresh", counted)
    for node in servers.nodes:
        node.pause()
    try:
        outcomes = await asyncio.gather(*(command(store, "GET", f"k{n}") for n in range(40)), return_exceptions=True)
    finally:
        for node in servers.nodes:
            node.resume()
    assert all(isinstance(outcome, StoreUnavailable) for outcome in outcomes)
    assert len(asked) == 1
    await retry_until_available(lambda: command(store, "GET", CLUSTER_KEYS[0]))


async def test_connections_are_limited_and_callers_wait_for_one(open_store: Open, servers: ValkeyCluster):
    store = open_store(max_connections=3)
    before = [len(str(node.ask("CLIENT", "LIST")).split("\\n")) for node in servers.nodes]
    await asyncio.gather(*(pipeline(store, [("GET", f"k{n + m}") for m in range(9)]) for n in range(50)))
    after = [len(str(node.ask("CLIENT", "LIST")).split("\\n")) for node in servers.nodes]
    assert all(0 < then - now <= 3 for now, then in zip(before, after, strict=True))


async def test_blocking_reads_do_not_delay_other_commands(open_store: Open):
    store = open_store(socket_timeout_s=60.0)
    reads = [
        asyncio.create_task(command(store, "XREAD", "BLOCK", 30_000, "STREAMS", f"{{{key}}}{n}", "$"))
        for key in CLUSTER_KEYS
        for n in range(20)
    ]
    await asyncio.sleep(0.1)
    for n in range(20):
        await pipeline(store, [("SET", key, n) for key in CLUSTER_KEYS])
        assert not any(read.done() for read in reads)
    await pipeline(store, [("XADD", f"{{{key}}}{n}", "*", "f", "v") for key in CLUSTER_KEYS for n in range(20)])
    assert None not in await asyncio.gather(*reads)


class TestUrls:
    async def test_one_reachable_seed_is_enough(self, open_store: Open, servers: ValkeyCluster):
        last = f"127.0.0.1:{servers.nodes[-1].port}"
        for url in (f"redis+cluster://127.0.0.1:1,{last}", f"redis+cluster://{last}/0", f"redis+cluster://{last}/"):
            store = open_store(url)
            assert isinstance(store, Cluster)
            assert await pipeline(store, [("EXISTS", key) for key in CLUSTER_KEYS]) == [0, 0, 0]
            assert (await check_server(store)).primaries == NODES

    async def test_the_password_is_used_everywhere(self, open_store: Open, servers: ValkeyCluster):
        for node in servers.nodes:
            node.ask("CONFIG", "SET", "requirepass", "s3cret/@")
        try:
            place = servers.url.partition("://")[2]
            store = open_store(f"redis+cluster://:s3cret%2F%40@{place}")
            assert await pipeline(store, [("EXISTS", key) for key in CLUSTER_KEYS]) == [0, 0, 0]
            for url in (f"redis+cluster://:wrong@{place}", servers.url):
                with pytest.raises(StoreError) as refused:
                    await command(open_store(url), "GET", "k")
                assert not isinstance(refused.value, StoreUnavailable)
        finally:
            for node in servers.nodes:
                with Redis(port=node.port, password="s3cret/@") as client:
                    client.config_set("requirepass", "")

    @pytest.mark.parametrize(
        "url",
        [
            "redis+cluster://",
            "redis+cluster://host:port",
            "redis+cluster://host:99999",
            "redis+cluster://a:1,,b:2",
            "redis+cluster://:hidden@a:1,b:x",
            "redis+cluster://host:1/3",
            "redis+cluster://:hidden@host:1?protocol=seven",
        ],
    )
    def test_invalid_urls_are_refused(self, url: str):
        with pytest.raises(StoreError, match="cannot be used") as refused:
            connect(url)
        assert "hidden" not in str(refused.value)

    async def test_a_single_server_is_refused_as_a_cluster(self, open_store: Open, tmp_path: Path):
        alone = Valkey(tmp_path)
        with running(alone), pytest.raises(StoreError, match="not part of a cluster"):
            await command(open_store(f"redis+cluster://127.0.0.1:{alone.port}"), "GET", "k")

    async def test_a_cluster_is_refused_as_a_single_server(self, open_store: Open, servers: ValkeyCluster):
        with pytest.raises(StoreError, match=r"redis\+cluster://"):
            await check_server(open_store(servers.nodes[0].url))
