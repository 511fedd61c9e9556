"""The parts `profiles` and `movielens` of `metaban bench fusion`: first rounds of new users."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table

from metaban.bench.core.report import Bar
from metaban.bench.warm_starts.newcomers import (
    CONTEXT,
    COPIED,
    FUSION,
    NEAREST,
    PRIOR,
    RANDOM,
    RIDGE,
    UNGUARDED,
    Contest,
    ContestResult,
    compete,
)
from metaban.bench.warm_starts.plan import FusionBenchPlan
from metaban.bench.worlds.data import DataMissing
from metaban.bench.worlds.profiles import ProfileWorld, RatedProfiles

#: Limits of fusion's regret over that of other starts.
PROFILE_LIMITS: Final = {PRIOR: 0.7, RANDOM: 0.5, COPIED: 1.0, NEAREST: 1.0, RIDGE: 1.03, CONTEXT: 1.03}
MOVIELENS_LIMITS: Final = {PRIOR: 1.01}


def measure_profiles(plan: FusionBenchPlan, quick: bool, console: Console) -> tuple[dict[str, Any], list[Bar]]:
    """First rounds of new users where profiles predict taste."""
    outcomes = []
    for seed in plan.seeds:
        world = ProfileWorld(seed=seed, users=plan.teachers + plan.newcomers)
        console.print(f"profiles, seed {seed}", highlight=False)
        contest = Contest(world, plan.teachers, plan.newcomers, seed, plan.source_rounds, plan.first_rounds)
        outcomes.append(compete(contest, console))
    return _told("profiles", summary(outcomes), PROFILE_LIMITS, plan, quick, console)


def measure_movielens(plan: FusionBenchPlan, quick: bool, console: Console) -> tuple[dict[str, Any], list[Bar]]:
    """First rounds of MovieLens users with age, gender and occupation."""
    outcomes = []
    for seed in plan.seeds:
        try:
            world = RatedProfiles(seed=seed, data=plan.data)
        except DataMissing as missing:
            console.print(f"skipped movielens: {missing}", highlight=False, markup=False, soft_wrap=True)
            return {"skipped": str(missing)}, []
        console.print(f"movielens, seed {seed}", highlight=False)
        teachers = plan.raters or world.users // 2
        newcomers = plan.raters or world.users - teachers
        rounds = plan.source_rounds, plan.first_rounds
        contest = Contest(world, teachers, newcomers, seed, *rounds, methods=(PRIOR, FUSION, UNGUARDED))
        outcomes.append(compete(contest, console))
    return _told("movielens", summary(outcomes), MOVIELENS_LIMITS, plan, quick, console)


def _told(
    part: str,
    results: dict[str, Any],
    limits: Mapping[str, float],
    plan: FusionBenchPlan,
    quick: bool,
    console: Console,
) -> tuple[dict[str, Any], list[Bar]]:
    _print(part, results, console)
    if plan.plot is not None:
        _plot(part, results, plan.plot)
    return results, start_bars(part, results, limits, quick=quick)


def summary(outcomes: Sequence[ContestResult]) -> dict[str, Any]:
    """Regret of new users' first rounds over seeds, by method and by round, and the guards' reports."""
    methods: dict[str, Any] = {}
    for name in outcomes[0].regret:
        rounds = np.array([outcome.regret[name] for outcome in outcomes])  # [seeds, rounds]
        totals = rounds.sum(1)
        methods[name] = {
            "mean": float(totals.mean()),
            "sd": float(totals.std(ddof=1)) if len(totals) > 1 else 0.0,
            "values": totals.tolist(),
            "rounds": rounds.mean(0).tolist(),
        }
    guards = {name: [outcome.guards[name].to_json() for outcome in outcomes] for name in outcomes[0].guards}
    return {"methods": methods, "guards": guards}


def start_bars(part: str, results: Mapping[str, Any], limits: Mapping[str, float], *, quick: bool) -> list[Bar]:
    """Bars of fusion's regret over others'."""
    methods, note = results["methods"], ", quick" if quick else ""
    return [
        Bar(f"{part}: regret of fusion / {name}{note}", methods[FUSION]["mean"] / methods[name]["mean"], "<=", limit)
        for name, limit in limits.items()
    ]


def _print(part: str, results: Mapping[str, Any], console: Console) -> None:
    """Print a table, least regret first, and the guards' verdicts."""
    methods = results["methods"]
    table = Table(f"{part}: regret of {len(methods[FUSION]['rounds'])} rounds", "mean", "sd", box=None, pad_edge=False)
    for name in sorted(methods, key=lambda name: methods[name]["mean"]):
        table.add_row(name, f"{methods[name]['mean']:.3f}", f"{methods[name]['sd']:.3f}")
    console.print(table)
    for report in results["guards"].get(FUSION, []):
        console.print(
            f"guard: {report['verdict']}, blend {report['blend']:.2f}, trust {report['trust']:.2f}; gain "
            f"{report['gain']:.3f} ± {report['gain_error']:.3f} nats per user over {report['held_out']} held out",
            highlight=False,
        )


def _plot(part: str, results: Mapping[str, Any], folder: Path) -> None:
    """Cumulative regret by round and method."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    methods = results["methods"]
    for name in sorted(methods, key=lambda name: -methods[name]["mean"]):
        summed = np.cumsum(methods[name]["rounds"])
        axes.plot(range(1, len(summed) + 1), summed, label=name, lw=2.4 if name == FUSION else 1.2)
    axes.set(xlabel="round of a new user", ylabel="regret so far", title=part)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(folder / f"fusion-{part}.png", dpi=150)
