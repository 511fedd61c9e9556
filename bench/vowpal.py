"""Vowpal Wabbit as a peer: a contextual bandit with action-dependent features, in its own process memory.

The user's id is a namespace of its own and crossed with the arm's features (`-q ua`), so that VW learns what all users
like and how each differs. Three ways to explore, with and without products of arm features, with two update rules,
are tried on a seed that no result is reported on, and the best is recorded here for each environment.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, Final, final

import numpy as np
from rich.console import Console

from bench.environments import build_environment
from bench.methods import VOWPAL, Method, Question
from bench.runs import Contender, Run, play
from bench.tuning import FIRST_LOOK_DIVISOR, SLOW_DIVISOR, SLOW_WORLDS, TUNING_SEED

EXPLORATIONS: Final = ("--squarecb --gamma_scale 1000", "--epsilon 0.02", "--bag 5 --greedify")
INTERACTIONS: Final = ("-q ua", "-q ua -q aa")
UPDATES: Final = ("", "--coin")
#: Arms of more numbers than this are not multiplied with themselves: the products would be too many to be quick.
PRODUCTS_UP_TO: Final = 64
#: 2 to this power weights: enough for ten thousand users crossed with their arms.
WEIGHT_BITS: Final = 20
#: How many of the best options play on to decide between them.
FINALISTS: Final = 4
#: The best of the candidates in each environment, as `metaban bench tune --methods vw` found it.
CHOSEN: Final = {
    "synthetic": "--squarecb --gamma_scale 1000 -q ua -q aa",
    "movielens": "--epsilon 0.02 -q ua",
    "yelp": "--squarecb --gamma_scale 1000 -q ua -q aa",
    "service": "--squarecb --gamma_scale 1000 -q ua -q aa --coin",
    "mnist": "--squarecb --gamma_scale 1000 -q ua",
}


def candidates(dimension: int) -> list[str]:
    """The options to choose from for arms of so many numbers."""
    interactions = INTERACTIONS if dimension <= PRODUCTS_UP_TO else INTERACTIONS[:1]
    return [" ".join(filter(None, parts)) for parts in product(EXPLORATIONS, interactions, UPDATES)]


def choose_options(env: str, *, data: Path | None, rounds: int, console: Console) -> dict[str, Any]:
    """The best options in an environment: as for the baselines, the best of all after some rounds play on."""
    dimension = build_environment(env, seed=TUNING_SEED, data=data).dimension
    rounds = max(1, rounds // SLOW_DIVISOR) if env in SLOW_WORLDS else rounds
    left, regrets = candidates(dimension), [0.0]
    for length in (max(1, rounds // FIRST_LOOK_DIVISOR), rounds):
        run = Run(Contender.plain(VOWPAL), env, TUNING_SEED, length, data)
        regrets = []
        for options in left:
            world = build_environment(env, seed=TUNING_SEED, data=data)
            regrets.append(float(play(world, VowpalMethod(options, seed=TUNING_SEED), run).regret.sum()))
            console.print(f"{env}, vw {options}: {regrets[-1]:.1f} after {length:,}", highlight=False, markup=False)
        order = np.argsort(regrets, kind="stable")[:FINALISTS]
        left, regrets = [left[place] for place in order], [regrets[place] for place in order]
    settings = {"options": left[0]}
    return {"settings": settings, "seed": TUNING_SEED, "rounds": rounds, "regret": round(regrets[0], 1)}


def chosen_options(env: str) -> str:
    """The recorded options of an environment."""
    return CHOSEN[env]


@final
class VowpalMethod(Method):
    """`--cb_explore_adf` with the given options; arms are drawn from the distribution VW answers with."""

    def __init__(self, options: str, *, seed: int) -> None:
        self.settings = {"options": f"--cb_explore_adf {options}"}
        # By name, since the package is optional and untyped.
        workspace: Any = import_module("vowpalwabbit").Workspace
        self._vw = workspace(f"--cb_explore_adf {options} -b {WEIGHT_BITS} --random_seed {seed} --quiet")
        self._random = np.random.default_rng(seed)
        self._open: dict[int, tuple[list[str], int, float]] = {}

    def decide(self, asked: Question, number: int) -> int:
        lines = [f"shared |u {asked.user}", *(_line(row) for row in asked.joined.tolist())]
        examples = self._vw.parse(lines)
        chances = np.asarray(self._vw.predict(examples))
        self._vw.finish_example(examples)
        # VW answers in single precision, which does not sum to 1 in double.
        arm = int(self._random.choice(len(chances), p=chances / chances.sum()))
        self._open[number] = lines, arm, float(chances[arm])
        return arm

    def learn(self, number: int, reward: float) -> None:
        lines, arm, chance = self._open.pop(number)
        lines[arm + 1] = f"0:{-reward:g}:{chance:.6g} {lines[arm + 1]}"
        examples = self._vw.parse(lines)
        self._vw.learn(examples)
        self._vw.finish_example(examples)


def _line(row: Iterable[float]) -> str:
    """An arm in VW's text format; zeros need not be said."""
    return "|a " + " ".join(f"{place}:{value:.6g}" for place, value in enumerate(row) if value)
