"""One server: how it is connected to and talked to. A cluster is several of these."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, cast, final

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ReadOnlyError

from store.errors import NotReplicated, StoreError, StoreUnavailable, translate_errors

Argument: TypeAlias = str | bytes | int | float
Command: TypeAlias = Sequence[Argument]


@final
@dataclass(frozen=True, slots=True)
class Confirmation:
    """How many replicas must have what was written before it counts as written, and how long that may take."""

    replicas: int
    timeout_ms: int
    #: Synced to disk by the server and the replicas; otherwise in the memory of the replicas.
    on_disk: bool

    def commands(self) -> list[Command]:
        """They wait for the latest write of the connection they are sent on, and for no other's."""
        if not self.on_disk:
            return [("WAIT", self.replicas, self.timeout_ms)]
        # A replica tells what it has synced when it is asked, which is before it syncs what came with the question,
        # and then once a second. Asked once more after it got everything, it can tell at once.
        first_ms = max(1, self.timeout_ms // 4)
        return [("WAIT", self.replicas, first_ms), ("WAITAOF", 1, self.replicas, max(1, self.timeout_ms - first_ms))]

    def check(self, reply: Any) -> None:
        """Raise NotReplicated unless the reply to the last of `commands` says that enough have it."""
        if isinstance(reply, Exception):
            raise NotReplicated(f"the server cannot tell what its replicas have: {reply}") from reply
        here, there = (int(reply[0]), int(reply[1])) if self.on_disk else (1, int(reply))
        if not here or there < self.replicas:
            raise NotReplicated(
                f"{there} of {self.replicas} replicas confirmed a write within {self.timeout_ms} ms"
                + ("" if here else ", and the server itself has not synced it")
            )


def open_node(url: str, *, socket_timeout_s: float, max_connections: int) -> Redis:
    """A client of one server, which connects on first use and never retries."""
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


async def close_idle(node: Redis) -> None:
    """Close the connections that nobody uses now; the next users make new ones."""
    await node.connection_pool.disconnect(inuse_connections=False)


@asynccontextmanager
async def exchange(node: Redis) -> AsyncIterator[None]:
    """Talk to the server, driver errors translated.

    A connection that turns out to be dead means that the idle ones are dead too, after a restart of the server: they
    are dropped together, or each would fail one caller.
    """
    try:
        with translate_errors():
            yield
    except StoreUnavailable:
        await close_idle(node)
        raise


async def send_one(node: Redis, name: str, *arguments: Argument) -> Any:
    """Send one command; the raw reply, driver errors translated."""
    # Named in bytes, a command is not found in the driver's table of reply parsers.
    send = cast(Callable[..., Awaitable[Any]], node.execute_command)
    async with exchange(node):
        return await send(name.encode(), *arguments)


async def send(node: Redis, commands: Sequence[Command], confirm: Confirmation | None = None) -> list[Any]:
    """Send commands together on one connection; raw replies in order, refusals as exceptions among them.

    With `confirm`, NotReplicated unless enough replicas have all that these commands wrote.
    """
    wire = commands if confirm is None else [*commands, *confirm.commands()]
    async with exchange(node), node.pipeline(transaction=False) as batch:
        queue = cast(Callable[..., object], batch.execute_command)
        for name, *arguments in wire:
            queue(name.encode() if isinstance(name, str) else name, *arguments)
        replies = await cast(Callable[..., Awaitable[list[Any]]], batch.execute)(raise_on_error=False)
    if any(isinstance(reply, ReadOnlyError) for reply in replies):
        # A primary no more. An address that moved on leads to the new one, yet only by new connections.
        await close_idle(node)
    if confirm is not None:
        confirm.check(replies[-1])
    return replies[: len(commands)]
