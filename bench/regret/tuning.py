"""Settings of the baselines, by grid search on seeds that are not reported.

The grid of λ and α is the Meta-Ban paper's. Linear methods also choose between raw and standardised inputs, clustering
methods the separation of two estimates. The whole grid runs for a fifth of the reported rounds, the best settings for
all of them: what leads after a fifth is often a model that shares too much between users. `baseline_settings.json`
records the result. Where a search would take hours, an entry names the environment whose settings it takes: `as_in`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, Final, final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from metaban.bench.baselines import BASELINES, build_baseline
from metaban.bench.worlds.environments import Environment, EnvironmentRound, build_environment

SETTINGS_FILE: Final = Path(__file__).with_name("baseline_settings.json")

#: Seeds of the search, those of some environments, and rounds.
TUNING_SEEDS: Final = (50,)
TUNING_SEEDS_OF: Final = dict.fromkeys(("digits", "categories-50", "categories-200", "revenue"), (200, 201, 202))
TUNING_ROUNDS: Final = 10_000

#: Divisor of the rounds in the first stage, and settings that reach the second.
FIRST_LOOK_DIVISOR: Final = 5
FINALISTS: Final = 6

#: λ and α, as in the paper.
REGULARIZATIONS: Final = (0.01, 0.1, 1.0)
EXPLORATIONS: Final = (0.001, 0.01, 0.1, 1.0)

#: α₂ by method: confidence widths within which users count as equal.
SEPARATIONS: Final[dict[str, tuple[float, ...]]] = {
    "club": (0.1, 0.2, 0.4, 0.8),
    "sclub": (0.1, 0.2, 0.4, 0.8),
    "locb": (0.1, 0.2, 0.4, 0.8),
    "cofiba": (0.05, 0.1, 0.2),
}
NEURAL: Final = ("neuralucb-one", "neuralucb-ind")

#: Environments with wide inputs, where a round of clustering and neural methods takes milliseconds, in the first ones
#: that of all methods: rounds are divided by this, and clustering methods try raw inputs and every other α₂ only.
SLOW_FOR_ALL: Final = ("mnist",)
SLOW_WORLDS: Final = (*SLOW_FOR_ALL, "digits", "categories-200")
SLOW_DIVISOR: Final = 5


@final
@dataclass(frozen=True, slots=True)
class GridTrial:
    """One setting of one baseline in one environment."""

    env: str
    method: str
    settings: dict[str, float | bool]
    seed: int
    rounds: int
    data: Path | None


def tuning_seeds(env: str) -> tuple[int, ...]:
    """Seeds of the search in an environment."""
    return TUNING_SEEDS_OF.get(env, TUNING_SEEDS)


def tuning_rounds(env: str, method: str, rounds: int) -> int:
    """Rounds of the second stage of a search."""
    slow = env in SLOW_FOR_ALL or (env in SLOW_WORLDS and (method in SEPARATIONS or method in NEURAL))
    return max(1, rounds // SLOW_DIVISOR) if slow else rounds


def tuned_settings(env: str, method: str) -> dict[str, float | bool]:
    """The recorded settings of a baseline in an environment."""
    chosen = json.loads(SETTINGS_FILE.read_text("utf-8"))
    try:
        entry = chosen[env][method]
        return dict(chosen[entry["as_in"]][method]["settings"] if "as_in" in entry else entry["settings"])
    except KeyError:
        raise ValueError(f"there are no settings of {method} in {env}; run `metaban bench tune`") from None


def candidates(env: str, method: str) -> list[dict[str, float | bool]]:
    """The grid of a baseline in an environment."""
    axes: dict[str, Sequence[float | bool]] = {"regularization": REGULARIZATIONS, "exploration": EXPLORATIONS}
    if method not in NEURAL:
        axes["standardize"] = (False,) if env in SLOW_WORLDS and method in SEPARATIONS else (False, True)
    if method in SEPARATIONS:
        axes["separation"] = SEPARATIONS[method][:: 2 if env in SLOW_WORLDS else 1]
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def tune(
    env_names: Sequence[str],
    methods: Sequence[str],
    data: Path | None,
    rounds: int = TUNING_ROUNDS,
    jobs: int = 1,
    console: Console | None = None,
) -> dict[str, dict[str, dict[str, Any]]]:
    """By environment and method: the best settings, the rounds and seeds they were chosen on, and their mean regret."""
    unknown = [method for method in methods if method not in BASELINES]
    if unknown:
        raise ValueError(f"unknown baselines: {', '.join(unknown)}; choose from {', '.join(BASELINES)}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console or Console(stderr=True), transient=True)
    found: dict[str, dict[str, dict[str, Any]]] = {env: {} for env in env_names}
    with bar, _players(jobs) as pool:
        for env, method in product(env_names, methods):
            length, seeds = tuning_rounds(env, method, rounds), tuning_seeds(env)
            grid = candidates(env, method)
            for stage in (max(1, length // FIRST_LOOK_DIVISOR), length):
                # Seed by seed, since the rounds of the latest worlds are kept.
                trials = [GridTrial(env, method, settings, seed, stage, data) for seed in seeds for settings in grid]
                task = bar.add_task(f"{method} in {env}, {stage} rounds", total=len(trials))
                found_regrets = []
                for regret in map(play, trials) if pool is None else pool.map(play, trials):
                    found_regrets.append(regret)
                    bar.advance(task)
                bar.remove_task(task)
                regrets = [sum(found_regrets[place :: len(grid)]) / len(seeds) for place in range(len(grid))]
                order = sorted(range(len(grid)), key=regrets.__getitem__)
                grid = [grid[place] for place in order[:FINALISTS]]
            found[env][method] = {
                "settings": grid[0],
                "seeds": list(seeds),
                "rounds": length,
                "regret": round(min(regrets), 1),
            }
            bar.console.print(f"{env}, {method}: {json.dumps(found[env][method])}", highlight=False, markup=False)
    return found


def play(trial: GridTrial) -> float:
    """Cumulative regret of a trial."""
    users, dimension, recorded = _recorded(trial.env, trial.seed, trial.rounds, trial.data)
    baseline = build_baseline(trial.method, users=users, dimension=dimension, seed=trial.seed, settings=trial.settings)
    total = 0.0
    for asked in recorded:
        arms = asked.arms
        arm = baseline.choose(asked.user, arms)
        baseline.learn(asked.user, arms[arm], float(asked.rewards[arm]))
        total += asked.regret(arm)
    return total


@lru_cache(maxsize=2)
def _recorded(env: str, seed: int, rounds: int, data: Path | None) -> tuple[int, int, list[EnvironmentRound]]:
    """Users, dimension and rounds of an environment; cached, since trials share it and it is slow to build."""
    world: Environment = build_environment(env, seed=seed, data=data)
    return world.users, world.dimension, [world.next_round() for _ in range(rounds)]


@contextmanager
def _players(jobs: int) -> Iterator[ProcessPoolExecutor | None]:
    """A pool of processes with one thread each, or None for one job."""
    if jobs == 1:
        yield None
        return
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # read by children when they load numpy
    try:
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            yield pool
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
