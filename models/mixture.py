"""Few kinds of users, found by EM: everybody's rewards are explained by one of K centres.

Centres of a mean shift (`prior.find_groups`) stand around each user: they need nobody to say how many kinds there are,
and help from early on, but pool only as far as users are told apart already. Once there are enough rewards, K centres
that share all users between them foresee more: with beliefs β_uk that user u is of kind k,

    β_uk ∝ π_k · p(rewards of u | w ~ N(c_k, κΣ))        c_k = posterior mean of heads from Σ_u β_uk (A_u, b_u)

and π_k the share of all users. EM finds the nearest of many solutions, so it starts several times from random beliefs,
sure of nothing at first (evidence counts a third, then more and more), and the most probable solution is kept.

How many kinds there are is told by the evidence, in which centres are integrated out by Laplace's method: a kind more
has to explain more than its freedom to fit anything would (MacKay, "Bayesian Interpolation", 1992). Two kinds are what
is always found, in pure chance as well, so the evidence of more has to be clearly ahead of theirs. Where users blend
into each other, more kinds are always better: then, when the largest number explains most, there are none. Without
kinds groups are those of the mean shift. Whether either helps is for the guard to say (upkeep.py); kinds that do not
make way for the mean shift, until there are twice as many events.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self, final

import torch
from torch import Tensor

from models.arrays import inverse
from models.growth import grown
from models.learner import State
from models.prior import NO_GROUP, Groups, Prior, Statistics, find_groups, groups_state, stored_prior, voices

#: Users that groups are made of, those with the most events; the mean shift has a centre around each.
VOICES_MAX: Final = 256
#: Shifts of these centres.
SHIFT_STEPS: Final = 4
#: Numbers of kinds to try, of which the first and the last are only to be compared with; Σ within a kind over Σ.
COUNTS: Final = (2, 3, 4, 6, 9)
SPREAD: Final = 0.02
#: Evidence, in nats, that more kinds have to be ahead of two by.
AHEAD: Final = 20.0
#: Random beginnings of EM and its steps from each, and steps when a solution is carried over to newer samples.
BEGINNINGS: Final = 3
STEPS: Final = 16
STEPS_CARRIED: Final = 3
#: Evidence counts one in so many at first.
FIRST_HEAT: Final = 3.0
#: Applied events from which kinds are sought, those of each user that it takes on average, and when they are sought
#: again: at so many times the events.
FROM_EVENTS: Final = 1_024
EVENTS_EACH: Final = 10.0
GROWTH: Final = 1.3
#: Kinds are dropped when the guard trusts groups less than this, and for how long: until so many times the events.
TRUSTED: Final = 0.5
DROPPED_GROWTH: Final = 2.0
#: Random numbers are at least this, so that their logarithm is a number.
LEAST_UNIFORM: Final = 1e-9
#: Users that a kind has at least, so that the logarithm of its share is a number.
LEAST_MASS: Final = 1e-3


@final
@dataclass(frozen=True, slots=True)
class Mixture:
    """Centres [..., K, D] and the logarithm of the share of users of each kind [..., K]; NO_GROUP for no kind."""

    centres: Tensor
    log_weight: Tensor

    @classmethod
    def of(cls, groups: Groups, prior: Prior) -> Self:
        """The first few of groups that were made under this prior."""
        most = max(COUNTS)
        centres = groups.centres(prior)[:most]
        return cls(centres, groups.offset[:most] + 0.5 * (groups.pull[:most] * centres).sum(-1))


@final
class Crowd:
    """Users who count w_u [U], as EM needs them under a prior and a spread κ []."""

    def __init__(self, prior: Prior, users: Statistics, share: Tensor, weights: Tensor) -> None:
        self._prior, self._users, self._weights = prior, users, weights
        self._within = prior.precision / share
        covariance = inverse(users.gram / prior.noise + self._within)  # [U, D, D]
        self._drawn = (covariance @ (users.moment / prior.noise).unsqueeze(-1)).squeeze(-1)  # [U, D]
        self._half = 0.5 * covariance.flatten(1)  # [U, D²]

    def evidence(self, mixture: Mixture) -> Tensor:
        """log π_k + log p(rewards of u | kind k), up to what all kinds have in common [..., U, K]."""
        pull = mixture.centres @ self._within  # [..., K, D]
        outer = (pull.unsqueeze(-1) * pull.unsqueeze(-2)).flatten(-2)  # [..., K, D²]
        # ½ aᵀPa of Groups.beliefs for every pair.
        each: Tensor = self._drawn @ pull.mT + self._half @ outer.mT
        return each + (mixture.log_weight - 0.5 * (pull * mixture.centres).sum(-1)).unsqueeze(-2)

    def explained(self, belief: Tensor) -> Mixture:
        """Centres and shares under beliefs [..., U, K]."""
        gram, moment, mass = self._pooled(belief)
        return Mixture(self._prior.posterior_mean(gram, moment), (mass / mass.sum(-1, keepdim=True)).log())

    def found(self, beliefs: Tensor) -> Mixture:
        """The most probable of the mixtures that EM finds from beliefs [beginnings, U, K]."""
        mixture = self.explained(beliefs)
        for step in range(STEPS):
            heat = max(1.0, FIRST_HEAT * (1 - 2 * step / STEPS))
            mixture = self.explained((self.evidence(mixture) / heat).softmax(-1))
        best = self.probability(mixture).argmax().view(1)
        return Mixture(mixture.centres[best][0], mixture.log_weight[best][0])

    def carried(self, mixture: Mixture) -> Mixture:
        """A mixture that was found before, a few steps on; where there is no kind, there stays none."""
        none = mixture.log_weight <= NO_GROUP / 2
        for _ in range(STEPS_CARRIED):
            mixture = self.explained(self.evidence(mixture).softmax(-1))
            mixture = Mixture(mixture.centres, mixture.log_weight.masked_fill(none, NO_GROUP))
        return mixture

    def probability(self, mixture: Mixture) -> Tensor:
        """The logarithm of that of all rewards and these centres, up to a constant [...]."""
        away = mixture.centres - self._prior.mean
        unlikely = 0.5 * ((away @ self._prior.precision) * away).sum((-1, -2))
        return self.evidence(mixture).logsumexp(-1) @ self._weights - unlikely

    def worth(self, mixture: Mixture) -> Tensor:
        """The logarithm of the probability of all rewards by so many kinds, up to the same constant []."""
        gram, _, _ = self._pooled(self.evidence(mixture).softmax(-1))
        volume = torch.logdet(self._prior.covariance @ (gram / self._prior.noise + self._prior.precision))  # [K]
        return self.probability(mixture) - 0.5 * volume.sum(-1)

    def _pooled(self, belief: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Statistics A [..., K, D, D], b [..., K, D] and users [..., K] of kinds under beliefs [..., U, K]."""
        belief = (belief * self._weights.unsqueeze(-1)).mT  # [..., K, U]
        gram = (belief @ self._users.gram.flatten(1)).view(*belief.shape[:-1], *self._users.gram.shape[1:])
        return gram, belief @ self._users.moment, belief.sum(-1) + LEAST_MASS


def random_beliefs(count: int, users: int, generator: torch.Generator, like: Tensor) -> Tensor:
    """Beliefs [BEGINNINGS, users, count] to start from: each user leans to some kind."""
    uniform = torch.rand(BEGINNINGS, users, count, generator=generator, dtype=torch.float64)
    leaning = uniform.clamp_min(LEAST_UNIFORM).log().square()
    return (leaning / leaning.sum(-1, keepdim=True)).to(like.device)


def mixture_due(epoch_events: int, total_events: int, *, refit: bool) -> bool:
    """Whether kinds are to be sought anew: there are so many more events than at an epoch, or inputs are others."""
    return total_events >= FROM_EVENTS and (refit or grown(epoch_events, total_events, GROWTH))


def groups_anew(
    shared: State, prior: Prior, users: Statistics, teaching: Tensor, *, spread: float, seek: bool, total_events: int
) -> State:
    """Groups of users who count w_u [U] under a new prior; `shared` has those of before, and the prior they are under.

    Kinds are sought anew, or those of before carried over; `spread` is κ of the mean shift. `group_mixture` is positive
    while groups are kinds, and the negative of the events until which kinds that did not help are not sought.
    """
    loudest = (teaching * users.events).argsort(descending=True, stable=True)[:VOICES_MAX]
    users, teaching = users.rows(loudest), teaching[loudest]
    shift = find_groups(prior, users, torch.full_like(prior.noise, spread), SHIFT_STEPS, teaching)
    share, before = torch.full_like(prior.noise, SPREAD), shared["group_mixture"]
    crowd = Crowd(prior, users, share, voices(users, teaching))
    if not seek:
        groups = Groups(shared["group_pull"], shared["group_offset"], shared["group_share"])
        kinds = crowd.carried(Mixture.of(groups, stored_prior(shared)))
        return _state(prior, share, shift, [kinds], (before > 0).to(torch.int64)) | {"group_mixture": before}
    generator, count = torch.Generator().manual_seed(total_events), users.events.shape[0]
    found = [crowd.found(random_beliefs(kinds, count, generator, prior.mean)) for kinds in COUNTS]
    worth = torch.stack([crowd.worth(mixture) for mixture in found])
    best = worth.argmax()
    told_apart = (worth[best] - worth[0] > AHEAD) & (best < len(COUNTS) - 1) & (users.events.mean() >= EVENTS_EACH)
    barred = torch.where(
        (before > 0) & (shared["guard"] < TRUSTED), -DROPPED_GROWTH * total_events, before.clamp_max(0)
    )
    best = torch.where(told_apart & (total_events >= -barred), best, 0)
    state = _state(prior, share, shift, found[1:], best)
    return state | {"group_mixture": torch.where(best > 0, torch.ones_like(barred), barred)}


def _state(prior: Prior, share: Tensor, shift: Groups, kinds: Sequence[Mixture], best: Tensor) -> State:
    """What an epoch keeps: the mean shift if best is 0, or that one of several kinds; only the device knows which."""
    mixtures = (Groups.of(prior, each.centres, each.log_weight, share) for each in kinds)
    states = [groups_state(each, VOICES_MAX) for each in (shift, *mixtures)]
    return {name: torch.stack([state[name] for state in states])[best.view(1)][0] for name in states[0]}
