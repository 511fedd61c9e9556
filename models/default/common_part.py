"""Slate effects: separates what the arms of one request share from what differs between them.

A choice among arms depends on their differences; a part that they share (ten crops of one photograph, results of one
search) is noise. Column j of arm a in request q is modelled as x = m + c_q + o_a with random effects of the request,
Var c = τ², and of the arm, Var o = σ². From the mean x̄ of the slate's k arms, the best estimate of the common part is
ĉ = ρ·(x̄ − m) with ρ = kτ²/(kτ² + σ²), and the learner sees x − ĉ. For unrelated arms τ² = 0 and nothing is subtracted;
columns that are constant within a request describe the request and are kept. (Mundlak, "On the pooling of time series
and cross section data", 1978, on the two effects.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from metaban.models.numerics.arrays import Array, cast, double, library_of
from metaban.models.numerics.normalizer import winsorize
from metaban.models.numerics.slates import Slates

#: A column describes the request when arms differ by less than this share of its variance, or of its mean's size
#: (a mean of equal numbers is subject to rounding).
SMALLEST_OWN_SHARE = 1e-6
SMALLEST_OWN_SPREAD = 1e-5


def slate_summary(arms: Array, slates: Slates) -> Array:
    """Number of arms in the slate and their mean, for each arm: arms [N, d] → [N, 1 + d]."""
    library = library_of(arms)
    padded = double(slates.padded(arms))  # [R, K, d]; sums may overflow float32
    count = slates.counts(padded)  # [R, 1]
    known = cast(library.concatenate([count, padded.sum(1) / count], -1), arms)  # [R, 1 + d]
    return slates.spread(known)


def remove_common(arms: Array, slate: Array, ratio: Array, centre: Array) -> Array:
    """x − ĉ: arms [..., d], `slate_summary` of them [..., 1 + d], τ²/σ² [d] and m [d] → [..., d]."""
    pull = slate[..., :1] * ratio
    return arms - pull / (pull + 1) * (slate[..., 1:] - centre)


def fit_common_effect(arms: Tensor, slate: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """(τ²/σ², m), both [d], from chosen arms [n, d], their slate summaries [n, 1 + d] and sample weights [n]."""
    weight, tiny = weights.to(torch.float64).unsqueeze(-1), torch.finfo(torch.float64).tiny
    count, real = slate[:, :1].to(torch.float64).clamp_min(1), weights > 0
    # Winsorized like the moments: one absurd value must not determine the common part.
    means = winsorize(slate[:, 1:], real)
    away = winsorize(arms.to(torch.float64) - slate[:, 1:].to(torch.float64), real & (count[:, 0] > 1))
    total = weight.sum().clamp_min(tiny)
    centre = (means * weight).sum(0) / total
    between = ((means - centre).square() * weight).sum(0) / total
    # A slate of one arm carries no information on σ²; with k arms, the deviation from their mean has (1 − 1/k)·σ².
    effective = (weight * (1 - 1 / count)).sum().clamp_min(tiny)
    own = (away.square() * weight).sum(0) / effective
    common = (between - own * (weight / count).sum() / total).clamp_min(0)
    least = SMALLEST_OWN_SHARE * (own + between) + (SMALLEST_OWN_SPREAD * centre).square()
    return torch.where(own > least, common / own.clamp_min(tiny), 0.0), centre
