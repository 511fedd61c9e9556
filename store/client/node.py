"""Client of one server: connecting and sending commands. A cluster consists of several."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, NoReturn, TypeAlias, cast, final

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ReadOnlyError

from metaban.store.errors import NotReplicated, StoreError, StoreUnavailable, raise_translated

Argument: TypeAlias = str | bytes | int | float

Command: TypeAlias = Sequence[Argument]

#: Lets the next command of the connection run on a server that is about to get its slot.
ASKING: Final = ("ASKING",)


@final
@dataclass(frozen=True, slots=True)
class Confirmation:
    """Number of replicas that must have a write before it counts as written, and the time for that."""

    replicas: int
    timeout_ms: int
    #: True: synced to disk by the server and the replicas. False: in the memory of the replicas.
    on_disk: bool

    def commands(self) -> list[Command]:
        """Commands that wait for the latest write of their connection. They must be sent right after it."""
        if not self.on_disk:
            return [("WAIT", self.replicas, self.timeout_ms)]
        # A replica reports what it has synced when WAITAOF asks it, before it syncs the write that came with the
        # question, and then once a second. After WAIT it has the write, so the first report covers it.
        first_ms = max(1, self.timeout_ms // 4)
        return [("WAIT", self.replicas, first_ms), ("WAITAOF", 1, self.replicas, max(1, self.timeout_ms - first_ms))]

    def check(self, reply: Any) -> None:
        """Raise NotReplicated unless the reply to the last of `commands` confirms enough replicas."""
        if isinstance(reply, Exception):
            raise NotReplicated(f"the server refused to report what its replicas have: {reply}") from reply
        here, there = (int(reply[0]), int(reply[1])) if self.on_disk else (1, int(reply))
        if not here or there < self.replicas:
            raise NotReplicated(
                f"{there} of {self.replicas} replicas confirmed a write within {self.timeout_ms} ms"
                + ("" if here else ", and the server itself has not synced it")
            )


@final
class SharedNode(Redis):
    """Client of one server that sends together what its callers ask for in one turn of the event loop.

    For many callers that ask for little at the same time. A blocking command would delay the others.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._asked: list[tuple[Sequence[Command], asyncio.Future[list[Any]]]] = []
        self._exchanges: set[asyncio.Task[None]] = set()

    async def join(self, commands: Sequence[Command]) -> list[Any]:
        """Like `send`, together with the commands of other callers."""
        loop = asyncio.get_running_loop()
        replies: asyncio.Future[list[Any]] = loop.create_future()
        if not self._asked:
            loop.call_soon(self._send_asked)
        self._asked.append((commands, replies))
        return await replies

    def _send_asked(self) -> None:
        asked, self._asked = self._asked, []
        exchange = asyncio.create_task(self._exchange(asked), context=Context())
        self._exchanges.add(exchange)
        exchange.add_done_callback(self._exchanges.discard)

    async def _exchange(self, asked: Sequence[tuple[Sequence[Command], asyncio.Future[list[Any]]]]) -> None:
        try:
            answers = iter(await _send_now(self, [command for commands, _ in asked for command in commands]))
        except Exception as error:
            for _, replies in asked:
                if not replies.done():
                    replies.set_exception(error)
            return
        for commands, replies in asked:
            own = list(islice(answers, len(commands)))
            if not replies.done():
                replies.set_result(own)


def open_node(url: str, *, socket_timeout_s: float, max_connections: int, shared: bool) -> Redis:
    """Client of one server. It connects on first use and never repeats a command."""
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
        # The driver's text is about the invalid part of the URL and never contains the password.
        raise StoreError(f"the URL of the store cannot be used: {error}") from None
    return SharedNode.from_pool(pool) if shared else Redis.from_pool(pool)


async def close_idle(node: Redis) -> None:
    """Close idle connections; new ones are opened when needed."""
    await node.connection_pool.disconnect(inuse_connections=False)


async def _fail(node: Redis, error: Exception) -> NoReturn:
    """Raise the translated error; if the server does not answer, close the idle connections first.

    After a restart of the server all idle connections are dead; each would fail one more caller.
    """
    try:
        raise_translated(error)
    except StoreUnavailable:
        await close_idle(node)
        raise


async def send_one(node: Redis, name: str, *arguments: Argument) -> Any:
    """Send one command and return the raw reply. Driver errors are translated."""
    if isinstance(node, SharedNode):
        [reply] = await node.join([(name, *arguments)])
        if isinstance(reply, Exception):
            await _fail(node, reply)
        return reply
    # As bytes, the name is not in the driver's table of reply parsers, so the reply stays raw.
    send = cast(Callable[..., Awaitable[Any]], node.execute_command)
    try:
        return await send(name.encode(), *arguments)
    except Exception as error:
        await _fail(node, error)


async def send(node: Redis, commands: Sequence[Command], confirm: Confirmation | None = None) -> list[Any]:
    """Send commands together on one connection. Returns raw replies in order; refused commands reply an exception.

    With `confirm`, raises NotReplicated unless enough replicas have all writes of these commands. If all commands are
    refused, there is nothing to confirm.
    """
    if confirm is None and isinstance(node, SharedNode):
        return await node.join(commands)
    return await _send_now(node, commands, confirm)


async def _send_now(node: Redis, commands: Sequence[Command], confirm: Confirmation | None = None) -> list[Any]:
    wire = commands if confirm is None else [*commands, *confirm.commands()]
    try:
        async with node.pipeline(transaction=False) as batch:
            queue = cast(Callable[..., object], batch.execute_command)
            for name, *arguments in wire:
                queue(name.encode() if isinstance(name, str) else name, *arguments)
            replies = await cast(Callable[..., Awaitable[list[Any]]], batch.execute)(raise_on_error=False)
    except Exception as error:
        await _fail(node, error)
    for reply in replies:
        if isinstance(reply, ReadOnlyError):
            # No longer a primary. Its address may lead to the new one, but only for new connections.
            await close_idle(node)
            break
    answers = replies[: len(commands)]
    if confirm is not None and any(
        command is not ASKING and not isinstance(answer, Exception)
        for command, answer in zip(commands, answers, strict=True)
    ):
        confirm.check(replies[-1])
    return answers
