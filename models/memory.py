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

from models.arrays import Array, dots, double, exponential, library_of

#: Values of g to choose from: so much over itself plus 1 of a single residual is believed.
GAINS = (0.0, 0.05, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0)
#: Before anything is known of it.
FIRST_GAIN = 1.0
#: What a sample counts that is not to count: its logarithm is a number.
LEAST_WEIGHT = 1e-300
#: Numbers held at once while kernels are computed.
KERNEL_NUMBERS_MAX = 1 << 24


def closeness(columns: int, radius: float) -> float:
    """1 over the squared distance at which arms of so many numbers differ by a radius in the root mean square."""
    return 1 / (radius * radius * max(1, columns))


def kept_table(kept: Array, weights: Array, radius: float) -> Array:
    """What `kernel` multiplies with [..., 1 + c, S], of kept arms [1, k] [..., S, 1 + c] and what each counts [..., S].

    Whatever of the exponent does not depend on the other arm is a multiple of its constant.
    """
    arms, close = double(kept), closeness(kept.shape[-1] - 1, radius)
    table = (arms * close).mT
    table[..., 0, :] += library_of(arms).log(double(weights).clip(LEAST_WEIGHT, None)) - close / 2 * dots(arms, arms)
    return table


def kernel(x: Array, table: Array, radius: float) -> Array:
    """Weight · exp(−½·(distance in radii)²) [..., n, S] of arms [1, x] [..., n, 1 + c], in float64, and `kept_table`.

    ½‖x‖² + ½‖k‖² − xᵀk cancels where arms are nearly the same, the only place that counts: hence float64.
    """
    near = x @ table
    near -= dots(x, x)[..., None] * (closeness(x.shape[-1] - 1, radius) / 2)
    return exponential(near)


def told(residuals: Array, gain: Array) -> Array:
    """What `recall` sums up of samples: g·e and g, of residuals [..., S] → [..., S, 2], in float64."""
    library, earned = library_of(residuals), double(residuals)
    return library.stack([earned, library.ones_like(earned)], -1) * gain


def recall(similarity: Array, samples: Array, gain: Array) -> tuple[Array, Array]:
    """Correction and share of variance left, both [..., n], from kernel values [..., n, S] and `told` samples."""
    sums = similarity @ samples  # [..., n, 2]
    known = 1 + sums[..., 1]
    return sums[..., 0] / known, gain / known


def foresight(x: Tensor, residuals: Tensor, valid: Tensor, radius: float) -> Tensor:
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
        near = kernel(part.to(torch.float64), kept_table(part, torch.ones_like(e), radius), radius)
        similarity = near * (earlier & real.unsqueeze(1))  # [b, S, S]
        seen = similarity.sum(-1)  # [b, S]
        earned = (similarity @ e.to(torch.float64).unsqueeze(-1)).squeeze(-1)
        missed = (e - gains * earned / (1 + gains * seen)) * real  # [G, b, S]
        errors += missed.square().sum((1, 2))
    return errors
