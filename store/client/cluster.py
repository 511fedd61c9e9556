"""A Redis Cluster as one store: every command goes to the server that has its key.

A server that does not have the key refuses with MOVED or ASK and executes nothing, so the command is sent on to the
server it names. Nothing else is ever sent twice. redis-py's own `RedisCluster` was tried instead: with retries off its
pipelines never notice a failover, with retries on it repeats commands (docs/research/cluster-client.md).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias, final

from redis.asyncio import Redis
from redis.crc import key_slot
from redis.exceptions import AskError, ClusterDownError, MovedError, ReadOnlyError

from metaban.store.client.node import ASKING, Argument, Command, Confirmation, close_idle, send
from metaban.store.errors import StoreError, StoreUnavailable, raise_translated

Address: TypeAlias = tuple[str, int]

SCHEMES: Final = {"redis+cluster": "redis", "rediss+cluster": "rediss"}
DEFAULT_PORT: Final = 6379

#: Most servers that one command is sent to, following redirections.
HOPS_MAX: Final = 5

#: Least time between two refreshes of the slot table.
REFRESH_PAUSE_S: Final = 0.2

#: Commands whose key is not their first argument, by where it is.
AFTER_SUBCOMMAND: Final = frozenset({"MEMORY", "OBJECT", "XGROUP", "XINFO"})
AFTER_COUNT: Final = frozenset({"EVAL", "EVALSHA", "EVALSHA_RO", "EVAL_RO", "FCALL", "FCALL_RO"})
AFTER_STREAMS: Final = frozenset({"XREAD", "XREADGROUP"})

#: Commands without a key that any server can answer.
ANYWHERE: Final = frozenset({"ECHO", "PING", "TIME"})

#: Commands without a key that each server answers differently.
EVERYWHERE: Final = frozenset(
    {
        "ACL", "BGREWRITEAOF", "BGSAVE", "CLIENT", "CLUSTER", "CONFIG", "DBSIZE", "DEBUG", "FLUSHALL", "FLUSHDB",
        "FUNCTION", "INFO", "KEYS", "LATENCY", "MULTI", "RANDOMKEY", "ROLE", "SCAN", "SCRIPT", "SLOWLOG", "WAIT",
        "WAITAOF",
    }
)  # fmt: skip


class Place(NamedTuple):
    """Server that one command of a batch is sent to next."""

    command: int
    address: Address
    asking: bool


@final
class Cluster:
    """Client of a cluster. The slot table is read on first use and after failures."""

    def __init__(
        self, seeds: Sequence[Address], open_node: Callable[[Address], Redis], *, socket_timeout_s: float
    ) -> None:
        """`seeds` are the servers asked first for the slot table."""
        self.socket_timeout_s = socket_timeout_s
        self._seeds = tuple(seeds)
        self._open_node = open_node
        self._nodes: dict[Address, Redis] = {}
        self._owners: dict[int, Address] = {}
        self._replicas: tuple[Address, ...] = ()
        self._suspects: set[Address] = set()
        self._refreshing = asyncio.Lock()
        self._refreshed_s: float | None = None
        self._stale = True

    async def send(self, commands: Sequence[Command], confirm: Confirmation | None = None) -> list[Any]:
        """Like `node.send`, with each command sent to the server of its key, to all servers concurrently.

        When a server does not answer, the commands of the others were sent and executed.
        """
        slots = [slot_of(command) for command in commands]
        await self._look_up()
        replies: list[Any] = [None] * len(commands)
        places = [Place(at, self._owner(slot), False) for at, slot in enumerate(slots)]
        for _ in range(HOPS_MAX):
            shares: dict[Address, list[Place]] = {}
            for place in places:
                shares.setdefault(place.address, []).append(place)
            exchanges = [self._send_share(address, share, commands, confirm) for address, share in shares.items()]
            places = []
            for (address, share), answers in zip(shares.items(), await _all(exchanges), strict=True):
                for place, reply in zip(share, answers, strict=True):
                    replies[place.command] = reply
                    if isinstance(reply, AskError):
                        places.append(self._redirected(place.command, reply, address))
                    elif isinstance(reply, ClusterDownError | ReadOnlyError):
                        self._suspect(address)
            if not places:
                return replies
        raise StoreUnavailable(f"the slots of the cluster keep moving: {HOPS_MAX} servers redirected a command")

    async def primaries(self) -> list[Redis]:
        """Clients of the servers that hold slots."""
        await self._look_up()
        return [self._node(address) for address in dict.fromkeys(self._owners.values())]

    async def replicas(self) -> list[Redis]:
        """Clients of the replicas."""
        await self._look_up()
        return [self._node(address) for address in self._replicas]

    def known(self) -> list[Redis]:
        """Clients of all servers used so far."""
        return list(self._nodes.values())

    def separate(self) -> Cluster:
        """Another client of the same cluster."""
        return Cluster(self._seeds, self._open_node, socket_timeout_s=self.socket_timeout_s)

    async def aclose(self) -> None:
        """Close all connections."""
        for node in self._nodes.values():
            await node.aclose()

    async def _send_share(
        self, address: Address, share: Sequence[Place], commands: Sequence[Command], confirm: Confirmation | None
    ) -> list[Any]:
        wire: list[Command] = []
        kept: list[int] = []
        for place in share:
            if place.asking:
                wire.append(ASKING)
            kept.append(len(wire))
            wire.append(commands[place.command])
        try:
            replies = await send(self._node(address), wire, confirm)
        except StoreUnavailable:
            self._suspect(address)
            raise
        self._suspects.discard(address)
        return [replies[at] for at in kept]

    def _suspect(self, address: Address) -> None:
        """Refresh the slot table before the next command, and ask this server last."""
        self._suspects.add(address)
        self._stale = True

    def _redirected(self, command: int, refusal: AskError, refused_by: Address) -> Place:
        # A server that does not know its own name leaves the host out and means itself.
        target = (refusal.host or refused_by[0], int(refusal.port))
        moved = isinstance(refusal, MovedError)
        if moved:
            self._owners[refusal.slot_id] = target
            self._stale = True
        return Place(command, target, asking=not moved)

    def _owner(self, slot: int | None) -> Address:
        if slot is None:
            sound = [address for address in self._owners.values() if address not in self._suspects]
            return next(iter(sound or self._owners.values()))
        owner = self._owners.get(slot)
        if owner is None:
            self._stale = True
            raise StoreUnavailable(f"no server of the cluster serves slot {slot}")
        return owner

    def _node(self, address: Address) -> Redis:
        if address not in self._nodes:
            self._nodes[address] = self._open_node(address)
        return self._nodes[address]

    async def _look_up(self) -> None:
        """Refresh the slot table if it may be out of date."""
        if self._due():
            async with self._refreshing:
                if self._due():  # another caller may have refreshed it meanwhile
                    await self.refresh()
        if not self._owners:
            raise StoreUnavailable("no server of the cluster answers")

    def _due(self) -> bool:
        if not self._stale:
            return False
        return self._refreshed_s is None or time.monotonic() - self._refreshed_s >= REFRESH_PAUSE_S

    async def refresh(self) -> None:
        """Read the slot table from the first server that answers."""
        known = list(dict.fromkeys([*self._owners.values(), *self._replicas, *self._seeds]))
        # In random order, so that a server cut off from the others is not always believed. Servers that did not answer
        # come last: each may take a whole time-out.
        random.shuffle(known)
        failure: StoreUnavailable | None = None
        try:
            for address in sorted(known, key=lambda address: address in self._suspects):
                try:
                    [reply] = await send(self._node(address), [("CLUSTER", "SLOTS")])
                except StoreUnavailable as error:
                    self._suspects.add(address)
                    failure = error
                    continue
                _check_clustered(reply, address)
                await self._adopt(reply, address)
                return
        finally:
            # Also after a failure: callers that waited for this refresh do not start another one.
            self._refreshed_s = time.monotonic()
        raise StoreUnavailable("no server of the cluster answers") from failure

    async def _adopt(self, ranges: Iterable[Any], asked: Address) -> None:
        owners: dict[int, Address] = {}
        replicas: dict[Address, None] = {}
        for first, last, primary, *followers in ranges:
            owner = _address(primary, asked)
            owners.update(dict.fromkeys(range(first, last + 1), owner))
            replicas.update(dict.fromkeys(_address(follower, asked) for follower in followers))
        if not owners:
            raise StoreUnavailable("no server of the cluster serves any slot yet")
        self._owners, self._replicas = owners, tuple(replicas)
        self._stale = False
        # Commands under way to servers that left the cluster are still answered; idle connections are closed.
        for address in self._nodes.keys() - set(owners.values()) - replicas.keys():
            await close_idle(self._nodes[address])


def _check_clustered(reply: Any, address: Address) -> None:
    if isinstance(reply, Exception):
        if "cluster support disabled" in str(reply):
            host, port = address
            raise StoreError(f"the server at {host}:{port} is not part of a cluster: use redis:// or rediss://")
        raise_translated(reply)


def is_cluster_url(url: str) -> bool:
    """Whether the URL of a store names a cluster."""
    return url.partition("://")[0] in SCHEMES


def open_cluster(url: str, open_node: Callable[[str], Redis], *, socket_timeout_s: float) -> Cluster:
    """The cluster of `redis+cluster://[user:password@]host:port[,host:port…][?options]`; it connects on first use."""
    scheme, _, rest = url.partition("://")
    location, mark, options = rest.partition("?")
    location, _, database = location.partition("/")
    credentials, at, hosts = location.rpartition("@")
    if database not in ("", "0"):
        raise StoreError("the URL of the store cannot be used: a cluster has only database 0")
    try:
        seeds = [_seed(part) for part in hosts.split(",")]
    except ValueError:
        raise StoreError("the URL of the store cannot be used: write hosts as host:port, separated by commas") from None

    def open_one(address: Address) -> Redis:
        host, port = address
        place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return open_node(f"{SCHEMES[scheme]}://{credentials}{at}{place}{mark}{options}")

    open_one(seeds[0])  # raises for an invalid URL
    return Cluster(seeds, open_one, socket_timeout_s=socket_timeout_s)


def slot_of(command: Command) -> int | None:
    """Slot of the key of a command; None if any server can answer."""
    name, *arguments = command
    verb = (name.decode() if isinstance(name, bytes) else str(name)).upper()
    if verb in ANYWHERE:
        return None
    try:
        if verb in EVERYWHERE:
            raise ValueError
        if verb in AFTER_STREAMS:
            key = arguments[_index_of("STREAMS", arguments) + 1]
        elif verb in AFTER_COUNT:
            if not int(arguments[1]):
                raise ValueError
            key = arguments[2]
        else:
            key = arguments[1 if verb in AFTER_SUBCOMMAND else 0]
    except (IndexError, ValueError):
        raise ValueError(f"{verb} names no key: in a cluster, send it to each server") from None
    return int(key_slot(key if isinstance(key, bytes) else str(key).encode()))


def _index_of(word: str, arguments: Sequence[Argument]) -> int:
    return [str(argument).upper() for argument in arguments].index(word)


def _seed(text: str) -> Address:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(DEFAULT_PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not 0 < int(port) < 2**16:
        raise ValueError(text)
    return host, int(port)


def _address(node: Sequence[Any], asked: Address) -> Address:
    host = node[0].decode() if isinstance(node[0], bytes) else node[0]
    # Empty or unknown: the server that was asked is at the address we used.
    return (asked[0] if host in (None, "", "?") else host), int(node[1])


async def _all(exchanges: Sequence[Any]) -> list[list[Any]]:
    """Wait for all exchanges, then raise the first failure: none is left running."""
    if len(exchanges) == 1:
        return [await exchanges[0]]
    outcomes = await asyncio.gather(*exchanges, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
