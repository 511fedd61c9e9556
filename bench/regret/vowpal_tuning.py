"""Options of Vowpal Wabbit by grid search, on seeds that are not reported.

Three ways to explore, with and without products of arm features, with two update rules. The whole grid runs for a fifth
of the rounds, the best options for all of them, as for the baselines (`tuning.py`).
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console

from metaban.bench.regret.runs import Contender, Run, play
from metaban.bench.regret.tuning import FIRST_LOOK_DIVISOR, tuning_rounds, tuning_seeds
from metaban.bench.regret.vowpal import VOWPAL, VowpalMethod
from metaban.bench.worlds.environments import build_environment

EXPLORATIONS: Final = ("--squarecb --gamma_scale 1000", "--epsilon 0.02", "--bag 5 --greedify")
INTERACTIONS: Final = ("-q ua", "-q ua -q aa")
UPDATES: Final = ("", "--coin")

#: Wider arms get no products of their features: there would be too many.
PRODUCTS_UP_TO: Final = 64

#: Options that reach the second stage.
FINALISTS: Final = 4


def candidates(dimension: int) -> list[str]:
    """Options to choose from, for arms of this many numbers."""
    interactions = INTERACTIONS if dimension <= PRODUCTS_UP_TO else INTERACTIONS[:1]
    return [" ".join(filter(None, parts)) for parts in product(EXPLORATIONS, interactions, UPDATES)]


def choose_options(env: str, *, data: Path | None, rounds: int, console: Console) -> dict[str, Any]:
    """The best options in an environment, in two stages like the baselines."""
    seeds, rounds = tuning_seeds(env), tuning_rounds(env, VOWPAL, rounds)
    dimension = build_environment(env, seed=seeds[0], data=data).dimension
    left, regrets = candidates(dimension), [0.0]
    for length in (max(1, rounds // FIRST_LOOK_DIVISOR), rounds):
        regrets = []
        for options in left:
            regrets.append(float(np.mean([_regret(options, env, seed, length, data) for seed in seeds])))
            console.print(
                f"{env}, vw {options}: {regrets[-1]:.1f} after {length:,} rounds", highlight=False, markup=False
            )
        order = np.argsort(regrets, kind="stable")[:FINALISTS]
        left, regrets = [left[place] for place in order], [regrets[place] for place in order]
    settings = {"options": left[0]}
    return {"settings": settings, "seeds": list(seeds), "rounds": rounds, "regret": round(regrets[0], 1)}


def _regret(options: str, env: str, seed: int, rounds: int, data: Path | None) -> float:
    world = build_environment(env, seed=seed, data=data)
    run = Run(Contender.plain(VOWPAL), env, seed, rounds, data)
    return float(play(world, VowpalMethod(options, seed=seed), run).regret.sum())
