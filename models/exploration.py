"""Policies: from scores to choices with known probabilities.

A policy turns mean and bonus of the arms into a distribution over them and knows nothing of the learner behind. The
distribution is exact, ties included, so that the logged propensity of a choice is the probability it had, and rewards
can be reweighted later. A slate is drawn position by position without replacement; the propensity of a position is
conditional on the arms above it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from hashlib import blake2b
from typing import final

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


class Policy(ABC):
    """A rule for choosing among arms."""

    name: str

    @abstractmethod
    def probabilities(self, mean: Vector, bonus: Vector) -> Vector:
        """The chance of each arm to be chosen next; sums to 1."""


@final
class UpperConfidence(Policy):
    """`ucb`: the arm with the largest mean + bonus; ties share evenly."""

    name = "ucb"

    def probabilities(self, mean: Vector, bonus: Vector) -> Vector:
        score = mean + bonus
        best = (score == score.max()).astype(np.float64)
        shares: Vector = best / best.sum()
        return shares


@final
class FlooredUpperConfidence(Policy):
    """`ucb-floor`: as `ucb`, with a share ε spread evenly over all arms so that every arm can be evaluated."""

    name = "ucb-floor"

    def __init__(self, epsilon: float) -> None:
        if not 0 <= epsilon <= 1:
            raise ValueError("epsilon must lie in [0, 1]")
        self.epsilon = epsilon

    def probabilities(self, mean: Vector, bonus: Vector) -> Vector:
        greedy = UpperConfidence().probabilities(mean, bonus)
        return (1 - self.epsilon) * greedy + self.epsilon / len(mean)


@final
class InverseGap(Policy):
    """`squarecb`: 1 / (n + γ·gap) for all but the best arm, which takes the rest (Foster and Rakhlin, 2020)."""

    name = "squarecb"

    def __init__(self, gamma: float) -> None:
        if not gamma > 0:
            raise ValueError("gamma must be positive")
        self.gamma = gamma

    def probabilities(self, mean: Vector, bonus: Vector) -> Vector:
        score = mean + bonus
        weights: Vector = 1 / (len(score) + self.gamma * (score.max() - score))
        best = score == score.max()
        weights[best] = (1 - weights[~best].sum()) / best.sum()
        return weights


@final
@dataclass(frozen=True, slots=True)
class Slate:
    """Chosen arms from the first position on, and the conditional propensity of each."""

    chosen: tuple[int, ...]
    propensities: tuple[float, ...]


def draw_slate(policy: Policy, mean: Vector, bonus: Vector, size: int, generator: np.random.Generator) -> Slate:
    """Draw `size` arms without replacement; scores that are not finite have no distribution to draw from."""
    if not (np.isfinite(mean).all() and np.isfinite(bonus).all()):
        raise ValueError("scores must be finite")
    left = np.arange(len(mean))
    chosen: list[int] = []
    propensities: list[float] = []
    for _ in range(size):
        chances = policy.probabilities(mean[left], bonus[left])
        place = int(generator.choice(len(left), p=chances / chances.sum()))
        chosen.append(int(left[place]))
        propensities.append(float(chances[place]))
        left = np.delete(left, place)
    return Slate(tuple(chosen), tuple(propensities))


def decision_generator(seed: int, decision_id: str) -> np.random.Generator:
    """Randomness that belongs to a decision: the same decision id draws the same arms from the same scores."""
    digest = blake2b(f"{seed}:{decision_id}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little")))


def build_policy(name: str, *, epsilon: float, squarecb_gamma: float) -> Policy:
    """The policy of that name."""
    policies: dict[str, Policy] = {
        "ucb": UpperConfidence(),
        "ucb-floor": FlooredUpperConfidence(epsilon),
        "squarecb": InverseGap(squarecb_gamma),
    }
    return policies[name]
