"""Users who want the opposite of what everybody wants on the whole.

Two populations of users, w ~ N(μ_k, Σ_k), are told apart by EM from everybody's statistics: where some report the
opposite of what they like, the smaller one is theirs. That alone is no fault, any crowd can be split in two, and both
parts will contradict each other. What shows a bad teacher is a taste that goes against what all users together, these
among them, were rewarded for. Where tastes merely spread there is no such whole to go against.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from models.gem_heads import log_marginal
from models.prior import Prior, Statistics, matched

#: Steps of EM, for both populations and for a prior that some users teach alone.
STEPS: Final = 10
STEPS_ALONE: Final = 4
#: How decidedly users are put on either side at first, in logits a standard deviation.
FIRST_LEAN: Final = 2.0
#: Where users do not differ there is nothing to divide by.
LEAST_SPREAD: Final = 1e-12


def smaller_population(prior: Prior, users: Statistics, points: Tensor, voice: Tensor) -> Tensor:
    """How likely users, whose heads lie at points [U, c], are of the smaller one of two populations [U].

    EM begins with both sides of the direction in which users, who count their voice [U], differ most.
    """
    apart = points - voice @ points / voice.sum()
    directions = torch.linalg.svd(apart * voice.sqrt().unsqueeze(-1), full_matrices=False).Vh
    side = apart @ directions[0]  # [U]
    side = side / (voice @ side.square() / voice.sum()).sqrt().clamp_min(LEAST_SPREAD)
    belief = torch.stack([side, -side]).mul(FIRST_LEAN).sigmoid()  # [2, U]
    populations = [prior, prior]
    for _ in range(STEPS):
        share = belief.mean(-1, keepdim=True)  # [2, 1]
        populations = [_taught(each, users, weights) for each, weights in zip(populations, belief, strict=True)]
        evidence = [log_marginal(each.mean, each.precision, each.noise, users) for each in populations]
        belief = (torch.stack(evidence) + share.log()).softmax(0)
    return belief[belief.sum(-1).argmin()]


def _taught(population: Prior, users: Statistics, weights: Tensor) -> Prior:
    """A step of EM in which users count weights [U], and noise stays as it is: it is the same for both populations."""
    known = population.posterior(users.gram, users.moment)
    mean, covariance = matched(weights.unsqueeze(0), *known, population.noise)
    return Prior.of(mean[0], covariance[0], population.noise)


def contradiction(prior: Prior, users: Statistics, some: Tensor) -> Tensor:
    """By how many standard errors everybody's rewards fall where the taste of some users [U] bool has them rise [].

    Taste is the mean of the prior that these would teach alone, but for its constant. Rewards are held against their
    user's mean, since whoever likes more of everything contradicts nobody, and users count once, however active.
    """
    alone, theirs = prior, users.rows(torch.nonzero(some).squeeze(-1))
    for _ in range(STEPS_ALONE):
        alone = alone.improved(theirs)
    events = users.events.unsqueeze(-1)
    together = users.moment - users.gram[:, 0] * users.moment[:, :1] / events  # [U, D], Σ(h − h̄)(r − r̄)
    rise = (together / events)[:, 1:] @ alone.mean[1:]  # [U]
    error = (rise.std() / len(rise) ** 0.5).clamp_min(LEAST_SPREAD)
    errors: Tensor = -rise.mean() / error
    return errors
