"""Starts processes of the service in 50 ms instead of 2 s, by a fork of a process that has imported everything.

A forked process runs the `metaban` command as a shell would start it, with its own session, environment and log. Faster
starts allow more kills in the same time, and most of a start is the import of torch.

    python -m tests.chaos.fork_server      reads one JSON order per line; writes pids and exits
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self, final

ROOT = Path(__file__).resolve().parents[2]
#: Longest time to import everything, and to answer a request.
FORK_SERVER_TIMEOUT_S = 120.0


@final
class Child:
    """One process of the service."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._ended = threading.Event()
        self._status: int | None = None
        self.ended_at = 0.0

    @property
    def alive(self) -> bool:
        return not self._ended.is_set()

    @property
    def status(self) -> int | None:
        """Exit status as in `subprocess`: None while it runs, negative for a signal."""
        return self._status

    def wait(self, timeout_s: float) -> bool:
        """Wait; whether it ended within the given time."""
        return self._ended.wait(timeout_s)

    def send(self, number: signal.Signals) -> None:
        """Send a signal; does nothing when the process has ended."""
        if self.alive:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                return

    def end(self, status: int) -> None:
        self._status = status
        self.ended_at = time.monotonic()
        self._ended.set()


@final
class ForkServer:
    """The process that forks, and the status of its children."""

    def __init__(self) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("METABAN_", "REDIS_URL"))}
        # Threads do not survive a fork, so numpy and torch must start none.
        self.environment = {**kept, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._process: subprocess.Popen[str] | None = None
        self._ordering = threading.Lock()
        self._answered = threading.Condition()
        self._pids: list[int] = []
        self._children: dict[int, Child] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process and all its children."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait(FORK_SERVER_TIMEOUT_S)
            self._process = None

    def spawn(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Child:
        """Run `metaban` with these arguments, its output appended to `log`."""
        order = {
            "arguments": list(arguments),
            "environment": {**self.environment, **environment},
            "log": os.fspath(log),
        }
        with self._ordering:
            process = self._running()
            if process.stdin is None:
                raise RuntimeError("the fork server has no input")
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
            with self._answered:
                if not self._answered.wait_for(lambda: self._pids, FORK_SERVER_TIMEOUT_S):
                    raise RuntimeError("the fork server does not answer")
                return self._children[self._pids.pop()]

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.fork_server"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env=self.environment,
                start_new_session=True,
            )
            threading.Thread(target=self._listen, args=(self._process,), name="fork_server", daemon=True).start()
        return self._process

    def _listen(self, process: subprocess.Popen[str]) -> None:
        for line in process.stdout or ():
            said: dict[str, int] = json.loads(line)
            with self._answered:
                if "ended" in said:
                    self._children[said["ended"]].end(said["status"])
                else:
                    self._children[said["pid"]] = Child(said["pid"])
                    self._pids.append(said["pid"])
                self._answered.notify_all()


def main() -> None:
    """Fork the requested commands and report their ends, until stdin is closed."""
    from metaban.store import failpoints  # noqa: F401 (imported now, once for all)

    import_everything()
    woken, waker = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(waker, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.set_wakeup_fd(waker)
    living: set[int] = set()
    orders = b""
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd == woken:
                    os.read(woken, 4096)
                    continue
                received = os.read(0, 65536)
                if not received:
                    _end_all(living)
                    return
                orders += received
                while b"\n" in orders:
                    line, _, orders = orders.partition(b"\n")
                    pid = os.fork()
                    if pid == 0:
                        os.close(woken)
                        signal.set_wakeup_fd(-1)
                        os.close(waker)
                        run_command(json.loads(line))
                    living.add(pid)
                    _say(pid=pid)
            _reap(living)


def import_everything() -> None:
    """Import what the commands import when they run."""
    import metaban.worker.process  # noqa: F401


def run_command(order: dict[str, Any]) -> NoReturn:
    """In the forked process: run the requested command."""
    from metaban.service.cli import main as cli
    from metaban.store import failpoints

    for number in (signal.SIGCHLD, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(order["environment"])
    # The module read the parent's environment when it was imported.
    failpoints._left.update(failpoints.parse_failpoints(os.environ.get(failpoints.FAILPOINTS_VARIABLE, "")))
    sys.argv = ["metaban", *order["arguments"]]
    status = 1
    try:
        cli.main()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _reap(living: set[int]) -> None:
    while living:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        living.discard(pid)
        _say(ended=pid, status=os.waitstatus_to_exitcode(status))


def _end_all(living: set[int]) -> None:
    for pid in living:
        os.kill(pid, signal.SIGKILL)
    for pid in living:
        os.waitpid(pid, 0)


def _say(**said: int) -> None:
    os.write(1, (json.dumps(said) + "\n").encode())


if __name__ == "__main__":
    main()
