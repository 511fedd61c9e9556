"""Starts processes of the service in 50 ms instead of 2 s: they are forked from one that has imported everything.

What is forked runs the `metaban` command as the shell would start it: a process, a session, an environment and a log
of its own. Chaos is worth as much as the number of times something dies, and most of a start is importing torch.

    python -m tests.chaos.nursery      orders in, one JSON object a line; pids and deaths out
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
#: Longest time to import everything, and to answer an order.
NURSERY_TIMEOUT_S = 120.0


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
        """None while it runs; negative for a signal, as subprocess has it."""
        return self._status

    def wait(self, timeout_s: float) -> bool:
        """Whether it ended within the time given."""
        return self._ended.wait(timeout_s)

    def send(self, number: signal.Signals) -> None:
        """Send a signal; nothing when it has ended."""
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
class Nursery:
    """The process that forks, and what became of those it forked."""

    def __init__(self) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("METABAN_", "REDIS_URL"))}
        # Threads do not survive a fork: the libraries of numpy and torch are told to start none.
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
        """End the nursery, which ends all its children."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait(NURSERY_TIMEOUT_S)
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
                raise RuntimeError("the nursery has no input")
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
            with self._answered:
                if not self._answered.wait_for(lambda: self._pids, NURSERY_TIMEOUT_S):
                    raise RuntimeError("the nursery does not answer")
                return self._children[self._pids.pop()]

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.nursery"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env=self.environment,
                start_new_session=True,
            )
            threading.Thread(target=self._listen, args=(self._process,), name="nursery", daemon=True).start()
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
    """Fork what is ordered, and tell who ended, until the input ends."""
    from store import failpoints  # noqa: F401 (imported now, once for all)

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
                        become(json.loads(line))
                    living.add(pid)
                    _say(pid=pid)
            _reap(living)


def import_everything() -> None:
    """What the commands import when they run."""
    import worker.runtime  # noqa: F401


def become(order: dict[str, Any]) -> NoReturn:
    """In the forked process: be the command that was ordered."""
    from service import cli
    from store import failpoints

    for number in (signal.SIGCHLD, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(order["environment"])
    # The table was made of the nursery's environment when the module was imported.
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
