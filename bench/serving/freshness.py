"""Delay from an accepted reward to its use in answers, idle and under load.

Starts a real service. Every event has its own decision. The reward is sent and acknowledged with 202, then sent again
with `?wait=applied`: the duplicate changes nothing and returns when the first one is served, so the time between both
responses is the delay 202 → served as a client sees it.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, final

import httpx
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from metaban.bench.core.report import Bar, Report
from metaban.bench.worlds.environments import SyntheticGroups
from metaban.service.process.local_deployment import Deployment

#: Under load, one event in this many is measured; the others are only sent.
WATCHED_EVERY: Final = 5

#: Limit of the p99.
P99_LIMIT_S: Final = 1.0

#: Parallel decisions during preparation.
PREPARING_AT_ONCE: Final = 16


@final
@dataclass(frozen=True, slots=True)
class FreshnessPlan:
    """Sizes of a run."""

    idle_events: int = 200
    load_events: int = 3_000
    load_rate: float = 100.0
    users: int = 200

    @classmethod
    def quick(cls) -> FreshnessPlan:
        """Sizes of a run of about half a minute."""
        return cls(idle_events=50, load_events=1_000, users=50)


def measure_freshness(plan: FreshnessPlan, seeds: Sequence[int], *, quick: bool, console: Console) -> Report:
    """Start a service for every seed, measure and stop it; the delays of all seeds are pooled."""
    idle: list[float] = []
    load: list[float] = []
    for seed in seeds:
        with tempfile.TemporaryDirectory(prefix="metaban-") as folder, Deployment(Path(folder)) as service:
            delays = asyncio.run(_measure(service.url, plan, seed, console))
        idle += delays[0]
        load += delays[1]
    at_idle, at_load = _summary(idle), _summary(load)
    bars = [
        Bar("freshness p99 at idle, seconds", at_idle["p99_s"], "<=", P99_LIMIT_S),
        Bar(f"freshness p99 at {plan.load_rate:g} events/s, seconds", at_load["p99_s"], "<=", P99_LIMIT_S),
    ]
    results = {"idle": at_idle, "load": at_load, "load_rate": plan.load_rate}
    return Report("freshness", {**asdict(plan), "seeds": list(seeds)}, results, bars, quick)


def print_freshness(report: Report, console: Console) -> None:
    """Print percentiles of the delay, then the bars."""
    table = Table("202 → served", "events", "p50 ms", "p99 ms", "max ms", box=None, pad_edge=False)
    for name, label in (("idle", "idle"), ("load", f"{report.results['load_rate']:g} events/s")):
        row = report.results[name]
        times = [f"{row[key] * 1_000:.1f}" for key in ("p50_s", "p99_s", "max_s")]
        table.add_row(label, str(row["events"]), *times)
    console.print(table)
    report.print_bars(console)


def plot_freshness(report: Report, path: Path) -> None:
    """Distributions of the delay, idle and under load."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    for name, label in (("idle", "idle"), ("load", f"{report.results['load_rate']:g} events/s")):
        delays = np.sort(report.results[name]["delays_s"]) * 1_000
        axes.step(delays, np.arange(1, len(delays) + 1) / len(delays), where="post", label=label)
    axes.set(xlabel="202 → served, ms", ylabel="share of rewards", xscale="log", title="Freshness")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


async def _measure(url: str, plan: FreshnessPlan, seed: int, console: Console) -> tuple[list[float], list[float]]:
    world = SyntheticGroups(seed=seed, users=plan.users)
    limits = httpx.Limits(max_connections=128)
    async with httpx.AsyncClient(base_url=url, timeout=30, limits=limits) as client:
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("deciding", total=plan.idle_events + plan.load_events)
            rewards = await _decide(client, world, plan.idle_events + plan.load_events, lambda: progress.advance(task))
            task = progress.add_task("at idle", total=plan.idle_events)
            idle = []
            for reward in rewards[: plan.idle_events]:
                idle.append(await _delay(client, reward))
                progress.advance(task)
            task = progress.add_task(f"at {plan.load_rate:g} events/s", total=plan.load_events)
            load = await _under_load(
                client, rewards[plan.idle_events :], plan.load_rate, lambda: progress.advance(task)
            )
    return idle, load


async def _decide(
    client: httpx.AsyncClient, world: SyntheticGroups, count: int, done: Callable[[], None]
) -> list[dict[str, Any]]:
    """Ask for all decisions in advance, so that only rewards are sent during the measurement."""
    rounds = [world.next_round() for _ in range(count)]
    gate = asyncio.Semaphore(PREPARING_AT_ONCE)

    async def decide(number: int) -> dict[str, Any]:
        asked = rounds[number]
        arms = [{"id": str(place), "features": row} for place, row in enumerate(asked.arms.tolist())]
        async with gate:
            answer = await client.post("/recommend", json={"user_id": asked.user_id, "arms": arms})
        answer.raise_for_status()
        done()
        chosen = answer.json()
        reward = world.reward(asked, int(chosen["items"][0]["arm_id"]))
        return {"decision_id": chosen["decision_id"], "reward": reward}

    first = await decide(0)
    return [first, *await asyncio.gather(*(decide(number) for number in range(1, count)))]


async def _delay(client: httpx.AsyncClient, reward: dict[str, Any]) -> float:
    """Seconds from the 202 to the reward being served."""
    (await client.post("/feedback", json=reward)).raise_for_status()
    acknowledged = time.perf_counter()
    answer = await client.post("/feedback", params={"wait": "applied"}, json=reward)
    answer.raise_for_status()
    if not answer.json()["applied"]:
        raise RuntimeError("a reward was not applied before the time limit of ?wait=applied")
    return time.perf_counter() - acknowledged


async def _under_load(
    client: httpx.AsyncClient, rewards: list[dict[str, Any]], rate: float, done: Callable[[], None]
) -> list[float]:
    """Send rewards at a fixed rate without waiting for responses, and measure some of them."""
    delays: list[float] = []

    async def send(reward: dict[str, Any], watched: bool) -> None:
        if watched:
            delays.append(await _delay(client, reward))
        else:
            (await client.post("/feedback", json=reward)).raise_for_status()
        done()

    start = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for number, reward in enumerate(rewards):
            await asyncio.sleep(max(0.0, start + number / rate - time.perf_counter()))
            tasks.create_task(send(reward, number % WATCHED_EVERY == 0))
    return delays


def _summary(delays: list[float]) -> dict[str, Any]:
    return {
        "events": len(delays),
        "p50_s": float(np.percentile(delays, 50)),
        "p99_s": float(np.percentile(delays, 99)),
        "max_s": max(delays),
        "delays_s": delays,
    }
