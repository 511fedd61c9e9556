"""A mixture of few kinds of users, fitted by EM.

The mean shift (`prior.find_groups`) has a centre around each user: it needs no number of kinds and helps early, but
pools only users that are already separated. With enough rewards, K centres shared by all users predict better. With
responsibilities β_uk of kind k for user u,

    β_uk ∝ π_k · p(rewards of u | w ~ N(c_k, κΣ))        c_k = posterior mean of heads from Σ_u β_uk (A_u, b_u)

where π_k is the share of users. EM is restarted several times from random responsibilities with annealing, and the most
probable solution is kept.

K is chosen by the evidence, with centres integrated out by Laplace's method (MacKay, "Bayesian Interpolation", 1992).
Two kinds are found even in pure noise, so the evidence for more has to exceed that for two clearly. If the largest K
has the most evidence, users form a continuum and there are no kinds; groups are then those of the mean shift. The guard
λ (evidence.py) measures whether groups help; kinds that do not are replaced by the mean shift until the events have
doubled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Self, final

import torch
from torch import Tensor

from metaban.models.default.prior import (
    NO_GROUP,
    Groups,
    Prior,
    Statistics,
    evidence_weights,
    find_groups,
    groups_state,
)
from metaban.models.numerics.arrays import Array, inverse
from metaban.models.numerics.schedule import grown

#: Number of users that groups are derived from, those with the most events; the mean shift has a centre for each.
GROUP_USERS_MAX: Final = 256

#: Steps of the mean shift.
SHIFT_STEPS: Final = 4

#: Numbers of kinds to try, the first and the last for comparison only; κ, Σ within a kind relative to Σ.
COUNTS: Final = (2, 3, 4, 6, 9)
SPREAD: Final = 0.02

#: Evidence, in nats, by which more kinds have to exceed two.
EVIDENCE_MARGIN: Final = 20.0

#: Random restarts of EM, steps of each, and steps when a solution is continued with newer samples.
RESTARTS: Final = 3
STEPS: Final = 16
STEPS_CARRIED: Final = 3

#: Initial temperature of the EM annealing.
FIRST_TEMPERATURE: Final = 3.0

#: Applied events from which kinds are searched for, the mean events per user required, and the growth of events after
#: which they are searched for again.
FROM_EVENTS: Final = 1_024
EVENTS_EACH: Final = 10.0
GROWTH: Final = 1.3

#: Kinds are dropped when the guard is below this, until the events have grown by this factor.
LEAST_GUARD: Final = 0.5
DROPPED_GROWTH: Final = 2.0

#: Lower bound of uniform random numbers, whose logarithm is taken.
LEAST_UNIFORM: Final = 1e-9

#: Added to the number of users of a kind, whose logarithm is taken.
LEAST_MASS: Final = 1e-3


@final
@dataclass(frozen=True, slots=True)
class Mixture:
    """Centres [..., K, D] and log shares of users [..., K]; NO_GROUP for an unused kind."""

    centres: Tensor
    log_weight: Tensor

    @classmethod
    def of(cls, groups: Groups, prior: Prior) -> Self:
        """The first rows of groups that were made under this prior."""
        most = max(COUNTS)
        centres = groups.centres(prior)[:most]
        return cls(centres, groups.offset[:most] + 0.5 * (groups.pull[:most] * centres).sum(-1))


@final
class MixtureEM:
    """EM for a mixture of users with weights w_u [U], under a prior and a spread κ []."""

    def __init__(self, prior: Prior, users: Statistics, share: Tensor, weights: Tensor) -> None:
        self._prior, self._users, self._weights = prior, users, weights
        self._within = prior.precision / share
        covariance = inverse(users.gram / prior.noise + self._within)  # [U, D, D]
        self._drawn = (covariance @ (users.moment / prior.noise).unsqueeze(-1)).squeeze(-1)  # [U, D]
        self._half = 0.5 * covariance.flatten(1)  # [U, D²]

    def log_joint(self, mixture: Mixture) -> Tensor:
        """log π_k + log p(rewards of u | kind k), up to a constant of the user [..., U, K]."""
        pull = mixture.centres @ self._within  # [..., K, D]
        outer = (pull.unsqueeze(-1) * pull.unsqueeze(-2)).flatten(-2)  # [..., K, D²]
        # ½ aᵀPa of Groups.responsibilities for every pair.
        each: Tensor = self._drawn @ pull.mT + self._half @ outer.mT
        return each + (mixture.log_weight - 0.5 * (pull * mixture.centres).sum(-1)).unsqueeze(-2)

    def m_step(self, belief: Tensor) -> Mixture:
        """M-step: centres and shares from responsibilities [..., U, K]."""
        gram, moment, mass = self._pooled(belief)
        return Mixture(self._prior.posterior_mean(gram, moment), (mass / mass.sum(-1, keepdim=True)).log())

    def fit(self, beliefs: Tensor) -> Mixture:
        """The most probable solution of EM from initial responsibilities [restarts, U, K]."""
        mixture = self.m_step(beliefs)
        for step in range(STEPS):
            heat = max(1.0, FIRST_TEMPERATURE * (1 - 2 * step / STEPS))
            mixture = self.m_step((self.log_joint(mixture) / heat).softmax(-1))
        best = self.log_posterior(mixture).argmax().view(1)
        return Mixture(mixture.centres[best][0], mixture.log_weight[best][0])

    def continued(self, mixture: Mixture) -> Mixture:
        """A few EM steps from an earlier solution; unused kinds stay unused."""
        none = mixture.log_weight <= NO_GROUP / 2
        for _ in range(STEPS_CARRIED):
            mixture = self.m_step(self.log_joint(mixture).softmax(-1))
            mixture = Mixture(mixture.centres, mixture.log_weight.masked_fill(none, NO_GROUP))
        return mixture

    def log_posterior(self, mixture: Mixture) -> Tensor:
        """log p(rewards, centres), up to a constant [...]."""
        away = mixture.centres - self._prior.mean
        unlikely = 0.5 * ((away @ self._prior.precision) * away).sum((-1, -2))
        return self.log_joint(mixture).logsumexp(-1) @ self._weights - unlikely

    def log_evidence(self, mixture: Mixture) -> Tensor:
        """log p(rewards | K) by Laplace's method, up to the same constant []."""
        gram, _, _ = self._pooled(self.log_joint(mixture).softmax(-1))
        volume = torch.logdet(self._prior.covariance @ (gram / self._prior.noise + self._prior.precision))  # [K]
        return self.log_posterior(mixture) - 0.5 * volume.sum(-1)

    def _pooled(self, belief: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Statistics A [..., K, D, D], b [..., K, D] and users [..., K] of kinds under responsibilities [..., U, K]."""
        belief = (belief * self._weights.unsqueeze(-1)).mT  # [..., K, U]
        gram = (belief @ self._users.gram.flatten(1)).view(*belief.shape[:-1], *self._users.gram.shape[1:])
        return gram, belief @ self._users.moment, belief.sum(-1) + LEAST_MASS


def random_responsibilities(count: int, users: int, generator: torch.Generator, like: Tensor) -> Tensor:
    """Initial responsibilities [RESTARTS, users, count], each user leaning to some kind."""
    uniform = torch.rand(RESTARTS, users, count, generator=generator, dtype=torch.float64)
    leaning = uniform.clamp_min(LEAST_UNIFORM).log().square()
    return (leaning / leaning.sum(-1, keepdim=True)).to(like.device)


@final
@dataclass(frozen=True, slots=True)
class GroupState:
    """The groups of an epoch, GROUP_USERS_MAX rows, used ones first, and their guard λ [].

    `mixture` [] is positive while groups are kinds; a negative value −n blocks the search for kinds until n events.
    """

    rows: Groups
    mixture: Array
    guard: Array

    @classmethod
    def none(cls, dimension: int, spread: float) -> Self:
        """Before any event, with κ of the mean shift."""
        nothing = torch.zeros((), dtype=torch.float64)
        return cls(Groups.none(dimension, spread), nothing, nothing.clone())

    @classmethod
    def stored(cls, shared: Mapping[str, Array]) -> Self:
        """From an epoch's shared state."""
        rows = Groups(shared["group_pull"], shared["group_offset"], shared["group_share"])
        return cls(rows, shared["group_mixture"], shared["guard"])

    def state(self) -> dict[str, Array]:
        """The shared state of the groups."""
        return {**groups_state(self.rows, GROUP_USERS_MAX), "group_mixture": self.mixture, "guard": self.guard}

    def used(self) -> Groups | None:
        """The rows in use, None if there are none; with tensors, which may be on a GPU, all rows."""
        if isinstance(self.rows.offset, Tensor):  # no synchronisation
            return self.rows
        count = int((self.rows.offset > NO_GROUP / 2).sum())
        return Groups(self.rows.pull[:count], self.rows.offset[:count], self.rows.share) if count else None

    def clusters(self) -> int:
        """Number of kinds while groups are kinds, otherwise 1."""
        return int((self.rows.offset > NO_GROUP / 2).sum()) if float(self.mixture) > 0 else 1

    def cluster_of(self, prior: Prior, users: Statistics) -> Tensor:
        """The most probable kind of each user [U] int64; 0 while groups are no kinds."""
        if self.clusters() == 1:
            return torch.zeros_like(users.events, dtype=torch.int64)
        within = inverse(users.gram / prior.noise + prior.precision / self.rows.share)  # [U, D, D]
        belief: Tensor = self.rows.responsibilities(within, users.moment / prior.noise)  # [U, Q]
        return belief.argmax(-1)


def mixture_due(epoch_events: int, total_events: int, *, refit: bool) -> bool:
    """Whether kinds have to be searched for again: events have grown, or inputs changed."""
    return total_events >= FROM_EVENTS and (refit or grown(epoch_events, total_events, GROWTH))


def derive_groups(
    before: GroupState,
    earlier: Prior,
    prior: Prior,
    users: Statistics,
    user_weights: Tensor,
    *,
    spread: float,
    seek: bool,
    total_events: int,
) -> GroupState:
    """Groups under a new prior, of users with weights w_u [U], from the groups before under an earlier prior.

    With `seek` kinds are searched for, otherwise the previous ones are continued; `spread` is κ of the mean shift.
    """
    largest = (user_weights * users.events).argsort(descending=True, stable=True)[:GROUP_USERS_MAX]
    users, user_weights = users.rows(largest), user_weights[largest]
    shift = find_groups(prior, users, torch.full_like(prior.noise, spread), SHIFT_STEPS, user_weights)
    share, mixture = torch.full_like(prior.noise, SPREAD), before.mixture
    em = MixtureEM(prior, users, share, evidence_weights(users, user_weights))
    if not seek:
        kinds = em.continued(Mixture.of(before.rows, earlier))
        return replace(before, rows=_chosen(prior, share, shift, [kinds], (mixture > 0).to(torch.int64)))
    generator, count = torch.Generator().manual_seed(total_events), users.events.shape[0]
    found = [em.fit(random_responsibilities(kinds, count, generator, prior.mean)) for kinds in COUNTS]
    worth = torch.stack([em.log_evidence(mixture) for mixture in found])
    best = worth.argmax()
    separated = (
        (worth[best] - worth[0] > EVIDENCE_MARGIN) & (best < len(COUNTS) - 1) & (users.events.mean() >= EVENTS_EACH)
    )
    blocked_until = torch.where(
        (mixture > 0) & (before.guard < LEAST_GUARD), -DROPPED_GROWTH * total_events, mixture.clamp_max(0)
    )
    best = torch.where(separated & (total_events >= -blocked_until), best, 0)
    rows = _chosen(prior, share, shift, found[1:], best)
    mixture = torch.where(best > 0, torch.ones_like(blocked_until), blocked_until)
    return replace(before, rows=rows, mixture=mixture)


def _chosen(prior: Prior, share: Tensor, shift: Groups, kinds: Sequence[Mixture], best: Tensor) -> Groups:
    """The groups of the mean shift if best is 0, otherwise of that mixture; chosen on the device, all rows."""
    mixtures = (Groups.of(prior, each.centres, each.log_weight, share) for each in kinds)
    states = [groups_state(each, GROUP_USERS_MAX) for each in (shift, *mixtures)]
    chosen = {name: torch.stack([state[name] for state in states])[best.view(1)][0] for name in states[0]}
    return Groups(chosen["group_pull"], chosen["group_offset"], chosen["group_share"])
