"""Heads as exact posteriors under a prior learned from all users, in sufficient statistics.

A user's reward for head inputs h is r = hᵀw_u + noise, w_u ~ N(μ, Σ), noise ~ N(0, σ²). With A = Σ hhᵀ, b = Σ hr the
posterior is N(w, P), P = (A/σ² + Σ⁻¹)⁻¹, w = P(b/σ² + Σ⁻¹μ). (μ, Σ, σ²) maximise the likelihood of everyone's rewards
by EM: this is GEM-BML (Algorithm 1) where inference has no error, since Gaussian heads need none.

*Groups.* A Gaussian cannot say that users come in kinds. The same statistics give centres: each user's posterior mean
is drawn towards the pooled posterior of those whose rewards it explains (a mean shift in the space of heads), until
users of one kind share one centre. A user is then N(c_q, κΣ) around some centre, and the evidence of their own rewards
says which: a user with two events belongs a little everywhere, one with fifty to a group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self, final

import torch
from torch import Tensor

from models.arrays import Array, dots, double, inverse, lower_factor, softmax

#: Variance of a coefficient that nobody has shown anything of, as a share of σ², and how many users that weighs.
UNSEEN_SPREAD = 0.04
UNSEEN_USERS = 2.0
#: Spread of rewards around the model before any is seen, worth one event.
FIRST_NOISE = 0.1
#: Smallest σ².
LEAST_NOISE = 1e-6
#: Events at which a user's voice counts half in the search for groups.
HALF_VOICE_EVENTS = 5.0
#: Offset of a row that is no group; finite, since everything that is stored has to be.
NO_GROUP = -1e9


@final
@dataclass(frozen=True, slots=True)
class Statistics:
    """What is known of U users: A [U, D, D], b [U, D], Σr² [U], events [U], all float64."""

    gram: Tensor
    moment: Tensor
    squares: Tensor
    events: Tensor

    @classmethod
    def of(cls, heads: Array, rewards: Array, weight: Array) -> Self:
        """From head inputs [U, S, D], rewards [U, S], and a weight [U, S] that is 0 for padding."""
        h, r, w = double(heads), double(rewards), double(weight)
        weighted = (h * w[..., None]).mT  # [U, D, S]
        return cls(weighted @ h, (weighted @ r[..., None])[..., 0], (w * r * r).sum(1), w.sum(1))

    @classmethod
    def joined(cls, parts: list[Statistics]) -> Statistics:
        """Users of several batches, one after the other."""
        return Statistics(
            torch.cat([part.gram for part in parts]),
            torch.cat([part.moment for part in parts]),
            torch.cat([part.squares for part in parts]),
            torch.cat([part.events for part in parts]),
        )

    def cpu(self) -> Statistics:
        """On the CPU."""
        return Statistics(self.gram.cpu(), self.moment.cpu(), self.squares.cpu(), self.events.cpu())

    def rows(self, index: Tensor) -> Statistics:
        """Some of the users."""
        return Statistics(self.gram[index], self.moment[index], self.squares[index], self.events[index])


@final
@dataclass(frozen=True, slots=True)
class Prior:
    """μ [D], Σ [D, D], Σ⁻¹ [D, D] and σ² [], float64."""

    mean: Tensor
    covariance: Tensor
    precision: Tensor
    noise: Tensor

    @classmethod
    def initial(cls, dimension: int) -> Prior:
        """Before any event."""
        noise = torch.tensor(FIRST_NOISE, dtype=torch.float64)
        return cls.of(
            torch.zeros(dimension, dtype=torch.float64), torch.eye(dimension, dtype=torch.float64) * noise / 2, noise
        )

    @classmethod
    def of(cls, mean: Tensor, covariance: Tensor, noise: Tensor) -> Prior:
        """With the inverse of Σ."""
        return cls(mean, covariance, inverse(covariance), noise)

    def cpu(self) -> Prior:
        """On the CPU."""
        return Prior(self.mean.cpu(), self.covariance.cpu(), self.precision.cpu(), self.noise.cpu())

    def posterior(self, gram: Tensor, moment: Tensor) -> tuple[Tensor, Tensor]:
        """Mean [..., D] and covariance [..., D, D] of heads with these statistics."""
        covariance = inverse(gram / self.noise + self.precision)
        return self.mean_under(covariance, moment), covariance

    def posterior_mean(self, gram: Tensor, moment: Tensor) -> Tensor:
        """The mean alone [..., D]: to solve for it takes a third of the time of an inverse."""
        factor, sound = lower_factor(gram / self.noise + self.precision)
        mean = torch.cholesky_solve(self._natural(moment)[..., None], factor)[..., 0]
        return torch.where(sound[..., None], mean, torch.nan)

    def mean_under(self, covariance: Array, moment: Array) -> Array:
        """The posterior's mean [..., D], when its covariance is known."""
        return (covariance @ self._natural(moment)[..., None])[..., 0]

    def _natural(self, moment: Array) -> Array:
        """b/σ² + Σ⁻¹μ [..., D]."""
        return moment / self.noise + self.precision @ self.mean

    def improved(self, users: Statistics, teaching: Tensor | None = None) -> Prior:
        """One step of EM, in which users count w_u [U], or 1."""
        teaching = torch.ones_like(users.events) if teaching is None else teaching
        mean, covariance = self.posterior(users.gram, users.moment)  # [U, D], [U, D, D]
        seconds = covariance + mean.unsqueeze(-1) * mean.unsqueeze(-2)  # [U, D, D], E[wwᵀ]
        errors = users.squares - 2 * (mean * users.moment).sum(-1) + (users.gram * seconds).sum((-1, -2))  # [U]
        noise = ((teaching @ errors + FIRST_NOISE) / (teaching @ users.events + 1)).clamp_min(LEAST_NOISE)
        centres, spreads = matched(teaching.unsqueeze(0), mean, covariance, noise)
        return Prior.of(centres[0], spreads[0], noise)


def matched(weights: Tensor, mean: Tensor, covariance: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Means [n, D] and covariances [n, D, D] of heads by moments, where users count weights [n, U].

    What is known of users are means [U, D] and covariances [U, D, D]; UNSEEN_USERS of whom nothing is known are among
    them.
    """
    count = weights.sum(-1, keepdim=True)  # [n, 1]
    centre = weights @ mean / count  # [n, D]
    about = mean.mean(0)  # moments about some point near all means lose less to rounding
    apart, off = mean - about, centre - about  # [U, D], [n, D]
    seconds = (covariance + apart.unsqueeze(-1) * apart.unsqueeze(-2)).flatten(1)  # [U, D²]
    total = (weights @ seconds).view(*centre.shape, -1)  # [n, D, D]
    unseen = torch.eye(centre.shape[-1], dtype=mean.dtype, device=mean.device) * (UNSEEN_SPREAD * noise)
    count = count.unsqueeze(-1)  # [n, 1, 1]
    spread = (total - count * off.unsqueeze(-1) * off.unsqueeze(-2) + UNSEEN_USERS * unseen) / (count + UNSEEN_USERS)
    return centre, (spread + spread.mT) / 2


@final
@dataclass(frozen=True, slots=True)
class Groups:
    """Q kinds of users, w ~ N(c_q, κΣ), as a request needs them: Σ⁻¹c_q/κ [Q, D], and log weight − ½ c_qᵀΣ⁻¹c_q/κ [Q].

    A row of offset NO_GROUP stands for none.
    """

    pull: Tensor
    offset: Tensor
    share: Tensor  #: κ []

    @classmethod
    def of(cls, prior: Prior, centres: Tensor, log_weight: Tensor, share: Tensor) -> Groups:
        """From centres [Q, D] and the logarithm of their weights [Q]."""
        pull = centres @ prior.precision / share
        return cls(pull, log_weight - 0.5 * (pull * centres).sum(-1), share)

    @classmethod
    def none(cls, dimension: int, share: float) -> Groups:
        """Before any are found."""
        known = torch.zeros(0, dimension + 1, dtype=torch.float64)
        return cls(known[:, 1:], known[:, 0], torch.tensor(share, dtype=torch.float64))

    def centres(self, prior: Prior) -> Tensor:
        """c_q [Q, D]."""
        return self.pull @ prior.covariance * self.share

    def any(self) -> Tensor:
        """Whether there are any [] bool."""
        return self.offset.max() > NO_GROUP / 2

    def beliefs(self, covariance: Array, known: Array) -> Array:
        """How likely each group is [R, Q], for users with b/σ² [R, D] and covariance (A/σ² + Σ⁻¹/κ)⁻¹ [R, D, D]."""
        # ½ aᵀPa with a = known + pull; the part without pull is the same for all groups.
        drawn = (covariance @ known[..., None]).mT + 0.5 * (self.pull @ covariance)  # [R, Q, D]
        return softmax(dots(drawn, self.pull) + self.offset)

    def head(self, covariance: Array, known: Array, belief: Array) -> Array:
        """The users' mean heads [R, D] under these beliefs."""
        return (covariance @ (known + belief @ self.pull)[..., None])[..., 0]


def voices(users: Statistics, teaching: Tensor | None = None) -> Tensor:
    """What users who count w_u [U], or 1, have to say of groups [U]: the less the fewer events they have."""
    voice = users.events / (users.events + HALF_VOICE_EVENTS)
    return voice if teaching is None else teaching * voice


def find_groups(prior: Prior, users: Statistics, share: Tensor, steps: int, teaching: Tensor | None = None) -> Groups:
    """Centres, one a user, after `steps` shifts towards those whose rewards they explain.

    Users count w_u [U], or 1; whoever does not count is in no group, and no group is around them.
    """
    log_weight = voices(users, teaching).log().clamp_min(NO_GROUP)
    centres = prior.posterior_mean(users.gram, users.moment)  # [U, D]
    within = prior.precision / share
    covariance = inverse(users.gram / prior.noise + within)  # [U, D, D]
    known = users.moment / prior.noise  # [U, D]
    drawn = (covariance @ known.unsqueeze(-1)).squeeze(-1)  # [U, D]
    half = 0.5 * covariance.flatten(1)  # [U, D²]
    itself = torch.eye(centres.shape[0], dtype=torch.bool, device=centres.device)
    for _ in range(steps):
        pull = centres @ within  # [U, D]
        # ½ aᵀPa of Groups.beliefs for every pair, without a tensor of all pairs' heads: a = known + pull.
        outer = (pull.unsqueeze(-1) * pull.unsqueeze(-2)).flatten(1)  # [U, D²]
        evidence = torch.addmm(drawn @ pull.mT, half, outer.mT)  # [U, U]
        evidence += log_weight - 0.5 * (pull * centres).sum(-1)
        belief = evidence.masked_fill(itself, -torch.inf).softmax(-1)
        belief = torch.where(itself, torch.ones_like(belief), belief.nan_to_num(0.0))
        gram = (belief @ users.gram.flatten(1)).view_as(users.gram)
        moment = belief @ users.moment
        centres = prior.posterior_mean(gram, moment)
    return Groups.of(prior, centres, log_weight, share)


def stored_prior(shared: Mapping[str, Array]) -> Prior:
    """The prior of an epoch."""
    return Prior(shared["prior_mean"], shared["prior_covariance"], shared["prior_precision"], shared["noise"])


def prior_state(prior: Prior) -> dict[str, Tensor]:
    """What an epoch keeps of a prior."""
    return {
        "prior_mean": prior.mean,
        "prior_covariance": prior.covariance,
        "prior_precision": prior.precision,
        "noise": prior.noise,
    }


def groups_state(groups: Groups, most: int) -> dict[str, Tensor]:
    """What an epoch keeps of groups: rows for so many, those that are none behind."""
    missing = most - groups.offset.shape[0]
    return {
        "group_pull": torch.cat([groups.pull, groups.pull.new_zeros(missing, groups.pull.shape[1])]),
        "group_offset": torch.cat([groups.offset, groups.offset.new_full((missing,), NO_GROUP)]),
        "group_share": groups.share,
    }


def stored_groups(shared: Mapping[str, Array]) -> Groups | None:
    """The groups of an epoch; None where there are none, as far as that can be told."""
    pull, offset = shared["group_pull"], shared["group_offset"]
    if not isinstance(offset, Tensor):  # a tensor may be on a GPU, which is not to be waited for
        count = int((offset > NO_GROUP / 2).sum())
        pull, offset = pull[:count], offset[:count]
        if not count:
            return None
    return Groups(pull, offset, shared["group_share"])
