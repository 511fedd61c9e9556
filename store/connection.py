"""One client for all of the store, be it one server or a cluster, and the only way to it.

Replies come as the wire gives them (bytes, ints, lists): the driver's own parsing differs between protocol
versions and its types are unions of values and awaitables, so `command` and `pipeline` are the typed way in.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, final

from redis.asyncio import Redis

from store.cluster import Cluster, is_cluster_url, open_cluster
from store.errors import CorruptRecord, StoreError, StoreUnavailable, translate_errors
from store.node import Argument, Command, Confirmation, close_idle, open_node, send, send_one

__all__ = [
    "BEFORE_ALL",
    "Argument",
    "Command",
    "Confirmation",
    "ServerInfo",
    "Store",
    "as_bytes",
    "as_int",
    "as_text",
    "block_arguments",
    "check_server",
    "command",
    "connect",
    "drop_idle",
    "parse_entries",
    "pipeline",
    "pipeline_with_errors",
    "refusal_code",
    "scan",
    "stream_entries",
]

#: What holds the state: one server, or several that share it.
Store: TypeAlias = Redis | Cluster

#: Longest wait for an answer, and for a free connection.
SOCKET_TIMEOUT_S = 5.0
#: Longest wait of a blocking read, as a share of the socket time-out: the reply must arrive before it.
BLOCK_SHARE = 0.5
#: Longest wait of a blocking read when the socket has no time-out.
UNLIMITED_BLOCK_MS = 5_000
#: Commands sent in one go; a longer pipeline would hold all its replies in the server's memory.
PIPELINE_COMMANDS = 1_000
#: Keys looked at by one step of a scan.
SCAN_KEYS = 1_000
#: The cursor of a stream before its first entry.
BEFORE_ALL = "0-0"
#: Oldest server whose scripts and streams behave as ours need.
OLDEST_REDIS = (7, 0)


@final
@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server says about itself; of a cluster, what holds for all of its primaries."""

    version: str
    maxmemory_policy: str
    aof: bool
    #: Replicas that follow the server, of a cluster the primary with the fewest.
    replicas: int
    #: Servers that hold state.
    primaries: int = 1


def connect(url: str, *, socket_timeout_s: float = SOCKET_TIMEOUT_S, max_connections: int = 128) -> Store:
    """A client for `redis://`, `rediss://` or `unix://path`, or for a cluster by `redis+cluster://host:port,…` or
    `rediss+cluster://…`; it connects on first use.

    The client never retries: a command whose reply got lost may have been executed, and an XADD sent twice is
    two events. At `max_connections` (to each server) callers wait for a free connection instead of failing.
    """
    open_one = partial(open_node, socket_timeout_s=socket_timeout_s, max_connections=max_connections)
    if is_cluster_url(url):
        return open_cluster(url, open_one, socket_timeout_s=socket_timeout_s)
    return open_one(url)


async def check_server(redis: Store) -> ServerInfo:
    """Refuse a server, or any one of a cluster, that would lose events or misread scripts."""
    if isinstance(redis, Redis):
        return await _check_node(redis, in_cluster=False)
    primaries = [await _check_node(node, in_cluster=True) for node in await redis.primaries()]
    for node in await redis.replicas():
        # One that is away now cannot take over now; whoever starts next checks it.
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
            f"the server{_place(node) if in_cluster else ''} evicts keys when memory is full (maxmemory-policy "
            f"{policy}), which would silently drop users and events: set `maxmemory-policy noeviction`, or use a "
            "server of its own"
        )
    followers = [value for name, value in fields.items() if name.startswith("slave") and "state=online" in value]
    return ServerInfo(version, policy, fields.get("aof_enabled", "0") == "1", len(followers))


def _place(node: Redis) -> str:
    settings = node.connection_pool.connection_kwargs
    return f" at {settings.get('host')}:{settings.get('port')}"


async def drop_idle(redis: Store) -> None:
    """Close the connections that nobody uses now; the next users make new ones."""
    for node in [redis] if isinstance(redis, Redis) else redis.known():
        await close_idle(node)


async def command(redis: Store, name: str, *arguments: Argument) -> Any:
    """Send one command; the raw reply, driver errors translated."""
    if isinstance(redis, Redis):
        return await send_one(redis, name, *arguments)
    [reply] = await redis.send([(name, *arguments)])
    if isinstance(reply, Exception):
        with translate_errors():
            raise reply
    return reply


async def pipeline(redis: Store, commands: Iterable[Command]) -> list[Any]:
    """Send commands together, without a transaction; raw replies in order, the first error raised."""
    replies = await pipeline_with_errors(redis, commands)
    for reply in replies:
        if isinstance(reply, Exception):
            with translate_errors():
                raise reply
    return replies


async def pipeline_with_errors(
    redis: Store, commands: Iterable[Command], *, confirm: Confirmation | None = None
) -> list[Any]:
    """As `pipeline`, yet the server's refusals stand as exceptions among the replies.

    With `confirm`, NotReplicated unless enough replicas have all that was written.
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
    """The keys that match, some at a time; a key may come twice, and one made or deleted meanwhile may or may not."""
    for node in [redis] if isinstance(redis, Redis) else await redis.primaries():
        cursor = "0"
        while True:
            reply = await send_one(node, "SCAN", cursor, "MATCH", pattern, "COUNT", SCAN_KEYS)
            yield [as_bytes(key) for key in reply[1]]
            cursor = as_text(reply[0])
            if cursor == "0":
                break


def refusal_code(error: BaseException) -> str:
    """The first word of what the server refused with, such as NOGROUP; empty for other errors."""
    source = error.__cause__ if isinstance(error, StoreError) else error
    words = str(source).split(maxsplit=1) if source is not None else []
    return words[0] if words else ""


def block_arguments(redis: Store, block_ms: int) -> tuple[Argument, ...]:
    """The BLOCK option of a read, kept below the socket time-out; none at all for no waiting."""
    if block_ms <= 0:
        return ()  # BLOCK 0 would wait for ever
    if isinstance(redis, Redis):
        timeout_s = redis.connection_pool.connection_kwargs.get("socket_timeout")
    else:
        timeout_s = redis.socket_timeout_s
    limit_ms = UNLIMITED_BLOCK_MS if timeout_s is None else int(float(timeout_s) * 1_000 * BLOCK_SHARE)
    return ("BLOCK", max(1, min(block_ms, limit_ms)))


def as_bytes(reply: Any) -> bytes:
    """A reply that has to be a string."""
    if isinstance(reply, bytes):
        return reply
    if isinstance(reply, str):
        return reply.encode()
    raise CorruptRecord(f"expected a string from the store, got {type(reply).__name__}")


def as_text(reply: Any) -> str:
    """A reply that has to be UTF-8 text."""
    try:
        return as_bytes(reply).decode()
    except UnicodeDecodeError as error:
        raise CorruptRecord("expected UTF-8 text from the store") from error


def as_int(reply: Any, *, absent: int | None = None) -> int:
    """A reply that has to be a whole number; `absent` stands for a missing one."""
    if reply is None and absent is not None:
        return absent
    try:
        return int(reply)
    except (TypeError, ValueError, OverflowError) as error:
        raise CorruptRecord(f"expected a whole number from the store, got {reply!r}") from error


def stream_entries(reply: Any) -> list[tuple[str, dict[bytes, bytes]]]:
    """(entry id, fields) of an XREAD or XREADGROUP of one stream, in either version of the protocol."""
    if not reply:
        return []
    rows = next(iter(reply.values())) if isinstance(reply, dict) else reply[0][1]
    return parse_entries(rows)


def parse_entries(rows: Iterable[Any]) -> list[tuple[str, dict[bytes, bytes]]]:
    """(entry id, fields) of the rows that stream commands reply with."""
    entries = []
    for row in rows:
        if row is None:
            continue  # deleted while pending
        entry_id, flat = row
        fields = flat or []
        entries.append((as_text(entry_id), dict(zip(fields[0::2], fields[1::2], strict=True))))
    return entries
