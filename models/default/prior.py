"""Heads as exact posteriors under a prior learned from all users, from sufficient statistics.

A user's reward for head inputs h is r = hᵀw_u + noise, w_u ~ N(μ, Σ), noise ~ N(0, σ²). With A = Σ hhᵀ, b = Σ hr the
posterior is N(w, P), P = (A/σ² + Σ⁻¹)⁻¹, w = P(b/σ² + Σ⁻¹μ). (μ, Σ, σ²) maximise the likelihood of all users' rewards
by EM: GEM-BML (Algorithm 1) with exact inference.

*Groups.* One Gaussian cannot represent kinds of users. A mean shift in the space of heads gives centres: each user's
posterior mean moves towards the pooled posterior of users whose rewards it explains, until users of one kind share a
centre. A user's prior is then a mixture of N(c_q, κΣ) over the centres, weighted by the evidence of their own rewards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self, final

import torch
from torch import Tensor

from metaban.models.numerics.arrays import Array, dots, double, inverse, lower_factor, softmax

#: Prior variance of a coefficient without data, as a share of σ², and its weight in users.
UNSEEN_SPREAD = 0.04
UNSEEN_USERS = 2.0

#: Initial noise variance, worth one event.
FIRST_NOISE = 0.1

#: Smallest σ².
LEAST_NOISE = 1e-6

#: Events at which a user gets half weight in the search for groups.
HALF_WEIGHT_EVENTS = 5.0

#: Offset of an unused row of groups; finite, because everything stored has to be.
NO_GROUP = -1e9


@final
@dataclass(frozen=True, slots=True)
class Statistics:
    """Sufficient statistics of U users: A [U, D, D], b [U, D], Σr² [U], events [U], all float64."""

    gram: Tensor
    moment: Tensor
    squares: Tensor
    events: Tensor

    @classmethod
    def of(cls, heads: Array, rewards: Array, weight: Array) -> Self:
        """From head inputs [U, S, D], rewards [U, S] and sample weights [U, S], 0 for padding."""
        h, r, w = double(heads), double(rewards), double(weight)
        weighted = (h * w[..., None]).mT  # [U, D, S]
        return cls(weighted @ h, (weighted @ r[..., None])[..., 0], (w * r * r).sum(1), w.sum(1))

    @classmethod
    def joined(cls, parts: list[Statistics]) -> Statistics:
        """The users of several batches, concatenated."""
        return Statistics(
            torch.cat([part.gram for part in parts]),
            torch.cat([part.moment for part in parts]),
            torch.cat([part.squares for part in parts]),
            torch.cat([part.events for part in parts]),
        )

    def cpu(self) -> Statistics:
        """A copy on the CPU."""
        return Statistics(self.gram.cpu(), self.moment.cpu(), self.squares.cpu(), self.events.cpu())

    def rows(self, index: Tensor) -> Statistics:
        """Some of the users."""
        return Statistics(self.gram[index], self.moment[index], self.squares[index], self.events[index])


@final
@dataclass(frozen=True, slots=True)
class Prior:
    """μ [D], Σ [D, D], Σ⁻¹ [D, D] and σ² [], float64."""

    mean: Tensor
    covariance: Tensor
    precision: Tensor
    noise: Tensor

    @classmethod
    def initial(cls, dimension: int) -> Prior:
        """Before any event."""
        noise = torch.tensor(FIRST_NOISE, dtype=torch.float64)
        return cls.of(
            torch.zeros(dimension, dtype=torch.float64), torch.eye(dimension, dtype=torch.float64) * noise / 2, noise
        )

    @classmethod
    def of(cls, mean: Tensor, covariance: Tensor, noise: Tensor) -> Prior:
        """Computes the inverse of Σ."""
        return cls(mean, covariance, inverse(covariance), noise)

    def posterior(self, gram: Tensor, moment: Tensor) -> tuple[Tensor, Tensor]:
        """Mean [..., D] and covariance [..., D, D] of heads with these statistics."""
        covariance = inverse(gram / self.noise + self.precision)
        return self.mean_under(covariance, moment), covariance

    def posterior_mean(self, gram: Tensor, moment: Tensor) -> Tensor:
        """The mean alone [..., D], in a third of the time of an inverse."""
        factor, sound = lower_factor(gram / self.noise + self.precision)
        mean = torch.cholesky_solve(self._natural(moment)[..., None], factor)[..., 0]
        return torch.where(sound[..., None], mean, torch.nan)

    def mean_under(self, covariance: Array, moment: Array) -> Array:
        """The posterior mean [..., D], given its covariance."""
        return (covariance @ self._natural(moment)[..., None])[..., 0]

    def _natural(self, moment: Array) -> Array:
        """b/σ² + Σ⁻¹μ [..., D]."""
        return moment / self.noise + self.precision @ self.mean

    def em_step(self, users: Statistics, user_weights: Tensor | None = None) -> Prior:
        """One EM step with user weights w_u [U], or 1 (GEM-BML, Algorithm 1, with exact posteriors)."""
        user_weights = torch.ones_like(users.events) if user_weights is None else user_weights
        mean, covariance = self.posterior(users.gram, users.moment)  # [U, D], [U, D, D]
        seconds = covariance + mean.unsqueeze(-1) * mean.unsqueeze(-2)  # [U, D, D], E[wwᵀ]
        errors = users.squares - 2 * (mean * users.moment).sum(-1) + (users.gram * seconds).sum((-1, -2))  # [U]
        noise = ((user_weights @ errors + FIRST_NOISE) / (user_weights @ users.events + 1)).clamp_min(LEAST_NOISE)
        centres, spreads = moment_matched(user_weights.unsqueeze(0), mean, covariance, noise)
        return Prior.of(centres[0], spreads[0], noise)


def moment_matched(weights: Tensor, mean: Tensor, covariance: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Mean [n, D] and covariance [n, D, D] of heads by moment matching, for n weightings of users [n, U].

    Users have posterior means [U, D] and covariances [U, D, D]; UNSEEN_USERS users without data are added.
    """
    count = weights.sum(-1, keepdim=True)  # [n, 1]
    centre = weights @ mean / count  # [n, D]
    about = mean.mean(0)  # moments about a point near all means lose less to rounding
    apart, off = mean - about, centre - about  # [U, D], [n, D]
    seconds = (covariance + apart.unsqueeze(-1) * apart.unsqueeze(-2)).flatten(1)  # [U, D²]
    total = (weights @ seconds).view(*centre.shape, -1)  # [n, D, D]
    unseen = torch.eye(centre.shape[-1], dtype=mean.dtype, device=mean.device) * (UNSEEN_SPREAD * noise)
    count = count.unsqueeze(-1)  # [n, 1, 1]
    spread = (total - count * off.unsqueeze(-1) * off.unsqueeze(-2) + UNSEEN_USERS * unseen) / (count + UNSEEN_USERS)
    return centre, (spread + spread.mT) / 2


def log_marginal(mean: Tensor, precision: Tensor, noise: Tensor, users: Statistics) -> Tensor:
    """log p(rewards; μ, Λ, σ²) of each user with heads integrated out, from their statistics: [U].

    For several priors at once, means [n, D] and precisions [n, D, D]: [n, U].
    """
    drawn = precision @ mean.unsqueeze(-1)  # [D, 1]
    natural = users.moment / noise + drawn.mT  # [U, D]
    factor = torch.linalg.cholesky(users.gram / noise + precision.unsqueeze(-3))  # [U, D, D], of posterior precisions
    found = torch.linalg.solve_triangular(factor, natural.unsqueeze(-1), upper=False).squeeze(-1)  # [U, D]
    # Log density at the posterior mean w: prior · likelihood / posterior, with the squares combined.
    prior = (mean.unsqueeze(-2) @ drawn).squeeze(-1)  # [1], μᵀΛμ
    squares: Tensor = users.squares / noise + prior - found.square().sum(-1)  # [U]
    volumes = _log_determinant(torch.linalg.cholesky(precision)).unsqueeze(-1) - _log_determinant(factor)  # [U]
    missing: Tensor = users.events * (2 * math.pi * noise).log()  # [U]
    return 0.5 * (volumes - missing - squares)


def _log_determinant(factor: Tensor) -> Tensor:
    """log det LLᵀ of L [..., D, D]: [...]."""
    return 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)


@final
@dataclass(frozen=True, slots=True)
class Groups:
    """Q mixture components w ~ N(c_q, κΣ) in the form that scoring needs.

    Σ⁻¹c_q/κ [Q, D], and log weight − ½ c_qᵀΣ⁻¹c_q/κ [Q]; a row with offset NO_GROUP is unused.
    """

    pull: Tensor
    offset: Tensor
    share: Tensor  #: κ []

    @classmethod
    def of(cls, prior: Prior, centres: Tensor, log_weight: Tensor, share: Tensor) -> Groups:
        """From centres [Q, D] and the logarithms of their weights [Q]."""
        pull = centres @ prior.precision / share
        return cls(pull, log_weight - 0.5 * (pull * centres).sum(-1), share)

    @classmethod
    def none(cls, dimension: int, share: float) -> Groups:
        """No groups."""
        known = torch.zeros(0, dimension + 1, dtype=torch.float64)
        return cls(known[:, 1:], known[:, 0], torch.tensor(share, dtype=torch.float64))

    def centres(self, prior: Prior) -> Tensor:
        """c_q [Q, D]."""
        return self.pull @ prior.covariance * self.share

    def any(self) -> Tensor:
        """Whether there are any groups [] bool."""
        return self.offset.max() > NO_GROUP / 2

    def responsibilities(self, covariance: Array, known: Array) -> Array:
        """Posterior group probabilities [R, Q] of users with b/σ² [R, D] and covariance (A/σ² + Σ⁻¹/κ)⁻¹ [R, D, D]."""
        # ½ aᵀPa with a = known + pull; the part without pull is the same for all groups.
        drawn = (covariance @ known[..., None]).mT + 0.5 * (self.pull @ covariance)  # [R, Q, D]
        return softmax(dots(drawn, self.pull) + self.offset)

    def head(self, covariance: Array, known: Array, belief: Array) -> Array:
        """The users' mean heads [R, D] under these responsibilities."""
        return (covariance @ (known + belief @ self.pull)[..., None])[..., 0]


def evidence_weights(users: Statistics, user_weights: Tensor | None = None) -> Tensor:
    """Weights of users in the search for groups [U]: w_u, or 1, reduced for users with few events."""
    evidence_weight = users.events / (users.events + HALF_WEIGHT_EVENTS)
    return evidence_weight if user_weights is None else user_weights * evidence_weight


def find_groups(
    prior: Prior, users: Statistics, share: Tensor, steps: int, user_weights: Tensor | None = None
) -> Groups:
    """Mean shift: one centre per user, after `steps` shifts towards users whose rewards they explain.

    Users have weights w_u [U], or 1; a user of weight 0 is in no group and is no centre.
    """
    log_weight = evidence_weights(users, user_weights).log().clamp_min(NO_GROUP)
    centres = prior.posterior_mean(users.gram, users.moment)  # [U, D]
    within = prior.precision / share
    covariance = inverse(users.gram / prior.noise + within)  # [U, D, D]
    known = users.moment / prior.noise  # [U, D]
    drawn = (covariance @ known.unsqueeze(-1)).squeeze(-1)  # [U, D]
    half = 0.5 * covariance.flatten(1)  # [U, D²]
    itself = torch.eye(centres.shape[0], dtype=torch.bool, device=centres.device)
    for _ in range(steps):
        pull = centres @ within  # [U, D]
        # ½ aᵀPa of Groups.responsibilities for every pair, a = known + pull, without a tensor of all pairs' heads.
        outer = (pull.unsqueeze(-1) * pull.unsqueeze(-2)).flatten(1)  # [U, D²]
        evidence = torch.addmm(drawn @ pull.mT, half, outer.mT)  # [U, U]
        evidence += log_weight - 0.5 * (pull * centres).sum(-1)
        belief = evidence.masked_fill(itself, -torch.inf).softmax(-1)
        belief = torch.where(itself, torch.ones_like(belief), belief.nan_to_num(0.0))
        gram = (belief @ users.gram.flatten(1)).view_as(users.gram)
        moment = belief @ users.moment
        centres = prior.posterior_mean(gram, moment)
    return Groups.of(prior, centres, log_weight, share)


def prior_from_state(shared: Mapping[str, Array]) -> Prior:
    """The prior from an epoch's shared state."""
    return Prior(shared["prior_mean"], shared["prior_covariance"], shared["prior_precision"], shared["noise"])


def prior_state(prior: Prior) -> dict[str, Tensor]:
    """The shared state of a prior."""
    return {
        "prior_mean": prior.mean,
        "prior_covariance": prior.covariance,
        "prior_precision": prior.precision,
        "noise": prior.noise,
    }


def groups_state(groups: Groups, most: int) -> dict[str, Tensor]:
    """The shared state of groups, padded to `most` rows."""
    missing = most - groups.offset.shape[0]
    return {
        "group_pull": torch.cat([groups.pull, groups.pull.new_zeros(missing, groups.pull.shape[1])]),
        "group_offset": torch.cat([groups.offset, groups.offset.new_full((missing,), NO_GROUP)]),
        "group_share": groups.share,
    }
