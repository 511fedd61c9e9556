"""Supervised processes, with real children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from metaban.store.processes import SupervisedProcess, spawn_ending_with_parent

WAIT_S = 30.0
#: Writes one line when it starts and one on SIGTERM.
CHILD = """
import os, pathlib, signal, sys, time
log = pathlib.Path(sys.argv[1])
def say(word):
    with log.open("a") as file:
        file.write(f"{word} {os.getpid()} {os.getsid(0)} {os.environ.get('REDIS_URL', '')}\\n")
def drain(number, frame):
    time.sleep(0.2)
    say("drained")
    sys.exit()
signal.signal(signal.SIGTERM, signal.SIG_IGN if "deaf" in sys.argv else drain)
say("started")
if "crash" in sys.argv:
    sys.exit(3)
while True:
    time.sleep(0.05)
"""


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.01)


def lines(log: Path) -> list[list[str]]:
    return [line.split(" ") for line in log.read_text().splitlines()] if log.exists() else []


def alive(pid: int) -> bool:
    """False for a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def supervised(log: Path, *words: str, stop_grace_s: float = 5.0) -> SupervisedProcess:
    command = [sys.executable, "-c", CHILD, str(log), *words]
    return SupervisedProcess(
        lambda: spawn_ending_with_parent(command, environment={"REDIS_URL": "redis://:secret@host"}),
        name="child",
        first_backoff_s=0.01,
        stop_grace_s=stop_grace_s,
    )


def test_a_child_is_drained(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with supervised(log) as child:
        until(lambda: len(lines(log)) == 1)
        pid = child.pid
        (_, said_pid, session, url) = lines(log)[0]
        assert (int(said_pid), int(session)) == (pid, pid), "Ctrl-C must not reach it"
        assert url == "redis://:secret@host"
        assert b"secret" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert [line[0] for line in lines(log)] == ["started", "drained"]
    assert child.pid is None
    assert child.restarts == 0


def test_a_dead_child_is_replaced(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with supervised(log) as child:
        until(lambda: len(lines(log)) == 1)
        os.kill(int(lines(log)[0][1]), signal.SIGKILL)
        until(lambda: len(lines(log)) == 2)
        until(lambda: child.pid == int(lines(log)[1][1]))  # the child may write before its start is noted
        assert child.restarts == 1
    assert not alive(int(lines(log)[1][1]))


def test_a_child_that_keeps_failing_is_restarted_with_a_delay(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with supervised(log, "crash") as child:
        until(lambda: child.restarts >= 3)
    ended = child.restarts
    time.sleep(0.1)
    assert child.restarts == ended
    assert child.pid is None


def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with supervised(log, "deaf", stop_grace_s=0.2) as child:
        until(lambda: len(lines(log)) == 1)
        pid = int(lines(log)[0][1])
        until(lambda: child.pid == pid)
    assert not alive(pid)


def test_a_missing_program_raises_at_once() -> None:
    with pytest.raises(FileNotFoundError):
        SupervisedProcess(lambda: spawn_ending_with_parent(["/nowhere/at-all"]), name="child").start()


def test_a_child_ends_with_its_parent(tmp_path: Path) -> None:
    child = "import os, time; from metaban.store.processes import end_with_parent; end_with_parent(); time.sleep(60)"
    parent = (
        "import sys, time\n"
        "from metaban.store.processes import SupervisedProcess, spawn_ending_with_parent\n"
        f"command = [sys.executable, '-c', {child!r}]\n"
        "child = SupervisedProcess(lambda: spawn_ending_with_parent(command), name='child')\n"
        "child.start(); print(child.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
    until(lambda: not alive(pid))
