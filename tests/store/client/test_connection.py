"""The client: checks of the server, and translation of driver errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.exceptions as driver
from redis.asyncio import Redis

from metaban.store.client.connection import (
    Store,
    block_arguments,
    check_server,
    command,
    connect,
    entries_by_key,
    parse_entries,
    pipeline,
    refusal_code,
)
from metaban.store.errors import CorruptRecord, StoreError, StoreUnavailable, raise_translated
from metaban.store.events.stream import EventStream
from metaban.store.namespaces import NamespaceRecord, NamespaceStore
from tests.valkeys import ask_every_server


async def test_connect_and_check(valkey_url: str):
    client = connect(valkey_url, max_connections=2)
    try:
        info = await check_server(client)
        assert info.version.startswith("valkey ")
        assert info.maxmemory_policy == "noeviction"
        assert not info.aof
        # more callers than connections wait for their turn
        assert await asyncio.gather(*(command(client, "ECHO", n) for n in range(20))) == [
            str(n).encode() for n in range(20)
        ]
    finally:
        await client.aclose()


async def test_an_evicting_server_is_refused(redis: Redis):
    await redis.config_set("maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(StoreError, match="noeviction"):
            await check_server(redis)
    finally:
        await redis.config_set("maxmemory-policy", "noeviction")


async def test_the_client_does_not_retry(valkey_url: str):
    client = connect(valkey_url)
    try:
        for node in [client] if isinstance(client, Redis) else await client.primaries():
            pool_settings = node.connection_pool.connection_kwargs
            assert pool_settings["retry"].get_retries() == 0
            assert pool_settings["retry_on_error"] == []
    finally:
        await client.aclose()


async def test_no_server(tmp_path):
    client = connect(f"unix://{tmp_path}/none.sock")
    try:
        with pytest.raises(StoreUnavailable):
            await command(client, "PING")
        with pytest.raises(StoreUnavailable):
            await pipeline(client, [("PING",)])
    finally:
        await client.aclose()


async def test_slow_answers_are_unavailable(valkey_url: str, redis: Redis):
    client = connect(valkey_url, socket_timeout_s=0.05)
    try:
        with pytest.raises(StoreUnavailable):
            await command(client, "BLPOP", "nothing", 0)
    finally:
        await client.aclose()


async def test_refused_commands(redis: Redis):
    await redis.set("text", "x")
    for attempt in (command(redis, "HGET", "text", "f"), pipeline(redis, [("GET", "text"), ("HGET", "text", "f")])):
        with pytest.raises(StoreError) as refused:
            await attempt
        assert refusal_code(refused.value) == "WRONGTYPE"
        assert not isinstance(refused.value, StoreUnavailable)


async def test_full_memory_is_unavailable(redis: Redis, stream: EventStream, make_event, picture):
    await stream.enqueue([make_event("u", "a")])
    before = await picture()
    await ask_every_server(redis, "CONFIG", "SET", "maxmemory", 1)
    try:
        with pytest.raises(StoreUnavailable):
            await stream.enqueue([make_event("u", "b")])
    finally:
        await ask_every_server(redis, "CONFIG", "SET", "maxmemory", 0)
    assert await picture() == before


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (driver.ConnectionError("gone"), StoreUnavailable),
        (driver.TimeoutError("slow"), StoreUnavailable),
        (driver.BusyLoadingError("loading"), StoreUnavailable),
        (driver.ReadOnlyError("You can't write against a read only replica."), StoreUnavailable),
        (driver.ResponseError("BUSY a script is running"), StoreUnavailable),
        (driver.ResponseError("MISCONF cannot persist"), StoreUnavailable),
        (ConnectionRefusedError("no"), StoreUnavailable),
        (driver.AuthenticationError("wrong password"), StoreError),
        (driver.ResponseError("ERR unknown command"), StoreError),
        (driver.ResponseError(""), StoreError),
    ],
)
def test_translation(error, kind):
    with pytest.raises(StoreError) as raised:
        raise_translated(error)
    assert type(raised.value) is kind
    assert raised.value.__cause__ is error


def test_other_errors_are_not_translated():
    with pytest.raises(ZeroDivisionError):
        raise_translated(ZeroDivisionError())


async def test_blocking_stays_below_the_socket_timeout(valkey_url: str):
    for timeout_s, asked_ms, granted in [(4.0, 60_000, 2_000), (4.0, 100, 100), (0.001, 100, 1)]:
        client = connect(valkey_url, socket_timeout_s=timeout_s)
        assert block_arguments(client, asked_ms) == ("BLOCK", granted)
        assert block_arguments(client, 0) == ()
        await client.aclose()
    client = connect(valkey_url, socket_timeout_s=2.0)
    assert await command(client, "XREAD", *block_arguments(client, 60_000), "STREAMS", "none", "$") is None
    await client.aclose()


@pytest.mark.parametrize("protocol", [2, 3])
async def test_both_protocols(valkey_url: str, redis: Redis, make_event, protocol):
    client = connect(f"{valkey_url}?protocol={protocol}")
    try:
        record: NamespaceRecord = await NamespaceStore(client).open_or_create("n", partitions=1, seed=0, learner={})
        stream = EventStream(client, record.keys, dedupe_window_s=60, backlog_limit=10)
        await stream.enqueue([make_event("u", "e")])
        [delivery] = await stream.read([0], "one", count=9, block_ms=5)
        assert delivery.event is not None
        [claimed] = await stream.claim_stalled([0], "two", min_idle_ms=0, count=9)
        assert claimed.entry_id == delivery.entry_id
        assert await stream.pending(0) == 1
    finally:
        await client.aclose()


def test_entry_shapes():
    rows = [[b"1-0", [b"a", b"b"]], None, [b"2-0", None]]
    assert parse_entries(rows) == [("1-0", {b"a": b"b"}), ("2-0", {})]
    assert entries_by_key(None) == {}
    assert entries_by_key([[b"s", rows]]) == entries_by_key({b"s": rows}) == {"s": parse_entries(rows)}
    with pytest.raises(CorruptRecord):
        parse_entries([[3, []]])


def test_a_connection_that_is_closed_before_it_is_written_to():
    """The driver drops the writer of a connection that another task closes."""
    cases = [
        (lambda: None.writelines([b"PING"]), StoreUnavailable),
        (lambda: None.strip(), AttributeError),
        (lambda: "text".writelines([]), AttributeError),
    ]
    for fails, kind in cases:
        with pytest.raises(AttributeError) as raised:
            fails()
        with pytest.raises(kind):
            raise_translated(raised.value)


class TestSharedClient:
    """A client that sends together what callers ask for at the same time."""

    @pytest.fixture
    async def shared(self, redis: Redis, valkey_url: str) -> AsyncIterator[Store]:
        client = connect(valkey_url, shared=True)
        yield client
        await client.aclose()

    async def test_callers_get_their_own_replies(self, shared: Store) -> None:
        singles = [command(shared, "SET", f"key {n}", n, "GET") for n in range(50)]
        several = [pipeline(shared, [("APPEND", f"text {n}", "a"), ("APPEND", f"text {n}", "b")]) for n in range(50)]
        replies = await asyncio.gather(*singles, *several)
        assert replies == [None] * 50 + [[1, 2]] * 50
        assert await asyncio.gather(*(command(shared, "GET", f"key {n}") for n in range(50))) == [
            str(n).encode() for n in range(50)
        ]

    @pytest.mark.single_node("counts the connections to one server")
    async def test_callers_share_a_connection(self, redis: Redis, shared: Store) -> None:
        before = len(await redis.client_list())
        await asyncio.gather(*(command(shared, "GET", f"key {n}") for n in range(50)))
        assert len(await redis.client_list()) == before + 1

    async def test_a_refused_command_fails_for_its_caller_alone(self, shared: Store) -> None:
        await command(shared, "SET", "text", "a")
        outcomes = await asyncio.gather(
            command(shared, "INCR", "text"), command(shared, "GET", "text"), return_exceptions=True
        )
        assert (type(outcomes[0]), outcomes[1]) == (StoreError, b"a")

    async def test_a_cancelled_caller_does_not_affect_the_others(self, shared: Store) -> None:
        await command(shared, "SET", "text", "a")
        cancelled, other = (asyncio.create_task(command(shared, "GET", "text")) for _ in range(2))
        await asyncio.sleep(0)
        cancelled.cancel()
        assert await other == b"a"

    async def test_an_outage_fails_for_all(self, tmp_path: Path) -> None:
        client = connect(f"unix://{tmp_path}/none.sock", shared=True)
        calls = [command(client, "PING"), pipeline(client, [("PING",)])]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [StoreUnavailable] * 2
        await client.aclose()
