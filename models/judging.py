"""What the default learner's heads, groups and memories say of the arms of a query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from models.learner import Query
from models.memory import KERNEL_NUMBERS_MAX, kernel, recall
from models.prior import Groups, Prior, inverse


@final
@dataclass(frozen=True, slots=True)
class Judgement:
    """Of N arms, the head's mean without groups and with them, what is believed of the two, its variance, each [N];
    and the believed mean head of each asking user [R, D]."""

    alone: Tensor
    together: Tensor
    mean: Tensor
    variance: Tensor
    head: Tensor


def judge(prior: Prior, groups: Groups | None, guard: Tensor, query: Query, arms: Tensor) -> Judgement:
    """What heads say of arms h(x) [N, D], groups weighed by the guard."""
    h, request = arms.to(torch.float64), query.request
    moment = query.own["moment"].to(torch.float64)
    known = query.own["gram"].to(torch.float64) / prior.noise  # [R, D, D]
    if groups is None:
        covariance = inverse(known + prior.precision)
        head = prior.mean_under(covariance, moment)
        alone = _dots(h, head[request])
        return Judgement(alone, alone, alone, _forms(h, covariance[request]), head)
    both = torch.stack([prior.precision, prior.precision / groups.share]).unsqueeze(1)  # [2, 1, D, D]
    covariance, within = inverse(known + both)  # each [R, D, D]
    head = prior.mean_under(covariance, moment)  # [R, D]
    alone = _dots(h, head[request])
    rewarded = moment / prior.noise  # [R, D]
    belief = groups.beliefs(within, rewarded)  # [R, Q]
    reach = (within[request] @ h.unsqueeze(-1)).squeeze(-1)  # [N, D], Ph
    said = torch.addmm(_dots(reach, rewarded[request]).unsqueeze(-1), reach, groups.pull.mT)  # [N, Q], by each group
    weight = belief[request]
    together = _dots(weight, said)
    spread = _dots(weight, (said - together.unsqueeze(-1)).square())
    return Judgement(
        alone,
        torch.where(groups.any(), together, alone),
        alone.lerp(together, guard),
        _forms(h, covariance[request]).lerp(_dots(h, reach) + spread, guard),
        head.lerp(groups.head(within, rewarded, belief), guard),
    )


def count_agreeing(heads: Tensor, query: Query, arms: Tensor, judged: Judgement, deviations: float) -> Tensor:
    """Eq. 4 with ν deviations of the posterior for a threshold: who agrees with the user on each arm, counted [N].

    `heads` [P, D] are the pool's, arms [N, D]; the asking user counts, once.
    """
    reach = (deviations * judged.variance.clamp_min(0).sqrt()).to(arms.dtype).unsqueeze(-1)  # [N, 1]
    agree = (arms @ heads.mT).sub_(judged.mean.to(arms.dtype).unsqueeze(-1)).abs_() <= reach  # [N, P]
    row = query.own_row[query.request].unsqueeze(-1)  # [N, 1]
    if not heads.shape[0]:
        return torch.ones_like(query.request)
    themselves = agree.gather(1, row.clamp_min(0)) & (row >= 0)  # [N, 1]
    return agree.sum(-1) - themselves.squeeze(-1).to(torch.int64) + 1


def remember(query: Query, arms: Tensor, heads: Tensor, gain: Tensor, radius: float) -> tuple[Tensor, Tensor]:
    """By the users' memories: a correction [N], and the share of the noise's variance that is left [N].

    arms [N, D], heads [R, D].
    """
    own, gain = query.own, gain.to(arms.dtype)
    weights = own["kept_weights"]
    expected = (own["kept_heads"] @ heads.to(arms.dtype).unsqueeze(-1)).squeeze(-1)
    residuals = own["kept_rewards"] - expected  # [R, S]
    kept, x = own["kept_heads"][..., 1:-1], arms[:, 1:-1]  # without the constant and the trunk's prediction
    corrections, lefts = [], []
    step = max(1, KERNEL_NUMBERS_MAX // max(1, kept.shape[1] * kept.shape[2]))
    for start in range(0, x.shape[0], step):
        rows = query.request[start : start + step]
        near = kernel(x[start : start + step].unsqueeze(1), kept[rows], radius).squeeze(1)  # [n, S]
        correction, left = recall(near * weights[rows], residuals[rows], gain)
        corrections.append(correction)
        lefts.append(left)
    return torch.cat(corrections), torch.cat(lefts)


def _dots(one: Tensor, other: Tensor) -> Tensor:
    """Σ_j a_ij b_ij [N]."""
    return (one * other).sum(-1)


def _forms(h: Tensor, matrices: Tensor) -> Tensor:
    """hᵀMh [N]: h [N, D], matrices [N, D, D]."""
    return _dots(h, (matrices @ h.unsqueeze(-1)).squeeze(-1))
