"""Loss of users when others send false rewards, with and without influence weights.

Three users in ten are poisoned: they send other rewards than their arms have. Regret counts the true rewards of the
other users, and is compared with a run without the poisoned users: the same rounds except theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from metaban.bench.core.local_loop import LocalLoop
from metaban.bench.core.parallel import run_parallel
from metaban.bench.core.report import Bar
from metaban.bench.regret.method import VisibleRound
from metaban.bench.regret.methods import LearnerMethod, layout_of
from metaban.bench.transfer.plan import TransferPlan
from metaban.bench.worlds.data import DataMissing
from metaban.bench.worlds.environments import Environment, EnvironmentRound, build_environment
from metaban.models.settings import named_settings

Vector = NDArray[np.float64]

Flags = NDArray[np.bool_]

Counts = NDArray[np.int64]

ENV: Final = "service"

#: Share of poisoned users.
SHARE: Final = 0.3

#: Separates the seed that selects poisoned users from other uses of the environment's seed.
POISON_STREAM: Final = 30

#: Limit of the regret with weights over that without the poisoned users.
LIMIT: Final = 1.05

#: Rounds between two counts of silenced users, and between two points of a curve.
LOOK_EVERY: Final = 250


def inverted(asked: EnvironmentRound, arm: int) -> float:
    """Rewards inverted: 1 becomes 0 and 0 becomes 1."""
    return 1.0 - float(asked.rewards[arm])


def contrary(asked: EnvironmentRound, arm: int) -> float:
    """Reward 1 for the arm farthest from the liked one, 0 for all others.

    With arms centred over the slate, it has the smallest inner product with the liked one: a taste as sharp as a true
    one, and as predictable from the features.
    """
    centred = asked.arms - asked.arms.mean(0)  # [k, d]
    return float(arm == int((centred @ centred[int(asked.chances.argmax())]).argmin()))


@final
@dataclass(frozen=True, slots=True)
class Condition:
    """What the poisoned users send, and whether influence weights are used."""

    label: str
    #: Reward that they send for an arm; None is the true one.
    report: Callable[[EnvironmentRound, int], float] | None = None
    teaching: bool = True
    #: Whether they take part.
    present: bool = True


ABSENT: Final = Condition("absent", present=False)
HONEST: Final = Condition("honest")
WEIGHTS: Final = Condition("weights", inverted)
NO_WEIGHTS: Final = Condition("no weights", inverted, teaching=False)
CONTRARY: Final = Condition("contrary, weights", contrary)
CONTRARY_NO_WEIGHTS: Final = Condition("contrary, no weights", contrary, teaching=False)
CONDITIONS: Final = (ABSENT, HONEST, WEIGHTS, NO_WEIGHTS, CONTRARY, CONTRARY_NO_WEIGHTS)


@final
@dataclass(frozen=True, slots=True)
class PoisonTrial:
    """One condition in one environment."""

    condition: Condition
    seed: int
    rounds: int
    data: Path | None = None


@final
@dataclass(frozen=True, slots=True)
class PoisonResult:
    """Result of a trial: regret of each round [rounds], 0 in rounds of the poisoned; numbers of silenced poisoned and
    other users at each count [looks, 2], λ of groups then [looks]; and the gain from silencing at the last epoch, with
    its standard error.
    """

    regret: Vector
    silent: Counts
    guard: Vector
    gain: float
    gain_error: float
    users: int
    poisoned: int


def poisoned_users(seed: int, users: int) -> Flags:
    """Which users are poisoned [users]."""
    flags = np.zeros(users, dtype=np.bool_)
    random = np.random.default_rng([seed, POISON_STREAM])
    flags[random.choice(users, size=round(SHARE * users), replace=False)] = True
    return flags


def play(trial: PoisonTrial) -> PoisonResult:
    """Decide and learn round by round, with the shipped default learner."""
    condition = trial.condition
    world = _world(trial.seed, trial.data)
    settings = named_settings("default", seed=trial.seed, teaching=condition.teaching)
    method = LearnerMethod(settings, layout_of(world), seed=trial.seed)
    poisoned = poisoned_users(trial.seed, world.users)
    regret, heard = np.zeros(trial.rounds), np.zeros(world.users, dtype=np.bool_)
    silent: list[list[int]] = []
    guard: list[float] = []
    for number in range(trial.rounds):
        asked = world.next_round()
        if condition.present or not poisoned[asked.user]:
            heard[asked.user] = True
            arm = method.decide(VisibleRound(asked.user, asked.arms, asked.context), number)
            reward = world.reward(asked, arm)
            if not poisoned[asked.user]:
                regret[number] = asked.regret(arm)
            elif condition.report is not None:
                reward = condition.report(asked, arm)
            method.learn(number, reward)
        if (number + 1) % LOOK_EVERY == 0 or number + 1 == trial.rounds:
            users = np.flatnonzero(heard)
            quiet = silenced(method.loop, [f"user-{user}" for user in users.tolist()])
            silent.append([int((quiet & poisoned[users]).sum()), int((quiet & ~poisoned[users]).sum())])
            guard.append(float(method.loop.teaching([])[1]["guard"]))
    learner, shared, _ = method.loop.teaching([])
    teaching = learner.influence(shared)
    gain, error = (0.0, 0.0) if teaching is None else (teaching.gain, teaching.gain_error)
    return PoisonResult(regret, np.array(silent), np.array(guard), gain, error, world.users, int(poisoned.sum()))


def _world(seed: int, data: Path | None) -> Environment:
    return build_environment(ENV, seed=seed, data=data)


def silenced(loop: LocalLoop, users: Sequence[str]) -> Flags:
    """Which users the next epoch leaves out, according to the served one [users]."""
    learner, shared, batch = loop.teaching(users)
    teaching = learner.influence(shared)
    if teaching is None or not teaching.in_use:
        return np.zeros(len(users), dtype=np.bool_)
    with torch.inference_mode():
        quiet: Flags = (teaching.weights[learner.kinds(shared, batch)] < 1).cpu().numpy()
    return quiet


def measure_poison(plan: TransferPlan, quick: bool, console: Console) -> tuple[dict[str, Any], list[Bar]]:
    """Regret of the other users by condition, and who was silenced."""
    try:
        _world(plan.seeds[0], plan.data)
    except DataMissing as missing:
        console.print(f"skipped poison: {missing}", highlight=False, markup=False, soft_wrap=True)
        return {"skipped": str(missing)}, []
    trials = [PoisonTrial(each, seed, plan.poison_rounds, plan.data) for seed in plan.seeds for each in CONDITIONS]
    by_label: dict[str, list[PoisonResult]] = {each.label: [] for each in CONDITIONS}
    for trial, played in zip(trials, run_parallel(play, trials), strict=True):
        label = trial.condition.label
        console.print(f"poison, seed {trial.seed}, {label}: regret {played.regret.sum():.0f}", highlight=False)
        by_label[label].append(played)
    results = compared(by_label)
    _print(results["conditions"], console)
    if plan.plot is not None:
        _plot(results, plan.plot)
    return results, poison_bars(results["conditions"], quick=quick)


def compared(by_label: Mapping[str, Sequence[PoisonResult]]) -> dict[str, Any]:
    """Regret by condition, one value a seed, and its ratio to that without the poisoned users."""
    regrets = {label: np.array([one.regret.sum() for one in played]) for label, played in by_label.items()}  # [seeds]
    reference = regrets[ABSENT.label]
    conditions = {}
    for label, played in by_label.items():
        values, silent = regrets[label], np.stack([one.silent for one in played])  # [seeds], [seeds, looks, 2]
        conditions[label] = {
            "regret_mean": float(values.mean()),
            "regret_sd": float(values.std(ddof=1)) if len(values) > 1 else 0.0,
            "regrets": values.tolist(),
            "ratio": float(values.mean() / reference.mean()),
            "ratios": (values / reference).tolist(),
            "silent_poisoned": silent[:, -1, 0].tolist(),
            "silent_others": silent[:, -1, 1].tolist(),
            # A user silenced by mistake may be heard again before the end.
            "most_silent_poisoned": silent[:, :, 0].max(1).tolist(),
            "most_silent_others": silent[:, :, 1].max(1).tolist(),
            "gain": [one.gain for one in played],
            "gain_error": [one.gain_error for one in played],
            "curve": np.mean([np.cumsum(one.regret)[_looks(one)] for one in played], axis=0).tolist(),
            "silent_by_look": silent.tolist(),
            "guard_by_look": [one.guard.tolist() for one in played],
        }
    first = by_label[ABSENT.label][0]
    rounds = (_looks(first) + 1).tolist()
    return {"users": first.users, "poisoned": first.poisoned, "curve_rounds": rounds, "conditions": conditions}


def _looks(played: PoisonResult) -> Counts:
    """Rounds of the counts, from 0 [looks]."""
    rounds = len(played.regret)
    return np.unique(np.append(np.arange(LOOK_EVERY, rounds + 1, LOOK_EVERY), rounds)) - 1


def poison_bars(conditions: Mapping[str, Any], *, quick: bool) -> list[Bar]:
    """One bar, about the shipped learner and inverted rewards; all else is reported only."""
    note = ", quick" if quick else ""
    ratio = float(conditions[WEIGHTS.label]["regret_mean"] / conditions[ABSENT.label]["regret_mean"])
    return [Bar(f"poison: regret with weights / without the poisoned users{note}", ratio, "<=", LIMIT)]


def _print(conditions: Mapping[str, Any], console: Console) -> None:
    """Print regret, and users silenced at the end of each seed."""
    table = Table("poison", "regret", "/ absent", "poisoned silenced", "others silenced", box=None, pad_edge=False)
    for label, row in conditions.items():
        regret = f"{row['regret_mean']:.0f} ± {row['regret_sd']:.0f}"
        counts = [", ".join(map(str, row[name])) for name in ("silent_poisoned", "silent_others")]
        table.add_row(label, regret, f"{row['ratio']:.3f}", *counts)
    console.print(table)


def _plot(results: Mapping[str, Any], folder: Path) -> None:
    """Cumulative loss of the other users caused by the poisoned; negative is a gain."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(10, 4), layout="constrained")
    rounds, conditions = results["curve_rounds"], results["conditions"]
    reference = np.array(conditions[ABSENT.label]["curve"])  # [looks]
    panels = (("inverted rewards", WEIGHTS, NO_WEIGHTS), ("contrary tastes", CONTRARY, CONTRARY_NO_WEIGHTS))
    names = ("weights", "no weights", "honest")
    for axes, (title, *shown) in zip(figure.subplots(1, 2, sharey=True), panels, strict=True):
        axes.plot(rounds, (LIMIT - 1) * reference, color="grey", ls=":", label=f"{LIMIT - 1:.0%} more")
        for condition, style, name in zip((*shown, HONEST), ("o-", "s--", "k-"), names, strict=True):
            lost = np.array(conditions[condition.label]["curve"]) - reference  # [looks]
            axes.plot(rounds, lost, style, ms=3, label=name)
        axes.axhline(0, color="grey", lw=1)
        axes.set(title=title, xlabel="round")
        axes.grid(alpha=0.3)
    axes.legend()
    figure.axes[0].set_ylabel("regret − regret without them")
    figure.savefig(folder / "transfer-poison.png", dpi=150)
