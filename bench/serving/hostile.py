"""Latency of good requests during attacks, and the memory that attacks take.

Starts a real service with keys. A good client asks for recommendations at a fixed, moderate rate, first without and
then during an attack from another process. Latency counts from the time a request was due, so a delayed request also
counts for those behind it.

Quiet and attacked turns alternate. Each attacked turn is compared with the quiet turn before it, and the median of
these ratios counts: a virtual machine that loses its processor for 100 ms decides about the 99th percentile of one turn
alone.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, final
from urllib.parse import urlsplit

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from metaban.bench.core.report import Bar, Report
from metaban.bench.serving.attacks import ATTACKS, Attacker
from metaban.bench.worlds.environments import SyntheticGroups
from metaban.service.http.auth import FreshKey
from metaban.service.process.local_deployment import Deployment

#: Limits: slow-down of good requests, and memory growth of the service.
RATIO_LIMIT: Final = 3.0
GROWTH_LIMIT_MIB: Final = 64.0

#: Time from the start of an attack to the measurement.
SWING_S: Final = 1.0
STOP_TIMEOUT_S: Final = 30.0


@final
@dataclass(frozen=True, slots=True)
class HostilePlan:
    """Sizes of a run."""

    attacks: tuple[str, ...] = tuple(ATTACKS)
    rate: float = 50.0
    #: Pairs of a quiet and an attacked turn.
    turns: int = 7
    turn_s: float = 4.0
    users: int = 50

    @classmethod
    def quick(cls) -> HostilePlan:
        """Sizes of a run under two minutes."""
        return cls(turns=2, turn_s=2.0)


def measure_hostile(plan: HostilePlan, *, quick: bool, console: Console) -> Report:
    """Start a service, run every attack, stop it."""
    key = FreshKey.generate()
    settings = {"METABAN_CLIENT_KEYS": key.digest}
    with tempfile.TemporaryDirectory(prefix="metaban-") as folder, Deployment(Path(folder), settings) as service:
        results = _measure(service, key.key, plan, console)
    bars = [
        Bar(f"median over turns of p99 during {name} / p99 before", row["ratio"], "<=", RATIO_LIMIT)
        for name, row in results["attacks"].items()
    ]
    bars.append(Bar("memory taken by all attacks, MiB", results["growth_mib"], "<=", GROWTH_LIMIT_MIB))
    unanswered = sum(row["failed"] for row in results["attacks"].values())
    bars.append(Bar("good requests that failed", unanswered, "<=", 0))
    return Report("hostile", asdict(plan), results, bars, quick)


def print_hostile(report: Report, console: Console) -> None:
    """Print one row an attack, then the bars."""
    table = Table("attack", "quiet p50", "p99 ms", "attack p50", "p99 ms", "ratio", "MiB", "answers", box=None)
    for name, row in report.results["attacks"].items():
        times = [f"{row[phase][key] * 1_000:.2f}" for phase in ("quiet", "attacked") for key in ("p50_s", "p99_s")]
        answers = ", ".join(f"{status} × {count}" for status, count in sorted(row["outcomes"].items()))
        table.add_row(name, *times, f"{row['ratio']:.2f}", f"{row['growth_mib']:.1f}", answers)
    console.print(table)
    report.print_bars(console)


@contextmanager
def under_attack(name: str, url: str, key: str) -> Iterator[dict[str, int]]:
    """Run an attack in another process; its outcomes are in the dictionary afterwards."""
    outcomes: dict[str, int] = {}
    attacker = subprocess.Popen(
        [sys.executable, "-P", "-m", Attacker.__module__, name, url],
        env={**os.environ, "METABAN_KEY": key},
        stdout=subprocess.PIPE,
        text=True,
    )
    if attacker.stdout is None or attacker.stdout.readline() != "ready\n":
        raise RuntimeError(f"the attack {name!r} did not start")
    try:
        yield outcomes
    finally:
        attacker.send_signal(signal.SIGTERM)
        said, _ = attacker.communicate(timeout=STOP_TIMEOUT_S)
        outcomes.update(json.loads(said or "{}"))


def peak_mib(pid: int) -> float:
    """Peak memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) / 1_024 for line in status.splitlines() if line.startswith("VmHWM"))


class GoodClient:
    """Asks at a fixed rate on one connection and records latencies and statuses."""

    def __init__(self, url: str, key: str, *, users: int) -> None:
        address = urlsplit(url)
        self._host, self._port = str(address.hostname), int(address.port or 80)
        self._key = key
        self._world = SyntheticGroups(seed=100, users=users)

    async def ask(self, seconds: float, rate: float) -> tuple[list[float], int]:
        """Seconds that each request took since it was due, and the number not answered with 200."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        times: list[float] = []
        failed = 0
        start = time.perf_counter()
        for number in range(round(seconds * rate)):
            request = self._request()
            due = start + number / rate
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            try:
                writer.write(request)
                headers = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                await reader.readexactly(int(headers.partition("content-length: ")[2].split("\r\n")[0]))
                failed += headers.split()[1] != "200"
            except (ConnectionError, asyncio.IncompleteReadError):
                failed += 1
                reader, writer = await asyncio.open_connection(self._host, self._port)
            times.append(time.perf_counter() - due)
        writer.close()
        return times, failed

    def _request(self) -> bytes:
        asked = self._world.next_round()
        arms = [{"id": str(place), "features": row} for place, row in enumerate(asked.arms.tolist())]
        body = json.dumps({"user_id": asked.user_id, "arms": arms}).encode()
        headers = (
            f"POST /recommend HTTP/1.1\r\nHost: {self._host}\r\nX-API-Key: {self._key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return headers.encode() + body


def _measure(service: Deployment, key: str, plan: HostilePlan, console: Console) -> dict[str, Any]:
    client = GoodClient(service.url, key, users=plan.users)
    pid = service.process.pid
    asyncio.run(client.ask(plan.turn_s, plan.rate))  # warm-up: loading and compilation
    begin = peak_mib(pid)
    rows: dict[str, Any] = {}
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("attacks", total=len(plan.attacks))
        for name in plan.attacks:
            progress.update(task, description=name)
            rows[name] = _attack_in_turns(service, client, name, key, plan)
            progress.advance(task)
    return {"attacks": rows, "growth_mib": peak_mib(pid) - begin}


def _attack_in_turns(service: Deployment, client: GoodClient, name: str, key: str, plan: HostilePlan) -> dict[str, Any]:
    quiet: list[list[float]] = []
    attacked: list[list[float]] = []
    failed = 0
    outcomes: Counter[str] = Counter()
    before = peak_mib(service.process.pid)
    for _ in range(plan.turns):
        times, wrong = asyncio.run(client.ask(plan.turn_s, plan.rate))
        quiet.append(times)
        with under_attack(name, service.url, key) as became:
            time.sleep(SWING_S)
            times, wrong_then = asyncio.run(client.ask(plan.turn_s, plan.rate))
        attacked.append(times)
        failed += wrong + wrong_then
        outcomes.update(became)
    return {
        "quiet": _summary(quiet),
        "attacked": _summary(attacked),
        "ratio": median_ratio(quiet, attacked),
        "failed": failed,
        "growth_mib": peak_mib(service.process.pid) - before,
        "outcomes": dict(outcomes),
        "unexpected": sorted(set(outcomes) - ATTACKS[name][1]),
    }


def median_ratio(quiet: list[list[float]], attacked: list[list[float]]) -> float:
    """Median over pairs of turns of the ratio of their 99th percentiles."""
    return float(np.median([np.percentile(b, 99) / np.percentile(a, 99) for a, b in zip(quiet, attacked, strict=True)]))


def _summary(turns: list[list[float]]) -> dict[str, Any]:
    times = [seconds for turn in turns for seconds in turn]
    return {
        "requests": len(times),
        "p50_s": float(np.percentile(times, 50)),
        "p99_s": float(np.percentile(times, 99)),
        "max_s": max(times),
        "times_s": turns,
    }
