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

#: A column whose arms differ by less than this share of its variance belongs to the request.
SMALLEST_OWN_SHARE = 1e-6


def on_offer(arms: Tensor, request: Tensor, requests: int) -> Tensor:
    """For each arm, how many its request has and their mean: arms [N, d], request [N] → [N, 1 + d]."""
    if requests == 1:
        mean = arms.mean(0, keepdim=True)
        return torch.cat([mean.new_full((1, 1), arms.shape[0]), mean], dim=1).expand(arms.shape[0], -1)
    known = torch.cat([arms.new_ones(arms.shape[0], 1), arms], dim=1)
    total = arms.new_zeros(requests, known.shape[1]).index_add_(0, request, known)
    count = total[:, :1].clamp_min(1)
    return torch.cat([count, total[:, 1:] / count], dim=1)[request]


def without_common(arms: Tensor, offer: Tensor, ratio: Tensor, centre: Tensor) -> Tensor:
    """x − ĉ: arms [..., d], `on_offer` of them [..., 1 + d], τ²/σ² [d] and m [d] → [..., d]."""
    pull = offer[..., :1] * ratio
    return arms - pull / (pull + 1) * (offer[..., 1:] - centre)


def common_ratio(arms: Tensor, offer: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """(τ²/σ², m), both [d], from chosen arms [n, d], their offers [n, 1 + d] and what each counts [n]."""
    x, offered, weight = arms.to(torch.float64), offer.to(torch.float64), weights.to(torch.float64).unsqueeze(-1)
    count, means = offered[:, :1].clamp_min(1), offered[:, 1:]
    total = weight.sum().clamp_min(1)
    centre = (means * weight).sum(0) / total
    between = ((means - centre).square() * weight).sum(0) / total
    # An arm alone on offer says nothing of how arms differ; of k arms, one is 1 − 1/k of σ² away from their mean.
    telling = weight * (1 - 1 / count)
    own = ((x - means).square() * weight * (count > 1)).sum(0) / telling.sum().clamp_min(1e-9)
    common = (between - own * (weight / count).sum() / total).clamp_min(0)
    describes_arm = own > SMALLEST_OWN_SHARE * (own + between)
    ratio = torch.where(describes_arm, common / own.clamp_min(torch.finfo(torch.float64).tiny), 0.0)
    return ratio, centre
