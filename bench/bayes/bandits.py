"""Regret of Thompson sampling against UCB, a test of logged propensities, and calibration of the learner's predictions.

A trial runs the default learner under one policy in one environment and records its predictions and their outcomes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.stats import chi2

from metaban.bench.bayes.plan import BayesPlan
from metaban.bench.core.local_loop import LocalLoop
from metaban.bench.core.parallel import run_parallel
from metaban.bench.core.report import Bar
from metaban.bench.regret.methods import layout_of, shipped_settings
from metaban.bench.worlds.data import DataMissing
from metaban.bench.worlds.environments import build_environment
from metaban.models.default.calibration import BINS, HELD, NORMAL_REACH
from metaban.models.default.notes import Notes
from metaban.models.policies import Policy, build_policy
from metaban.models.settings import named_settings

Vector = NDArray[np.float64]

Matrix = NDArray[np.float64]

ROUNDS: Final = 10_000
QUICK_ROUNDS: Final = 600
WORLDS: Final = ("movielens", "service")

#: Limits of the claims.
REGRET_LIMIT: Final = 1.05
FIT_LIMIT: Final = 0.01
ERROR_LIMIT: Final = 0.05
COVERED_LEAST: Final = 0.85
COVERED_MOST: Final = 0.95

#: With less total variance than this, choices are certain and there is nothing to test.
SURE: Final = 1e-12


@final
@dataclass(frozen=True, slots=True)
class PolicyContender:
    """A policy of the default learner, with this bonus weight α or the shipped one (None)."""

    label: str
    policy: str
    alpha: float | None = None

    def settings(self) -> dict[str, Any]:
        """All settings of the policy."""
        shipped = shipped_settings()
        learner = named_settings("default").to_json()
        alpha = learner["alpha"] if self.alpha is None else self.alpha
        found: dict[str, Any] = {"policy": self.policy, "alpha": alpha}
        if self.policy == "thompson":
            found |= {"draws": shipped.thompson_draws, "scale": shipped.thompson_scale}
        return {**found, "epsilon": shipped.epsilon} if self.policy == "ucb-floor" else found


THOMPSON: Final = PolicyContender("thompson", "thompson")
SHIPPED: Final = PolicyContender("ucb-floor, α = 0.3", "ucb-floor")

#: Rivals of Thompson sampling: UCB as shipped, and without a floor at several bonus weights.
UCBS: Final = (SHIPPED, *(PolicyContender(f"ucb, α = {alpha:g}", "ucb", alpha) for alpha in (0.1, 0.3)))


@final
@dataclass(frozen=True, slots=True)
class PolicyTrial:
    """One contender in one environment."""

    contender: PolicyContender
    env: str
    seed: int
    rounds: int
    data: Path | None = None


@final
@dataclass(frozen=True, slots=True)
class PolicyRecord:
    """What a trial recorded, by round.

    The chosen arm's place and the chances of all arms are sorted by falling chance, since arms differ in every round.
    """

    regret: Vector  # [n]
    place: NDArray[np.int64]  # [n]
    chances: Matrix  # [n, k]
    mean: Vector  # [n] predicted mean reward of the chosen arm, logged at the decision
    deviation: Vector  # [n]
    reach: Vector  # [n]
    reward: Vector  # [n]
    #: Rounds whose logged propensity differs from the chance that the policy gave the arm.
    mislogged: int


@final
class Recording(Policy):
    """Wraps a policy and keeps its latest chances."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.name, self.draws = policy.name, policy.draws
        self.latest: Vector = np.empty(0)

    def probabilities(self, mean: Vector, bonus: Vector, drawn: Matrix | None = None) -> Vector:
        self.latest = self._policy.probabilities(mean, bonus, drawn)
        return self.latest


def play(trial: PolicyTrial) -> PolicyRecord:
    """Decide and learn, round by round."""
    shipped, contender = shipped_settings(), trial.contender
    world = build_environment(trial.env, seed=trial.seed, data=trial.data)
    changes = {} if contender.alpha is None else {"alpha": contender.alpha}
    policy = Recording(
        build_policy(
            contender.policy,
            epsilon=shipped.epsilon,
            squarecb_gamma=shipped.squarecb_gamma,
            thompson_draws=shipped.thompson_draws,
            thompson_scale=shipped.thompson_scale,
        )
    )
    loop = LocalLoop(
        named_settings("default", seed=trial.seed, **changes),
        policy,
        inputs=layout_of(world),
        seed=trial.seed,
        samples_kept=shipped.samples_kept,
        pool_max=shipped.candidate_pool,
    )
    regret, reward = np.empty((2, trial.rounds))
    notes, places, chances = np.empty((trial.rounds, 3)), np.empty(trial.rounds, dtype=np.int64), []
    mislogged = 0
    for number in range(trial.rounds):
        asked = world.next_round()
        context = None if asked.context is None else asked.context.tolist()
        choice = loop.choose(asked.user_id, asked.arms.tolist(), str(number), context)
        regret[number], reward[number] = asked.regret(choice.arm), world.reward(asked, choice.arm)
        noted = Notes(choice.phi)
        notes[number] = noted.mean, noted.deviation, noted.reach
        order = np.argsort(-policy.latest, kind="stable")
        places[number] = int(np.flatnonzero(order == choice.arm)[0])
        mislogged += choice.propensity != policy.latest[choice.arm]
        chances.append(policy.latest[order])
        loop.learn(asked.user_id, choice, float(reward[number]))
    mean, deviation, reach = notes.T
    return PolicyRecord(regret, places, np.stack(chances), mean, deviation, reach * deviation, reward, mislogged)


def play_all(trials: Sequence[PolicyTrial], console: Console) -> list[PolicyRecord]:
    """Run all trials, one core each; results in the order of trials."""
    return [_printed(trial, played, console) for trial, played in zip(trials, run_parallel(play, trials), strict=True)]


def _printed(trial: PolicyTrial, played: PolicyRecord, console: Console) -> PolicyRecord:
    console.print(
        f"{trial.env}, {trial.contender.label}, seed {trial.seed}: regret {played.regret.sum():.0f}", highlight=False
    )
    return played


def measure_bandits(
    plan: BayesPlan, quick: bool, console: Console, worlds: Sequence[str] = WORLDS, rounds: int | None = None
) -> tuple[dict[str, Any], list[Bar]]:
    """Regret of Thompson sampling and UCB, and a test of the logged propensities."""
    results, bars = _begun(quick, rounds), list[Bar]()
    for env in _available(worlds, plan, results, console):
        trials = [_trial(each, env, seed, plan, results) for each in (THOMPSON, *UCBS) for seed in plan.seeds]
        played = play_all(trials, console)
        by_label: dict[str, list[PolicyRecord]] = {}
        for trial, one in zip(trials, played, strict=True):
            by_label.setdefault(trial.contender.label, []).append(one)
        found = results["worlds"][env] = _compared(by_label)
        note = ", quick" if quick else ""
        bars.append(Bar(f"{env}: regret of thompson / best UCB{note}", found["ratio"], "<=", REGRET_LIMIT))
        bars.append(Bar(f"{env}: p of logged propensities{note}", found["fit"]["thompson"], ">=", FIT_LIMIT))
    _print_bandits(results["worlds"], console)
    return results, bars


def _compared(by_label: Mapping[str, Sequence[PolicyRecord]]) -> dict[str, Any]:
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
        # A wrongly logged propensity is not a chance that can be tested.
        sound = not any(one.mislogged for one in played)
        fits[contender.label] = goodness_of_fit(places, chances) if sound else 0.0
    ratio = methods[THOMPSON.label]["regret_mean"] / methods[best]["regret_mean"]
    return {"methods": methods, "best_ucb": best, "ratio": ratio, "fit": fits}


def goodness_of_fit(places: NDArray[np.int64], chances: Matrix) -> float:
    """p-value of the hypothesis that places [n] were drawn with these chances [n, k], round by round.

    Σ(observed − expected) has the covariance Σ(diag(p) − ppᵀ), of rank at most k − 1: a chi-square test that allows
    different chances in every round.
    """
    seen = np.bincount(places, minlength=chances.shape[1]).astype(np.float64)
    apart = seen - chances.sum(0)
    covariance = np.diag(chances.sum(0)) - chances.T @ chances
    if np.trace(covariance) < SURE:
        return 1.0 if np.abs(apart).max() < 0.5 else 0.0
    values, vectors = np.linalg.eigh(covariance)
    kept = values > values[-1] * 1e-9
    along = vectors[:, kept].T @ apart
    return float(chi2.sf(float((along**2 / values[kept]).sum()), int(kept.sum())))


def measure_calibration(
    plan: BayesPlan, quick: bool, console: Console, worlds: Sequence[str] = WORLDS, rounds: int | None = None
) -> tuple[dict[str, Any], list[Bar]]:
    """Calibration of the shipped learner: means and 90 % intervals logged at decisions, for the chosen arms."""
    results, bars = _begun(quick, rounds), list[Bar]()
    for env in _available(worlds, plan, results, console):
        played = play_all([_trial(SHIPPED, env, seed, plan, results) for seed in plan.seeds], console)
        found = results["worlds"][env] = reliability(played)
        note = ", quick" if quick else ""
        for name, kind in (("equal width", "ece"), ("equal mass", "ece_equal_mass")):
            bars.append(Bar(f"{env}: ECE, bins of {name}{note}", found[kind], "<=", ERROR_LIMIT))
        bars.append(Bar(f"{env}: coverage of 90 % intervals, at least{note}", found["coverage"], ">=", COVERED_LEAST))
        bars.append(Bar(f"{env}: coverage of 90 % intervals, at most{note}", found["coverage"], "<=", COVERED_MOST))
    _print_calibration(results["worlds"], console)
    if plan.plot is not None and results["worlds"]:
        _plot(results["worlds"], plan.plot / "calibration.png")
    return results, bars


def reliability(played: Sequence[PolicyRecord]) -> dict[str, Any]:
    """Calibration over all rounds of all seeds; bins of equal mass are formed per seed."""
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
    """The rank of each value, 0 for the smallest."""
    ranks = np.empty(len(values), dtype=np.int64)
    ranks[np.argsort(values, kind="stable")] = np.arange(len(values))
    return ranks


def _table(bins: NDArray[np.int64], predicted: Vector, rewards: Vector) -> list[dict[str, Any]]:
    """Mean prediction and mean reward of each bin."""
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


def _available(worlds: Sequence[str], plan: BayesPlan, results: dict[str, Any], console: Console) -> list[str]:
    """The environments whose data was found; prints those that are skipped."""
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


def _trial(contender: PolicyContender, env: str, seed: int, plan: BayesPlan, results: Mapping[str, Any]) -> PolicyTrial:
    return PolicyTrial(contender, env, seed, results["rounds"], plan.data)


def _print_bandits(worlds: Mapping[str, Any], console: Console) -> None:
    for env, found in worlds.items():
        table = Table(f"{env}: policy", "regret", "p-value of propensities", box=None, pad_edge=False)
        methods = found["methods"]
        for label in sorted(methods, key=lambda label: methods[label]["regret_mean"]):
            row, fit = methods[label], found["fit"].get(label)
            regret = f"{row['regret_mean']:.0f} ± {row['regret_sd']:.0f}"
            table.add_row(label, regret, "" if fit is None else f"{fit:.3f}")
        console.print(table)


def _print_calibration(worlds: Mapping[str, Any], console: Console) -> None:
    columns = ("ECE", "equal mass", "MCE", "coverage", "of normal intervals")
    table = Table("world", *columns, box=None, pad_edge=False)
    for env, found in worlds.items():
        names = ("ece", "ece_equal_mass", "mce", "coverage", "coverage_of_normal_intervals")
        table.add_row(env, *[f"{found[name]:.4f}" for name in names])
    console.print(table)


def _plot(worlds: Mapping[str, Any], path: Path) -> None:
    """Mean reward against mean prediction; markers grow with the number of samples."""
    from matplotlib.figure import Figure

    path.parent.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(5 * len(worlds), 4.6), layout="constrained")
    for axes, (env, found) in zip(np.atleast_1d(figure.subplots(1, len(worlds))), worlds.items(), strict=True):
        axes.plot([0, 1], [0, 1], color="grey", ls="--", label="perfect calibration")
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
