"""What the arms of one request have in common, and what is an arm's own.

A choice among arms turns on what tells them apart; what they share (one photograph cut ten ways, candidates fetched for
one search) only blurs it. Column j of arm a in request q is seen as x = m + c_q + o_a with a random effect of the
request, Var c = τ², and of the arm, Var o = σ². From the mean x̄ of the k arms on offer, the best estimate of what is
common is ĉ = ρ·(x̄ − m) with ρ = kτ²/(kτ² + σ²), and the learner judges x − ĉ. Where arms have nothing to do with each
other τ² is 0, and nothing is taken away; columns in which the arms of a request never differ describe the request, and
stay as they are. (Mundlak, "On the pooling of time series and cross section data", 1978, for the two kinds of effect.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.arrays import Array, cast, double, library_of
from models.normalizer import winsorize
from models.slates import Slates

#: A column belongs to the request when its arms differ by less than this share of its variance, or of the size of its
#: mean: a mean of equal numbers is not quite that number.
SMALLEST_OWN_SHARE = 1e-6
SMALLEST_OWN_SPREAD = 1e-5


def on_offer(arms: Array, slates: Slates) -> Array:
    """For each arm, how many its request has and their mean: arms [N, d] → [N, 1 + d]."""
    library = library_of(arms)
    padded = double(slates.padded(arms))  # [R, K, d]; sums may leave float32
    count = slates.counts(padded)  # [R, 1]
    known = cast(library.concatenate([count, padded.sum(1) / count], -1), arms)  # [R, 1 + d]
    return slates.spread(known)


def without_common(arms: Array, offer: Array, ratio: Array, centre: Array) -> Array:
    """x − ĉ: arms [..., d], `on_offer` of them [..., 1 + d], τ²/σ² [d] and m [d] → [..., d]."""
    pull = offer[..., :1] * ratio
    return arms - pull / (pull + 1) * (offer[..., 1:] - centre)


def common_ratio(arms: Tensor, offer: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """(τ²/σ², m), both [d], from chosen arms [n, d], their offers [n, 1 + d] and what each counts [n]."""
    weight, tiny = weights.to(torch.float64).unsqueeze(-1), torch.finfo(torch.float64).tiny
    count, real = offer[:, :1].to(torch.float64).clamp_min(1), weights > 0
    # Drawn in, as the moments are: one absurd value must not decide what is common.
    means = winsorize(offer[:, 1:], real)
    away = winsorize(arms.to(torch.float64) - offer[:, 1:].to(torch.float64), real & (count[:, 0] > 1))
    total = weight.sum().clamp_min(tiny)
    centre = (means * weight).sum(0) / total
    between = ((means - centre).square() * weight).sum(0) / total
    # An arm alone on offer says nothing of how arms differ; of k arms, one is 1 − 1/k of σ² away from their mean.
    telling = (weight * (1 - 1 / count)).sum().clamp_min(tiny)
    own = (away.square() * weight).sum(0) / telling
    common = (between - own * (weight / count).sum() / total).clamp_min(0)
    least = SMALLEST_OWN_SHARE * (own + between) + (SMALLEST_OWN_SPREAD * centre).square()
    return torch.where(own > least, common / own.clamp_min(tiny), 0.0), centre
