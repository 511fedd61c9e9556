"""What a user earned on arms just like this one, on top of what the head says.

A head generalises and so cannot hold that *this* film failed; a network forgets it. The memory is a Gaussian process on
the head's residuals e with a kernel so narrow that arms are either near-identical or unrelated. For such a kernel the
posterior needs no matrix inverse: with s = Σ k(x, x_i) over the user's latest samples,

    correction  g · Σ k(x, x_i) e_i / (1 + g·s)          variance left  g·σ² / (1 + g·s)

g, the variance of what repeats over the variance of noise, is learned from all users: 0 where nothing repeats, large
where an arm earns the same every time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.arrays import Array, double, library_of, nowhere_positive

#: Values of g to choose from: so much over itself plus 1 of a single residual is believed.
GAINS = (0.0, 0.05, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0)
#: Before anything is known of it.
FIRST_GAIN = 1.0
#: Numbers held at once while kernels are computed.
KERNEL_NUMBERS_MAX = 1 << 24


def in_radii(x: Array, radius: float) -> Array:
    """Arms [..., c] in float64, so that two of them are as far apart as their rms difference in radii."""
    return double(x) * (1 / (radius * max(1, x.shape[-1]) ** 0.5))


def half_squares(x: Array) -> Array:
    """½·‖x‖² [...] of arms [..., c]."""
    return 0.5 * (x * x).sum(-1)


def kernel(x: Array, kept: Array, squares: Array) -> Array:
    """exp(−½·distance²) of arms in radii, [..., n, S]: x [..., n, c], and kept [..., S, c] with half squares [..., S].

    ½‖x‖² + ½‖k‖² − xᵀk cancels where arms are nearly the same, the only place that counts: hence float64.
    """
    near = x @ kept.mT
    near -= half_squares(x)[..., None]
    near -= squares[..., None, :]
    return library_of(x).exp(nowhere_positive(near))


def recall(similarity: Array, residuals: Array, gain: Array) -> tuple[Array, Array]:
    """Correction and share of variance left, both [..., n], from kernel values [..., n, S] and residuals [..., S]."""
    left = gain / (1 + gain * similarity.sum(-1))
    return (similarity @ residuals[..., None])[..., 0] * left, left


def foresight(x: Tensor, residuals: Tensor, valid: Tensor, radius: float) -> Tensor:
    """Squared errors [len(GAINS)] of predicting each residual from the user's earlier ones, summed over users.

    x [B, S, c] oldest first, residuals [B, S], valid [B, S].
    """
    samples = x.shape[1]
    gains = torch.tensor(GAINS, dtype=torch.float64, device=x.device).view(-1, 1, 1)  # [G, 1, 1]
    earlier = torch.ones(samples, samples, dtype=torch.bool, device=x.device).tril(-1)  # [S, S]
    errors = torch.zeros(len(GAINS), dtype=torch.float64, device=x.device)
    rows = max(1, KERNEL_NUMBERS_MAX // max(1, samples * samples))
    for start in range(0, x.shape[0], rows):
        part, e, real = x[start : start + rows], residuals[start : start + rows], valid[start : start + rows]
        arms = in_radii(part, radius)
        similarity = kernel(arms, arms, half_squares(arms)) * (earlier & real.unsqueeze(1))  # [b, S, S]
        seen = similarity.sum(-1)  # [b, S]
        told = (similarity @ e.to(torch.float64).unsqueeze(-1)).squeeze(-1)
        missed = (e - gains * told / (1 + gains * seen)) * real  # [G, b, S]
        errors += missed.square().sum((1, 2))
    return errors
