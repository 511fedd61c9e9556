"""How the default learner judges its own predictions: whether groups help, whether arms repeat, whether tastes changed.

All of it rests on what was noted when decisions were made, before their rewards were known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Self, final

import torch
from torch import Tensor

from models.arrays import Array, cast
from models.learner import UserBatch
from models.memory import FIRST_GAIN, GAINS, foresight
from models.prior import Prior, Statistics

#: What is noted of a decision: predictions of the trunk, of the plain head and of the user's without and with groups;
#: the mean, the standard deviation of the reward around it, noise included, and in how many of these 9 rewards in 10
#: were expected; who asked.
TRUNK, PLAIN, ALONE, TOGETHER, MEAN, DEVIATION, REACH, EMBEDDED = range(8)
#: Largest evidence, in nats, that the guard takes for or against groups.
GUARD_REACH: Final = 30.0
#: Evidence against users' heads, in nats, at which the plain one counts as much: a choice by it teaches little of who
#: differs, so that it has to foresee clearly more.
TRUST_AHEAD: Final = 10.0
#: Applied events until which the plain head may decide: on arms of its own choice it may foresee more than users' heads
#: for ever, which learn little from such arms, as where many inputs tell hidden groups apart.
PLAIN_UNTIL_EVENTS: Final = 2_048
#: Where rewards are rare, and each tells less of a toss of a coin than one in twenty does, it is what all of them told
#: that counts, in tosses: until when it decides alone, and until when it may.
RARE_TELLING: Final = 0.2
PLAIN_ALONE_TOLD: Final = 512.0
PLAIN_UNTIL_TOLD: Final = 2_048.0
#: Evidence, in nats, from which another gain of the memory is believed in.
GAIN_EVIDENCE: Final = 3.0
#: A change of tastes is looked for in the latest so many epochs, with at least so many samples there and before.
CHANGE_EPOCHS: Final = 2
CHANGE_SAMPLES: Final = 128
#: Rewards have to fall short of what was foreseen by so many standard errors more than they used to.
CHANGE_ERRORS: Final = 6.0
#: Where rewards are all the same there is nothing to divide by.
LEAST_SPREAD: Final = torch.finfo(torch.float64).tiny
#: What samples from before a change still count.
FADED: Final = 0.05


def faded(current: Array, like: Array) -> Array:
    """1 where something is of now, FADED where it is not, in the type of another array."""
    return FADED + (1 - FADED) * cast(current, like)


def sample_weights(batch: UserBatch, since: Array) -> Array:
    """What each sample counts [B, S]: 0 for padding, FADED before the last change of tastes, otherwise 1."""
    return faded(batch.epochs >= since, batch.rewards) * batch.valid


@final
@dataclass(frozen=True, slots=True)
class Samples:
    """Everybody's samples in one row each: inputs [n, d], rewards [n], notes [n, q], epochs [n], weights [n]."""

    features: Tensor
    rewards: Tensor
    notes: Tensor
    epochs: Tensor
    weights: Tensor

    @classmethod
    def of(cls, batches: Sequence[UserBatch], since: Tensor) -> Self:
        """The rows of all batches, padding included, with weight 0."""
        return cls(
            torch.cat([batch.features.flatten(0, 1) for batch in batches]),
            torch.cat([batch.rewards.flatten() for batch in batches]),
            torch.cat([batch.phi.flatten(0, 1) for batch in batches]),
            torch.cat([batch.epochs.flatten() for batch in batches]),
            torch.cat([sample_weights(batch, since).flatten() for batch in batches]),
        )

    def taught(self, batches: Sequence[UserBatch], teaching: Tensor) -> Samples:
        """The same, where the samples of a user count w_u [U] as well."""
        parts = torch.split(teaching, [batch.rewards.shape[0] for batch in batches])
        each = [part.repeat_interleave(batch.rewards.shape[1]) for part, batch in zip(parts, batches, strict=True)]
        return replace(self, weights=self.weights * torch.cat(each).to(self.weights))

    def telling(self) -> Tensor:
        """How much a reward can tell [], as a share of a toss of a fair coin: (Σw|d|)²/(Σw·Σwd²) of deviations d.

        Where one in m earns, m being large, 4/m; where all differ, on whatever scale, most of one.
        """
        weights, rewards = self.weights.to(torch.float64), self.rewards.to(torch.float64)
        count = weights.sum().clamp_min(1)
        away = (rewards - weights @ rewards / count).abs()
        return (weights @ away).square() / (count * (weights @ away.square())).clamp_min(LEAST_SPREAD)

    def at(self, shares: Tensor) -> Tensor:
        """Rows [m] at these shares [m] of all weight, each in [0, 1): uniform shares draw rows by their weight."""
        ends = self.weights.to(torch.float64).cumsum(0)  # [n]
        return torch.searchsorted(ends, shares * ends[-1], right=True).clamp_max(ends.shape[0] - 1)

    def spread(self, most: int) -> Tensor:
        """At most so many rows, evenly over all weight."""
        count = min(most, self.weights.shape[0])
        return self.at((torch.arange(count, dtype=torch.float64, device=self.weights.device) + 0.5) / count)


def tastes_changed(samples: Samples, epoch: Tensor, since: Tensor) -> Tensor:
    """Whether rewards lately fall short of what was foreseen for them as never before [] bool."""
    short = (samples.notes[:, TOGETHER] - samples.rewards).to(torch.float64)  # [n]
    real = samples.weights > 0
    late = real & (samples.epochs > epoch - CHANGE_EPOCHS)
    early = real & ~late & (samples.epochs >= since)
    now, before = _Mean.of(short, late), _Mean.of(short, early)
    error = (now.variance / now.count + before.variance / before.count).sqrt()
    enough = (now.count >= CHANGE_SAMPLES) & (before.count >= CHANGE_SAMPLES)
    # Rewards used to exceed what was foreseen while nothing was known: to have learned is no change.
    return enough & (now.mean - before.mean.clamp_min(0) > CHANGE_ERRORS * error)


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


def guard_of(batches: Sequence[UserBatch], noise: Tensor, since: Tensor) -> Tensor:
    """λ in [0, 1]: how much better groups foresaw the newer half of each user's rewards than the head alone did."""
    missed = _missed(batches, since, 1 / 2)
    return _weighed(missed[ALONE] - missed[TOGETHER], noise)


def trust_of(batches: Sequence[UserBatch], noise: Tensor, since: Tensor) -> Tensor:
    """Trust in users' heads in [0, 1]: how much better the better of both kinds foresaw rewards than the plain head.

    Of the newest quarter only: users' heads start far behind, and what they missed then is not to be held against them.
    """
    missed = _missed(batches, since, 1 / 4)
    return _weighed(missed[PLAIN] - torch.minimum(missed[ALONE], missed[TOGETHER]), noise, TRUST_AHEAD)


def trust_now(earned: Tensor, samples: Samples, total_events: int, *, rare: bool) -> Tensor:
    """What users' heads count beside the plain one [], that earned so much trust by what they foresaw.

    Where inputs are wide the plain head sees little of them, and rewards are not looked at for being rare.
    """
    usual = earned if total_events < PLAIN_UNTIL_EVENTS else torch.ones_like(earned)
    if not rare:
        return usual
    telling = samples.telling()
    told = telling * total_events  # of all there were: samples are of those kept, of some of the users
    where_rare = torch.where(told < PLAIN_ALONE_TOLD, 0.0, torch.where(told < PLAIN_UNTIL_TOLD, earned, 1.0))
    return torch.where(telling < RARE_TELLING, where_rare, usual)


def _missed(batches: Sequence[UserBatch], since: Tensor, share: float) -> Tensor:
    """Squared errors in what was foreseen of this newest share of each user's rewards, by the place of notes [4]."""
    missed = torch.zeros(MEAN, dtype=torch.float64, device=since.device)
    for batch in batches:
        place = torch.arange(batch.valid.shape[1], device=since.device)
        older = (batch.valid.sum(-1, keepdim=True) * (1 - share)).floor()  # [B, 1]
        newer = sample_weights(batch, since) * (place >= older)  # [B, S]
        short = batch.rewards.to(torch.float64)[..., None] - batch.phi[..., :MEAN]  # [B, S, 4]
        missed += (short.square() * newer[..., None]).sum((0, 1))
    return missed


def _weighed(less: Tensor, noise: Tensor, ahead: float = 0.0) -> Tensor:
    """The weight [] of one side of two whose squared errors are less by so much [], and that was ahead by some nats."""
    return (less / (2 * noise) + ahead).clamp(-GUARD_REACH, GUARD_REACH).sigmoid()


def gain_of(
    prior: Prior,
    users: Statistics,
    heads: Sequence[Tensor],
    batches: Sequence[UserBatch],
    inputs: int,
    radius: float,
) -> Tensor:
    """The memory's gain that would have foreseen users' residuals best, heads [B, S, D] a batch.

    The first `inputs` numbers behind the constant tell arms apart.
    """
    means = prior.posterior_mean(users.gram, users.moment)  # [U, D]
    errors, start = torch.zeros(len(GAINS), dtype=torch.float64, device=means.device), 0
    for h, batch in zip(heads, batches, strict=True):
        own = means[start : start + h.shape[0]].to(h.dtype)
        start += h.shape[0]
        residuals = (batch.rewards - (h @ own.unsqueeze(-1)).squeeze(-1)) * batch.valid
        errors += foresight(h[..., : 1 + inputs], residuals, batch.valid, radius)
    # Where little repeats, errors differ by chance: without evidence against it, the first value stands.
    worth = (errors[GAINS.index(FIRST_GAIN)] - errors) / (2 * prior.noise)  # [gains], in nats
    gains = torch.tensor(GAINS, dtype=torch.float64, device=means.device)
    return torch.where(worth.max() >= GAIN_EVIDENCE, gains[worth.argmax()], FIRST_GAIN)
