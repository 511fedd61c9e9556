"""Options of Vowpal Wabbit by grid search, on a seed that is not reported.

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
from metaban.bench.regret.tuning import FIRST_LOOK_DIVISOR, SLOW_DIVISOR, SLOW_WORLDS, TUNING_SEED
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
    dimension = build_environment(env, seed=TUNING_SEED, data=data).dimension
    rounds = max(1, rounds // SLOW_DIVISOR) if env in SLOW_WORLDS else rounds
    left, regrets = candidates(dimension), [0.0]
    for length in (max(1, rounds // FIRST_LOOK_DIVISOR), rounds):
        run = Run(Contender.plain(VOWPAL), env, TUNING_SEED, length, data)
        regrets = []
        for options in left:
            world = build_environment(env, seed=TUNING_SEED, data=data)
            regrets.append(float(play(world, VowpalMethod(options, seed=TUNING_SEED), run).regret.sum()))
            console.print(
                f"{env}, vw {options}: {regrets[-1]:.1f} after {length:,} rounds", highlight=False, markup=False
            )
        order = np.argsort(regrets, kind="stable")[:FINALISTS]
        left, regrets = [left[place] for place in order], [regrets[place] for place in order]
    settings = {"options": left[0]}
    return {"settings": settings, "seed": TUNING_SEED, "rounds": rounds, "regret": round(regrets[0], 1)}
