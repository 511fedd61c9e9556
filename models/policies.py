"""Policies: from scores to choices with exact propensities.

A policy maps mean and bonus of the arms to a distribution over them. The distribution is exact, ties included, so that
the logged propensity of a choice is its probability. A slate is drawn position by position without replacement; the
propensity of a position is conditional on the arms above it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate, count
from math import isfinite
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

#: Posterior draws of n arms [n, M].
Matrix = NDArray[np.float64]

#: Default number of posterior draws of `thompson`; it sets the resolution and the minimum of its propensities.
DRAWS: Final = 256

#: Up to this many arms plain Python is faster than numpy.
FEW_ARMS: Final = 32

#: Default spread of the draws around the score, relative to the posterior's deviation.
DRAWS_SCALE: Final = 0.01


class Policy(ABC):
    """A rule that chooses among arms."""

    name: str
    #: Number of joint posterior draws of each arm that it needs.
    draws: int = 0

    @abstractmethod
    def probabilities(self, mean: Vector, bonus: Vector, drawn: Matrix | None = None) -> Vector:
        """The probability of each arm to be chosen next; sums to 1. `drawn` holds `draws` draws of each arm, if any."""


def _best_with_floor(score: Vector, share: float, floor: float) -> Vector:
    """Probability `share` for the arm with the largest score plus `floor` for every arm; ties share evenly."""
    if len(score) <= FEW_ARMS:
        scores = score.tolist()
        best = max(scores)
        high = floor + share / scores.count(best)
        return np.array([high if each == best else floor for each in scores])
    ties = score == score.max()
    return np.where(ties, floor + share / np.count_nonzero(ties), floor)


@final
class UpperConfidence(Policy):
    """`ucb`: the arm with the largest mean + bonus; ties share evenly."""

    name = "ucb"

    def probabilities(self, mean: Vector, bonus: Vector, drawn: Matrix | None = None) -> Vector:
        return _best_with_floor(mean + bonus, 1.0, 0.0)


@final
class FlooredUpperConfidence(Policy):
    """`ucb-floor`: as `ucb`, with probability ε spread evenly over all arms so that every arm can be evaluated."""

    name = "ucb-floor"

    def __init__(self, epsilon: float) -> None:
        if not 0 <= epsilon <= 1:
            raise ValueError("epsilon must lie in [0, 1]")
        self.epsilon = epsilon

    def probabilities(self, mean: Vector, bonus: Vector, drawn: Matrix | None = None) -> Vector:
        return _best_with_floor(mean + bonus, 1 - self.epsilon, self.epsilon / len(mean))


@final
class InverseGap(Policy):
    """`squarecb`: 1 / (n + γ·gap) for all but the best arm, which gets the rest (Foster and Rakhlin, 2020)."""

    name = "squarecb"

    def __init__(self, gamma: float) -> None:
        if not gamma > 0:
            raise ValueError("gamma must be positive")
        self.gamma = gamma

    def probabilities(self, mean: Vector, bonus: Vector, drawn: Matrix | None = None) -> Vector:
        score = mean + bonus
        weights: Vector = 1 / (len(score) + self.gamma * (score.max() - score))
        best = score == score.max()
        weights[best] = (1 - weights[~best].sum()) / best.sum()
        return weights


@final
class Thompson(Policy):
    """`thompson`: the probability of an arm is how often it is best in a posterior draw (Thompson, 1933).

    An arm that is best in m of M draws gets (m + 1/n)/(M + 1), as if all arms shared one more draw, and the arm is
    sampled from these probabilities. Following a single draw has nearly the same distribution, but its propensity would
    be unknown. A scale below 1 narrows the posterior and explores less. Draws are centred at mean + bonus, which adds
    the optimism that draws around the mean lack (Zhang, "Feel-Good Thompson Sampling", 2022). Without a bonus this is
    plain Thompson sampling.
    """

    name = "thompson"

    def __init__(self, draws: int, scale: float) -> None:
        if draws < 1:
            raise ValueError("draws must be at least 1")
        if not 0 <= scale < np.inf:
            raise ValueError("scale must not be negative")
        self.draws = draws
        self.scale = scale

    def probabilities(self, mean: Vector, bonus: Vector, drawn: Matrix | None = None) -> Vector:
        if drawn is None or drawn.shape != (len(mean), self.draws):
            raise ValueError(f"thompson needs {self.draws} draws of each arm")
        worth = (mean + bonus)[:, None] + self.scale * (drawn - mean[:, None])  # [n, M]
        best = worth == worth.max(0)
        often: Vector = (best / best.sum(0)).sum(1)  # [n], ties shared
        return (often + 1 / len(mean)) / (self.draws + 1)


def build_policy(
    name: str,
    *,
    epsilon: float,
    squarecb_gamma: float,
    thompson_draws: int = DRAWS,
    thompson_scale: float = DRAWS_SCALE,
) -> Policy:
    """The policy of that name."""
    policies: dict[str, Policy] = {
        "ucb": UpperConfidence(),
        "ucb-floor": FlooredUpperConfidence(epsilon),
        "squarecb": InverseGap(squarecb_gamma),
        "thompson": Thompson(thompson_draws, thompson_scale),
    }
    return policies[name]


@final
@dataclass(frozen=True, slots=True)
class Slate:
    """Chosen arms, first position first, and their conditional propensities."""

    chosen: tuple[int, ...]
    propensities: tuple[float, ...]


def draw_slate(
    policy: Policy, mean: Vector, bonus: Vector, size: int, shares: Iterator[float], drawn: Matrix | None = None
) -> Slate:
    """Draw `size` arms without replacement, using one uniform number of `shares` each; ValueError unless all finite.

    `drawn` are the posterior draws that the policy needs [n, M]; later positions compare the remaining arms.
    """
    if not _all_finite(mean + bonus) or not (drawn is None or np.isfinite(drawn).all()):
        raise ValueError("scores must be finite")
    left = list(range(len(mean)))
    chosen: list[int] = []
    propensities: list[float] = []
    while len(chosen) < size:
        chances = policy.probabilities(mean, bonus, drawn)
        place = _place_of(next(shares), chances)
        chosen.append(left.pop(place))
        propensities.append(float(chances[place]))
        if len(chosen) < size:
            mean, bonus = np.delete(mean, place), np.delete(bonus, place)
            drawn = None if drawn is None else np.delete(drawn, place, 0)
    return Slate(tuple(chosen), tuple(propensities))


def _place_of(share: float, chances: Vector) -> int:
    """The arm at this share in [0, 1) of the cumulative probabilities; never one of probability 0."""
    if len(chances) > FEW_ARMS:
        ends = chances.cumsum()
        return int(ends.searchsorted(share * ends[-1], side="right"))
    sums = list(accumulate(chances.tolist()))
    return bisect_right(sums, share * sums[-1])


def _all_finite(scores: Vector) -> bool:
    # A finite sum implies finite terms; for few numbers Python's sum is fastest.
    if len(scores) <= FEW_ARMS and isfinite(sum(scores.tolist())):
        return True
    return bool(np.isfinite(scores).all())


def decision_draws(seed: int, decision_id: str) -> Iterator[float]:
    """Uniform numbers in [0, 1) of a decision: the same decision id draws the same arms from the same scores.

    Bits of a hash are uniform, and no generator has to be set up for the one or two numbers needed.
    """
    for block in count():
        digest = blake2b(f"{seed}:{block}:{decision_id}".encode()).digest()
        for start in range(0, len(digest), 8):
            yield (int.from_bytes(digest[start : start + 8], "little") >> 11) * 2.0**-53
