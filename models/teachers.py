"""Who teaches well: the weights w_u of Eq. 5 of the Meta-Ban paper, by task modeling over kinds of users.

A few users who are rewarded for other reasons than the rest make the prior wider and everybody slower: it has to allow
for them. Users are told apart into kinds by what they say of arms, and Algorithm 1 (`models.transfer`) is run for each
kind as the target, with the other kinds as sources. Since by default all of them teach, a set S is of those who are
*silent*, and f_t(S) is −log p of the rewards of users of kind t, in nats a user, under the prior that all but S have
taught. A kind whose silence would save the median user of the others more than γ is silenced, if that helps users who
had no part in the choice and its taste goes against what everybody likes on the whole: to be different is no fault.

This trusts the many, and only where groups do not tell users apart anyway (the guard λ of `models.upkeep`). Whoever is
silenced still learns from their own rewards, but starts from what the others want.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, final

import torch
from torch import Tensor

from models.arrays import inverse
from models.contradiction import contradiction, smaller_population
from models.gem_heads import log_marginal
from models.growth import grown
from models.prior import Prior, Statistics, matched, voices
from models.transfer import SubsetLosses, TransferSettings, draw_subsets, fit_surrogate

#: Kinds of users.
KINDS: Final = 8
#: Users that are looked at, fewest of them, and fewest rewards of one.
USERS_MAX: Final = 256
LEAST_USERS: Final = 64
LEAST_REWARDS: Final = 2
#: Rounds of Lloyd's algorithm.
LLOYD_ROUNDS: Final = 16
#: Kinds that are silent at once in a set.
SUBSETS: Final = TransferSettings(subset_size=2, subsets_per_source=4, ridge=1e-4)
#: γ, in nats: what a kind costs the median user of the others before it is silenced.
WORST: Final = 0.25
#: What is saved on users held out has to be this much at least, in nats a user, and so many standard errors above 0.
LEAST_GAIN: Final = 0.15
GUARD_ERRORS: Final = 2.0
#: Share of the users who may be silenced, and of those who go on who may be of kinds that lose by it: users who are
#: missed are a group like others, and no bad teachers.
FEW: Final = 0.45
MISSED: Final = 0.2
#: Standard errors from which on a taste goes against everybody's.
CONTRADICTED: Final = 2.0
#: Kinds are measured whenever inputs change, and from so many events on each time there are so many times as many.
FROM_EVENTS: Final = 512
GROWTH: Final = 1.3
#: λ from which on groups tell users apart, and everybody teaches.
GROUPS_FORESEE: Final = 0.5


@final
@dataclass(frozen=True, slots=True)
class Kinds:
    """K kinds of users: centres [K, D] of their heads, and what each kind counts as a teacher [K]; the same for all
    until measured."""

    centres: Tensor
    weights: Tensor
    #: The prior that everybody teaches: in that of the good teachers alone, the others would look more like them.
    prior: Prior
    #: By how much less users held out would have lost, and the standard error of it [2].
    gain: Tensor

    @classmethod
    def one(cls, prior: Prior) -> Kinds:
        """Everybody is of one kind."""
        centres = torch.zeros_like(prior.mean.expand(KINDS, -1))
        return cls(
            centres,
            torch.ones_like(centres[:, 0]),
            prior,
            torch.zeros_like(prior.mean[:2]),
        )

    @property
    def told_apart(self) -> bool:
        """Whether there is more than one."""
        return bool((self.centres != self.centres[:1]).any())

    @property
    def any_silent(self) -> bool:
        """Whether anybody does not teach."""
        return bool((self.weights < 1).any())

    def kind_of(self, users: Statistics) -> Tensor:
        """The kind of each user [U] int64."""
        heads = self.prior.posterior_mean(users.gram, users.moment)  # [U, D]
        apart = heads.unsqueeze(1) - self.centres  # [U, K, D]
        return ((apart @ metric(users)) * apart).sum(-1).argmin(-1)

    def weights_of(self, users: Statistics) -> Tensor:
        """w_u: what each user counts as a teacher [U]."""
        return self.weights[self.kind_of(users)]


def stored_kinds(shared: Mapping[str, Tensor]) -> Kinds:
    """The kinds of an epoch."""
    precision = shared["kind_precision"]
    prior = Prior(shared["kind_mean"], precision, precision, shared["kind_noise"])
    return Kinds(shared["kind_centres"], shared["kind_weights"], prior, shared["kind_gain"])


def kinds_state(kinds: Kinds) -> dict[str, Tensor]:
    """What an epoch keeps of kinds."""
    return {
        "kind_centres": kinds.centres,
        "kind_weights": kinds.weights,
        "kind_gain": kinds.gain,
        "kind_mean": kinds.prior.mean,
        "kind_precision": kinds.prior.precision,
        "kind_noise": kinds.prior.noise,
    }


def metric(users: Statistics) -> Tensor:
    """The mean of hhᵀ [D, D]: in its norm users are as far apart as what they say of arms."""
    return users.gram.sum(0) / users.events.sum().clamp_min(1.0)


def cluster(points: Tensor, weights: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Lloyd's algorithm from starts that lie apart: the cluster of each point [n, c], weighed by [n] → [n] int64."""
    centres = points[torch.multinomial(weights, 1, generator=generator)]  # [1, c]
    while len(centres) < count:
        away = torch.cdist(points, centres).amin(-1).square() * weights + 1e-12  # [n]
        centres = torch.cat([centres, points[torch.multinomial(away, 1, generator=generator)]])
    for _ in range(LLOYD_ROUNDS):
        nearest = torch.cdist(points, centres).argmin(-1)  # [n]
        member = torch.nn.functional.one_hot(nearest, count).to(points) * weights.unsqueeze(-1)  # [n, K]
        total = member.sum(0).unsqueeze(-1)  # [K, 1]
        centres = torch.where(total > 0, member.mT @ points / total.clamp_min(1e-12), centres)
    return torch.cdist(points, centres).argmin(-1)


@final
class SilenceLosses(SubsetLosses):
    """f_t of a kind t, of sets of other kinds that are silent."""

    def __init__(
        self, known: tuple[Tensor, Tensor], noise: Tensor, users: Statistics, kind: Tensor, target: int
    ) -> None:
        """Users are of kinds [U], and known by posteriors: means [U, D] and covariances [U, D, D]."""
        self.sources = KINDS - 1
        self.others = torch.tensor([each for each in range(KINDS) if each != target])  # [k]
        #: Rows of the users of kind t [u].
        self.pupils = torch.nonzero(kind == target).squeeze(-1)
        self._users, self._noise = users.rows(self.pupils), noise
        self._mean, self._covariance = known
        self._member = torch.nn.functional.one_hot(kind, KINDS).mT.double()  # [K, U]

    def validation(self, members: Tensor) -> Tensor:
        return self.held_out(members).mean(-1)

    def held_out(self, members: Tensor) -> Tensor:
        """−log p of the rewards of each user of the kind [n, u]."""
        teach = torch.ones(len(members), KINDS, dtype=torch.float64)  # [n, K]
        teach[:, self.others] = 1 - members.double()
        mean, covariance = matched(teach @ self._member, self._mean, self._covariance, self._noise)
        return -log_marginal(mean, inverse(covariance), self._noise, self._users)


@final
@dataclass(frozen=True, slots=True)
class Lesson:
    """What users of a kind lose [1 + n, u] while sets of other kinds are silent [1 + n, k]: first nobody, then some."""

    losses: SilenceLosses
    silent: Tensor
    lost: Tensor

    @classmethod
    def of(cls, losses: SilenceLosses, generator: torch.Generator) -> Lesson:
        count = SUBSETS.subsets_per_source * losses.sources
        sets = draw_subsets(losses.sources, SUBSETS.subset_size, count, generator)  # [n, k]
        silent = torch.cat([torch.zeros_like(sets[:1]), sets])
        return cls(losses, silent, losses.held_out(silent))

    def cost(self, choosing: Tensor) -> Tensor:
        """What each kind costs the users among them who choose [U], in nats a user: Eq. 2 [K], 0 for their own."""
        cost = torch.zeros(KINDS, dtype=torch.float64)
        mine = choosing[self.losses.pupils]  # [u]
        if bool(mine.any()):
            cost[self.losses.others] = -fit_surrogate(self.silent, self.lost[:, mine].mean(-1), SUBSETS).coefficients
        return cost


def badly_teaching(lessons: Sequence[Lesson], contrary: Tensor, choosing: Tensor) -> Tensor:
    """Of contrary kinds [K] those that cost the median user of the others more than γ, as some of the users say [U].

    Nobody, if nearly half of the users or more would be silenced: then there are no many to trust.
    """
    cost = torch.stack([lesson.cost(choosing) for lesson in lessons])  # [target, source]
    size = torch.stack([choosing[lesson.losses.pupils].sum() for lesson in lessons]).double()  # [K]
    others = 1 - torch.eye(KINDS, dtype=torch.float64)
    found = torch.stack([_median(cost[:, each], size * others[each]) for each in range(KINDS)]) > WORST
    found &= contrary
    return found & (size[found].sum() < FEW * size.sum())


def _median(values: Tensor, weights: Tensor) -> Tensor:
    """The least value [] that at least half of the weight is at or below."""
    ordered, order = values.sort()
    return ordered[(weights[order].cumsum(0) >= weights.sum() / 2).int().argmax()]


def _saved(lessons: Sequence[Lesson], silent: Tensor, judging: Tensor) -> list[Tensor]:
    """What users who judge [U], of each kind that goes on, would save [u], in nats, if the others [K] were silent."""
    found = []
    for lesson in (lesson for lesson, ends in zip(lessons, silent.tolist(), strict=True) if not ends):
        lost = lesson.losses.held_out(silent[lesson.losses.others].unsqueeze(0))  # [1, u]
        found.append((lesson.lost[0] - lost[0])[judging[lesson.losses.pupils]])
    return [kind for kind in found if len(kind)]


def enough_users(users: Statistics) -> bool:
    """Whether there are so many users that kinds of them are worth telling apart."""
    return users.events.shape[0] >= LEAST_USERS


def kinds_anew(
    before: Kinds, users: Statistics, guard: Tensor, epoch_events: int, total_events: int, *, refit: bool, seed: int
) -> Kinds:
    """Kinds by now, of which `before` has the prior: measured, if inputs are others or there are many more events."""
    grew = total_events >= FROM_EVENTS and grown(epoch_events, total_events, GROWTH)
    if refit or (grew and bool(guard < GROUPS_FORESEE)):
        return measured_kinds(before.prior, users, seed + total_events)
    return before


def measured_kinds(prior: Prior, everyone: Statistics, seed: int) -> Kinds:
    """Kinds of users, and which of them teach well."""
    if not enough_users(everyone):
        return Kinds.one(prior)
    # Many small steps, for which a GPU is no help.
    near, heard = prior.cpu(), everyone.cpu()
    # Not those with the most rewards: who sends most of them is not the many. Epochs list users by a hash.
    users = heard.rows(torch.nonzero(heard.events >= LEAST_REWARDS).squeeze(-1)[:USERS_MAX])
    if not enough_users(users):
        return Kinds.one(prior)
    generator = torch.Generator().manual_seed(seed)
    try:
        found = _measured(near, users, generator)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        # Of numbers at the end of their range nothing can be told.
        return Kinds.one(prior)
    if (found.weights_of(heard) < 1).double().mean() >= FEW:
        found = replace(found, weights=torch.ones_like(found.weights))
    device = prior.mean.device
    return Kinds(found.centres.to(device), found.weights.to(device), prior, found.gain.to(device))


def _measured(prior: Prior, users: Statistics, generator: torch.Generator) -> Kinds:
    known = prior.posterior(users.gram, users.moment)
    heads = known[0]  # [U, D]
    values, vectors = torch.linalg.eigh(metric(users))
    root = vectors * values.clamp_min(0).sqrt()  # [D, D]
    points, voice = heads @ root, voices(users)  # [U, D], [U]
    # Users may differ most in how much they like anything at all, which would hide whose tastes are contrary.
    tastes = heads[:, 1:] @ root[1:]
    splits = [smaller_population(prior, users, each, voice) > 0.5 for each in (points, tastes)]
    kind = _kinds(max(splits, key=partial(_against, prior, users)), points, voice, generator)
    member = torch.nn.functional.one_hot(kind, KINDS).double()  # [U, K]
    centres = (member * voice.unsqueeze(-1)).mT @ heads / (member.mT @ voice).unsqueeze(-1).clamp_min(1e-9)  # [K, D]
    kinds = Kinds(centres, torch.ones_like(centres[:, 0]), prior, torch.zeros_like(prior.mean[:2]))
    contrary = torch.tensor([_against(prior, users, kind == each) > CONTRADICTED for each in range(KINDS)])
    if not bool(contrary.any()):
        return kinds
    lessons = [Lesson.of(SilenceLosses(known, prior.noise, users, kind, target), generator) for target in range(KINDS)]
    # Each half of the users, of each kind as many, judges what the other half chose.
    half = ((member.cumsum(0) * member).sum(-1) % 2).bool()  # [U]
    parts = [
        part
        for choosing in (half, ~half)
        for part in _saved(lessons, badly_teaching(lessons, contrary, choosing), ~choosing)
    ]
    saved = torch.cat(parts)  # [U] at most
    missed = sum(len(part) for part in parts if part.mean() < 0) / len(saved)
    gain = torch.stack([saved.mean(), saved.std() / len(saved) ** 0.5]).nan_to_num(0.0)
    if missed <= MISSED and bool(gain[0] > torch.clamp(GUARD_ERRORS * gain[1], min=LEAST_GAIN)):
        kinds = replace(kinds, weights=(~badly_teaching(lessons, contrary, torch.ones_like(half))).double())
    return replace(kinds, gain=gain)


def _against(prior: Prior, users: Statistics, some: Tensor) -> float:
    """How far the taste of some users [U] bool goes against everybody's, in standard errors."""
    return float(contradiction(prior, users, some)) if bool(some.any()) else -math.inf


def _kinds(few: Tensor, points: Tensor, voice: Tensor, generator: torch.Generator) -> Tensor:
    """Kinds [U] of users at points [U, c]: those of the smaller population [U] are one, the many are the others.

    Bad teachers in several kinds would excuse each other: silence of one would save little beside the rest.
    """
    kind = torch.zeros_like(few, dtype=torch.int64)
    many = torch.nonzero(~few).squeeze(-1)
    kind[many] = 1 + cluster(points[many], voice[many], KINDS - 1, generator)
    return kind
