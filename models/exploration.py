"""Policies: from scores to choices with known probabilities.

A policy turns mean and bonus of the arms into a distribution over them and knows nothing of the learner behind. The
distribution is exact, ties included, so that the logged propensity of a choice is the probability it had, and rewards
can be reweighted later. A slate is drawn position by position without replacement; the propensity of a position is
conditional on the arms above it.
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
#: Posterior draws [n, M]: what each of n arms may be worth.
Matrix = NDArray[np.float64]

#: Draws of each arm that `thompson` counts, unless told otherwise: they set how fine its propensities are, and how
#: small the least of them.
DRAWS: Final = 256
#: Arms up to which numbers are looked at one by one sooner than an array of them is called.
FEW_ARMS: Final = 32
#: How far from the score draws are taken, as a share of the posterior's deviation.
DRAWS_SCALE: Final = 0.01


class Policy(ABC):
    """A rule for choosing among arms."""

    name: str
    #: How many joint posterior draws of each arm it wants to see.
    draws: int = 0

    @abstractmethod
    def probabilities(self, mean: Vector, bonus: Vector, drawn: Matrix | None = None) -> Vector:
        """The chance of each arm to be chosen next; sums to 1. `drawn` has as many draws as it wants, if any."""


def _shared_by_the_best(score: Vector, share: float, floor: float) -> Vector:
    """This share for the arm with the largest score, beside a floor for all; ties share evenly."""
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
        return _shared_by_the_best(mean + bonus, 1.0, 0.0)


@final
class FlooredUpperConfidence(Policy):
    """`ucb-floor`: as `ucb`, with a share ε spread evenly over all arms so that every arm can be evaluated."""

    name = "ucb-floor"

    def __init__(self, epsilon: float) -> None:
        if not 0 <= epsilon <= 1:
            raise ValueError("epsilon must lie in [0, 1]")
        self.epsilon = epsilon

    def probabilities(self, mean: Vector, bonus: Vector, drawn: Matrix | None = None) -> Vector:
        return _shared_by_the_best(mean + bonus, 1 - self.epsilon, self.epsilon / len(mean))


@final
class InverseGap(Policy):
    """`squarecb`: 1 / (n + γ·gap) for all but the best arm, which takes the rest (Foster and Rakhlin, 2020)."""

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
    """`thompson`: as often as an arm is the best of a posterior draw (Thompson, 1933), drawn around its score.

    Where an arm is best in m of M draws its chance is (m + 1/n)/(M + 1), as if all had shared one more draw, and the
    arm is drawn from these chances: to follow a single draw is nearly the same in law, but nobody could tell the chance
    that its choice had. A scale below 1 takes the posterior to be narrower than it is, and explores the less. Draws
    are around mean + bonus, for the optimism that draws around the mean lack (as Zhang, "Feel-Good Thompson Sampling",
    2022, argues): what chance explores too timidly the bonus makes up for. Without a bonus this is plain Thompson
    sampling.
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


@final
@dataclass(frozen=True, slots=True)
class Slate:
    """Chosen arms from the first position on, and the conditional propensity of each."""

    chosen: tuple[int, ...]
    propensities: tuple[float, ...]


def draw_slate(
    policy: Policy, mean: Vector, bonus: Vector, size: int, shares: Iterator[float], drawn: Matrix | None = None
) -> Slate:
    """Draw `size` arms without replacement, one share in [0, 1) each; scores have to be finite to be drawn from.

    `drawn` are the draws that the policy wants [n, M]. Below the first position they are compared over the arms left.
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
    """The arm in whose part of all chances a share in [0, 1) falls; never one without a chance."""
    if len(chances) > FEW_ARMS:
        ends = chances.cumsum()
        return int(ends.searchsorted(share * ends[-1], side="right"))
    sums = list(accumulate(chances.tolist()))
    return bisect_right(sums, share * sums[-1])


def _all_finite(scores: Vector) -> bool:
    # A sum is finite only if all that is summed is, and that is the usual case; of few numbers Python's is the fastest.
    if len(scores) <= FEW_ARMS and isfinite(sum(scores.tolist())):
        return True
    return bool(np.isfinite(scores).all())


def decision_draws(seed: int, decision_id: str) -> Iterator[float]:
    """Numbers in [0, 1) that belong to a decision: the same decision id draws the same arms from the same scores.

    Bits of a hash are as uniform as any generator's, and there is no generator to set up for the one or two needed.
    """
    for block in count():
        digest = blake2b(f"{seed}:{block}:{decision_id}".encode()).digest()
        for start in range(0, len(digest), 8):
            yield (int.from_bytes(digest[start : start + 8], "little") >> 11) * 2.0**-53


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
