"""A child process that is kept alive until it is told to stop.

The child leads a session of its own: Ctrl-C in the terminal reaches the parent alone, which stops things in order.
Its standard input is a pipe that nobody writes to; when the parent dies, however it dies, the pipe closes, and a
child that calls `end_with_parent` ends too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Final, final

import structlog

FIRST_BACKOFF_S: Final = 0.5
MAX_BACKOFF_S: Final = 30.0
#: A child that lived this long has recovered: the wait before its next restart is the first one again.
HEALTHY_AFTER_S: Final = 60.0
#: How long a child may drain after SIGTERM before it is killed.
DRAIN_S: Final = 15.0
#: Tells the child that its standard input is the pipe of a supervisor.
SUPERVISED_VARIABLE: Final = "METABAN_SUPERVISED"

_log = structlog.stdlib.get_logger(__name__)


@final
class Supervisor:
    """One child; `start` and `stop` once each, or use it as a context manager."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        name: str,
        environment: Mapping[str, str] | None = None,
        first_backoff_s: float = FIRST_BACKOFF_S,
        max_backoff_s: float = MAX_BACKOFF_S,
        drain_s: float = DRAIN_S,
    ) -> None:
        """`environment` is added to ours: what must not be seen in a list of processes belongs there."""
        self._command = list(command)
        self._name = name
        self._environment = {**os.environ, **(environment or {}), SUPERVISED_VARIABLE: "1"}
        self._first_backoff_s = first_backoff_s
        self._max_backoff_s = max_backoff_s
        self._drain_s = drain_s
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        """The process id of the child, None while there is none."""
        child = self._child
        return child.pid if child is not None and child.poll() is None else None

    def __enter__(self) -> Supervisor:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the child, and a thread that starts it again whenever it ends."""
        child = self._spawn()
        self._thread = threading.Thread(target=self._watch, args=(child,), name=self._name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """SIGTERM, time to drain, then SIGKILL; returns when the child is gone."""
        self._stopping.set()
        with self._lock:  # a restart that has begun is waited for, none begins after
            child = self._child
        if child is not None:
            if child.poll() is None:
                child.terminate()
            try:
                child.wait(self._drain_s)
            except subprocess.TimeoutExpired:
                _log.warning("child_killed", child=self._name, drain_s=self._drain_s)
            # Also after a clean end: whatever the child started is in its group and ends with it.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        if self._thread is not None:
            self._thread.join()

    def _spawn(self) -> subprocess.Popen[bytes]:
        self._child = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, env=self._environment, start_new_session=True
        )
        return self._child

    def _watch(self, child: subprocess.Popen[bytes]) -> None:
        backoff_s = self._first_backoff_s
        while True:
            started_s = time.monotonic()
            code = child.wait()
            if child.stdin is not None:
                child.stdin.close()
            if self._stopping.is_set():
                return
            if time.monotonic() - started_s >= HEALTHY_AFTER_S:
                backoff_s = self._first_backoff_s
            _log.warning("child_ended", child=self._name, code=code, restart_in_s=backoff_s)
            replacement = self._replace(backoff_s)
            while replacement is None and not self._stopping.is_set():
                backoff_s = min(backoff_s * 2, self._max_backoff_s)
                replacement = self._replace(backoff_s)
            if replacement is None:
                return
            child = replacement
            backoff_s = min(backoff_s * 2, self._max_backoff_s)

    def _replace(self, backoff_s: float) -> subprocess.Popen[bytes] | None:
        """A new child after the wait; None when stopped meanwhile, or when the system has no room for one."""
        if self._stopping.wait(backoff_s):
            return None
        with self._lock:
            if self._stopping.is_set():
                return None
            try:
                child = self._spawn()
            except OSError as error:
                _log.error("child_not_started", child=self._name, reason=str(error))
                return None
            self.restarts += 1
            return child


def end_with_parent() -> None:
    """In a supervised child: end as if told to (SIGTERM) when the parent is gone; elsewhere nothing."""
    if os.environ.get(SUPERVISED_VARIABLE) != "1":
        return

    def wait_for_end() -> None:
        # Reads past the buffer of sys.stdin, whose lock a daemon thread must not hold at exit.
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait_for_end, name="end-with-parent", daemon=True).start()
