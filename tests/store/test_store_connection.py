"""The client, what it asks of a server, and how errors leave the package."""

from __future__ import annotations

import asyncio

import pytest
import redis.exceptions as driver
from redis.asyncio import Redis

from store.connection import (
    block_arguments,
    check_server,
    command,
    connect,
    parse_entries,
    pipeline,
    refusal_code,
    stream_entries,
)
from store.errors import CorruptRecord, StoreError, StoreUnavailable, translate_errors
from store.events import EventStream
from store.namespaces import NamespaceRecord, Namespaces
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
    with pytest.raises(StoreError) as raised, translate_errors():
        raise error
    assert type(raised.value) is kind
    assert raised.value.__cause__ is error


def test_other_errors_pass():
    with pytest.raises(ZeroDivisionError), translate_errors():
        raise ZeroDivisionError


async def test_blocking_stays_below_the_socket_timeout(valkey_url: str):
    for timeout_s, asked_ms, granted in [(4.0, 60_000, 2_000), (4.0, 100, 100), (0.001, 100, 1)]:
        client = connect(valkey_url, socket_timeout_s=timeout_s)
        assert block_arguments(client, asked_ms) == ("BLOCK", granted)
        assert block_arguments(client, 0) == ()
        await client.aclose()
    client = connect(valkey_url, socket_timeout_s=0.2)
    assert await command(client, "XREAD", *block_arguments(client, 60_000), "STREAMS", "none", "$") is None
    await client.aclose()


@pytest.mark.parametrize("protocol", [2, 3])
async def test_both_protocols(valkey_url: str, redis: Redis, make_event, protocol):
    client = connect(f"{valkey_url}?protocol={protocol}")
    try:
        record: NamespaceRecord = await Namespaces(client).open_or_create("n", partitions=1, seed=0, learner={})
        stream = EventStream(client, record.keys, dedupe_window_s=60, backlog_limit=10)
        await stream.enqueue([make_event("u", "e")])
        [delivery] = await stream.read(0, "one", count=9, block_ms=5)
        assert delivery.event is not None
        [claimed] = await stream.claim_stalled(0, "two", min_idle_ms=0, count=9)
        assert claimed.entry_id == delivery.entry_id
        assert await stream.pending(0) == 1
    finally:
        await client.aclose()


def test_entry_shapes():
    rows = [[b"1-0", [b"a", b"b"]], None, [b"2-0", None]]
    assert parse_entries(rows) == [("1-0", {b"a": b"b"}), ("2-0", {})]
    assert stream_entries(None) == []
    assert stream_entries([[b"s", rows]]) == stream_entries({b"s": rows}) == parse_entries(rows)
    with pytest.raises(CorruptRecord):
        parse_entries([[3, []]])


def test_a_connection_that_is_closed_before_it_is_written_to():
    """The driver forgets the writer of a connection that another task closes."""
    with pytest.raises(StoreUnavailable), translate_errors():
        None.writelines([b"PING"])
    with pytest.raises(AttributeError), translate_errors():
        None.strip()
    with pytest.raises(AttributeError), translate_errors():
        "text".writelines([])
