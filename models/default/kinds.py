"""Kinds of users: the prior of heads as a mixture, fitted by EM.

A user's head is w ~ Σ_k π_k N(c_k, κΣ), with shares of users π_k and centres c_k. Without kinds the mixture has one
component, the prior N(μ, Σ) itself, κ = 1. With responsibilities β_uk of kind k for user u,

    β_uk ∝ π_k · p(rewards of u | w ~ N(c_k, κΣ))        c_k = posterior mean of heads from Σ_u β_uk (A_u, b_u)

so a centre is fitted as if all users of a kind had the same head: κ is small. EM is restarted several times from random
responsibilities with annealing, and the most probable solution is kept.

The number of kinds is the least under which the rewards of users who were held out are as probable as under any other
number, within two standard errors and three nats (cross-validation; after the one-standard-error rule of Breiman et
al., "Classification and Regression Trees", 1984). The prior alone comes first. So does one kind, which counts as none:
where all users are alike, Σ may still be too wide, and any narrower prior is better.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self, final

import torch
from torch import Tensor

from metaban.models.default.prior import Prior, Statistics, log_marginal
from metaban.models.numerics.arrays import Array, dots, inverse, softmax
from metaban.models.numerics.schedule import grown

#: Number of users that kinds are derived from, those with the most events.
USERS_MAX: Final = 256

#: Numbers of kinds to try, the first for comparison only; κ, the covariance within a kind relative to Σ.
COUNTS: Final = (1, 2, 3, 4, 6, 9)
KINDS_MAX: Final = max(COUNTS)
SPREAD: Final = 0.07

#: Parts of the users that are held out in turn.
FOLDS: Final = 3

#: Standard errors, and nats, by which fewer kinds may be worse than the best number.
TOLERATED_ERRORS: Final = 2.0
TOLERATED_NATS: Final = 3.0

#: Random restarts of EM, steps of each, and steps when a solution is continued with newer samples.
RESTARTS: Final = 3
STEPS: Final = 16
STEPS_CARRIED: Final = 3

#: Initial temperature of the EM annealing.
FIRST_TEMPERATURE: Final = 3.0

#: Applied events from which kinds are searched for, and the growth of events after which they are searched for again.
FROM_EVENTS: Final = 1_024
GROWTH: Final = 1.3

#: Lower bound of uniform random numbers, whose logarithm is taken.
LEAST_UNIFORM: Final = 1e-9

#: Added to the number of users of a kind, whose logarithm is taken.
LEAST_MASS: Final = 1e-3

#: Log share of an unused row; finite, because everything stored has to be.
UNUSED: Final = -1e9


@final
@dataclass(frozen=True, slots=True)
class Kinds:
    """Centres c_k [..., K, D], log π_k [..., K] and κ []; in shared state KINDS_MAX rows, used ones first."""

    centres: Array
    log_shares: Array
    spread: Array

    @classmethod
    def none(cls, prior: Prior) -> Self:
        """The prior as the only component."""
        return cls(prior.mean.unsqueeze(0), prior.mean.new_zeros(1), torch.ones_like(prior.noise)).padded()

    @classmethod
    def stored(cls, shared: Mapping[str, Array]) -> Self:
        """From an epoch's shared state."""
        return cls(shared["kind_centres"], shared["kind_log_shares"], shared["kind_spread"])

    def state(self) -> dict[str, Array]:
        """The shared state of the kinds."""
        return {"kind_centres": self.centres, "kind_log_shares": self.log_shares, "kind_spread": self.spread}

    def padded(self) -> Self:
        """The same with KINDS_MAX rows."""
        rows, size = self.centres.shape
        centres = self.centres.new_zeros(KINDS_MAX, size)
        centres[:rows] = self.centres
        log_shares = self.log_shares.new_full((KINDS_MAX,), UNUSED)
        log_shares[:rows] = self.log_shares
        return type(self)(centres, log_shares, self.spread)

    def used(self) -> Self:
        """The rows in use; with tensors, which may be on a GPU, all rows: no synchronisation."""
        if isinstance(self.log_shares, Tensor):
            return self
        count = self.count()
        return type(self)(self.centres[:count], self.log_shares[:count], self.spread)

    def count(self) -> int:
        """Number of kinds; 1 without."""
        return int((self.log_shares > UNUSED / 2).sum())

    def posteriors(self, prior: Prior, gram: Array, moment: Array) -> HeadPosteriors:
        """Posteriors of the heads of users with A [R, D, D] and b [R, D] (prior.py), in float64."""
        within = prior.precision / self.spread  # (κΣ)⁻¹
        covariance = inverse(gram / prior.noise + within)  # [R, D, D], of a user within any kind
        pull = self.centres @ within  # [K, D]
        known = moment / prior.noise  # [R, D]
        # ½ aᵀPa with a = known + pull; the part without pull is the same for all kinds.
        drawn = (covariance @ known[..., None]).mT + 0.5 * (pull @ covariance)  # [R, K, D]
        belief = softmax(dots(drawn, pull) + (self.log_shares - 0.5 * dots(pull, self.centres)))  # [R, K]
        head = (covariance @ (known + belief @ pull)[..., None])[..., 0]
        return HeadPosteriors(head, covariance, belief, pull)

    def log_marginal(self, prior: Prior, users: Statistics) -> Tensor:
        """log p(rewards) of each user [U]."""
        each = log_marginal(self.centres, prior.precision / self.spread, prior.noise, users)  # [K, U]
        mixed: Tensor = (each + self.log_shares.unsqueeze(-1)).logsumexp(0)
        return mixed

    def of(self, prior: Prior, users: Statistics) -> Tensor:
        """The most probable kind of each user [U] int64; 0 without kinds."""
        belief: Tensor = self.posteriors(prior, users.gram, users.moment).belief
        return belief.argmax(-1)


@final
@dataclass(frozen=True, slots=True)
class HeadPosteriors:
    """Posteriors of R users' heads under a mixture: mean heads [R, D], and probabilities of kinds [R, K]."""

    head: Array
    _within: Array  # [R, D, D], covariance within a kind
    belief: Array
    _pull: Array  # [K, D], c_k/(κΣ)

    def covariance(self) -> Array:
        """Covariance of the head [R, D, D]: within a kind, plus the spread between the kinds' heads."""
        apart = (self._pull - (self.belief @ self._pull)[:, None]) @ self._within  # [R, K, D], relative to the mean
        return self._within + apart.mT @ (apart * self.belief[..., None])


@final
class MixtureEM:
    """EM for a mixture of users with weights w_u [U] under a prior."""

    def __init__(self, prior: Prior, users: Statistics, weights: Tensor) -> None:
        self._prior, self._users, self._weights = prior, users, weights
        self._spread = torch.full_like(prior.noise, SPREAD)
        self._within = prior.precision / SPREAD
        covariance = inverse(users.gram / prior.noise + self._within)  # [U, D, D]
        self._drawn = (covariance @ (users.moment / prior.noise).unsqueeze(-1)).squeeze(-1)  # [U, D]
        self._half = 0.5 * covariance.flatten(1)  # [U, D²]

    def log_joint(self, kinds: Kinds) -> Tensor:
        """log π_k + log p(rewards of u | kind k), up to a constant of the user [..., U, K]."""
        pull = kinds.centres @ self._within  # [..., K, D]
        outer = (pull.unsqueeze(-1) * pull.unsqueeze(-2)).flatten(-2)  # [..., K, D²]
        # ½ aᵀPa of Kinds.posteriors for every pair.
        each = self._drawn @ pull.mT + self._half @ outer.mT
        joint: Tensor = each + (kinds.log_shares - 0.5 * (pull * kinds.centres).sum(-1)).unsqueeze(-2)
        return joint

    def m_step(self, belief: Tensor) -> Kinds:
        """M-step: centres and shares from responsibilities [..., U, K]."""
        gram, moment, mass = self._sums(belief)
        shares = (mass / mass.sum(-1, keepdim=True)).log()
        return Kinds(self._prior.posterior_mean(gram, moment), shares, self._spread)

    def fit(self, count: int, generator: torch.Generator) -> Kinds:
        """The most probable solution of EM for so many kinds, the largest first; those without users are unused."""
        kinds = self.m_step(random_responsibilities(count, generator, self._weights))
        for step in range(STEPS):
            heat = max(1.0, FIRST_TEMPERATURE * (1 - 2 * step / STEPS))
            kinds = self.m_step((self.log_joint(kinds) / heat).softmax(-1))
        best = self.log_posterior(kinds).nan_to_num(nan=-torch.inf).argmax().view(1)
        log_shares, order = kinds.log_shares[best][0].sort(descending=True, stable=True)
        # A kind of less than one user is none; the largest remains.
        empty = (log_shares < -math.log(max(1, self._weights.shape[0]))) & (log_shares < log_shares[0])
        log_shares = log_shares.masked_fill(empty, -torch.inf).log_softmax(0).masked_fill(empty, UNUSED)
        return Kinds(kinds.centres[best][0][order], log_shares, kinds.spread)

    def continued(self, kinds: Kinds) -> Kinds:
        """A few EM steps from an earlier solution; unused kinds stay unused."""
        unused = kinds.log_shares <= UNUSED / 2
        for _ in range(STEPS_CARRIED):
            kinds = self.m_step(self.log_joint(kinds).softmax(-1))
            kinds = Kinds(kinds.centres, kinds.log_shares.masked_fill(unused, UNUSED), kinds.spread)
        return kinds

    def log_posterior(self, kinds: Kinds) -> Tensor:
        """log p(rewards, centres), up to a constant [...]."""
        away = kinds.centres - self._prior.mean
        unlikely: Tensor = 0.5 * ((away @ self._prior.precision) * away).sum((-1, -2))
        return self.log_joint(kinds).logsumexp(-1) @ self._weights - unlikely

    def _sums(self, belief: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Statistics A [..., K, D, D], b [..., K, D] and users [..., K] of kinds under responsibilities [..., U, K]."""
        belief = (belief * self._weights.unsqueeze(-1)).mT  # [..., K, U]
        gram = (belief @ self._users.gram.flatten(1)).view(*belief.shape[:-1], *self._users.gram.shape[1:])
        return gram, belief @ self._users.moment, belief.sum(-1) + LEAST_MASS


def random_responsibilities(count: int, generator: torch.Generator, weights: Tensor) -> Tensor:
    """Initial responsibilities [RESTARTS, U, count] of users with weights [U], each leaning to some kind."""
    uniform = torch.rand(RESTARTS, weights.shape[0], count, generator=generator, dtype=torch.float64)
    leaning = uniform.clamp_min(LEAST_UNIFORM).log().square()
    return (leaning / leaning.sum(-1, keepdim=True)).to(weights.device)


def search_due(epoch_events: int, total_events: int, *, refit: bool) -> bool:
    """Whether kinds have to be searched for again: events have grown, or inputs changed."""
    return refit or grown(epoch_events, total_events, GROWTH)


#: Learns the prior of users with weights from its start values.
PriorLearning = Callable[[Statistics, Tensor], Prior]


def continued_kinds(before: Kinds, prior: Prior, users: Statistics, user_weights: Tensor) -> Kinds:
    """Kinds of an earlier epoch under a new prior, from newer samples of users with weights w_u [U]."""
    continued = MixtureEM(prior, *_largest(users, user_weights)).continued(before)
    return _chosen([Kinds.none(prior), continued], before.spread < 1)


def _largest(users: Statistics, user_weights: Tensor) -> tuple[Statistics, Tensor]:
    """The users that kinds are derived from, and their weights."""
    largest = (user_weights * users.events).argsort(descending=True, stable=True)[:USERS_MAX]
    return users.rows(largest), user_weights[largest]


def found_kinds(
    prior: Prior, users: Statistics, user_weights: Tensor, learn_prior: PriorLearning, generator: torch.Generator
) -> Kinds:
    """Kinds under a prior, of users with weights w_u [U], if they explain users who were held out."""
    users, weights = _largest(users, user_weights)
    gains = held_out_gains(users, weights, learn_prior, generator)  # [1 + len(COUNTS), U]
    short = gains[gains.sum(-1).argmax()] - gains
    count = short.shape[1]
    error = (short.var(-1, correction=0) * (count * count / max(1, count - 1))).sqrt()
    # With a single user nothing is comparable (NaN), and the first is none.
    first = (short.sum(-1) <= TOLERATED_ERRORS * error + TOLERATED_NATS).to(torch.int64).argmax()
    em, none = MixtureEM(prior, users, weights), Kinds.none(prior)
    several = [em.fit(kinds, generator).padded() for kinds in COUNTS[1:]]
    return _chosen([none, none, *several], first)


def _chosen(candidates: Sequence[Kinds], place: Tensor) -> Kinds:
    """The one in this place [], chosen on the device: no synchronisation."""
    states = [kinds.state() for kinds in candidates]
    row = place.to(torch.int64).view(1)
    return Kinds.stored({name: torch.stack([state[name] for state in states])[row][0] for name in states[0]})


def held_out_gains(
    users: Statistics, weights: Tensor, learn_prior: PriorLearning, generator: torch.Generator
) -> Tensor:
    """Logarithm by which each user's rewards are more probable with kinds than without [1 + len(COUNTS), U].

    Kinds and the prior are those of other users. The first row is without kinds, 0; columns are users fold by fold.
    """
    folds = torch.randperm(weights.shape[0], generator=generator).to(weights.device).tensor_split(FOLDS)
    gains = []
    for number, fold in enumerate(folds):
        rest = torch.cat([*folds[:number], *folds[number + 1 :]])
        others, held = ((users.rows(rows), weights[rows]) for rows in (rest, fold))
        prior = learn_prior(*others)
        em, none = MixtureEM(prior, *others), Kinds.none(prior)
        candidates = [none, *(em.fit(count, generator) for count in COUNTS)]
        each = torch.stack([kinds.log_marginal(prior, held[0]) for kinds in candidates])
        gains.append((each - each[0]) * held[1])
    return torch.cat(gains, -1).nan_to_num(nan=-torch.inf)
