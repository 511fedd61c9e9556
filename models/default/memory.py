"""Memory of near-identical arms: a correction from the user's rewards on arms just like this one.

A head generalises and cannot represent that *this* film failed. The memory is a Gaussian process on the head's
residuals e with a kernel so narrow that arms are either near-identical or unrelated. For such a kernel the posterior
needs no matrix inverse: with s = Σ k(x, x_i) over the user's latest samples,

    correction  g · Σ k(x, x_i) e_i / (1 + g·s)          variance left  g·σ² / (1 + g·s)

The gain g, the variance of what repeats relative to the noise, is learned from all users: 0 where nothing repeats,
large where an arm earns the same every time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from metaban.models.default.kinds import Kinds
from metaban.models.default.prior import Prior, Statistics
from metaban.models.learner import UserBatch
from metaban.models.numerics.arrays import Array, dots, double, exponential, library_of

#: Candidates for g; a single residual is corrected by g/(1 + g).
GAINS = (0.0, 0.05, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0)

#: g before it is learned.
FIRST_GAIN = 1.0

#: Evidence, in nats, required for another gain.
GAIN_EVIDENCE = 3.0

#: Replaces a sample weight of 0, whose logarithm is taken.
LEAST_WEIGHT = 1e-300

#: Largest number of kernel values in memory.
KERNEL_NUMBERS_MAX = 1 << 24


def closeness(columns: int, radius: float) -> float:
    """1 over the squared distance at which arms of so many columns differ by `radius` in the root mean square."""
    return 1 / (radius * radius * max(1, columns))


def memory_table(kept: Array, weights: Array, radius: float) -> Array:
    """The right factor of `kernel` [..., 1 + c, S], from kept arms k [..., S, c] and their weights [..., S].

    The part of the exponent that does not depend on the other arm is the coefficient of its constant.
    """
    arms, close, library = double(kept), closeness(kept.shape[-1], radius), library_of(kept)
    # ½ in place of −½‖1‖², because the other arm has a constant of its own.
    own = library.log(double(weights).clip(LEAST_WEIGHT, None)) + close / 2 * (1 - dots(arms, arms))  # [..., S]
    return library.concatenate([own[..., None, :], (arms * close).mT], -2)


def kernel(x: Array, table: Array, radius: float) -> Array:
    """weight · exp(−½·(distance in radii)²) [..., n, S] of arms [1, x] [..., n, 1 + c] and a `memory_table`: float64.

    ½‖x‖² + ½‖k‖² − xᵀk cancels for nearly identical arms, the only case that matters: hence float64.
    """
    near = x @ table
    near -= dots(x, x)[..., None] * (closeness(x.shape[-1] - 1, radius) / 2)
    return exponential(near)


def residual_terms(residuals: Array, gain: Array) -> Array:
    """g·e and g for each sample, which `combine_terms` sums: residuals [..., S] → [..., S, 2], in float64."""
    library, earned = library_of(residuals), double(residuals)
    return library.stack([earned, library.ones_like(earned)], -1) * gain


def combine_terms(similarity: Array, samples: Array, gain: Array) -> tuple[Array, Array]:
    """Correction and remaining share of variance, both [..., n], by kernel values [..., n, S] and `residual_terms`."""
    sums = similarity @ samples  # [..., n, 2]
    known = 1 + sums[..., 1]
    return sums[..., 0] / known, gain / known


def replay_errors(x: Tensor, residuals: Tensor, valid: Tensor, radius: float) -> Tensor:
    """Squared errors [len(GAINS)] of predicting each residual from the user's earlier ones, summed over users.

    Arms [1, x] [B, S, 1 + c] oldest first, residuals [B, S], valid [B, S].
    """
    samples = x.shape[1]
    gains = torch.tensor(GAINS, dtype=torch.float64, device=x.device).view(-1, 1, 1)  # [G, 1, 1]
    earlier = torch.ones(samples, samples, dtype=torch.bool, device=x.device).tril(-1)  # [S, S]
    errors = torch.zeros(len(GAINS), dtype=torch.float64, device=x.device)
    rows = max(1, KERNEL_NUMBERS_MAX // max(1, samples * samples))
    for start in range(0, x.shape[0], rows):
        part, e, real = x[start : start + rows], residuals[start : start + rows], valid[start : start + rows]
        near = kernel(part.to(torch.float64), memory_table(part[..., 1:], torch.ones_like(e), radius), radius)
        similarity = near * (earlier & real.unsqueeze(1))  # [b, S, S]
        seen = similarity.sum(-1)  # [b, S]
        earned = (similarity @ e.to(torch.float64).unsqueeze(-1)).squeeze(-1)
        missed = (e - gains * earned / (1 + gains * seen)) * real  # [G, b, S]
        errors += missed.square().sum((1, 2))
    return errors


def memory_gain(
    prior: Prior,
    kinds: Kinds,
    users: Statistics,
    heads: Sequence[Tensor],
    targets: Sequence[Tensor],
    batches: Sequence[UserBatch],
    inputs: int,
    radius: float,
) -> Tensor:
    """The memory's gain with the least squared error on users' residuals.

    Heads are h [B, S, D] of each batch, targets what they predict [B, S]. The memory sees the first `inputs` numbers
    after the constant.
    """
    means = kinds.posteriors(prior, users.gram, users.moment).head  # [U, D]
    errors, start = torch.zeros(len(GAINS), dtype=torch.float64, device=means.device), 0
    for h, target, batch in zip(heads, targets, batches, strict=True):
        own = means[start : start + h.shape[0]].to(h.dtype)
        start += h.shape[0]
        residuals = (target - (h @ own.unsqueeze(-1)).squeeze(-1)) * batch.valid
        errors += replay_errors(h[..., : 1 + inputs], residuals, batch.valid, radius)
    # Where few arms repeat, errors differ by chance: the first value is kept without evidence against it.
    worth = (errors[GAINS.index(FIRST_GAIN)] - errors) / (2 * prior.noise)  # [gains], in nats
    gains = torch.tensor(GAINS, dtype=torch.float64, device=means.device)
    return torch.where(worth.max() >= GAIN_EVIDENCE, gains[worth.argmax()], FIRST_GAIN)
