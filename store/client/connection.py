"""Sending commands to the store, whether it is one server or a cluster.

Replies are raw (bytes, ints, lists): the driver's parsing differs between protocol versions and its types are unions
of values and awaitables. `command` and `pipeline` are the typed interface.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, final

from redis.asyncio import Redis

from metaban.store.client.cluster import Cluster, is_cluster_url, open_cluster
from metaban.store.client.node import Argument, Command, Confirmation, close_idle, open_node, send, send_one
from metaban.store.errors import CorruptRecord, StoreError, StoreUnavailable, raise_translated

#: Client of one server or of a cluster.
Store: TypeAlias = Redis | Cluster

#: Longest wait for a reply, and for a free connection.
SOCKET_TIMEOUT_S = 5.0

#: Longest blocking read as a share of the socket time-out: the reply must arrive earlier.
BLOCK_SHARE = 0.5

#: Longest blocking read when the socket has no time-out.
UNLIMITED_BLOCK_MS = 5_000

#: For clients whose callers wait for events: each holds a connection all the time.
NO_LIMIT = 2**31 - 1

#: Most commands of one pipeline: the server holds all its replies in memory.
PIPELINE_COMMANDS = 1_000

#: Keys visited by one step of a scan.
SCAN_KEYS = 1_000

#: Cursor before the first entry of a stream.
BEFORE_ALL = "0-0"

#: Oldest supported server version.
OLDEST_REDIS = (7, 0)


@final
@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Properties of a server; for a cluster, what holds for all its primaries."""

    version: str
    maxmemory_policy: str
    aof: bool
    #: Replicas that are online; for a cluster, those of the primary with the fewest.
    replicas: int
    #: Servers that hold data.
    primaries: int = 1


def connect(
    url: str, *, socket_timeout_s: float = SOCKET_TIMEOUT_S, max_connections: int = 128, shared: bool = False
) -> Store:
    """Client for `redis://`, `rediss://` or `unix://path`, or for a cluster by `redis+cluster://host:port,…` or
    `rediss+cluster://…`; it connects on first use.

    The client never retries: a command whose reply got lost may have been executed, and an XADD sent twice is
    two events. At `max_connections` (to each server) callers wait for a free connection instead of failing.
    With `shared`, what callers ask for at the same time is sent together: see `SharedNode`.
    """
    open_one = partial(open_node, socket_timeout_s=socket_timeout_s, max_connections=max_connections, shared=shared)
    if is_cluster_url(url):
        return open_cluster(url, open_one, socket_timeout_s=socket_timeout_s)
    return open_one(url)


def separate_client(redis: Store) -> Store:
    """Another client of the same store, for another event loop; it connects on first use."""
    if not isinstance(redis, Redis):
        return redis.separate()
    pool = redis.connection_pool
    return Redis.from_pool(type(pool)(connection_class=pool.connection_class, **pool.connection_kwargs))


async def check_server(redis: Store) -> ServerInfo:
    """Raise StoreError for a server, or a cluster with a server, that would lose events or is too old."""
    if isinstance(redis, Redis):
        return await _check_node(redis, in_cluster=False)
    primaries = [await _check_node(node, in_cluster=True) for node in await redis.primaries()]
    for node in await redis.replicas():
        # A replica that is down cannot take over now; it is checked at the next start.
        with suppress(StoreUnavailable):
            await _check_node(node, in_cluster=True)
    return ServerInfo(
        version=", ".join(sorted({info.version for info in primaries})),
        maxmemory_policy=primaries[0].maxmemory_policy,
        aof=all(info.aof for info in primaries),
        replicas=min(info.replicas for info in primaries),
        primaries=len(primaries),
    )


async def _check_node(node: Redis, *, in_cluster: bool) -> ServerInfo:
    text = as_bytes(await send_one(node, "INFO")).decode("utf-8", "replace")
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    compatible = fields.get("redis_version", "0")
    version = f"valkey {fields['valkey_version']}" if "valkey_version" in fields else f"redis {compatible}"
    numbers = tuple(int(part) if part.isdigit() else 0 for part in compatible.split(".")[:2])
    if numbers < OLDEST_REDIS:
        raise StoreError(f"{version} is too old: run Redis 7.0 or newer, or any Valkey")
    if fields.get("cluster_enabled") == "1" and not in_cluster:
        raise StoreError("the server is part of a cluster: use redis+cluster://host:port, or rediss+cluster://")
    policy = fields.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise StoreError(
            f"the server{_location(node) if in_cluster else ''} evicts keys when memory is full (maxmemory-policy "
            f"{policy}), which would silently drop users and events: set `maxmemory-policy noeviction`, or use a "
            "separate server"
        )
    followers = [value for name, value in fields.items() if name.startswith("slave") and "state=online" in value]
    return ServerInfo(version, policy, fields.get("aof_enabled", "0") == "1", len(followers))


async def waitaof_refusal(redis: Store) -> str:
    """Why a primary cannot report what is synced to disk, as Redis before 7.2; empty if all can."""
    for node in [redis] if isinstance(redis, Redis) else await redis.primaries():
        try:
            await send_one(node, "WAITAOF", 0, 0, 0)  # waits for nothing
        except StoreUnavailable:
            raise
        except StoreError as error:
            return f"the server{_location(node)} does not run WAITAOF: {error}"
    return ""


def _location(node: Redis) -> str:
    settings = node.connection_pool.connection_kwargs
    return f" at {settings['path']}" if "path" in settings else f" at {settings.get('host')}:{settings.get('port')}"


async def drop_idle(redis: Store) -> None:
    """Close idle connections; new ones are opened when needed."""
    for node in [redis] if isinstance(redis, Redis) else redis.known():
        await close_idle(node)


async def command(redis: Store, name: str, *arguments: Argument) -> Any:
    """Send one command and return the raw reply. Driver errors are translated."""
    if isinstance(redis, Redis):
        return await send_one(redis, name, *arguments)
    [reply] = await redis.send([(name, *arguments)])
    if isinstance(reply, Exception):
        raise_translated(reply)
    return reply


async def pipeline(redis: Store, commands: Iterable[Command]) -> list[Any]:
    """Send commands together, without a transaction. Returns raw replies in order; raises the first error."""
    replies = await pipeline_with_errors(redis, commands)
    for reply in replies:
        if isinstance(reply, Exception):
            raise_translated(reply)
    return replies


async def pipeline_with_errors(
    redis: Store, commands: Iterable[Command], *, confirm: Confirmation | None = None
) -> list[Any]:
    """Like `pipeline`, but the reply of a refused command is its exception.

    With `confirm`, raises NotReplicated unless enough replicas have all writes.
    """
    queue = list(commands)
    replies: list[Any] = []
    for start in range(0, len(queue), PIPELINE_COMMANDS):
        part = queue[start : start + PIPELINE_COMMANDS]
        if isinstance(redis, Redis):
            replies += await send(redis, part, confirm)
        else:
            replies += await redis.send(part, confirm)
    return replies


async def scan(redis: Store, pattern: str) -> AsyncIterator[list[bytes]]:
    """Keys that match, in batches. A key may come twice; keys created or deleted during the scan may be missing."""
    for node in [redis] if isinstance(redis, Redis) else await redis.primaries():
        cursor = "0"
        while True:
            reply = await send_one(node, "SCAN", cursor, "MATCH", pattern, "COUNT", SCAN_KEYS)
            yield [as_bytes(key) for key in reply[1]]
            cursor = as_text(reply[0])
            if cursor == "0":
                break


def reads_together(redis: Store) -> bool:
    """Whether one XREAD or XREADGROUP may name streams of several partitions; in a cluster their slots differ."""
    return isinstance(redis, Redis)


def refusal_code(error: BaseException) -> str:
    """First word of a server's error reply, such as NOGROUP; empty for other errors."""
    source = error.__cause__ if isinstance(error, StoreError) else error
    words = str(source).split(maxsplit=1) if source is not None else []
    return words[0] if words else ""


def block_arguments(redis: Store, block_ms: int) -> tuple[Argument, ...]:
    """BLOCK option of a read, below the socket time-out; empty if `block_ms` is 0."""
    if block_ms <= 0:
        return ()  # BLOCK 0 would wait forever
    if isinstance(redis, Redis):
        timeout_s = redis.connection_pool.connection_kwargs.get("socket_timeout")
    else:
        timeout_s = redis.socket_timeout_s
    limit_ms = UNLIMITED_BLOCK_MS if timeout_s is None else int(float(timeout_s) * 1_000 * BLOCK_SHARE)
    return ("BLOCK", max(1, min(block_ms, limit_ms)))


def as_bytes(reply: Any) -> bytes:
    """Reply as bytes; CorruptRecord if it is not a string."""
    if isinstance(reply, bytes):
        return reply
    if isinstance(reply, str):
        return reply.encode()
    raise CorruptRecord(f"expected a string from the store, got {type(reply).__name__}")


def as_text(reply: Any) -> str:
    """Reply as text; CorruptRecord if it is not UTF-8."""
    try:
        return as_bytes(reply).decode()
    except UnicodeDecodeError as error:
        raise CorruptRecord("expected UTF-8 text from the store") from error


def as_int(reply: Any, *, absent: int | None = None) -> int:
    """Reply as an integer, `absent` if it is missing; CorruptRecord if it is not an integer."""
    if reply is None and absent is not None:
        return absent
    try:
        return int(reply)
    except (TypeError, ValueError, OverflowError):
        # Without the reply, which may be an id.
        raise CorruptRecord("expected an integer from the store") from None


def entries_by_key(reply: Any) -> dict[str, list[tuple[str, dict[bytes, bytes]]]]:
    """(entry id, fields) by stream, from the reply of an XREAD or XREADGROUP, in RESP2 or RESP3."""
    streams = reply.items() if isinstance(reply, dict) else reply or ()
    return {as_text(key): parse_entries(rows) for key, rows in streams}


def parse_entries(rows: Iterable[Any]) -> list[tuple[str, dict[bytes, bytes]]]:
    """(entry id, fields) from the rows of a stream command's reply."""
    entries = []
    for row in rows:
        if row is None:
            continue  # deleted while pending
        entry_id, flat = row
        fields = flat or []
        entries.append((as_text(entry_id), dict(zip(fields[0::2], fields[1::2], strict=True))))
    return entries
