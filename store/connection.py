"""One client for all of the store, and the only place that calls the driver.

Replies come as the wire gives them (bytes, ints, lists): the driver's own parsing differs between protocol
versions and its types are unions of values and awaitables, so `command` and `pipeline` are the typed way in.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from store.errors import CorruptRecord, StoreError, StoreUnavailable, translate_errors

Argument: TypeAlias = str | bytes | int | float
Command: TypeAlias = Sequence[Argument]

#: Longest wait of a blocking read, as a share of the socket time-out: the reply must arrive before it.
BLOCK_SHARE = 0.5
#: Longest wait of a blocking read when the socket has no time-out.
UNLIMITED_BLOCK_MS = 5_000
#: Commands sent in one go; a longer pipeline would hold all its replies in the server's memory.
PIPELINE_COMMANDS = 1_000
#: Oldest server whose scripts and streams behave as ours need.
OLDEST_REDIS = (7, 0)


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server says about itself."""

    version: str
    maxmemory_policy: str
    aof: bool


def connect(url: str, *, socket_timeout_s: float = 5.0, max_connections: int = 128) -> Redis:
    """A client for `redis://`, `rediss://` or `unix://path`; it connects on first use.

    The client never retries: a command whose reply got lost may have been executed, and an XADD sent twice is
    two events. At `max_connections` callers wait for a free connection instead of failing.
    """
    try:
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=max_connections,
            timeout=socket_timeout_s,
            socket_timeout=socket_timeout_s,
            socket_connect_timeout=socket_timeout_s,
            retry=Retry(NoBackoff(), 0),
            retry_on_error=[],
            decode_responses=False,
        )
    except ValueError as error:
        # Its text is the driver's, about the part of the URL it stumbled over, never the password.
        raise StoreError(f"the URL of the store cannot be used: {error}") from None
    return Redis.from_pool(pool)


async def check_server(redis: Redis) -> ServerInfo:
    """Refuse a server that would lose events or misread scripts."""
    text = as_bytes(await command(redis, "INFO")).decode("utf-8", "replace")
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    compatible = fields.get("redis_version", "0")
    version = f"valkey {fields['valkey_version']}" if "valkey_version" in fields else f"redis {compatible}"
    numbers = tuple(int(part) if part.isdigit() else 0 for part in compatible.split(".")[:2])
    if numbers < OLDEST_REDIS:
        raise StoreError(f"{version} is too old: run Redis 7.0 or newer, or any Valkey")
    policy = fields.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise StoreError(
            f"the server evicts keys when memory is full (maxmemory-policy {policy}), which would silently "
            "drop users and events: set `maxmemory-policy noeviction`, or use a server of its own"
        )
    return ServerInfo(version, policy, fields.get("aof_enabled", "0") == "1")


@asynccontextmanager
async def exchange(redis: Redis) -> AsyncIterator[None]:
    """Talk to the server, driver errors translated.

    A connection that turns out to be dead means that the idle ones are dead too, after a restart of the server: they
    are dropped together, or each would fail one caller.
    """
    try:
        with translate_errors():
            yield
    except StoreUnavailable:
        await drop_idle(redis)
        raise


async def drop_idle(redis: Redis) -> None:
    """Close the connections that nobody uses now; the next users make new ones."""
    await redis.connection_pool.disconnect(inuse_connections=False)


async def command(redis: Redis, name: str, *arguments: Argument) -> Any:
    """Send one command; the raw reply, driver errors translated."""
    # Named in bytes, a command is not found in the driver's table of reply parsers.
    send = cast(Callable[..., Awaitable[Any]], redis.execute_command)
    async with exchange(redis):
        return await send(name.encode(), *arguments)


async def pipeline(redis: Redis, commands: Iterable[Command]) -> list[Any]:
    """Send commands together, without a transaction; raw replies in order, the first error raised."""
    replies = await pipeline_with_errors(redis, commands)
    for reply in replies:
        if isinstance(reply, Exception):
            with translate_errors():
                raise reply
    return replies


async def pipeline_with_errors(redis: Redis, commands: Iterable[Command]) -> list[Any]:
    """As `pipeline`, yet the server's refusals stand as exceptions among the replies."""
    queue = list(commands)
    replies: list[Any] = []
    for start in range(0, len(queue), PIPELINE_COMMANDS):
        async with exchange(redis), redis.pipeline(transaction=False) as batch:
            send = cast(Callable[..., object], batch.execute_command)
            for name, *arguments in queue[start : start + PIPELINE_COMMANDS]:
                send(name.encode() if isinstance(name, str) else name, *arguments)
            replies += await cast(Callable[..., Awaitable[list[Any]]], batch.execute)(raise_on_error=False)
    return replies


def refusal_code(error: BaseException) -> str:
    """The first word of what the server refused with, such as NOGROUP; empty for other errors."""
    source = error.__cause__ if isinstance(error, StoreError) else error
    words = str(source).split(maxsplit=1) if source is not None else []
    return words[0] if words else ""


def block_arguments(redis: Redis, block_ms: int) -> tuple[Argument, ...]:
    """The BLOCK option of a read, kept below the socket time-out; none at all for no waiting."""
    if block_ms <= 0:
        return ()  # BLOCK 0 would wait for ever
    timeout_s = redis.connection_pool.connection_kwargs.get("socket_timeout")
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
