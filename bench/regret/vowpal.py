"""Vowpal Wabbit, a contextual bandit with action-dependent features, as a method.

The user's id is a VW namespace of its own, crossed with the arm's features (`-q ua`), so VW learns what all users like
and how each user differs. `vowpal_tuning.py` searches the options that are recorded here.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any, Final, final

import numpy as np

from metaban.bench.regret.method import Method, VisibleRound

#: Name of the method.
VOWPAL: Final = "vw"

#: 2 to this power weights: enough for ten thousand users crossed with their arms.
WEIGHT_BITS: Final = 20

#: The best options in each environment, found by `metaban bench tune --methods vw`.
CHOSEN: Final = {
    "synthetic": "--squarecb --gamma_scale 1000 -q ua -q aa",
    "movielens": "--epsilon 0.02 -q ua",
    "yelp": "--squarecb --gamma_scale 1000 -q ua -q aa",
    "service": "--squarecb --gamma_scale 1000 -q ua -q aa --coin",
    "mnist": "--squarecb --gamma_scale 1000 -q ua",
    "digits": "--squarecb --gamma_scale 1000 -q ua",
    "categories-50": "--squarecb --gamma_scale 1000 -q ua -q aa",
    "categories-200": "--squarecb --gamma_scale 1000 -q ua",
    "revenue": "--squarecb --gamma_scale 1000 -q ua --coin",
}


def chosen_options(env: str) -> str:
    """The recorded options of an environment."""
    return CHOSEN[env]


@final
class VowpalMethod(Method):
    """`--cb_explore_adf` with the given options; arms are drawn from the distribution that VW returns."""

    def __init__(self, options: str, *, seed: int) -> None:
        self.settings = {"options": f"--cb_explore_adf {options}"}
        # Imported by name: the package is optional and untyped.
        workspace: Any = import_module("vowpalwabbit").Workspace
        self._vw = workspace(f"--cb_explore_adf {options} -b {WEIGHT_BITS} --random_seed {seed} --quiet")
        self._random = np.random.default_rng(seed)
        self._open: dict[int, tuple[list[str], int, float]] = {}

    def decide(self, asked: VisibleRound, number: int) -> int:
        lines = [f"shared |u {asked.user}", *(_line(row) for row in asked.joined.tolist())]
        examples = self._vw.parse(lines)
        chances = np.asarray(self._vw.predict(examples))
        self._vw.finish_example(examples)
        # VW returns single precision, which does not sum to 1 in double.
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
    """An arm in VW's text format; zeros are left out."""
    return "|a " + " ".join(f"{place}:{value:.6g}" for place, value in enumerate(row) if value)
