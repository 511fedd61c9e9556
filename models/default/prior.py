"""Heads as exact posteriors under a prior learned from all users, from sufficient statistics.

A user's reward for head inputs h is r = hᵀw_u + noise, w_u ~ N(μ, Σ), noise ~ N(0, σ²). With A = Σ hhᵀ, b = Σ hr the
posterior is N(w, P), P = (A/σ² + Σ⁻¹)⁻¹, w = P(b/σ² + Σ⁻¹μ). (μ, Σ, σ²) maximise the likelihood of all users' rewards
by EM: GEM-BML (Algorithm 1) with exact inference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self, final

import torch
from torch import Tensor

from metaban.models.numerics.arrays import Array, double, inverse, lower_factor

#: Prior variance of a coefficient without data, as a share of σ², and its weight in users.
UNSEEN_SPREAD = 0.04
UNSEEN_USERS = 2.0

#: Initial noise variance, worth one event.
FIRST_NOISE = 0.1

#: Smallest σ².
LEAST_NOISE = 1e-6


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
        return Prior.of(*moment_matched(user_weights, mean, covariance, noise), noise)


def moment_matched(weights: Tensor, mean: Tensor, covariance: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Mean [D] and covariance [D, D] of heads by moment matching, for users with weights [U].

    Users have posterior means [U, D] and covariances [U, D, D]; UNSEEN_USERS users without data are added.
    """
    count = weights.sum()
    centre = weights @ mean / count  # [D]
    apart = mean - centre  # [U, D]
    seconds = (covariance + apart.unsqueeze(-1) * apart.unsqueeze(-2)).flatten(1)  # [U, D²]
    unseen = torch.eye(centre.shape[0], dtype=mean.dtype, device=mean.device) * (UNSEEN_SPREAD * noise)
    spread = ((weights @ seconds).view_as(unseen) + UNSEEN_USERS * unseen) / (count + UNSEEN_USERS)
    return centre, (spread + spread.mT) / 2


def log_marginal(mean: Tensor, precision: Tensor, noise: Tensor, users: Statistics) -> Tensor:
    """log p(rewards; μ, Λ, σ²) of each user with heads integrated out, from their statistics: [U].

    For several priors at once, means [n, D] and precisions [n, D, D] or [D, D]: [n, U]. NaN where a matrix is singular.
    """
    drawn = precision @ mean.unsqueeze(-1)  # [D, 1]
    natural = users.moment / noise + drawn.mT  # [U, D]
    factor, sound = lower_factor(users.gram / noise + precision.unsqueeze(-3))  # [U, D, D], of posterior precisions
    found = torch.linalg.solve_triangular(factor, natural.unsqueeze(-1), upper=False).squeeze(-1)  # [U, D]
    # Log density at the posterior mean w: prior · likelihood / posterior, with the squares combined.
    prior = (mean.unsqueeze(-2) @ drawn).squeeze(-1)  # [1], μᵀΛμ
    squares: Tensor = users.squares / noise + prior - found.square().sum(-1)  # [U]
    volumes = _log_determinant(lower_factor(precision)[0]).unsqueeze(-1) - _log_determinant(factor)  # [U]
    missing: Tensor = users.events * (2 * math.pi * noise).log()  # [U]
    return torch.where(sound, 0.5 * (volumes - missing - squares), torch.nan)


def _log_determinant(factor: Tensor) -> Tensor:
    """log det LLᵀ of L [..., D, D]: [...]."""
    return 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)


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
