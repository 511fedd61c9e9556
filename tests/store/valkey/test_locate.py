"""A command finds the store of a running service, or starts its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from metaban.store.errors import EmbeddedServerError
from metaban.store.valkey import locate
from metaban.store.valkey.locate import located_store
from metaban.store.valkey.server import EmbeddedServer

OWNER = """
import sys, time
from pathlib import Path
from metaban.store.valkey.server import EmbeddedServer
with EmbeddedServer(Path(sys.argv[1])) as server:
    print(server.pid, server.url, flush=True)
    time.sleep(600)
"""


@contextmanager
def service(folder: Path) -> Iterator[tuple[subprocess.Popen[str], int, str]]:
    """Another process that owns the data directory."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER, folder], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid, url = owner.stdout.readline().split()
    try:
        yield owner, int(pid), url
    finally:
        owner.kill()
        owner.communicate()


def shut_down(url: str) -> None:
    redis.Redis.from_url(url).shutdown(nosave=True)


def pid_of(url: str) -> int:
    with redis.Redis.from_url(url) as client:
        return int(client.info("server")["process_id"])  # type: ignore[index]


def test_a_url_is_used_as_it_is(tmp_path: Path) -> None:
    with located_store("redis://elsewhere", tmp_path / "data") as url:
        assert url == "redis://elsewhere"
    assert not (tmp_path / "data").exists()


def test_without_a_service_a_server_is_started_and_stopped(tmp_path: Path) -> None:
    with located_store(None, tmp_path) as url:
        pid = pid_of(url)
        with redis.Redis.from_url(url) as client:
            client.set("kept", "1")
    assert not Path(f"/proc/{pid}").exists()
    with located_store(None, tmp_path) as url, redis.Redis.from_url(url) as client:
        assert client.get("kept") == b"1"


@pytest.mark.parametrize("depth", [0, 12])
def test_the_store_of_a_running_service(tmp_path: Path, depth: int) -> None:
    """Also with a path too long for a unix socket, which is then in another folder."""
    folder = tmp_path.joinpath(*["folder-name"] * depth)
    with service(folder) as (_, pid, _):
        with located_store(None, folder) as url:
            assert pid_of(url) == pid
            with located_store(None, folder) as again:
                assert again == url
        assert pid_of(url) == pid
        shut_down(url)


def test_the_server_of_a_killed_service_is_replaced(tmp_path: Path) -> None:
    with service(tmp_path) as (owner, pid, _):
        owner.kill()
        owner.wait()
        assert Path(f"/proc/{pid}").exists()
        with located_store(None, tmp_path) as url:
            assert pid_of(url) != pid


def test_a_service_whose_server_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locate, "ANSWER_WITHIN_S", 0.3)
    with service(tmp_path) as (owner, pid, url):
        owner.send_signal(signal.SIGSTOP)  # it cannot start another one
        os.kill(pid, signal.SIGKILL)
        socket = tmp_path / "run" / "valkey.sock"
        deadline = time.monotonic() + 30
        while _answers(url):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(EmbeddedServerError, match=f"pid {owner.pid}"), located_store(None, tmp_path):
            pass
        assert socket.exists()


def test_locating_does_not_lock_the_directory(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path):
        pass
    assert locate.owner_of(tmp_path) == ""
    with EmbeddedServer(tmp_path):
        assert locate.owner_of(tmp_path) == str(os.getpid())


def _answers(url: str) -> bool:
    try:
        with redis.Redis.from_url(url) as client:
            return bool(client.ping())
    except redis.ConnectionError:
        return False
