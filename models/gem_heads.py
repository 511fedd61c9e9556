"""GEM-BML on linear heads: posteriors of `models.prior.Prior` are exact, and so is the meta-gradient.

With w_u ~ N(μ, Σ), Λ = Σ⁻¹ and rewards of noise σ², Theorem 1 holds with no error of inference, for a full covariance
and for the noise. `Prior.improved`, EM, goes where this gradient is zero: one of its steps is μ + Σ·∇_μ L/U and, about
the new mean, Σ − 2∇_Λ L/U. What it adds for what nobody has shown (`UNSEEN_USERS`, `FIRST_NOISE`) is `pull_of_unseen`.
Letters in shape comments: U users, D inputs of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from models.prior import FIRST_NOISE, UNSEEN_SPREAD, UNSEEN_USERS, Prior, Statistics


@final
@dataclass(frozen=True, slots=True)
class HeadsGradient:
    """Of the sum over users, in μ [D], Λ = Σ⁻¹ [D, D] (as a symmetric matrix) and σ² []."""

    mean: Tensor
    precision: Tensor
    noise: Tensor

    def minus(self, other: HeadsGradient) -> HeadsGradient:
        """The difference."""
        return HeadsGradient(self.mean - other.mean, self.precision - other.precision, self.noise - other.noise)

    def plus(self, other: HeadsGradient) -> HeadsGradient:
        """The sum."""
        return HeadsGradient(self.mean + other.mean, self.precision + other.precision, self.noise + other.noise)


def heads_gradient(prior: Prior, users: Statistics) -> HeadsGradient:
    """∇L[1]: E ∇ log p(rewards, w; μ, Λ, σ²) under each user's exact posterior (Theorem 1, appendix B.7)."""
    mean, covariance = prior.posterior(users.gram, users.moment)  # [U, D], [U, D, D]
    away = mean - prior.mean  # [U, D]
    spread = covariance.sum(0) + away.mT @ away  # [D, D]
    seconds = covariance + mean.unsqueeze(-1) * mean.unsqueeze(-2)  # [U, D, D], E[wwᵀ]
    squares = users.squares.sum() - 2 * (mean * users.moment).sum() + (users.gram * seconds).sum()  # Σ E(r − hᵀw)²
    return HeadsGradient(
        prior.precision @ away.sum(0),
        0.5 * (mean.shape[0] * prior.covariance - spread),
        0.5 * (squares / prior.noise - users.events.sum()) / prior.noise,
    )


def heads_gradient_plus(prior: Prior, train: Statistics, both: Statistics) -> HeadsGradient:
    """∇L[2] = ∇ log p(train ∪ val) − ∇ log p(train) (appendix A.4), of statistics of train and of both together."""
    return heads_gradient(prior, both).minus(heads_gradient(prior, train))


def pull_of_unseen(prior: Prior) -> HeadsGradient:
    """What `Prior.improved` adds to L[1]: some users as wide as UNSEEN_SPREAD·σ², and one event of FIRST_NOISE."""
    unseen = torch.eye(len(prior.mean), dtype=prior.mean.dtype, device=prior.mean.device) * UNSEEN_SPREAD * prior.noise
    return HeadsGradient(
        torch.zeros_like(prior.mean),
        0.5 * UNSEEN_USERS * (prior.covariance - unseen),
        0.5 * (FIRST_NOISE / prior.noise - 1) / prior.noise,
    )


def log_marginal(mean: Tensor, precision: Tensor, noise: Tensor, users: Statistics) -> Tensor:
    """log p(rewards; μ, Λ, σ²) of each user, heads integrated out, from their statistics: [U].

    Of several priors at once, means [n, D] and precisions [n, D, D]: [n, U].
    """
    drawn = precision @ mean.unsqueeze(-1)  # [D, 1]
    natural = users.moment / noise + drawn.mT  # [U, D]
    factor = torch.linalg.cholesky(users.gram / noise + precision.unsqueeze(-3))  # [U, D, D], of the posterior's
    found = torch.linalg.solve_triangular(factor, natural.unsqueeze(-1), upper=False).squeeze(-1)  # [U, D]
    # Log density at the posterior's mean w: prior · likelihood / posterior, where squares combine.
    prior = (mean.unsqueeze(-2) @ drawn).squeeze(-1)  # [1], μᵀΛμ
    squares: Tensor = users.squares / noise + prior - found.square().sum(-1)  # [U]
    volumes = _log_determinant(torch.linalg.cholesky(precision)).unsqueeze(-1) - _log_determinant(factor)  # [U]
    missing: Tensor = users.events * (2 * math.pi * noise).log()  # [U]
    return 0.5 * (volumes - missing - squares)


def _log_determinant(factor: Tensor) -> Tensor:
    """Of LLᵀ, by L [..., D, D]: [...]."""
    return 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
