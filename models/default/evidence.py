"""Evidence for the default learner's parts: whether groups help, whether users' heads do, whether arms repeat.

All of it rests on the notes of decisions, which were made before their rewards were known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from metaban.models.default.memory import FIRST_GAIN, GAINS, replay_errors
from metaban.models.default.notes import Notes
from metaban.models.default.prior import Prior, Statistics
from metaban.models.default.samples import Samples, first_place_rewards, sample_weights
from metaban.models.default.shared_state import SharedState
from metaban.models.learner import UserBatch

#: Largest evidence, in nats, for or against one of two predictors.
EVIDENCE_MAX: Final = 30.0

#: Evidence against users' heads, in nats, at which the pooled head gets equal weight: choices by the pooled head carry
#: little information on differences between users, so it has to predict clearly better.
TRUST_LEAD: Final = 10.0

#: Applied events until which the pooled head may be used. On arms of its own choice it may predict better than users'
#: heads for ever, because these learn little from such arms.
POOLED_UNTIL_EVENTS: Final = 2_048

#: Where a reward carries less information than this share of a fair coin toss (rewards are rare), the total
#: information, in tosses, decides: until when the pooled head is used alone, and until when it may be used.
RARE_INFORMATION: Final = 0.2
POOLED_ALONE_INFORMATION: Final = 512.0
POOLED_UNTIL_INFORMATION: Final = 2_048.0

#: Evidence, in nats, required for another gain of the memory.
GAIN_EVIDENCE: Final = 3.0


def group_guard(batches: Sequence[UserBatch], noise: Tensor, shared: SharedState) -> Tensor:
    """λ in [0, 1]: weight of predictions with groups against those without, on the newer half of users' rewards."""
    missed = _squared_errors(batches, shared, 1 / 2)
    return _evidence_weight(missed.alone - missed.together, noise)


def measured_trust(batches: Sequence[UserBatch], noise: Tensor, shared: SharedState) -> Tensor:
    """τ in [0, 1]: weight of users' heads (the better of with and without groups) against the pooled head.

    Only the newest quarter counts, because users' heads start with large errors.
    """
    missed = _squared_errors(batches, shared, 1 / 4)
    return _evidence_weight(missed.pooled - torch.minimum(missed.alone, missed.together), noise, TRUST_LEAD)


def scheduled_trust(measured: Tensor, samples: Samples, total_events: int, *, rare: bool) -> Tensor:
    """The trust in users' heads [] that applies now, given the measured trust.

    The rule for rare rewards is skipped for wide inputs (`rare=False`), of which the pooled head sees little.
    """
    usual = measured if total_events < POOLED_UNTIL_EVENTS else torch.ones_like(measured)
    if not rare:
        return usual
    information = samples.information()
    total_information = information * total_events  # of all events: samples are only those kept, of some users
    where_rare = torch.where(
        total_information < POOLED_ALONE_INFORMATION,
        0.0,
        torch.where(total_information < POOLED_UNTIL_INFORMATION, measured, 1.0),
    )
    return torch.where(information < RARE_INFORMATION, where_rare, usual)


def _squared_errors(batches: Sequence[UserBatch], shared: SharedState, share: float) -> Notes:
    """Squared errors [] of the noted predictions on this newest share of each user's rewards."""
    device = shared.since.device
    missed = torch.zeros(Notes.PREDICTIONS, dtype=torch.float64, device=device)
    for batch in batches:
        place = torch.arange(batch.valid.shape[1], device=device)
        older = (batch.valid.sum(-1, keepdim=True) * (1 - share)).floor()  # [B, 1]
        newer = sample_weights(batch, shared) * (place >= older)  # [B, S]
        rewards = first_place_rewards(batch, shared).to(torch.float64)
        short = rewards[..., None] - Notes(batch.phi).predictions  # [B, S, 4]
        missed += (short.square() * newer[..., None]).sum((0, 1))
    return Notes(missed)


def _evidence_weight(less: Tensor, noise: Tensor, ahead: float = 0.0) -> Tensor:
    """Sigmoid weight [] of a predictor whose squared errors are lower by `less` [], with a head start in nats."""
    return (less / (2 * noise) + ahead).clamp(-EVIDENCE_MAX, EVIDENCE_MAX).sigmoid()


def memory_gain(
    prior: Prior,
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
    means = prior.posterior_mean(users.gram, users.moment)  # [U, D]
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
