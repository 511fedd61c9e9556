"""The default learner as its equations say, slow and obviously right.

One user, one arm, one sample at a time, in float64 numpy, and nothing imported from `models`. Where the fast code keeps
sums A = Σ hhᵀ and b = Σ hr and inverts precisions, this keeps the samples and conditions the joint normal distribution
of coefficients and rewards; where it compares evidence up to a constant, this computes the density of all rewards;
where it searches arms in a sorted table, this has a dictionary.

A reward at place k is e_k·(wᵀh + b_i + βᵀz) + noise; divided by e_k, it is one at the first place with noise σ²/e_k².
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.stats import multivariate_normal

Array = NDArray[np.float64]


@dataclass(frozen=True)
class LiteralKnown:
    """What is known of an arm: b with its variance, and q."""

    effect: float
    variance: float
    factors: list[float]


@dataclass(frozen=True)
class LiteralShared:
    """State shared by all users."""

    mean: Array  # [d]
    scale: Array  # [d]
    edges: Array | None  # [d, bins + 1]
    head_inputs: int  # the first numbers of an input that heads are about
    directions: Array | None  # [head inputs, c]
    common_ratio: Array | None  # τ²/σ² [d], where the common part of a slate is removed
    common_centre: Array | None  # m [d]
    trunk: list[list[tuple[Array, Array]]]  # weights [rows, columns] and biases [rows] of each layer of each member
    prior_mean: Array  # μ [D]
    prior_covariance: Array  # Σ [D, D]
    noise: float  # σ²
    centres: list[Array]  # c_k of each kind [D]
    shares: list[float]  # π_k
    spread: float  # κ
    gain: float  # g
    reach: float
    since: float  # epoch of the last change of tastes
    arms: dict[int, LiteralKnown]  # by key
    unknown: LiteralKnown  # an arm with an id that is not among them
    looks: list[float]  # e_k, the last for all later places
    wide: dict[tuple[int, int], float]  # β by the two columns that are multiplied; the last column is 1
    made: dict[int, list[float]]  # V: the factors that a column of the arm makes


@dataclass(frozen=True)
class LiteralSettings:
    """The settings that scoring reads."""

    alpha: float
    nu: float
    memory_samples: int
    memory_radius: float
    trunk: bool
    heads: bool
    memory: bool
    arms: bool


@dataclass(frozen=True)
class LiteralShown:
    """An arm's inputs, its slate (number of arms, then their mean) and its key, 0 without an id."""

    raw: Array  # [d]
    offer: list[float]  # 1 + d numbers, read only where common parts are removed
    key: int = 0


@dataclass(frozen=True)
class LiteralSample:
    """A reward, its arm, the trunk's prediction noted at the decision, the epoch of the decision, and the place."""

    arm: LiteralShown
    noted: float
    reward: float
    epoch: int
    place: int = 0


@dataclass
class LiteralArm:
    """Results for one arm."""

    mean: float
    bonus: float
    noted: list[float]
    #: By row in the pool: |prediction of that user − mean|, and the largest difference that still counts as agreement.
    distances: dict[int, tuple[float, float]] = field(default_factory=dict)


def shown(arms: Sequence[Array], keys: Sequence[int] | None = None) -> list[LiteralShown]:
    """The arms of one request, with their keys if they have ids."""
    means = [sum(float(arm[column]) for arm in arms) / len(arms) for column in range(len(arms[0]))]
    offer = [float(len(arms)), *means]
    return [LiteralShown(arm, offer, key) for arm, key in zip(arms, keys or [0] * len(arms), strict=True)]


def literal_ratio(arms: Array, offers: Array, weights: Sequence[float]) -> tuple[list[float], list[float]]:
    """(τ²/σ², m) of each column, from chosen arms [n, d] and their offers [n, 1 + d]."""
    ratios, centres = [], []
    everything = sum(weights)
    for column in range(arms.shape[1]):
        rows = [(arm[column], offer[0], offer[1 + column]) for arm, offer in zip(arms, offers, strict=True)]
        centre = sum(weight * mean for weight, (_, _, mean) in zip(weights, rows, strict=True)) / everything
        # E (x̄ − m)² = τ² + σ²/k, and E (x − x̄)² = (1 − 1/k)·σ².
        between = own = share_of_own = degrees = 0.0
        for weight, (x, count, mean) in zip(weights, rows, strict=True):
            between += weight * (mean - centre) ** 2 / everything
            share_of_own += weight / count / everything
            if count > 1:
                own += weight * (x - mean) ** 2
                degrees += weight * (1 - 1 / count)
        own = own / degrees if degrees else 0.0
        common = max(0.0, between - own * share_of_own)
        ratios.append(common / own if own > 1e-6 * (own + between) else 0.0)
        centres.append(centre)
    return ratios, centres


class LiteralPosterior:
    """`fit` and `score` of the default learner."""

    def __init__(self, settings: LiteralSettings, shared: LiteralShared) -> None:
        self.settings = settings
        self.shared = shared

    # -- inputs

    def arm_part(self, arm: LiteralShown) -> Array:
        """x − E[c | x̄], where c is the request's effect, Cov(c, x̄) = τ² and Var x̄ = τ² + σ²/k."""
        shared = self.shared
        if shared.common_ratio is None or shared.common_centre is None:
            return arm.raw
        count, *means = arm.offer
        columns = zip(arm.raw, means, shared.common_ratio, shared.common_centre, strict=True)
        return np.array([x - ratio / (ratio + 1 / count) * (mean - centre) for x, mean, ratio, centre in columns])

    def standardized(self, arm: LiteralShown) -> Array:
        """The arm's own part in standard deviations, clipped at 10."""
        z = [(x - m) / s for x, m, s in zip(self.arm_part(arm), self.shared.mean, self.shared.scale, strict=True)]
        return np.array([min(max(value, -10.0), 10.0) for value in z])

    def predicted(self, arm: LiteralShown) -> float:
        """p(x): the mean of the trunk's members on z and its piecewise-linear codes."""
        if not self.settings.trunk:
            return 0.0
        z = self.standardized(arm)
        codes = []
        if self.shared.edges is not None:
            for value, edges in zip(z, self.shared.edges, strict=True):
                for low, high in pairwise(edges):
                    codes.append(min(max((value - low) / (high - low), 0.0), 1.0) - 0.5)
        said = []
        for *hidden, last in self.shared.trunk:
            y = np.array([*z, *codes])
            for weights, offsets in hidden:
                y = np.maximum(weights @ y + offsets, 0.0)
            said.append(float((last[0] @ y + last[1])[0]))
        return sum(said) / len(said)

    def inputs(self, arm: LiteralShown) -> Array:
        """The part of h that comes from the arm alone."""
        z = self.standardized(arm)[: self.shared.head_inputs]
        return z if self.shared.directions is None else self.shared.directions.T @ z

    def h(self, arm: LiteralShown, predicted: float) -> Array:
        """[1, x, products of pairs of x where there is room for them, p, q]."""
        x, factors = self.inputs(arm), self.factors(arm)
        products = []
        if len(self.shared.prior_mean) > len(x) + 2 + len(factors):
            for i in range(len(x)):
                products += [x[i] * x[j] - (1.0 if i == j else 0.0) for j in range(i, len(x))]
        return np.array([1.0, *x, *products, predicted, *factors])

    # -- arms

    def known(self, arm: LiteralShown) -> LiteralKnown:
        """The arm's posterior, the prior if it is unknown; an arm without an id has no effect of its own."""
        if not arm.key:
            return LiteralKnown(0.0, 0.0, [0.0] * len(self.shared.unknown.factors))
        return self.shared.arms.get(arm.key, self.shared.unknown)

    def factors(self, arm: LiteralShown) -> list[float]:
        """q_i + Vᵀz: the arm's own factors, and those that its inputs make."""
        z, own = self.standardized(arm), self.known(arm).factors
        return [
            own[place] + sum(made[place] * z[column] for column, made in self.shared.made.items())
            for place in range(len(own))
        ]

    def effect(self, arm: LiteralShown) -> float:
        """b_i + βᵀz: the same for all users."""
        z = self.standardized(arm)
        factors = [*z, 1.0]
        terms = [weight * factors[one] * factors[other] for (one, other), weight in self.shared.wide.items()]
        return self.known(arm).effect + sum(terms)

    def look(self, sample: LiteralSample) -> float:
        """e_k of the sample's place."""
        return self.shared.looks[min(sample.place, len(self.shared.looks) - 1)]

    def target(self, sample: LiteralSample) -> float:
        """The reward as it would be at the first place, without the arm's effect: wᵀh + noise."""
        return sample.reward / self.look(sample) - self.effect(sample.arm)

    # -- users

    def weight(self, sample: LiteralSample) -> float:
        """Weight of a sample: one from before the last change of tastes has 20 times the noise variance, and one at
        place k 1/e_k² times."""
        return self.look(sample) ** 2 * (1.0 if sample.epoch >= self.shared.since else 0.05)

    def noises(self, samples: Sequence[LiteralSample]) -> Array:
        """The covariance of the samples' noise [S, S]."""
        return np.diag([self.shared.noise / self.weight(sample) for sample in samples])

    def posterior(self, mean: Array, covariance: Array, samples: Sequence[LiteralSample]) -> tuple[Array, Array]:
        """w ~ N(mean, covariance) given r_i = h_iᵀw + noise: the normal distribution of (w, r), conditioned on r."""
        if not samples:
            return mean, covariance
        rows = np.array([self.h(sample.arm, sample.noted) for sample in samples])  # [S, D]
        rewards = np.array([self.target(sample) for sample in samples])
        among = rows @ covariance @ rows.T + self.noises(samples)
        across = covariance @ rows.T
        kalman = across @ np.linalg.inv(among)
        return mean + kalman @ (rewards - rows @ mean), covariance - kalman @ across.T

    def responsibilities(self, samples: Sequence[LiteralSample]) -> list[float]:
        """Bayes' rule: share of the kind × density of the user's rewards when their head is N(centre, κΣ)."""
        within = self.shared.spread * self.shared.prior_covariance
        logs = []
        for centre, share in zip(self.shared.centres, self.shared.shares, strict=True):
            log = math.log(share)
            if samples:
                rows = np.array([self.h(sample.arm, sample.noted) for sample in samples])
                covariance = rows @ within @ rows.T + self.noises(samples)
                log += float(
                    multivariate_normal.logpdf([self.target(sample) for sample in samples], rows @ centre, covariance)
                )
            logs.append(log)
        weights = [math.exp(log - max(logs)) for log in logs]
        return [weight / sum(weights) for weight in weights]

    def of_kinds(self, samples: Sequence[LiteralSample]) -> list[tuple[float, Array, Array]]:
        """The probability of each kind, with the user's head and covariance if they are of it."""
        within = self.shared.spread * self.shared.prior_covariance
        return [
            (belief, *self.posterior(centre, within, samples))
            for belief, centre in zip(self.responsibilities(samples), self.shared.centres, strict=True)
        ]

    def head(self, samples: Sequence[LiteralSample]) -> Array:
        """The mean head."""
        mean = np.zeros_like(self.shared.prior_mean)
        for belief, head, _ in self.of_kinds(samples):
            mean = mean + belief * head
        return mean

    def statistics(self, samples: Sequence[LiteralSample]) -> tuple[Array, Array]:
        """A = Σ hhᵀ and b = Σ hr over weighted samples."""
        size = self.shared.prior_mean.shape[0]
        gram, moment = np.zeros((size, size)), np.zeros(size)
        for sample in samples:
            h = self.h(sample.arm, sample.noted)
            gram += self.weight(sample) * np.outer(h, h)
            moment += self.weight(sample) * h * self.target(sample)
        return gram, moment

    def kept(self, samples: Sequence[LiteralSample]) -> Sequence[LiteralSample]:
        """The newest samples, oldest first."""
        return list(samples)[max(0, len(samples) - self.settings.memory_samples) :]

    # -- requests

    def score(
        self, arm: LiteralShown, own: Sequence[LiteralSample], stored: Array, pool: Sequence[Array], own_row: int
    ) -> LiteralArm:
        """Score one arm for a user with these samples and this stored head, in a pool of these heads."""
        shared, settings = self.shared, self.settings
        offer = [] if shared.common_ratio is None else arm.offer
        predicted = self.predicted(arm)
        if not settings.heads:
            reported = [predicted, math.sqrt(shared.noise), shared.reach]
            return LiteralArm(predicted, 0.0, [predicted, *reported, *offer])
        h = self.h(arm, predicted)
        kinds = self.of_kinds(own)
        mean = sum(belief * float(h @ w) for belief, w, _ in kinds)
        # The variance of a mixture: variance within each component plus variance between them.
        variance = sum(belief * float(h @ p @ h) for belief, _, p in kinds)
        variance += sum(belief * (float(h @ w) - mean) ** 2 for belief, w, _ in kinds)
        found = LiteralArm(mean, 0.0, [])
        for row, other in enumerate(pool):
            if row != own_row:
                found.distances[row] = abs(float(h @ other) - mean), settings.nu * math.sqrt(variance)
        if settings.arms:
            effect = self.effect(arm)
            found.mean += effect
            variance += self.known(arm).variance
        if settings.memory:
            correction, left = self.remembered(arm, own)
            found.mean += correction
            variance += left
        found.bonus = settings.alpha * math.sqrt(variance)
        reported = [found.mean, math.sqrt(variance + shared.noise), shared.reach]
        found.noted = [predicted, *reported, *offer]
        return found

    def remembered(self, arm: LiteralShown, own: Sequence[LiteralSample]) -> tuple[float, float]:
        """g·Σ k e / (1 + g·s) and g·σ² / (1 + g·s), where a sample of weight v counts as v samples."""
        gain, x, head = self.shared.gain, self.inputs(arm), self.head(own)
        told = seen = 0.0
        for sample in self.kept(own):
            apart = math.sqrt(float(np.mean((x - self.inputs(sample.arm)) ** 2)))
            similarity = self.weight(sample) * math.exp(-0.5 * (apart / self.settings.memory_radius) ** 2)
            told += similarity * (self.target(sample) - float(self.h(sample.arm, sample.noted) @ head))
            seen += similarity
        return gain * told / (1 + gain * seen), gain * self.shared.noise / (1 + gain * seen)
