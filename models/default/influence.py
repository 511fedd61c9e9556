"""Kinds of users and their influence on shared state: the weights w_u of Eq. 5 of the Meta-Ban paper, by task modeling.

A few users with opposite preferences widen the prior and slow down learning for all users. EM fits two populations
w ~ N(μ_k, Σ_k) to all users' statistics; the smaller one is one kind, the other users are clustered into kinds by their
predictions. Algorithm 1 of task modeling (`models.transfer`) then runs with each kind as the target and the other
kinds as sources. By default all kinds contribute, so a set S holds the *excluded* kinds, and f_t(S) is −log p of the
rewards of users of kind t, in nats per user, under the prior learned without S. A kind gets weight 0 if

- its exclusion saves the median user of the other kinds more than γ,
- the saving holds for users who did not take part in the choice, and
- its preferences contradict the rewards of all users together: a kind that is merely different keeps its weight.

Weights apply only where groups do not separate users anyway (the guard λ of `evidence.py`). Excluded users still learn
from their own rewards, starting from the others' prior.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, final

import torch
from torch import Tensor

from metaban.models.default.prior import Prior, Statistics, evidence_weights, log_marginal, moment_matched
from metaban.models.numerics.arrays import inverse
from metaban.models.numerics.schedule import grown
from metaban.models.transfer.task_modeling import SubsetLosses, TransferSettings, draw_subsets, fit_surrogate

#: Number of kinds.
KINDS: Final = 8

#: Most users that are compared, fewest users, and fewest rewards of a user.
USERS_MAX: Final = 256
LEAST_USERS: Final = 64
LEAST_REWARDS: Final = 2

#: Iterations of Lloyd's algorithm.
LLOYD_ROUNDS: Final = 16

#: EM steps for the two populations.
POPULATION_STEPS: Final = 10

#: Initial sharpness of the split, in logits per standard deviation.
FIRST_LEAN: Final = 2.0

#: EM steps for the prior of one kind.
SUBSET_STEPS: Final = 4

#: Avoids a division by 0 when users do not differ.
LEAST_SPREAD: Final = 1e-12

#: Two kinds are excluded at once in a set.
SUBSETS: Final = TransferSettings(subset_size=2, subsets_per_source=4, ridge=1e-4)

#: γ, in nats: a kind that costs the median user of the others more is a candidate for exclusion.
COST_THRESHOLD: Final = 0.25

#: The gain on held-out users has to be at least this, in nats per user, and so many standard errors above 0.
LEAST_GAIN: Final = 0.15
GUARD_ERRORS: Final = 2.0

#: Largest share of users that may be excluded, and of the remaining users that may belong to kinds that lose by the
#: exclusion: users whose absence hurts others are a group, not a harmful kind.
EXCLUDED_SHARE_MAX: Final = 0.45
WORSE_SHARE_MAX: Final = 0.2

#: Standard errors from which preferences count as contradictory.
CONTRADICTION_ERRORS: Final = 2.0

#: Kinds are measured at refits, and from so many events on whenever the events have grown by this factor.
FROM_EVENTS: Final = 512
GROWTH: Final = 1.3

#: λ from which on groups separate users and all users keep their weight.
GROUPS_HELP: Final = 0.5


@final
@dataclass(frozen=True, slots=True)
class Kinds:
    """K kinds of users: centres [K, D] of their heads, and their weights w_u [K], all 1 until measured."""

    centres: Tensor
    weights: Tensor
    #: The prior learned from all users: under the prior without excluded kinds, these would look more like the rest.
    prior: Prior
    #: Mean loss saved on held-out users, and its standard error [2].
    gain: Tensor

    @classmethod
    def one(cls, prior: Prior) -> Kinds:
        """All users are of one kind."""
        centres = torch.zeros_like(prior.mean.expand(KINDS, -1))
        return cls(
            centres,
            torch.ones_like(centres[:, 0]),
            prior,
            torch.zeros_like(prior.mean[:2]),
        )

    @property
    def separated(self) -> bool:
        """Whether there is more than one kind."""
        return bool((self.centres != self.centres[:1]).any())

    @property
    def any_excluded(self) -> bool:
        """Whether any kind has less than full weight."""
        return bool((self.weights < 1).any())

    def kind_of(self, users: Statistics) -> Tensor:
        """The kind of each user [U] int64."""
        heads = self.prior.posterior_mean(users.gram, users.moment)  # [U, D]
        apart = heads.unsqueeze(1) - self.centres  # [U, K, D]
        return ((apart @ metric(users)) * apart).sum(-1).argmin(-1)

    def weights_of(self, users: Statistics) -> Tensor:
        """w_u: the weight of each user [U]."""
        return self.weights[self.kind_of(users)]


def kinds_from_state(shared: Mapping[str, Tensor]) -> Kinds:
    """Kinds from an epoch's shared state."""
    precision = shared["kind_precision"]
    prior = Prior(shared["kind_mean"], inverse(precision), precision, shared["kind_noise"])
    return Kinds(shared["kind_centres"], shared["kind_weights"], prior, shared["kind_gain"])


def kinds_state(kinds: Kinds) -> dict[str, Tensor]:
    """The shared state of kinds."""
    return {
        "kind_centres": kinds.centres,
        "kind_weights": kinds.weights,
        "kind_gain": kinds.gain,
        "kind_mean": kinds.prior.mean,
        "kind_precision": kinds.prior.precision,
        "kind_noise": kinds.prior.noise,
    }


def enough_users(users: Statistics) -> bool:
    """Whether there are enough users to find kinds."""
    return users.events.shape[0] >= LEAST_USERS


def derive_kinds(
    before: Kinds, users: Statistics, guard: Tensor, epoch_events: int, total_events: int, *, refit: bool, seed: int
) -> Kinds:
    """The kinds of the next epoch; `before` holds the new prior. Measured again if inputs changed or events grew."""
    grew = total_events >= FROM_EVENTS and grown(epoch_events, total_events, GROWTH)
    if refit or (grew and bool(guard < GROUPS_HELP)):
        return measure_kinds(before.prior, users, seed + total_events)
    return before


def measure_kinds(prior: Prior, everyone: Statistics, seed: int) -> Kinds:
    """Clusters users into kinds and measures their influence."""
    if not enough_users(everyone):
        return Kinds.one(prior)
    # Many small steps: a GPU does not help.
    prior_cpu, everyone_cpu = prior.cpu(), everyone.cpu()
    # The first users, not the most active: epochs list users by a hash, so this is a random sample.
    users = everyone_cpu.rows(torch.nonzero(everyone_cpu.events >= LEAST_REWARDS).squeeze(-1)[:USERS_MAX])
    if not enough_users(users):
        return Kinds.one(prior)
    generator = torch.Generator().manual_seed(seed)
    try:
        found = _measured_kinds(prior_cpu, users, generator)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        # Numbers at the limits of their range: no result.
        return Kinds.one(prior)
    if (found.weights_of(everyone_cpu) < 1).double().mean() >= EXCLUDED_SHARE_MAX:
        found = replace(found, weights=torch.ones_like(found.weights))
    device = prior.mean.device
    return Kinds(found.centres.to(device), found.weights.to(device), prior, found.gain.to(device))


def _measured_kinds(prior: Prior, users: Statistics, generator: torch.Generator) -> Kinds:
    known = prior.posterior(users.gram, users.moment)
    heads = known[0]  # [U, D]
    values, vectors = torch.linalg.eigh(metric(users))
    root = vectors * values.clamp_min(0).sqrt()  # [D, D]
    points, evidence_weight = heads @ root, evidence_weights(users)  # [U, D], [U]
    # Users may differ most in their overall level, which would hide contradictory preferences.
    tastes = heads[:, 1:] @ root[1:]
    splits = [smaller_population(prior, users, each, evidence_weight) > 0.5 for each in (points, tastes)]
    kind = _split_kinds(max(splits, key=partial(_contradiction_of, prior, users)), points, evidence_weight, generator)
    member = torch.nn.functional.one_hot(kind, KINDS).double()  # [U, K]
    centres = (
        (member * evidence_weight.unsqueeze(-1)).mT
        @ heads
        / (member.mT @ evidence_weight).unsqueeze(-1).clamp_min(1e-9)
    )  # [K, D]
    kinds = Kinds(centres, torch.ones_like(centres[:, 0]), prior, torch.zeros_like(prior.mean[:2]))
    contrary = torch.tensor(
        [_contradiction_of(prior, users, kind == each) > CONTRADICTION_ERRORS for each in range(KINDS)]
    )
    if not bool(contrary.any()):
        return kinds
    targets = [
        TargetLosses.of(ExclusionLosses(known, prior.noise, users, kind, target), generator) for target in range(KINDS)
    ]
    # Each half of the users, stratified by kind, evaluates the other half's choice.
    half = ((member.cumsum(0) * member).sum(-1) % 2).bool()  # [U]
    parts = [
        part
        for choosing in (half, ~half)
        for part in _gains(targets, harmful_kinds(targets, contrary, choosing), ~choosing)
    ]
    saved = torch.cat(parts)  # [U] at most
    missed = sum(len(part) for part in parts if part.mean() < 0) / len(saved)
    gain = torch.stack([saved.mean(), saved.std() / len(saved) ** 0.5]).nan_to_num(0.0)
    if missed <= WORSE_SHARE_MAX and bool(gain[0] > torch.clamp(GUARD_ERRORS * gain[1], min=LEAST_GAIN)):
        kinds = replace(kinds, weights=(~harmful_kinds(targets, contrary, torch.ones_like(half))).double())
    return replace(kinds, gain=gain)


def metric(users: Statistics) -> Tensor:
    """The mean of hhᵀ [D, D]: in its norm, heads are as far apart as their predictions."""
    return users.gram.sum(0) / users.events.sum().clamp_min(1.0)


def smaller_population(prior: Prior, users: Statistics, points: Tensor, evidence_weight: Tensor) -> Tensor:
    """Probability [U] that users, with heads at points [U, c], belong to the smaller of two populations.

    EM starts from the two sides of the first principal direction of users with these weights [U].
    """
    apart = points - evidence_weight @ points / evidence_weight.sum()
    directions = torch.linalg.svd(apart * evidence_weight.sqrt().unsqueeze(-1), full_matrices=False).Vh
    side = apart @ directions[0]  # [U]
    side = side / (evidence_weight @ side.square() / evidence_weight.sum()).sqrt().clamp_min(LEAST_SPREAD)
    belief = torch.stack([side, -side]).mul(FIRST_LEAN).sigmoid()  # [2, U]
    populations = [prior, prior]
    for _ in range(POPULATION_STEPS):
        share = belief.mean(-1, keepdim=True)  # [2, 1]
        populations = [
            _weighted_em_step(each, users, weights) for each, weights in zip(populations, belief, strict=True)
        ]
        evidence = [log_marginal(each.mean, each.precision, each.noise, users) for each in populations]
        belief = (torch.stack(evidence) + share.log()).softmax(0)
    return belief[belief.sum(-1).argmin()]


def _weighted_em_step(population: Prior, users: Statistics, weights: Tensor) -> Prior:
    """An EM step with user weights [U] and fixed noise, which both populations share."""
    known = population.posterior(users.gram, users.moment)
    mean, covariance = moment_matched(weights.unsqueeze(0), *known, population.noise)
    return Prior.of(mean[0], covariance[0], population.noise)


def _split_kinds(few: Tensor, points: Tensor, evidence_weight: Tensor, generator: torch.Generator) -> Tensor:
    """Kinds [U] of users at points [U, c]: the smaller population [U] is one kind, the others are clustered.

    Harmful users spread over several kinds would mask each other: excluding one kind would save little.
    """
    kind = torch.zeros_like(few, dtype=torch.int64)
    many = torch.nonzero(~few).squeeze(-1)
    kind[many] = 1 + cluster(points[many], evidence_weight[many], KINDS - 1, generator)
    return kind


def cluster(points: Tensor, weights: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Lloyd's algorithm with k-means++ starts: the cluster of each point [n, c] with weights [n] → [n] int64."""
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


def contradiction(prior: Prior, users: Statistics, some: Tensor) -> Tensor:
    """How strongly all users' rewards contradict the preferences of some users [U] bool, in standard errors [].

    Preferences are the mean of the prior learned from these users alone, without its constant. Rewards are taken
    relative to their user's mean, because a high overall level is no contradiction; every user counts once.
    """
    alone, theirs = prior, users.rows(torch.nonzero(some).squeeze(-1))
    for _ in range(SUBSET_STEPS):
        alone = alone.em_step(theirs)
    events = users.events.unsqueeze(-1)
    together = users.moment - users.gram[:, 0] * users.moment[:, :1] / events  # [U, D], Σ(h − h̄)(r − r̄)
    rise = (together / events)[:, 1:] @ alone.mean[1:]  # [U]
    error = (rise.std() / len(rise) ** 0.5).clamp_min(LEAST_SPREAD)
    errors: Tensor = -rise.mean() / error
    return errors


def _contradiction_of(prior: Prior, users: Statistics, some: Tensor) -> float:
    """Contradiction of some users [U] bool to all users together, in standard errors."""
    return float(contradiction(prior, users, some)) if bool(some.any()) else -math.inf


@final
class ExclusionLosses(SubsetLosses):
    """f_t of a kind t, for sets of excluded other kinds."""

    def __init__(
        self, known: tuple[Tensor, Tensor], noise: Tensor, users: Statistics, kind: Tensor, target: int
    ) -> None:
        """`kind` [U] holds the users' kinds, `known` their posteriors: means [U, D] and covariances [U, D, D]."""
        self.sources = KINDS - 1
        self.others = torch.tensor([each for each in range(KINDS) if each != target])  # [k]
        #: Rows of the users of kind t [u].
        self.target_rows = torch.nonzero(kind == target).squeeze(-1)
        self._users, self._noise = users.rows(self.target_rows), noise
        self._mean, self._covariance = known
        self._member = torch.nn.functional.one_hot(kind, KINDS).mT.double()  # [K, U]

    def validation(self, members: Tensor) -> Tensor:
        return self.held_out(members).mean(-1)

    def held_out(self, members: Tensor) -> Tensor:
        """−log p of the rewards of each user of the kind [n, u]."""
        included = torch.ones(len(members), KINDS, dtype=torch.float64)  # [n, K]
        included[:, self.others] = 1 - members.double()
        mean, covariance = moment_matched(included @ self._member, self._mean, self._covariance, self._noise)
        return -log_marginal(mean, inverse(covariance), self._noise, self._users)


@final
@dataclass(frozen=True, slots=True)
class TargetLosses:
    """Losses of one kind's users [1 + n, u] with sets of other kinds excluded [1 + n, k]; the first set is empty."""

    losses: ExclusionLosses
    excluded: Tensor
    lost: Tensor

    @classmethod
    def of(cls, losses: ExclusionLosses, generator: torch.Generator) -> TargetLosses:
        count = SUBSETS.subsets_per_source * losses.sources
        sets = draw_subsets(losses.sources, SUBSETS.subset_size, count, generator)  # [n, k]
        excluded = torch.cat([torch.zeros_like(sets[:1]), sets])
        return cls(losses, excluded, losses.held_out(excluded))

    def cost(self, choosing: Tensor) -> Tensor:
        """Cost of each kind for the target's users among `choosing` [U], in nats per user: Eq. 2 [K], 0 for itself."""
        cost = torch.zeros(KINDS, dtype=torch.float64)
        mine = choosing[self.losses.target_rows]  # [u]
        if bool(mine.any()):
            cost[self.losses.others] = -fit_surrogate(self.excluded, self.lost[:, mine].mean(-1), SUBSETS).coefficients
        return cost


def harmful_kinds(targets: Sequence[TargetLosses], contrary: Tensor, choosing: Tensor) -> Tensor:
    """Contradictory kinds [K] that cost the median user of the others more than γ, measured on some users [U].

    None, if nearly half of the users or more would be excluded: there is no majority then.
    """
    cost = torch.stack([target.cost(choosing) for target in targets])  # [target, source]
    size = torch.stack([choosing[target.losses.target_rows].sum() for target in targets]).double()  # [K]
    others = 1 - torch.eye(KINDS, dtype=torch.float64)
    found = torch.stack([_median(cost[:, each], size * others[each]) for each in range(KINDS)]) > COST_THRESHOLD
    found &= contrary
    return found & (size[found].sum() < EXCLUDED_SHARE_MAX * size.sum())


def _median(values: Tensor, weights: Tensor) -> Tensor:
    """The weighted median []: the least value with at least half of the weight at or below it."""
    ordered, order = values.sort()
    return ordered[(weights[order].cumsum(0) >= weights.sum() / 2).int().argmax()]


def _gains(targets: Sequence[TargetLosses], excluded: Tensor, evaluating: Tensor) -> list[Tensor]:
    """Nats saved by users among `evaluating` [U], one tensor [u] per remaining kind, if kinds [K] are excluded."""
    found = []
    for target in (target for target, ends in zip(targets, excluded.tolist(), strict=True) if not ends):
        lost = target.losses.held_out(excluded[target.losses.others].unsqueeze(0))  # [1, u]
        found.append((target.lost[0] - lost[0])[evaluating[target.losses.target_rows]])
    return [kind for kind in found if len(kind)]
