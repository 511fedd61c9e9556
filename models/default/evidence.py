"""Evidence for the default learner's parts: whether groups help, whether arms repeat, whether preferences drifted.

All of it rests on the notes of decisions, which were made before their rewards were known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Self, final

import torch
from torch import Tensor

from metaban.models.default.arms import looks_at
from metaban.models.default.memory import FIRST_GAIN, GAINS, replay_errors
from metaban.models.default.prior import Prior, Statistics
from metaban.models.learner import State, UserBatch
from metaban.models.numerics.arrays import Array, Arrays, cast

#: Columns of a decision's notes: predictions of the trunk, of the pooled head, and of the user's head without and with
#: groups; the mean; the standard deviation of the reward around it, noise included; the half-width, in these, of the
#: interval that should hold 9 rewards in 10; from the last one on, the user's embedding.
TRUNK, PLAIN, ALONE, TOGETHER, MEAN, DEVIATION, REACH, EMBEDDED = range(8)

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

#: Drift is tested on the latest epochs, with at least so many samples there and before.
DRIFT_EPOCHS: Final = 2
DRIFT_SAMPLES: Final = 128

#: Rewards have to fall short of predictions by so many standard errors more than before.
DRIFT_ERRORS: Final = 6.0

#: Avoids a division by 0 when all rewards are equal.
LEAST_SPREAD: Final = torch.finfo(torch.float64).tiny

#: Weight of samples from before a drift.
STALE_WEIGHT: Final = 0.05


def recency_weight(current: Array, like: Array) -> Array:
    """1 where `current` holds, otherwise STALE_WEIGHT, in the dtype of another array."""
    return STALE_WEIGHT + (1 - STALE_WEIGHT) * cast(current, like)


def sample_weights(batch: UserBatch, shared: Arrays) -> Array:
    """Weight of each sample [B, S]: 0 for padding, STALE_WEIGHT before the last drift, e_k² for its place (arms.py)."""
    looks = cast(looks_at(shared["arm_looks"], batch.places), batch.rewards)
    return recency_weight(batch.epochs >= shared["since"], batch.rewards) * batch.valid * looks * looks


def first_place_rewards(batch: UserBatch, shared: Arrays) -> Array:
    """Rewards as they would be at the first place [B, S]: r/e_k."""
    rewards: Array = batch.rewards / cast(looks_at(shared["arm_looks"], batch.places), batch.rewards)
    return rewards


@final
@dataclass(frozen=True, slots=True)
class Samples:
    """All users' samples, one row each: inputs [n, d], rewards at the first place [n], notes [n, q], epochs [n],
    weights [n], and e_k of their places [n]."""

    features: Tensor
    rewards: Tensor
    notes: Tensor
    epochs: Tensor
    weights: Tensor
    looks: Tensor

    @classmethod
    def of(cls, batches: Sequence[UserBatch], shared: State) -> Self:
        """The rows of all batches, padding included, with weight 0; rewards are those at the first place."""
        return cls(
            torch.cat([batch.features.flatten(0, 1) for batch in batches]),
            torch.cat([first_place_rewards(batch, shared).flatten() for batch in batches]),
            torch.cat([batch.phi.flatten(0, 1) for batch in batches]),
            torch.cat([batch.epochs.flatten() for batch in batches]),
            torch.cat([sample_weights(batch, shared).flatten() for batch in batches]),
            torch.cat([looks_at(shared["arm_looks"], batch.places).flatten() for batch in batches]),
        )

    def weighted_by_user(self, batches: Sequence[UserBatch], user_weights: Tensor) -> Samples:
        """The same with the weights of each user's samples multiplied by w_u [U]."""
        parts = torch.split(user_weights, [batch.rewards.shape[0] for batch in batches])
        each = [part.repeat_interleave(batch.rewards.shape[1]) for part, batch in zip(parts, batches, strict=True)]
        return replace(self, weights=self.weights * torch.cat(each).to(self.weights))

    def information(self) -> Tensor:
        """Information of a reward [], relative to a fair coin toss: (Σw|d|)²/(Σw·Σwd²) of deviations d from the mean.

        With one success in m, for large m, this is 4/m; for spread-out rewards on any scale it is close to 1.
        """
        weights, rewards = self.weights.to(torch.float64), self.rewards.to(torch.float64)
        count = weights.sum().clamp_min(1)
        away = (rewards - weights @ rewards / count).abs()
        return (weights @ away).square() / (count * (weights @ away.square())).clamp_min(LEAST_SPREAD)

    def rows_at(self, shares: Tensor) -> Tensor:
        """Rows [m] at shares [m] of the total weight, each in [0, 1): uniform shares sample rows by weight."""
        ends = self.weights.to(torch.float64).cumsum(0)  # [n]
        return torch.searchsorted(ends, shares * ends[-1], right=True).clamp_max(ends.shape[0] - 1)

    def evenly_spread(self, most: int) -> Tensor:
        """At most so many rows, evenly spaced over the total weight."""
        count = min(most, self.weights.shape[0])
        return self.rows_at((torch.arange(count, dtype=torch.float64, device=self.weights.device) + 0.5) / count)


def drift_detected(samples: Samples, epoch: Tensor, since: Tensor) -> Tensor:
    """Whether recent rewards fall short of predictions more than earlier ones did [] bool."""
    short = (samples.notes[:, TOGETHER] - samples.rewards).to(torch.float64)  # [n]
    real = samples.weights > 0
    late = real & (samples.epochs > epoch - DRIFT_EPOCHS)
    early = real & ~late & (samples.epochs >= since)
    now, before = _Mean.of(short, late), _Mean.of(short, early)
    error = (now.variance / now.count + before.variance / before.count).sqrt()
    enough = (now.count >= DRIFT_SAMPLES) & (before.count >= DRIFT_SAMPLES)
    # Early rewards exceed the predictions of an untrained learner; that difference is no drift.
    return enough & (now.mean - before.mean.clamp_min(0) > DRIFT_ERRORS * error)


@final
@dataclass(frozen=True, slots=True)
class _Mean:
    count: Tensor
    mean: Tensor
    variance: Tensor

    @classmethod
    def of(cls, values: Tensor, chosen: Tensor) -> Self:
        count = chosen.sum().clamp_min(1)
        mean = (values * chosen).sum() / count
        return cls(count, mean, ((values - mean).square() * chosen).sum() / count)


def group_guard(batches: Sequence[UserBatch], noise: Tensor, shared: State) -> Tensor:
    """λ in [0, 1]: weight of predictions with groups against those without, on the newer half of users' rewards."""
    missed = _squared_errors(batches, shared, 1 / 2)
    return _evidence_weight(missed[ALONE] - missed[TOGETHER], noise)


def measured_trust(batches: Sequence[UserBatch], noise: Tensor, shared: State) -> Tensor:
    """τ in [0, 1]: weight of users' heads (the better of with and without groups) against the pooled head.

    Only the newest quarter counts, because users' heads start with large errors.
    """
    missed = _squared_errors(batches, shared, 1 / 4)
    return _evidence_weight(missed[PLAIN] - torch.minimum(missed[ALONE], missed[TOGETHER]), noise, TRUST_LEAD)


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


def _squared_errors(batches: Sequence[UserBatch], shared: State, share: float) -> Tensor:
    """Squared errors of the noted predictions on this newest share of each user's rewards, by column of notes [4]."""
    device = shared["since"].device
    missed = torch.zeros(MEAN, dtype=torch.float64, device=device)
    for batch in batches:
        place = torch.arange(batch.valid.shape[1], device=device)
        older = (batch.valid.sum(-1, keepdim=True) * (1 - share)).floor()  # [B, 1]
        newer = sample_weights(batch, shared) * (place >= older)  # [B, S]
        short = first_place_rewards(batch, shared).to(torch.float64)[..., None] - batch.phi[..., :MEAN]  # [B, S, 4]
        missed += (short.square() * newer[..., None]).sum((0, 1))
    return missed


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
