"""GEM-BML: a prior over tasks' parameters, learned from their posteriors alone.

After *Gradient-EM Bayesian Meta-learning* (Zou, Lu, 2020). By Theorem 1

    ∇_Θ log p(D; Θ) = E_{θ ~ p(θ|D; Θ)} ∇_Θ log p(θ; Θ),

so that a meta-update needs the posteriors (`inference.py`) but neither the data nor the way they were computed: nothing
is differentiated through the inner loop. Θ is a Gaussian with diagonal covariance, for which the expectation
has a closed form (appendix B.7). `heads.py` is the case of linear heads, whose posteriors are exact.

Letters in shape comments: p parameters, T tasks; `...` are stacked runs, if any.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final, final

import torch
from torch import Tensor

from metaban.models.bayes.inference import Gaussian, InnerSettings, Likelihood, infer

#: Largest gradient in log v, against outlier batches.
SLOPE_MAX: Final = 100.0

#: Range of the prior's variances.
VARIANCES: Final = (1e-8, 1e2)


@final
@dataclass(frozen=True, slots=True)
class MetaGradient:
    """The gradient of L in the prior's mean [..., p] and in its precision (1 / variance) [..., p]."""

    mean: Tensor
    precision: Tensor

    def log_variance(self, prior: Gaussian) -> Tensor:
        """The gradient in the logarithm of the variance, the parameter of the updates: [..., p]."""
        return -self.precision / prior.variance

    def mean_of_tasks(self) -> MetaGradient:
        """[..., T, p] → [..., p]."""
        return MetaGradient(self.mean.mean(-2), self.precision.mean(-2))


def gaussian_gradient(prior: Gaussian, posterior: Gaussian) -> MetaGradient:
    """E_q ∇_Θ log p(θ; Θ), line 4 of GEM-BML in closed form (B.7), for each posterior: [..., p] each."""
    away = posterior.mean - prior.mean  # [..., p]
    return MetaGradient(away / prior.variance, 0.5 * (prior.variance - posterior.variance - away.square()))


def gaussian_gradient_plus(prior: Gaussian, train: Gaussian, both: Gaussian) -> MetaGradient:
    """Line 4 of GEM-BML+ in closed form, Eq. 21 of appendix B.7 with Λ of the posteriors read as covariances."""
    moved = both.mean - train.mean  # [..., p]
    spread = both.variance - train.variance + moved * (both.mean + train.mean - 2 * prior.mean)  # [..., p]
    return MetaGradient(moved / prior.variance, -0.5 * spread)


def sampled_gradient(
    log_prior: Callable[[dict[str, Tensor], Tensor], Tensor], parameters: dict[str, Tensor], draws: Tensor
) -> dict[str, Tensor]:
    """E_q ∇_Θ log p(θ; Θ) for any prior, from draws of q [S, ..., p]: mean over draws, sum over tasks.

    `log_prior` returns log p(θ; Θ) [S, ...] of draws. GEM-BML+ is the difference of two such gradients.
    """
    with torch.enable_grad():
        known = {name: value.detach().requires_grad_() for name, value in parameters.items()}
        value = log_prior(known, draws.detach()).mean(0).sum()
        slopes = torch.autograd.grad(value, list(known.values()))
    return dict(zip(known, slopes, strict=True))


@final
@dataclass(frozen=True, slots=True)
class GemSettings:
    """Settings; `plus` selects GEM-BML+ (objective L[2]), otherwise GEM-BML (L[1])."""

    plus: bool = False
    inner: InnerSettings = field(default_factory=InnerSettings)
    #: Steps on the validation data after those on the training data; the same number if None.
    query_steps: int | None = None
    rate: float = 1e-3
    #: Rate of the logarithm of the prior's variance; 0 keeps it fixed.
    variance_rate: float = 1e-2


def meta_gradient(
    prior: Gaussian,
    support: Likelihood,
    query: Likelihood,
    settings: GemSettings,
    generator: torch.Generator | None = None,
) -> MetaGradient:
    """Subroutine Meta-Gradient of GEM-BML or GEM-BML+, for each task [..., T, p], of a prior [..., p].

    λ(tr) = VI(Θ, D(tr)), λ(tr ⊕ val) = VI(λ(tr), D(val)). A point estimate has no variance and keeps the prior's for
    the second inference.
    """
    start = prior.for_tasks(support.tasks)
    inner, later = settings.inner, settings.inner
    if settings.query_steps is not None:
        later = replace(inner, steps=settings.query_steps)
    train = infer(start, support, inner, generator)
    between = Gaussian(train.mean, start.variance) if inner.point else train
    both = infer(between, query, later, generator)
    return gaussian_gradient_plus(start, train, both) if settings.plus else gaussian_gradient(start, both)


@final
class GemTrainer:
    """Algorithm 1: ascent of L[1] or L[2] in Θ = (μ, log v).

    The mean is updated by Adam or another torch optimiser. log v has Fisher information ½ for every v, so that a plain
    gradient step is a natural one; for L[1] and a variance rate of 2 it equals EM to first order. Both rates may be
    changed between steps: `variance_rate`, and the mean's in the optimiser.
    """

    def __init__(
        self,
        prior: Gaussian,
        settings: GemSettings,
        optimiser: Callable[[list[Tensor], float], torch.optim.Optimizer] = torch.optim.Adam,
    ) -> None:
        self._settings = settings
        self._mean = prior.mean.detach().clone()
        self._log_variance = prior.variance.detach().log()
        self.optimiser = optimiser([self._mean], settings.rate)
        self.variance_rate = settings.variance_rate

    @property
    def prior(self) -> Gaussian:
        """The current Θ."""
        return Gaussian(self._mean.clone(), self._log_variance.exp())

    def step(self, support: Likelihood, query: Likelihood, generator: torch.Generator | None = None) -> MetaGradient:
        """Lines 4-10: posteriors of a batch of tasks, and one step along their mean meta-gradient."""
        prior = self.prior
        found = meta_gradient(prior, support, query, self._settings, generator).mean_of_tasks()
        self._mean.grad = -found.mean  # optimisers descend
        self.optimiser.step()
        if self.variance_rate:
            change = self.variance_rate * found.log_variance(prior).clamp(-SLOPE_MAX, SLOPE_MAX)
            low, high = VARIANCES
            self._log_variance.add_(change).clamp_(math.log(low), math.log(high))
        return found
