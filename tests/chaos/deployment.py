"""A deployment to hurt: a Valkey, servers and workers, each a process that can be killed, stalled and armed.

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

from store.valkey_process import binary, configuration
from tests.chaos.nursery import Child, Nursery

AppendFsync = Literal["everysec", "always"]
#: Longest wait for something that has to happen, on a slow and busy machine.
PATIENCE_S = 90.0
POLL_S = 0.02
#: Pause before something dead is started again: what cannot start must not keep a core busy.
RESTART_PAUSE_S = 0.05
#: Fewer partitions than the default: workers meet more often. A narrow learner: it is not what is tested.
SETTINGS: Mapping[str, str] = {
    "METABAN_PARTITIONS": "4",
    "METABAN_SAMPLES_KEPT": "2048",
    "METABAN_WIDTH": "16",
    "METABAN_LEARNER": '{"bins": 4, "memory_samples": 8, "replayed": 64, "steps_per_event": 0.05}',
    "METABAN_LOG_FORMAT": "json",
    "METABAN_LOG_LEVEL": "info",
}


class Impatient(Exception):
    """Something that has to happen did not."""


def wait_until(holds: Callable[[], object], what: str, *, patience_s: float = PATIENCE_S) -> float:
    """Wait for a condition; the seconds it took. A store that is away is waited for too."""
    start = time.monotonic()
    while True:
        with suppress(redis.RedisError, OSError):
            if holds():
                return time.monotonic() - start
        if time.monotonic() - start > patience_s:
            raise Impatient(f"{what}: not within {patience_s:g} s")
        time.sleep(POLL_S)


@final
class Valkey:
    """The store, told what the private one of `metaban serve` is told."""

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
        """Start, and wait until the data is loaded."""
        self.socket.unlink(missing_ok=True)
        # Not from a path of our own: the server refuses a directory that it cannot enter, which is the check we want.
        process = self._process = subprocess.Popen(
            [binary(), self._config], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
        )
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                self.client.ping()
                return
            except (redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise Impatient(f"the store does not start: see {self.log}") from None
                time.sleep(POLL_S / 4)

    def kill(self) -> None:
        """kill -9, at a time that is remembered."""
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
    """A server or a worker: started, killed and started again under the same name."""

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
        """Whether it is dead by kill -9, of ours or of a failpoint."""
        return self.child is not None and self.child.status == -signal.SIGKILL

    def start(self, failpoints: str = "") -> Child:
        """Start it; with failpoints for this one life."""
        with self._changing:
            self._said = self.log.stat().st_size if self.log.exists() else 0
            environment = {**self._deployment.settings, **self.environment, "REDIS_URL": self._deployment.store_url}
            armed = failpoints or self._armed
            self._armed = ""
            if armed:
                environment["METABAN_FAILPOINTS"] = armed
            command = ["serve", "--no-worker", "--port", "0"] if self._kind == "server" else ["worker"]
            self.url = ""
            self.child = self._deployment.nursery.spawn(command, environment, self.log)
            return self.child

    def wait_ready(self) -> None:
        """Wait until it says that it works."""

        def holds() -> bool:
            if not self.alive:
                raise Impatient(f"{self.name} ended: see {self.log}")
            return self.ready()

        wait_until(holds, f"{self.name} starts (see {self.log})")

    def ready(self) -> bool:
        """Whether it has said that it works, in this life."""
        if self._kind == "worker":
            return "worker ready" in self.said()
        if not self.url:
            found = re.search(r"service\s+(http://\S+)\n", self.said())
            self.url = found.group(1) if found else ""
        return bool(self.url)

    def said(self) -> str:
        """What it has written in this life."""
        with self.log.open("rb") as log:
            log.seek(self._said)
            return log.read().decode(errors="replace")

    def kill(self) -> None:
        """kill -9, and wait for the end."""
        if self.child is not None:
            self.child.send(signal.SIGKILL)
            self.child.wait(PATIENCE_S)

    def arm(self, failpoints: str) -> None:
        """Have the next life end at a failpoint, and begin it."""
        with self._changing:
            self._armed = failpoints
        self.kill()

    def send(self, number: signal.Signals) -> None:
        if self.child is not None:
            self.child.send(number)


@final
class Deployment:
    """All processes of one fault, in a folder of their own."""

    def __init__(
        self,
        nursery: Nursery,
        *,
        servers: int = 1,
        workers: int = 1,
        appendfsync: AppendFsync = "always",
        settings: Mapping[str, str] | None = None,
    ) -> None:
        # Short: the address of a socket holds about 100 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="mb-chaos-"))
        self.nursery = nursery
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
        """Processes that died by kill -9, and were started again or not."""
        dead = sum(node.killed for node in self.nodes)
        return len(self.valkey.kills) + sum(node.kills for node in self.nodes) + dead

    def urls(self) -> list[str]:
        """Where there is a server now."""
        return [node.url for node in self.servers if node.alive and node.ready()]

    def start(self, *, workers: bool = True) -> None:
        """Start everybody and wait until they work."""
        for node in self.servers + (self.workers if workers else []):
            node.start()
        for node in self.servers + (self.workers if workers else []):
            node.wait_ready()

    def keep(self) -> None:
        """From now on, start again whatever dies."""
        self._keeping.set()
        self._keeper = threading.Thread(target=self._keep, name="keeper", daemon=True)
        self._keeper.start()

    def unkeep(self) -> None:
        """Let the dead be dead."""
        self._keeping.clear()
        if self._keeper is not None:
            self._keeper.join()
            self._keeper = None

    def _keep(self) -> None:
        while self._keeping.is_set():
            if not self.valkey.alive:
                with suppress(Impatient):
                    self.valkey.start()
            for node in self.nodes:
                if node.wanted and not node.alive:
                    node.kills += node.killed
                    # Without a store it would end at once, and burn a core that others need.
                    if self.valkey.alive:
                        node.start()
                    else:
                        node.child = None
            time.sleep(RESTART_PAUSE_S)

    def close(self) -> None:
        """End everything; the folder stays when it is needed."""
        self.unkeep()
        for node in self.nodes:
            node.send(signal.SIGCONT)
            node.kill()
        self.valkey.close()
        if not self.keep_files:
            shutil.rmtree(self.folder, ignore_errors=True)
