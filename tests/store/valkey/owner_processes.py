"""Processes that own a private server, and functions to inspect both."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis as driver

from metaban.store.valkey.configuration import servers_in
from metaban.store.valkey.server import EmbeddedServer

#: A process that owns the directory in argv[1], stores a value, prints its server's pid, and waits.
OWNER = """
import sys, time
from pathlib import Path
import redis
from metaban.store.valkey.server import EmbeddedServer
server = EmbeddedServer(Path(sys.argv[1]))
server.start()
with redis.Redis.from_url(server.url) as client:
    client.set("written by", "the owner")
print(server.pid, server.url, flush=True)
time.sleep(60)
"""


def until(condition: Callable[[], object], *, within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.01)


def answers(server: EmbeddedServer) -> bool:
    try:
        with driver.Redis.from_url(server.url, retry=None) as client:
            return bool(client.ping())
    except driver.RedisError:
        return False


def wait_for_restart(server: EmbeddedServer, restarts: list[int], count: int) -> None:
    until(lambda: len(restarts) == count and answers(server))


def call(server: EmbeddedServer, *command: str) -> Any:
    with driver.Redis.from_url(server.url, decode_responses=True) as client:
        return client.execute_command(*command)


def socket_of(server: EmbeddedServer) -> Path:
    return Path(server.url.removeprefix("unix://"))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def running(folder: Path) -> list[int]:
    """The server processes of a data directory."""
    return servers_in(folder / "valkey", folder / "valkey.conf")


@contextmanager
def owner_of(folder: Path) -> Iterator[tuple[subprocess.Popen[str], int, str]]:
    """Another process that owns the folder; it and its server are killed at the end."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER, folder], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        pid, url = owner.stdout.readline().split()
        yield owner, int(pid), url
    finally:
        owner.kill()
        owner.communicate()
        for leftover in running(folder):
            os.kill(leftover, signal.SIGKILL)
