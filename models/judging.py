"""What the default learner believes of users, and what heads, pool and memories say of arms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from models.memory import KERNEL_NUMBERS_MAX, kernel, recall
from models.prior import Groups, Prior, inverse


@final
@dataclass(frozen=True, slots=True)
class Beliefs:
    """Of R users, mean heads without groups, with them, and of the two as the guard weighs them, each [R, D]; and the
    covariance of the last [R, D, D]."""

    alone: Tensor
    together: Tensor
    head: Tensor
    covariance: Tensor


def believe(prior: Prior, groups: Groups | None, guard: Tensor, gram: Tensor, moment: Tensor) -> Beliefs:
    """What is known of users with A [R, D, D] and b [R, D], in float64."""
    known = gram / prior.noise
    if groups is None:
        covariance = inverse(known + prior.precision)
        alone = prior.mean_under(covariance, moment)
        return Beliefs(alone, alone, alone, covariance)
    both = torch.stack([prior.precision, prior.precision / groups.share]).unsqueeze(1)  # [2, 1, D, D]
    covariance, within = inverse(known + both)  # each [R, D, D]
    alone = prior.mean_under(covariance, moment)
    rewarded = moment / prior.noise
    belief = groups.beliefs(within, rewarded)  # [R, Q]
    together = groups.head(within, rewarded, belief)
    apart = (groups.pull - (belief @ groups.pull).unsqueeze(1)) @ within  # [R, Q, D], each group's head from the mean
    spread = apart.mT @ (apart * belief.unsqueeze(-1))  # [R, D, D]
    return Beliefs(
        alone,
        torch.where(groups.any(), together, alone),
        alone.lerp(together, guard),
        covariance.lerp(within + spread, guard),
    )


def count_agreeing(heads: Tensor, arms: Tensor, mean: Tensor, reach: Tensor, row: Tensor) -> Tensor:
    """Eq. 4: how many agree with the asking user on each arm [N], that user included, once.

    heads [P, D] of the pool, arms [N, D], the user's own mean [N] and how far from it others may be [N], and the user's
    row in the pool [N], −1 for none.
    """
    if not heads.shape[0]:
        return torch.ones_like(row)
    agree = (arms @ heads.mT).sub_(mean.unsqueeze(-1)).abs_() <= reach.unsqueeze(-1)  # [N, P]
    themselves = agree.gather(1, row.clamp_min(0).unsqueeze(-1)).squeeze(-1) & (row >= 0)  # [N]
    return agree.view(torch.uint8).sum(-1, dtype=torch.int32).to(torch.int64) - themselves.to(torch.int64) + 1


def remember(
    x: Tensor, request: Tensor, own: Mapping[str, Tensor], gain: Tensor, radius: float
) -> tuple[Tensor, Tensor]:
    """By the users' memories: a correction [N], and the share of the noise's variance that is left [N].

    Arms as heads see them, x [N, c]; `own` has `kept_inputs` [R, S, c], `kept_residuals` and `kept_weights` [R, S].
    """
    kept, residuals, weights = own["kept_inputs"], own["kept_residuals"], own["kept_weights"]
    if kept.shape[0] == 1:  # one request: nothing to gather
        return recall(kernel(x, kept[0], radius) * weights, residuals, gain)
    corrections, lefts = [], []
    step = max(1, KERNEL_NUMBERS_MAX // max(1, kept.shape[1] * kept.shape[2]))
    for start in range(0, x.shape[0], step):
        rows = request[start : start + step]
        near = kernel(x[start : start + step].unsqueeze(1), kept[rows], radius).squeeze(1)  # [n, S]
        correction, left = recall(near * weights[rows], residuals[rows], gain)
        corrections.append(correction)
        lefts.append(left)
    return torch.cat(corrections), torch.cat(lefts)
