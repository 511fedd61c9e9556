"""The command line."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis
from typer.testing import CliRunner

from metaban.bench.worlds.data import FOLDER_VARIABLE
from metaban.service.cli import doctor
from metaban.service.cli.main import app
from metaban.service.http.auth import digest_of
from metaban.service.process.server import ServeError, bind, store_name
from metaban.service.settings.environment import Settings, load_settings, variable_of
from metaban.service.settings.variables import OTHER_VARIABLES, unknown_variables
from metaban.store.valkey import locate
from metaban.store.valkey.server import EmbeddedServer
from tests.service.apps import running_app
from tests.valkeys import DURABLE, WITHOUT_WAITAOF, Valkey, eventually, running, running_pair

runner = CliRunner()


def text_of(*words: str, code: int = 0) -> str:
    result = runner.invoke(app, words, env={"COLUMNS": "160", "NO_COLOR": "1", "TERM": "dumb"})
    assert result.exit_code == code, result.output
    return result.output


def test_help() -> None:
    text = text_of("--help")
    for word in ("serve", "worker", "doctor", "key", "bench", "Examples", "METABAN_DATA_DIR"):
        assert word in text
    assert "--no-worker" in text_of("serve", "--help")
    assert re.fullmatch(r"metaban \d+\.\d+\.\d+\n", text_of("--version"))


def test_help_loads_no_heavy_packages() -> None:
    code = "import sys, metaban.service.cli.main; sys.exit('torch' in sys.modules or 'fastapi' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_key() -> None:
    words = dict(line.split() for line in text_of("key").splitlines()[:2])
    assert digest_of(words["key"]) == words["digest"]
    assert text_of("key") != text_of("key")


def test_invalid_settings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METABAN_EPSILON", "7")
    for command in ("serve", "worker", "doctor"):
        assert "METABAN_EPSILON: Input should be less than or equal to 1" in text_of(command, code=2)


def test_settings_hide_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://:secret@host")
    text = text_of("settings")
    assert "METABAN_REWARD_WINDOW_S" in text
    assert "secret@" not in text


def test_settings_include_the_options_of_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METABAN_PORT", "8123")
    values = {line.split()[0]: line.split()[1] for line in text_of("settings").splitlines()}
    assert (values["METABAN_HOST"], values["METABAN_PORT"]) == ("127.0.0.1", "8123")


def test_unset_settings_and_those_of_the_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {line.split()[0]: line for line in text_of("settings").splitlines()}
    for variable in ("METABAN_OTLP_ENDPOINT", "METABAN_REWARD_WAIT_S"):
        assert re.match(rf"{variable} +\(unset\) ", values[variable])
    assert re.match(r"METABAN_DEFAULT_REWARD +0\.0 ", values["METABAN_DEFAULT_REWARD"])
    monkeypatch.setenv("METABAN_DEFAULT_REWARD", "off")
    assert re.search(r"METABAN_DEFAULT_REWARD +off ", text_of("settings"))
    for variable in ("METABAN_ALPHA", "METABAN_BONUS"):
        assert re.match(rf"{variable} +\(the preset's\) ", values[variable])


def test_lists_are_shown_as_they_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown() -> dict[str, str]:
        return dict(line.split()[:2] for line in text_of("settings").splitlines() if line.startswith("METABAN_"))

    empty = {"METABAN_ALLOWED_HOSTS": "[]", "METABAN_CORS_ORIGINS": "[]", "METABAN_BASELINE": "[]"}
    some = {
        "METABAN_ALLOWED_HOSTS": "a.example,b.example",
        "METABAN_BASELINE": '["tea"]',
        "METABAN_LEARNER": '{"bins":3}',
    }
    assert empty.items() <= shown().items()
    for given in (some, empty):
        for variable, value in given.items():
            monkeypatch.setenv(variable, value)
        assert given.items() <= shown().items()


def test_address_of_serve_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("METABAN_PORT", str(port))
        monkeypatch.setenv("METABAN_HOST", "localhost")
        assert f"port {port} on localhost is in use" in text_of("serve", code=1)
        assert f"port {port} on 127.0.0.1 is in use" in text_of("serve", "--host", "127.0.0.1", code=1)
    assert unknown_variables(os.environ) == []


@pytest.mark.parametrize(
    ("variable", "choices"),
    [
        ("METABAN_PRESET", "default, paper, pooled"),
        ("METABAN_REPEATED_REWARDS", "first, last, sum"),
        ("METABAN_DEVICE", "auto, cpu, cuda"),
        ("METABAN_POLICY", "ucb, ucb-floor, squarecb, thompson"),
        ("METABAN_BONUS", "gradient, posterior"),
    ],
)
def test_settings_list_their_choices(variable: str, choices: str) -> None:
    (line,) = (line for line in text_of("settings").splitlines() if line.startswith(f"{variable} "))
    assert f"One of {choices}." in line


def test_variable_names_are_not_truncated_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    said = runner.invoke(app, ["settings"], env={"COLUMNS": "80", "NO_COLOR": "1", "TERM": "xterm"}).output
    shown = {line.split()[0] for line in said.splitlines() if line.startswith(("METABAN_", "REDIS_URL"))}
    assert shown == {variable_of(name) for name in Settings.model_fields} | {"METABAN_HOST", "METABAN_PORT"}


def test_unknown_variables_are_reported() -> None:
    assert {FOLDER_VARIABLE, "METABAN_KEY"} <= OTHER_VARIABLES
    assert unknown_variables({"METABAN_EPSILO": "1", "metaban_epsilon": "1", "METABAN_KEY": "k", "PATH": "/"}) == [
        "METABAN_EPSILO"
    ]


def test_a_worker_needs_a_store() -> None:
    assert "REDIS_URL" in text_of("worker", code=1)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])  # noqa: S104
def test_without_keys_only_loopback_is_allowed(host: str) -> None:
    with pytest.raises(ServeError, match="metaban key"):
        bind(Settings(), host, 0)
    bind(Settings(client_keys={digest_of("k")}), "0.0.0.0", 0).close()  # noqa: S104
    assert "metaban key" in text_of("serve", "--host", host, code=1)


def test_used_port_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ServeError, match=f"port {port} on 127.0.0.1 is in use"):
            bind(Settings(), "127.0.0.1", port)
        # Two processes with the same port: the second fails before it starts to listen.
        with bind(Settings(), "127.0.0.1", 0) as first, pytest.raises(ServeError, match="in use"):
            bind(Settings(), "127.0.0.1", first.getsockname()[1])


def test_foreign_address_is_refused() -> None:
    with pytest.raises(ServeError, match="not an address of this machine"):
        bind(Settings(client_keys={digest_of("k")}), "192.0.2.1", 0)
    with pytest.raises(ServeError, match="cannot find the address"):
        bind(Settings(), "no-such-host.invalid", 0)


def test_missing_store_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", f"unix://{tmp_path}/nothing.sock")
    assert "the store does not answer" in text_of("serve", "--port", "0", code=1)


def test_store_password_is_not_shown() -> None:
    assert store_name(Settings(redis_url="redis://me:secret@host:1/2")) == "redis://host:1/2"
    assert store_name(Settings(redis_url="unix://me:secret@/run/x.sock")) == "unix:///run/x.sock"
    many = Settings(redis_url="redis+cluster://me:secret@one:1,[::2]:2/0?password=secret")
    assert store_name(many) == "redis+cluster://one:1,[::2]:2/0"


def levels(checks: list[doctor.Check]) -> dict[str, str]:
    return {check.name: check.level for check in checks}


def test_doctor_passes(tmp_path: Path, valkey_url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    found = levels(doctor.collect(Settings(data_dir=tmp_path / "new", device="cpu"), port=port))
    assert "fail" not in found.values()
    assert {"python", "packages", "device", "store", "clock", "data directory", "disk", "port", "memory"} <= set(found)
    assert not (tmp_path / "new").exists()
    # The Valkey of the tests writes nothing to disk, which is a warning.
    assert levels(doctor.collect(Settings(redis_url=valkey_url), port=port))["store"] == "warn"


def test_doctor_asks_the_valkey_of_a_running_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(data_dir=tmp_path)
    with EmbeddedServer(tmp_path) as server:
        assert server.pid is not None
        monkeypatch.setattr(locate, "PING_TIMEOUT_S", 30.0)
        assert levels(doctor.collect(settings, port=0))["store"] == "ok"
        monkeypatch.setattr(locate, "PING_TIMEOUT_S", 0.2)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            [row] = [check for check in doctor.collect(settings, port=0) if check.name == "store"]
        finally:
            os.kill(server.pid, signal.SIGCONT)
    assert (row.level, str(os.getpid()) in row.detail, "valkey.log" in row.advice) == ("fail", True, True)


def test_doctor_counts_replicas(tmp_path: Path) -> None:
    with running_pair(tmp_path) as (primary, replica):
        settings = Settings(redis_url=primary.url, durability="replicated", data_dir=tmp_path)
        assert levels(doctor.collect(settings, port=0))["replicas"] == "ok"
        replica.kill()
        eventually(lambda: b"connected_slaves:0" in primary.ask("INFO", "replication"), "the replica is gone")
        assert levels(doctor.collect(settings, port=0))["replicas"] == "warn"
        without = Settings(redis_url=primary.url, durability="always", data_dir=tmp_path)
        assert "replicas" not in levels(doctor.collect(without, port=0))


def test_doctor_finds_a_server_that_cannot_confirm_rewards(tmp_path: Path) -> None:
    old = Valkey(tmp_path / "store", *DURABLE, *WITHOUT_WAITAOF)
    with running(old):
        settings = Settings(redis_url=old.url, durability="replicated", data_dir=tmp_path)
        [row] = [check for check in doctor.collect(settings, port=0) if check.name == "replicas"]
        assert (row.level, "WAITAOF" in row.detail, "Redis 7.2" in row.advice) == ("fail", True, True)
        without = Settings(redis_url=old.url, durability="always", data_dir=tmp_path)
        assert "fail" not in levels(doctor.collect(without, port=0)).values()


def worker_log(then: Callable[[subprocess.Popen[str]], object]) -> list[dict[str, Any]]:
    """The log of a worker. `then` is called when it is ready, and must make it end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "metaban.service.cli.main", "worker"],
        env={**os.environ, "METABAN_LOG_FORMAT": "json"},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    lines: list[dict[str, Any]] = []
    while not lines or lines[-1]["event"] != "worker_ready":
        lines.append(json.loads(process.stderr.readline()))
    then(process)
    _, rest = process.communicate(timeout=60)
    return [*lines, *map(json.loads, rest.splitlines())]


async def test_a_worker_logs_why_it_ends(redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_app(valkey_url):
        pass
    monkeypatch.setenv("REDIS_URL", valkey_url)
    loop = asyncio.get_running_loop()

    def empty(process: subprocess.Popen[str]) -> None:
        asyncio.run_coroutine_threadsafe(redis.flushall(), loop).result(30)

    lines = await asyncio.to_thread(worker_log, empty)
    assert (lines[-1]["event"], lines[-1]["level"]) == ("store_reset", "error")
    assert "worker ends" in lines[-1]["effect"]


async def test_doctor_and_worker_tell_what_differs_from_the_record(
    redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_app(valkey_url, reward_max=5.0):
        pass
    monkeypatch.setenv("REDIS_URL", valkey_url)
    assert levels(await asyncio.to_thread(doctor.collect, load_settings(), port=0))["namespaces"] == "ok"
    monkeypatch.setenv("METABAN_REWARD_MAX", "2")
    checks = {check.name: check for check in await asyncio.to_thread(doctor.collect, load_settings(), port=0)}
    assert checks["namespaces"].level == "warn"
    assert checks["namespaces"].detail == "default: METABAN_REWARD_MAX is 2.0, the record has 5.0"
    lines = await asyncio.to_thread(worker_log, subprocess.Popen.terminate)
    (told,) = (line for line in lines if line["event"] == "settings_differ")
    fields = {name: told[name] for name in ("namespace", "variable", "record", "environment")}
    assert fields == {"namespace": "default", "variable": "METABAN_REWARD_MAX", "record": 5.0, "environment": 2.0}


def test_doctor_finds_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METABAN_TYPO", "1")
    (tmp_path / "file").touch()
    settings = Settings(redis_url=f"unix://{tmp_path}/nothing.sock", data_dir=tmp_path / "file" / "data")
    with socket.create_server(("127.0.0.1", 0)) as other:
        checks = doctor.collect(settings, port=other.getsockname()[1])
    found = levels(checks)
    assert {name: found[name] for name in ("store", "data directory", "port", "settings")} == {
        "store": "fail",
        "data directory": "fail",
        "port": "fail",
        "settings": "warn",
    }
    assert all(check.advice for check in checks if check.level != "ok")
    (taken,) = (check for check in checks if check.name == "port")
    assert "--port" in taken.advice
    assert "--port" not in taken.detail


def test_doctor_exits_with_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REDIS_URL", f"unix://{tmp_path}/nothing.sock")
    assert "fail" in text_of("doctor", "--port", "0", code=1)


def test_serve_stops_everything_it_started(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "METABAN_DATA_DIR": str(tmp_path / "data"),
        "METABAN_LOG_FORMAT": "json",
        "METABAN_EPSILO": "0.7531",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "metaban.service.cli.main", "serve", "--port", "0"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    said: dict[str, str] = {}
    while "worker" not in said:
        name, _, value = process.stdout.readline().strip().partition(" ")
        said[name] = value.strip()
    assert said["data"] == str((tmp_path / "data").resolve())
    assert said["namespace"] == "default"
    assert said["docs"] == said["service"] + "/docs"
    # The socket already listens: the request waits until the service is ready.
    assert httpx.get(said["service"] + "/health/ready", timeout=30).json()["status"] == "ready"
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=30)
    assert process.returncode == 0, log
    assert "Traceback" not in log
    # Logged once, although the worker has the same environment, and without the value, which may be a secret.
    assert log.count("METABAN_EPSILO") == 1
    assert "0.7531" not in log
    worker = int(said["worker"].removeprefix("process "))
    deadline = time.monotonic() + 30
    while Path(f"/proc/{worker}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not (tmp_path / "data" / "run" / "valkey.sock").exists()
