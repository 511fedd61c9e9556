"""A deployment for faults: a Valkey, servers and workers, each a process that can be killed, stopped and armed.

With `keep()` whatever dies is started again, as an orchestrator would: faults then only have to kill.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, final

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from metaban.store.valkey.configuration import binary, configuration
from tests.chaos.fork_server import Child, ForkServer

AppendFsync = Literal["everysec", "always"]
#: Longest wait for a condition on a slow and busy machine.
WAIT_TIMEOUT_S = 90.0
POLL_S = 0.02
#: Pause before a dead process is started again, so that one that cannot start does not keep a core busy.
RESTART_PAUSE_S = 0.05
#: Few partitions, so that workers interact more often; a narrow learner, because it is not what is tested.
SETTINGS: Mapping[str, str] = {
    "METABAN_PARTITIONS": "4",
    "METABAN_SAMPLES_KEPT": "2048",
    "METABAN_WIDTH": "16",
    "METABAN_LEARNER": '{"bins": 4, "memory_samples": 8, "replayed": 64, "steps_per_event": 0.05}',
    "METABAN_LOG_FORMAT": "json",
    "METABAN_LOG_LEVEL": "info",
}


class WaitTimeout(Exception):
    """A condition did not become true in time."""


def wait_until(holds: Callable[[], object], what: str, *, timeout_s: float = WAIT_TIMEOUT_S) -> float:
    """Wait for a condition, also through an outage of the store; returns the seconds it took."""
    start = time.monotonic()
    while True:
        with suppress(redis.RedisError, OSError):
            if holds():
                return time.monotonic() - start
        if time.monotonic() - start > timeout_s:
            raise WaitTimeout(f"{what}: not within {timeout_s:g} s")
        time.sleep(POLL_S)


@final
class Valkey:
    """The store, with the settings of the private one of `metaban serve`."""

    def __init__(self, folder: Path, appendfsync: AppendFsync) -> None:
        self.data = folder / "valkey"
        self.data.mkdir(exist_ok=True)
        self.socket = folder / "v.sock"
        self.log = folder / "valkey.log"
        self._config = folder / "valkey.conf"
        self._config.write_text(
            configuration(socket=self.socket, data=self.data, log_file=self.log, appendfsync=appendfsync)
        )
        self._process: subprocess.Popen[bytes] | None = None
        self.kills: list[float] = []
        self.client = redis.Redis(
            unix_socket_path=os.fspath(self.socket), socket_timeout=10, retry=Retry(NoBackoff(), 0), protocol=2
        )

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it and wait until the data is loaded."""
        self.socket.unlink(missing_ok=True)
        # Not from a path of this process: the server refuses a directory it cannot enter, which is the check wanted.
        process = self._process = subprocess.Popen(
            [binary(), self._config], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
        )
        deadline = time.monotonic() + WAIT_TIMEOUT_S
        while True:
            try:
                self.client.ping()
                return
            except (redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise WaitTimeout(f"the store does not start: see {self.log}") from None
                time.sleep(POLL_S / 4)

    def kill(self) -> None:
        """Kill it (SIGKILL) and record the time."""
        if self._process is not None:
            self._process.kill()
            self.kills.append(time.monotonic())
            self._process.wait()

    def close(self) -> None:
        self.client.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@final
class Node:
    """A server or worker that can be killed and started again under the same name."""

    def __init__(self, deployment: Deployment, kind: Literal["server", "worker"], number: int) -> None:
        self.name = f"{kind}-{number}"
        self.log = deployment.folder / f"{self.name}.log"
        self.environment: dict[str, str] = {}
        self.wanted = True
        self._deployment = deployment
        self._kind = kind
        self._armed = ""
        self._changing = threading.Lock()
        self._said = 0
        self.child: Child | None = None
        self.url = ""
        self.kills = 0

    @property
    def alive(self) -> bool:
        return self.child is not None and self.child.alive

    @property
    def killed(self) -> bool:
        """Whether SIGKILL ended it, from a fault or a failpoint."""
        return self.child is not None and self.child.status == -signal.SIGKILL

    def start(self, failpoints: str = "") -> Child:
        """Start it, with failpoints until it ends."""
        with self._changing:
            self._said = self.log.stat().st_size if self.log.exists() else 0
            environment = {**self._deployment.settings, **self.environment, "REDIS_URL": self._deployment.store_url}
            armed = failpoints or self._armed
            self._armed = ""
            if armed:
                environment["METABAN_FAILPOINTS"] = armed
            command = ["serve", "--no-worker", "--port", "0"] if self._kind == "server" else ["worker"]
            self.url = ""
            self.child = self._deployment.fork_server.spawn(command, environment, self.log)
            return self.child

    def wait_ready(self) -> None:
        """Wait until it is ready."""

        def holds() -> bool:
            if not self.alive:
                raise WaitTimeout(f"{self.name} ended: see {self.log}")
            return self.ready()

        wait_until(holds, f"{self.name} starts (see {self.log})")

    def ready(self) -> bool:
        """Whether it is ready since its last start."""
        if self._kind == "worker":
            return "worker_ready" in self.said()
        if not self.url:
            found = re.search(r"service\s+(http://\S+)\n", self.said())
            self.url = found.group(1) if found else ""
        return bool(self.url)

    def said(self) -> str:
        """Its log since its last start."""
        with self.log.open("rb") as log:
            log.seek(self._said)
            return log.read().decode(errors="replace")

    def kill(self) -> None:
        """Kill it (SIGKILL) and wait for its end."""
        if self.child is not None:
            self.child.send(signal.SIGKILL)
            self.child.wait(WAIT_TIMEOUT_S)

    def arm(self, failpoints: str) -> None:
        """Restart it with a failpoint that ends it."""
        with self._changing:
            self._armed = failpoints
        self.kill()

    def send(self, number: signal.Signals) -> None:
        if self.child is not None:
            self.child.send(number)


@final
class Deployment:
    """All processes of one fault, in their own folder."""

    def __init__(
        self,
        fork_server: ForkServer,
        *,
        servers: int = 1,
        workers: int = 1,
        appendfsync: AppendFsync = "always",
        settings: Mapping[str, str] | None = None,
    ) -> None:
        # Short, because the path of a unix socket has at most about 100 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="mb-chaos-"))
        self.fork_server = fork_server
        self.settings = {**SETTINGS, "METABAN_DATA_DIR": str(self.folder / "data"), **(settings or {})}
        self.valkey = Valkey(self.folder, appendfsync)
        self.store_url = f"unix://{self.valkey.socket}"
        self.servers = [Node(self, "server", number) for number in range(1, servers + 1)]
        self.workers = [Node(self, "worker", number) for number in range(1, workers + 1)]
        self._keeper: threading.Thread | None = None
        self._keeping = threading.Event()
        self.keep_files = False

    def __enter__(self) -> Self:
        try:
            self.valkey.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.keep_files |= error is not None
        self.close()

    @property
    def nodes(self) -> list[Node]:
        return [*self.servers, *self.workers]

    @property
    def kills(self) -> int:
        """Number of processes ended by SIGKILL."""
        dead = sum(node.killed for node in self.nodes)
        return len(self.valkey.kills) + sum(node.kills for node in self.nodes) + dead

    def urls(self) -> list[str]:
        """URLs of the running servers."""
        return [node.url for node in self.servers if node.alive and node.ready()]

    def start(self, *, workers: bool = True) -> None:
        """Start all processes and wait until they are ready."""
        for node in self.servers + (self.workers if workers else []):
            node.start()
        for node in self.servers + (self.workers if workers else []):
            node.wait_ready()

    def keep(self) -> None:
        """From now on, restart processes that end."""
        self._keeping.set()
        self._keeper = threading.Thread(target=self._keep, name="keeper", daemon=True)
        self._keeper.start()

    def unkeep(self) -> None:
        """Restart no process any more."""
        self._keeping.clear()
        if self._keeper is not None:
            self._keeper.join()
            self._keeper = None

    def _keep(self) -> None:
        while self._keeping.is_set():
            if not self.valkey.alive:
                with suppress(WaitTimeout):
                    self.valkey.start()
            for node in self.nodes:
                if node.wanted and not node.alive:
                    node.kills += node.killed
                    # Without a store it would end at once and keep a core busy.
                    if self.valkey.alive:
                        node.start()
                    else:
                        node.child = None
            time.sleep(RESTART_PAUSE_S)

    def close(self) -> None:
        """End all processes; the folder is kept if needed."""
        self.unkeep()
        for node in self.nodes:
            node.send(signal.SIGCONT)
            node.kill()
        self.valkey.close()
        if not self.keep_files:
            shutil.rmtree(self.folder, ignore_errors=True)
