"""Finds the store of a CLI command: the configured URL, the server of a running service, or one started for it."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Literal

import redis

from metaban.store.errors import EmbeddedServerError
from metaban.store.valkey.configuration import client
from metaban.store.valkey.server import OWNER_LOCK, EmbeddedServer, possible_sockets, socket_url

#: Time limit of one PING.
PING_TIMEOUT_S: Final = 2.0

#: Longest wait for the server of a running service, which may be starting.
ANSWER_WITHIN_S: Final = 15.0
POLL_S: Final = 0.1


@contextmanager
def located_store(
    redis_url: str | None, data_dir: Path, *, appendfsync: Literal["everysec", "always"] = "everysec"
) -> Iterator[str]:
    """URL of the store: `redis_url`, or else that of the private Valkey of the data directory.

    If no service runs there, a server is started and stopped at the end.
    """
    if redis_url is not None:
        yield redis_url
        return
    socket = _running_socket(data_dir)
    if socket is not None:
        yield socket_url(socket)
        return
    with EmbeddedServer(data_dir, appendfsync=appendfsync) as server:
        yield server.url


def _running_socket(data_dir: Path) -> Path | None:
    """Socket of the service that owns the data directory; None if there is none."""
    deadline = time.monotonic() + ANSWER_WITHIN_S
    while owner := owner_of(data_dir):
        if socket := answering_socket(data_dir):
            return socket
        if time.monotonic() > deadline:
            raise EmbeddedServerError(
                f"the data directory {data_dir} belongs to the process with pid {owner}, whose Valkey does not "
                "answer: see its log, or stop it and try again"
            )
        time.sleep(POLL_S)
    return None


def answering_socket(data_dir: Path) -> Path | None:
    """Socket of the data directory behind which a server answers now; None if there is none."""
    for socket in possible_sockets(data_dir):
        with suppress(redis.RedisError, OSError), client(socket, timeout_s=PING_TIMEOUT_S) as connection:
            connection.ping()
            return socket
    return None


def owner_of(data_dir: Path) -> str:
    """Process id of the owner of the data directory; empty if no process holds its lock."""
    try:
        fd = os.open(Path(os.path.realpath(data_dir)) / "run" / OWNER_LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        # Shared: two commands that check at the same time do not take each other for the owner.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(fd, 32, 0).decode("ascii", "replace") or "unknown"
    finally:
        os.close(fd)
    return ""
