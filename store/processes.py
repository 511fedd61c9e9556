"""Supervised child processes: started, restarted with a growing wait when they end, and stopped with a deadline.

Used for the private Valkey and for the worker of `metaban serve`.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Final, final

import structlog

FIRST_BACKOFF_S: Final = 0.5
MAX_BACKOFF_S: Final = 30.0

#: A child that lived this long has recovered: its next restart waits for the first backoff again.
HEALTHY_AFTER_S: Final = 60.0

#: Time for each way of stopping a process (a request, SIGTERM, SIGKILL) before the next one is tried.
STOP_GRACE_S: Final = 15.0

#: Set for a child whose standard input is the pipe of `spawn_ending_with_parent`.
SUPERVISED_VARIABLE: Final = "METABAN_SUPERVISED"
POLL_S: Final = 0.01

log = structlog.wrap_logger(logging.getLogger(__name__))


@final
class ProcessNotEnded(Exception):
    """Processes still exist after SIGKILL."""

    def __init__(self, pids: list[int]) -> None:
        super().__init__(f"processes {pids} did not end after SIGKILL")
        self.pids = pids


@final
class SupervisedProcess:
    """A child process that is restarted whenever it ends, until `stop`. Used once.

    `spawn` starts the child as the leader of its own session, so that Ctrl-C in the terminal reaches the parent only
    and the children of the child can be killed as one process group.
    `on_restart` is called by the watching thread with the number of restarts so far; it may call `stop`.
    """

    def __init__(
        self,
        spawn: Callable[[], subprocess.Popen[bytes]],
        *,
        name: str,
        request_stop: Callable[[], bool] | None = None,
        on_restart: Callable[[int], None] | None = None,
        first_backoff_s: float = FIRST_BACKOFF_S,
        max_backoff_s: float = MAX_BACKOFF_S,
        healthy_after_s: float = HEALTHY_AFTER_S,
        stop_grace_s: float = STOP_GRACE_S,
        log_fields: Mapping[str, str] | None = None,
    ) -> None:
        """`request_stop` asks the child to end without a signal; it returns whether the child got the request.

        `log_fields` are added to every log event about the child.
        """
        self.restarts = 0
        self._spawn = spawn
        self._name = name
        self._request_stop = request_stop
        self._on_restart = on_restart
        self._first_backoff_s = first_backoff_s
        self._max_backoff_s = max_backoff_s
        self._healthy_after_s = healthy_after_s
        self._stop_grace_s = stop_grace_s
        self._stopping = threading.Event()
        # Re-entrant: a signal handler may call stop() in the thread that is inside launch().
        self._lock = threading.RLock()
        self._child: subprocess.Popen[bytes] | None = None
        self._log = log.bind(child=name, **(log_fields or {}))

    @property
    def pid(self) -> int | None:
        """Process id of the child; None while it does not run."""
        child = self._child
        return child.pid if child is not None and child.poll() is None else None

    def __enter__(self) -> SupervisedProcess:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Launch the child and watch it."""
        self.watch(self.launch())

    def launch(self) -> subprocess.Popen[bytes]:
        """Start the child without watching it yet."""
        with self._lock:
            self._child = child = self._spawn()
        return child

    def watch(self, child: subprocess.Popen[bytes]) -> None:
        """Restart the launched child whenever it ends, in a thread."""
        threading.Thread(target=self._watch, args=(child,), name=f"watch-{self._name}", daemon=True).start()

    def stop(self) -> None:
        """End the child: request, SIGTERM, SIGKILL, each with its time. ProcessNotEnded if it exists after that."""
        self._stopping.set()
        with self._lock:  # waits for a restart that has begun; no restart begins after it
            child = self._child
        if child is None:
            return

        def alive() -> list[int]:
            return [child.pid] if child.poll() is None else []

        requested = bool(alive()) and self._request_stop is not None and self._request_stop()
        try:
            end_processes(alive, name=self._name, grace_s=self._stop_grace_s, requested=requested)
        finally:
            # Also after a clean end: the child's own children are in its process group.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)

    def _watch(self, child: subprocess.Popen[bytes]) -> None:
        backoff_s = self._first_backoff_s
        while True:
            started_s = time.monotonic()
            code = child.wait()
            if child.stdin is not None:
                child.stdin.close()
            if self._stopping.is_set():
                return
            if time.monotonic() - started_s >= self._healthy_after_s:
                backoff_s = self._first_backoff_s
            self._log.warning("child_ended", code=code, restart_in_s=backoff_s)
            replacement = None
            while replacement is None:
                replacement = self._replace(backoff_s)
                if self._stopping.is_set():
                    return
                backoff_s = min(backoff_s * 2, self._max_backoff_s)
            child = replacement

    def _replace(self, backoff_s: float) -> subprocess.Popen[bytes] | None:
        """A new child after the wait; None if stopped meanwhile or if the child could not be started."""
        if self._stopping.wait(backoff_s):
            return None
        with self._lock:
            if self._stopping.is_set():
                return None
            try:
                child = self.launch()
            except Exception as error:
                self._log.error("child_not_started", reason=str(error))
                return None
            self.restarts += 1
        if self._on_restart is not None:
            try:
                self._on_restart(self.restarts)
            except Exception:
                self._log.exception("child_restart_callback_failed")
        return child


def end_processes(alive: Callable[[], list[int]], *, name: str, grace_s: float, requested: bool = False) -> None:
    """End the processes that `alive` lists; with `requested`, first wait for them to end by themselves.

    ProcessNotEnded if some exist after SIGKILL.
    """
    if requested and _gone(alive, grace_s):
        return
    for signum in (signal.SIGTERM, signal.SIGKILL):
        pids = alive()
        if pids and signum == signal.SIGKILL:
            log.warning("child_killed", child=name, pids=pids, grace_s=grace_s)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signum)
        if _gone(alive, grace_s):
            return
    raise ProcessNotEnded(alive())


def _gone(alive: Callable[[], list[int]], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while alive():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def spawn_ending_with_parent(
    command: Sequence[str], *, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a Python child that ends when this process ends, if it calls `end_with_parent`.

    Its standard input is a pipe without data. The system closes the pipe when this process ends, even by SIGKILL.
    `environment` is added to ours; secrets belong there, since everyone can list command lines.
    """
    return subprocess.Popen(
        list(command),
        stdin=subprocess.PIPE,
        env={**os.environ, **(environment or {}), SUPERVISED_VARIABLE: "1"},
        start_new_session=True,
    )


def end_with_parent() -> None:
    """In a child of `spawn_ending_with_parent`: SIGTERM to ourselves when the parent is gone. Elsewhere nothing."""
    if os.environ.get(SUPERVISED_VARIABLE) != "1":
        return

    def wait_for_end() -> None:
        # Bypasses the buffer of sys.stdin: a daemon thread must not hold its lock at exit.
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait_for_end, name="end-with-parent", daemon=True).start()
