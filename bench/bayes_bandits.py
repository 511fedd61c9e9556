"""Thompson sampling against UCB, and whether what the learner foresees comes true."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from bench.bandit_trials import Contender, Played, Trial, Vector, goodness_of_fit, play_all
from bench.bayes_plan import BayesPlan
from bench.data import DataMissing
from bench.environments import build_environment
from bench.report import Bar
from models.calibration import BINS, HELD, NORMAL_REACH

ROUNDS, QUICK_ROUNDS = 10_000, 600
WORLDS: Final = ("movielens", "service")
THOMPSON: Final = Contender("thompson", "thompson")
SHIPPED: Final = Contender("ucb-floor, α = 0.3", "ucb-floor")
#: What Thompson sampling is held against: UCB as shipped, and without a floor at a few weights of the bonus.
UCBS: Final = (SHIPPED, *(Contender(f"ucb, α = {alpha:g}", "ucb", alpha) for alpha in (0.1, 0.3)))
#: The claims.
REGRET_LIMIT, FIT_LIMIT, ERROR_LIMIT = 1.05, 0.01, 0.05
COVERED_LEAST, COVERED_MOST = 0.85, 0.95


def measure_bandits(
    plan: BayesPlan, quick: bool, console: Console, worlds: Sequence[str] = WORLDS, rounds: int | None = None
) -> tuple[dict[str, Any], list[Bar]]:
    """Regret of Thompson sampling and of UCB, and whether logged propensities are the chances that choices had."""
    results, bars = _begun(quick, rounds), list[Bar]()
    for env in _there(worlds, plan, results, console):
        trials = [_trial(each, env, seed, plan, results) for each in (THOMPSON, *UCBS) for seed in plan.seeds]
        played = play_all(trials, console)
        by_label: dict[str, list[Played]] = {}
        for trial, one in zip(trials, played, strict=True):
            by_label.setdefault(trial.contender.label, []).append(one)
        found = results["worlds"][env] = _compared(by_label)
        note = ", quick" if quick else ""
        bars.append(Bar(f"{env}: regret of thompson / best UCB{note}", found["ratio"], "<=", REGRET_LIMIT))
        bars.append(Bar(f"{env}: p of logged propensities{note}", found["fit"]["thompson"], ">=", FIT_LIMIT))
    _print_bandits(results["worlds"], console)
    return results, bars


def _compared(by_label: Mapping[str, Sequence[Played]]) -> dict[str, Any]:
    settings = {each.label: each.settings() for each in (THOMPSON, *UCBS)}
    regrets = {label: [float(one.regret.sum()) for one in played] for label, played in by_label.items()}
    methods: dict[str, dict[str, Any]] = {
        label: {
            "settings": settings[label],
            "regret_mean": float(np.mean(values)),
            "regret_sd": float(np.std(values, ddof=1)) if len(values) > 1 else 0.0,
            "regrets": values,
        }
        for label, values in regrets.items()
    }
    best = min((each.label for each in UCBS), key=lambda label: float(methods[label]["regret_mean"]))
    fits = {}
    for contender in (THOMPSON, SHIPPED):
        played = by_label[contender.label]
        places, chances = np.concatenate([one.place for one in played]), np.concatenate([one.chances for one in played])
        # A propensity that was logged wrong is no chance that can be tested.
        sound = not any(one.mislogged for one in played)
        fits[contender.label] = goodness_of_fit(places, chances) if sound else 0.0
    ratio = methods[THOMPSON.label]["regret_mean"] / methods[best]["regret_mean"]
    return {"methods": methods, "best_ucb": best, "ratio": ratio, "fit": fits}


def measure_calibration(
    plan: BayesPlan, quick: bool, console: Console, worlds: Sequence[str] = WORLDS, rounds: int | None = None
) -> tuple[dict[str, Any], list[Bar]]:
    """Calibration of the learner as shipped: means and 90 % intervals noted at decisions, of chosen arms."""
    results, bars = _begun(quick, rounds), list[Bar]()
    for env in _there(worlds, plan, results, console):
        played = play_all([_trial(SHIPPED, env, seed, plan, results) for seed in plan.seeds], console)
        found = results["worlds"][env] = reliability(played)
        note = ", quick" if quick else ""
        for name, kind in (("equal width", "ece"), ("equal mass", "ece_equal_mass")):
            bars.append(Bar(f"{env}: ECE, bins of {name}{note}", found[kind], "<=", ERROR_LIMIT))
        bars.append(Bar(f"{env}: coverage of 90 % intervals{note}", found["coverage"], ">=", COVERED_LEAST))
        bars.append(Bar(f"{env}: coverage of 90 % intervals, most{note}", found["coverage"], "<=", COVERED_MOST))
    _print_calibration(results["worlds"], console)
    if plan.plot is not None and results["worlds"]:
        _plot(results["worlds"], plan.plot / "calibration.png")
    return results, bars


def reliability(played: Sequence[Played]) -> dict[str, Any]:
    """Over all rounds of all seeds; bins of equal mass are those of one seed after the other."""
    predicted = [np.clip(one.mean, 0, 1) for one in played]
    everything, rewards = np.concatenate(predicted), np.concatenate([one.reward for one in played])
    miss = np.abs(rewards - everything)
    width = np.minimum((everything * BINS).astype(np.int64), BINS - 1)
    mass = np.concatenate([_ranks(each) * BINS // len(each) for each in predicted])
    table = _table(width, everything, rewards)
    covered = [float((np.abs(one.reward - p) <= one.reach).mean()) for one, p in zip(played, predicted, strict=True)]
    deviations = np.concatenate([one.deviation for one in played])
    return {
        "samples": len(rewards),
        "reward": float(rewards.mean()),
        "ece": _ece(table),
        "ece_equal_mass": _ece(_table(mass, everything, rewards)),
        "mce": max(abs(row["predicted"] - row["reward"]) for row in table if row["samples"] >= 0.01 * len(rewards)),
        "coverage": float((miss <= np.concatenate([one.reach for one in played])).mean()),
        "coverages": covered,
        "wanted_coverage": HELD,
        "coverage_of_normal_intervals": float((miss <= NORMAL_REACH * deviations).mean()),
        "bins": table,
        "bins_equal_mass": _table(mass, everything, rewards),
    }


def _ranks(values: Vector) -> NDArray[np.int64]:
    """The place of each value among all, the least first."""
    ranks = np.empty(len(values), dtype=np.int64)
    ranks[np.argsort(values, kind="stable")] = np.arange(len(values))
    return ranks


def _table(bins: NDArray[np.int64], predicted: Vector, rewards: Vector) -> list[dict[str, Any]]:
    """What was predicted and what came, bin by bin."""
    rows = []
    for place in np.unique(bins).tolist():
        inside = bins == place
        rows.append(
            {
                "bin": place,
                "samples": int(inside.sum()),
                "predicted": float(predicted[inside].mean()),
                "reward": float(rewards[inside].mean()),
            }
        )
    return rows


def _ece(table: Sequence[Mapping[str, Any]]) -> float:
    total = sum(row["samples"] for row in table)
    return float(sum(row["samples"] * abs(row["predicted"] - row["reward"]) for row in table) / total)


def _begun(quick: bool, rounds: int | None) -> dict[str, Any]:
    return {"rounds": rounds or (QUICK_ROUNDS if quick else ROUNDS), "worlds": {}, "skipped": {}}


def _there(worlds: Sequence[str], plan: BayesPlan, results: dict[str, Any], console: Console) -> list[str]:
    """The worlds whose data is there; it is said which are skipped."""
    found = []
    for env in worlds:
        try:
            build_environment(env, seed=plan.seeds[0], data=plan.data)
        except DataMissing as missing:
            console.print(f"skipped {env}: {missing}", highlight=False, markup=False, soft_wrap=True)
            results["skipped"][env] = str(missing)
        else:
            found.append(env)
    return found


def _trial(contender: Contender, env: str, seed: int, plan: BayesPlan, results: Mapping[str, Any]) -> Trial:
    return Trial(contender, env, seed, results["rounds"], plan.data)


def _print_bandits(worlds: Mapping[str, Any], console: Console) -> None:
    for env, found in worlds.items():
        table = Table(f"{env}: policy", "regret", "p of propensities", box=None, pad_edge=False)
        methods = found["methods"]
        for label in sorted(methods, key=lambda label: methods[label]["regret_mean"]):
            row, fit = methods[label], found["fit"].get(label)
            regret = f"{row['regret_mean']:.0f} ± {row['regret_sd']:.0f}"
            table.add_row(label, regret, "" if fit is None else f"{fit:.3f}")
        console.print(table)


def _print_calibration(worlds: Mapping[str, Any], console: Console) -> None:
    heads = ("ECE", "equal mass", "MCE", "coverage", "of normal intervals")
    table = Table("world", *heads, box=None, pad_edge=False)
    for env, found in worlds.items():
        names = ("ece", "ece_equal_mass", "mce", "coverage", "coverage_of_normal_intervals")
        table.add_row(env, *[f"{found[name]:.4f}" for name in names])
    console.print(table)


def _plot(worlds: Mapping[str, Any], path: Path) -> None:
    """Mean reward against mean prediction, the larger the more samples."""
    from matplotlib.figure import Figure

    path.parent.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(5 * len(worlds), 4.6), layout="constrained")
    for axes, (env, found) in zip(np.atleast_1d(figure.subplots(1, len(worlds))), worlds.items(), strict=True):
        axes.plot([0, 1], [0, 1], color="grey", ls="--", label="as foreseen")
        for name, label in (("bins", "bins of equal width"), ("bins_equal_mass", "bins of equal mass")):
            rows = found[name]
            sizes = [400 * row["samples"] / found["samples"] + 8 for row in rows]
            shown = [row["predicted"] for row in rows], [row["reward"] for row in rows]
            axes.scatter(*shown, s=sizes, alpha=0.6, label=label)
        title = f"{env}: ECE {found['ece']:.3f}, {found['coverage']:.0%} in 90 % intervals"
        axes.set(title=title, xlabel="mean prediction", ylabel="mean reward", xlim=(0, 1), ylim=(0, 1))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=150)
