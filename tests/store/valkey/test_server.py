"""The private server, with real processes and signals."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis as driver

from metaban.store.errors import EmbeddedServerError
from metaban.store.valkey.configuration import servers_by_command_line
from metaban.store.valkey.server import SOCKET_PATH_MAX_BYTES, EmbeddedServer
from tests.store.valkey.owner_processes import (
    answers,
    call,
    mode,
    owner_of,
    running,
    socket_of,
    until,
    wait_for_restart,
)
from tests.valkeys import eventually

pytestmark = pytest.mark.single_node("the private server is one")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A data directory; processes left by a failed test are ended at the end."""
    folder = tmp_path / "data"
    yield folder
    if (folder / "valkey").exists():
        for pid in running(folder):
            os.kill(pid, signal.SIGKILL)


def test_only_its_user_reaches_it_and_by_no_port(folder: Path) -> None:
    with EmbeddedServer(folder) as server:
        socket = socket_of(server)
        assert socket.is_socket()
        assert mode(socket) == 0o700
        assert mode(socket.parent) == 0o700
        assert mode(folder / "valkey") == 0o700
        assert mode(folder / "valkey.conf") == 0o600
        assert mode(folder / "valkey.log") == 0o600
        assert mode(folder / "valkey" / "appendonlydir") == 0o700
        assert call(server, "CONFIG", "GET", "port") == {"port": "0"}
        with pytest.raises(driver.ResponseError, match="DEBUG command not allowed"):
            call(server, "DEBUG", "RELOAD")


def test_listens_on_no_internet_socket(folder: Path) -> None:
    if not Path("/proc/net/tcp").exists():
        pytest.skip("needs /proc")
    with EmbeddedServer(folder) as server:
        links = (os.readlink(fd) for fd in Path(f"/proc/{server.pid}/fd").iterdir())
        sockets = {match[1] for link in links if (match := re.fullmatch(r"socket:\[(\d+)\]", link))}
        assert sockets
        for table in ("tcp", "tcp6", "udp", "udp6"):
            rows = Path(f"/proc/{server.pid}/net/{table}")
            if rows.exists():
                assert not sockets & {row.split()[9] for row in rows.read_text().splitlines()[1:]}


@pytest.mark.parametrize("appendfsync", ["everysec", "always"])
def test_settings_that_keep_data(folder: Path, appendfsync: Any) -> None:
    with EmbeddedServer(folder, appendfsync=appendfsync) as server:
        wanted = {
            "appendonly": "yes",
            "appendfsync": appendfsync,
            "aof-use-rdb-preamble": "yes",
            "maxmemory-policy": "noeviction",
            "save": "",
            "dir": str(folder / "valkey"),
        }
        assert call(server, "CONFIG", "GET", *wanted) == wanted


def test_data_survives_a_stop_and_a_start(folder: Path) -> None:
    server = EmbeddedServer(folder)
    for expected in (1, 2, 3):
        server.start()
        assert call(server, "INCR", "starts") == expected
        server.stop()


def test_a_clean_stop_leaves_no_process_and_no_socket(folder: Path) -> None:
    server = EmbeddedServer(folder)
    server.stop()
    server.start()
    server.start()
    socket, pid = socket_of(server), server.pid
    assert running(folder) == [pid]
    server.stop()
    server.stop()
    assert running(folder) == []
    assert not socket.exists()
    assert server.pid is None
    assert "bye bye" in (folder / "valkey.log").read_text()
    with pytest.raises(EmbeddedServerError, match="start"):
        _ = server.url


def test_it_stays_out_of_the_terminals_process_group(folder: Path) -> None:
    with EmbeddedServer(folder) as server:
        assert server.pid is not None
        assert os.getsid(server.pid) == server.pid
        assert os.getpgid(server.pid) != os.getpgid(0)


def test_a_killed_server_is_restarted_with_its_data(folder: Path) -> None:
    restarts: list[int] = []
    with EmbeddedServer(folder, appendfsync="always", on_restart=restarts.append) as server:
        for kills in (1, 2):
            call(server, "RPUSH", "log", f"before kill {kills}")
            pid, url = server.pid, server.url
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            wait_for_restart(server, restarts, kills)
            assert server.pid not in (None, pid)
            assert server.url == url
        assert call(server, "LRANGE", "log", "0", "-1") == ["before kill 1", "before kill 2"]
        assert restarts == [1, 2]
        assert running(folder) == [server.pid]


def test_a_failing_callback_does_not_end_the_supervision(folder: Path) -> None:
    restarts: list[int] = []

    def fail(count: int) -> None:
        restarts.append(count)
        raise RuntimeError("a mistake in the callback")

    with EmbeddedServer(folder, on_restart=fail) as server:
        for kills in (1, 2):
            os.kill(server.pid or 0, signal.SIGKILL)
            wait_for_restart(server, restarts, kills)


def test_a_stop_while_it_restarts_leaves_nothing_running(folder: Path) -> None:
    # From before the death is noticed, through the back-off of 0.1 s, to a new server that does not listen yet.
    for pause_s in (0.0, 0.05, 0.1, 0.105, 0.11, 0.13):
        server = EmbeddedServer(folder)
        server.start()
        os.kill(server.pid or 0, signal.SIGKILL)
        time.sleep(pause_s)
        server.stop()
        assert running(folder) == []
    eventually(lambda: all(thread.name != "watch-valkey" for thread in threading.enumerate()), "no thread watches")


def test_the_callback_may_stop_the_server(folder: Path) -> None:
    stopped = threading.Event()

    def give_up(_: int) -> None:
        server.stop()
        stopped.set()

    server = EmbeddedServer(folder, on_restart=give_up)
    server.start()
    os.kill(server.pid or 0, signal.SIGKILL)
    assert stopped.wait(10)
    assert server.pid is None
    assert running(folder) == []


def test_a_directory_in_use_is_refused_naming_the_owner(folder: Path) -> None:
    with owner_of(folder) as (owner, pid, _):
        with pytest.raises(EmbeddedServerError, match=rf"pid {owner.pid}\b.*METABAN_DATA_DIR"):
            EmbeddedServer(folder).start()
        assert running(folder) == [pid]


def test_a_directory_in_use_is_refused_in_the_same_process(folder: Path) -> None:
    with EmbeddedServer(folder) as server:
        other = EmbeddedServer(folder)
        with pytest.raises(EmbeddedServerError, match=rf"pid {os.getpid()}\b"):
            other.start()
        other.stop()
        assert answers(server)


def test_the_server_does_not_inherit_the_lock(folder: Path) -> None:
    with EmbeddedServer(folder) as server:
        held = [os.readlink(fd) for fd in Path(f"/proc/{server.pid}/fd").iterdir()]
        assert str(folder / "run" / "owner.lock") not in held


def test_the_server_of_a_killed_owner_is_taken_over(folder: Path) -> None:
    with owner_of(folder) as (owner, leftover, _):
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
        assert running(folder) == [leftover]
        with EmbeddedServer(folder) as server:
            assert call(server, "GET", "written by") == "the owner"
            assert server.pid != leftover
            assert running(folder) == [server.pid]
    assert (folder / "valkey.log").read_text().count("bye bye") == 2, "the orphaned server was not shut down cleanly"


def test_an_orphaned_server_without_its_socket_is_found(folder: Path) -> None:
    with owner_of(folder) as (owner, leftover, _):
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
        shutil.rmtree(folder / "run")
        with EmbeddedServer(folder) as server:
            assert call(server, "GET", "written by") == "the owner"
            assert running(folder) == [server.pid] != [leftover]


def test_a_stale_socket_does_not_prevent_a_start(folder: Path) -> None:
    with owner_of(folder) as (owner, leftover, url):
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
        os.kill(leftover, signal.SIGKILL)
        until(lambda: not running(folder))
        assert Path(url.removeprefix("unix://")).is_socket()
        with EmbeddedServer(folder) as server:
            assert server.url == url
            assert call(server, "GET", "written by") == "the owner"


def test_a_long_path_puts_the_socket_elsewhere(folder: Path) -> None:
    long = folder / ("a long name, with signs # ? % \" ' é " * 4)
    with EmbeddedServer(long) as server:
        socket = socket_of(server)
        assert not socket.is_relative_to(folder)
        assert len(os.fsencode(socket)) <= SOCKET_PATH_MAX_BYTES
        assert mode(socket) == mode(socket.parent) == 0o700
        assert call(server, "INCR", "starts") == 1
    assert not socket.parent.exists()
    with EmbeddedServer(long) as server:
        assert call(server, "INCR", "starts") == 2


def test_an_orphaned_server_with_its_socket_elsewhere_is_taken_over(folder: Path) -> None:
    long = folder / ("x" * 120)
    with owner_of(long) as (owner, leftover, url):
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
        with EmbeddedServer(long) as server:
            assert call(server, "GET", "written by") == "the owner"
            assert running(long) == [server.pid] != [leftover]
            assert not Path(url.removeprefix("unix://")).parent.exists()


def test_a_copied_directory_leaves_the_originals_server_alone(folder: Path) -> None:
    original, copy = folder / ("x" * 120), folder / ("y" * 120)
    with EmbeddedServer(original) as server:
        call(server, "SET", "key", "value")
        shutil.copytree(original, copy)
        with EmbeddedServer(copy) as second:
            assert call(second, "GET", "key") == "value"
            assert second.url != server.url
        assert answers(server)


def test_a_path_with_signs_is_quoted_in_the_url_and_the_configuration(folder: Path) -> None:
    with EmbeddedServer(folder / 'a "#? %41\n') as server:
        assert call(server, "PING")


def test_a_file_in_place_of_the_directory_is_explained(folder: Path) -> None:
    folder.write_text("not a directory")
    with pytest.raises(EmbeddedServerError, match=re.escape(str(folder)) + r".*METABAN_DATA_DIR"):
        EmbeddedServer(folder).start()


def test_damaged_data_is_explained_and_the_advice_works(folder: Path) -> None:
    server = EmbeddedServer(folder)
    with server, driver.Redis.from_url(server.url) as client:
        for number in range(200):
            client.set(f"key {number}", "value")
    (file,) = (folder / "valkey" / "appendonlydir").glob("*.incr.aof")
    content = file.read_bytes()
    file.write_bytes(content[:5000] + b"\xff" * 200 + content[5200:])
    with pytest.raises(EmbeddedServerError, match="Bad file format reading the append only file") as raised:
        server.start()
    assert str(folder / "valkey.log") in str(raised.value)
    assert "put a backup in its place" in str(raised.value)
    assert running(folder) == []

    (command,) = re.findall(r"bash -c .*", str(raised.value))
    repair = command.replace("NAME.incr.aof", file.name)
    subprocess.run(["bash", "-c", repair], input=b"y\n", check=True, stdout=subprocess.DEVNULL)
    with server:
        assert 0 < call(server, "DBSIZE") < 200


@pytest.mark.parametrize("damage", [lambda base: base.write_bytes(b"VALKEY080" + b"\xff" * 80), Path.unlink])
def test_a_damaged_or_missing_base_file_is_explained(folder: Path, damage: Callable[[Path], None]) -> None:
    server = EmbeddedServer(folder)
    with server:
        call(server, "SET", "key", "value")
    (base,) = (folder / "valkey" / "appendonlydir").glob("*.base.rdb")
    damage(base)
    with pytest.raises(EmbeddedServerError, match="put a backup in its place"):
        server.start()


def test_a_failed_start_leaves_no_lock_and_no_process(folder: Path) -> None:
    (folder / "valkey" / "appendonlydir").mkdir(parents=True)
    manifest = folder / "valkey" / "appendonlydir" / "appendonly.aof.manifest"
    manifest.write_text("nonsense\n")
    with pytest.raises(EmbeddedServerError, match="damaged"):
        EmbeddedServer(folder).start()
    manifest.unlink()
    with EmbeddedServer(folder) as server:
        assert answers(server)


def test_a_stop_from_another_thread_ends_a_start_that_waits(folder: Path) -> None:
    server = EmbeddedServer(folder)
    with server:
        # Enough data that the start below is stopped while loading.
        call(server, "EVAL", "for i = 1, 150000 do redis.call('RPUSH', 'list' .. i, i) end", "0")
    errors: list[EmbeddedServerError] = []

    def start() -> None:
        try:
            server.start()
        except EmbeddedServerError as error:
            errors.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    until(lambda: server.pid is not None)
    server.stop()
    thread.join(20)
    assert not thread.is_alive()
    assert [str(error) for error in errors] == ["the embedded Valkey was stopped while it was starting"]
    assert running(folder) == []


def test_servers_are_found_without_proc_too(folder: Path) -> None:
    if shutil.which("ps") is None:
        pytest.skip("needs ps")
    with EmbeddedServer(folder) as server:
        assert servers_by_command_line(folder / "valkey.conf") == [server.pid]
    assert servers_by_command_line(folder / "valkey.conf") == []
