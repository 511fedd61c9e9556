"""Arms as random effects: an effect of the arm itself, and a taste that no feature tells.

    reward at place k = e_k · ( wᵀh + b_i + βᵀt ) + noise          h = [1, x, x⊗x, p(x), q_i]

b_i ~ N(0, v_b) is the effect of arm i around what its features say; q_i ~ N(0, diag v_q) are its factors, on which the
head of a user has coefficients p_u ~ N(0, I): p_uᵀq_i is a low-rank taste (Salakhutdinov and Mnih, "Probabilistic
Matrix Factorization", 2007). Where an arm has more inputs than heads see, Vᵀu is added to its factors, u being the
inputs that they do not see: the columns of V are the directions in which users differ. e_k is how often place k is
looked at (places.py). t are terms whose coefficients β_j ~ N(0, v_βj) all users share: products of arm and context, and
inputs that are too many for heads. All variances are learned by EM, so that a part that does not help shrinks to
nothing.

Given e_k, a reward r at place k is a reward r/e_k at the first place that counts e_k² times: the rest of the learner
sees only first places. Everything here is derived from users' samples. An arm that is not in the table has the prior:
effect 0, variance v_b, no factors. An arm without an id has no effect of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Self, final

import numpy as np
import torch
from torch import Tensor

from metaban.models.default.places import PLACES, LookEvidence, looks_at
from metaban.models.default.prior import LEAST_NOISE, Prior, Statistics
from metaban.models.learner import NO_ARM_KEY
from metaban.models.numerics.arrays import Array, cast, double, inverse, library_of, zeros

#: Arms with a row of their own, those with most samples.
ARMS_MAX: Final = 4_096

#: Key of an unused row; larger than any key of an arm.
UNUSED_KEY: Final = torch.iinfo(torch.int64).max

#: Factors of an arm.
FACTORS: Final = 4

#: v_b, v_q and v_β before they are learned, relative to the noise, and their weight in arms (or terms).
FIRST_EFFECT: Final = 0.05
FIRST_FACTOR: Final = 0.05
FIRST_WIDE: Final = 0.0005
FIRST_ARMS: Final = 2.0

#: Weight of the mean of all terms in the variance v_β of one; its own estimate has weight 1.
TERMS_TOGETHER: Final = 0.5

#: Applied events from which factors are sought, at doublings; columns, some more than factors, and power iterations of
#: the search.
FACTORS_FROM_EVENTS: Final = 1_024
SEARCH_COLUMNS: Final = FACTORS + 4
SEARCH_STEPS: Final = 4

#: Rounds of (users' heads, features and effects, factors, places) in an epoch, and after factors were sought.
ROUNDS, ROUNDS_SOUGHT = 2, 4

#: Ridge on the coefficients of features, in events, and on the constant, which is the level of all rewards.
RIDGE_EVENTS: Final = 1.0
RIDGE_CONSTANT_EVENTS: Final = 0.01


@final
@dataclass(frozen=True, slots=True)
class ArmEffects:
    """Posteriors of arms, sorted by key [A] int64; float64.

    Effects b [A] with variances [A], factors q [A, r], and the spreads v_b [] and v_q [r].
    """

    keys: Array
    effects: Array
    variances: Array
    factors: Array
    effect_spread: Array
    factor_spread: Array

    @classmethod
    def initial(cls, noise: Tensor) -> Self:
        """Before any event: one unused row."""
        nothing = noise.new_zeros(1)
        factors = nothing.expand(1, FACTORS).clone()
        spread = FIRST_EFFECT * noise
        return cls(
            keys=torch.full((1,), UNUSED_KEY, device=noise.device),
            effects=nothing,
            variances=nothing + spread,
            factors=factors,
            effect_spread=spread,
            factor_spread=factors[0] + FIRST_FACTOR * noise,
        )

    @classmethod
    def stored(cls, shared: Mapping[str, Array]) -> Self:
        """From an epoch's shared state."""
        return cls(**{name: shared[f"arm_{name}"] for name in cls.__slots__})

    def state(self) -> dict[str, Array]:
        """The shared state."""
        return {f"arm_{name}": getattr(self, name) for name in self.__slots__}

    def of(self, keys: Array) -> tuple[Array, Array, Array]:
        """Effects [...], their variances [...] and factors [..., r] of arms with these keys [...] int64."""
        library = library_of(keys)
        rows = library.searchsorted(self.keys, keys).clip(None, self.keys.shape[0] - 1)
        known = self.keys[rows] == keys
        effects = library.where(known, self.effects[rows], 0.0)
        variances = library.where(known, self.variances[rows], self.effect_spread * (keys != NO_ARM_KEY))
        return effects, variances, library.where(known[..., None], self.factors[rows], 0.0)


@final
@dataclass(frozen=True, slots=True)
class SharedTerms:
    """What terms mean: coefficients β [W], which all users share, and the spread v_β [W] of each; V [W₀, r], by which
    the first terms make factors of an arm, and its spread v_V [r]; float64."""

    coefficients: Array
    spread: Array
    factors: Array
    factor_spread: Array

    @classmethod
    def initial(cls, noise: Tensor, count: int, making_factors: int) -> Self:
        """Before any event, of W terms, of which the first W₀ may make factors."""
        nothing, factors = noise.new_zeros(count), noise.new_zeros(making_factors, FACTORS)
        spread = noise.new_zeros(FACTORS) + FIRST_FACTOR * noise / max(1, making_factors)
        return cls(nothing, nothing + FIRST_WIDE * noise, factors, spread)


@final
@dataclass(frozen=True, slots=True)
class SharedEffects:
    """What rewards consist of beside users' heads: arms' effects, shared terms, and looks e [PLACES] in float64."""

    arms: ArmEffects
    terms: SharedTerms
    looks: Array

    @classmethod
    def initial(cls, noise: Tensor, terms: int, making_factors: int) -> Self:
        """Before any event: all places alike."""
        shared = SharedTerms.initial(noise, terms, making_factors)
        return cls(ArmEffects.initial(noise), shared, noise.new_ones(PLACES))

    @classmethod
    def stored(cls, shared: Mapping[str, Array]) -> Self:
        """From an epoch's shared state."""
        names = ("arm_wide", "arm_wide_spread", "arm_wide_factors", "arm_wide_factor_spread")
        terms = SharedTerms(*(shared[name] for name in names))
        return cls(ArmEffects.stored(shared), terms, shared["arm_looks"])

    def state(self) -> dict[str, Array]:
        """The shared state of all three."""
        terms = {
            "arm_wide": self.terms.coefficients,
            "arm_wide_spread": self.terms.spread,
            "arm_wide_factors": self.terms.factors,
            "arm_wide_factor_spread": self.terms.factor_spread,
        }
        return {**self.arms.state(), "arm_looks": self.looks, **terms}


@final
@dataclass(slots=True)  # made for every request; frozen, it would take three times as long
class QueryArms:
    """The arms of a query: effects [N], their variances [N] and factors [N, r]."""

    effects: Array
    variances: Array
    factors: Array


@final
@dataclass(frozen=True, slots=True)
class ArmLookup:
    """The arms as requests look them up: sorted keys [A] int64, and effect, variance and factors of each [A, 2 + r].

    The first row is for arms without an id, the last for unknown arms.
    """

    keys: Array
    rows: Array

    @classmethod
    def of(cls, arms: ArmEffects, like: Array) -> Self:
        """In the dtype of another array. Unused rows are left out where that needs no synchronisation, in numpy."""
        library = library_of(arms.keys)
        used = arms.keys.shape[0] if isinstance(arms.keys, Tensor) else int(np.searchsorted(arms.keys, UNUSED_KEY))
        rows = zeros((used + 2, 2 + arms.factors.shape[1]), arms.effects)
        rows[1:-1, 0], rows[1:-1, 1], rows[1:-1, 2:] = arms.effects[:used], arms.variances[:used], arms.factors[:used]
        rows[-1, 1] = arms.effect_spread
        ends = zeros((2,), arms.keys)
        ends[0], ends[1] = NO_ARM_KEY, UNUSED_KEY
        return cls(library.concatenate([ends[:1], arms.keys[:used], ends[1:]]), cast(rows, like))

    def look_up(self, keys: Array) -> QueryArms:
        """The arms with these keys [N]."""
        library = library_of(keys)
        place = library.searchsorted(self.keys, keys)
        found = self.rows[library.where(self.keys[place] == keys, place, self.keys.shape[0] - 1)]
        return QueryArms(found[:, 0], found[:, 1], found[:, 2:])


@final
@dataclass(frozen=True, slots=True)
class HeadSamples:
    """Samples as users' heads learn from them: head inputs [B, S, D], rewards at the first place without the arm's
    effect [B, S], e_k of their places [B, S], and weights [B, S]."""

    inputs: Array
    targets: Array
    looks: Array
    weights: Array

    def statistics(self) -> Statistics:
        """The users' sufficient statistics, of e_k·h and the reward minus e_k·b."""
        return Statistics.of(self.inputs * self.looks[..., None], self.targets * self.looks, self.weights)


@final
@dataclass(frozen=True, slots=True)
class ArmSamples:
    """Samples of B users for the arms' posteriors; float64, except the terms, which take most of the memory.

    Head inputs without factors [B, S, D₀], shared terms [B, S, W], those that make factors [B, S, W₀], rewards as
    observed [B, S], weights [B, S], 0 for padding; keys and places [B, S] int64.
    """

    inputs: Tensor
    wide: Tensor
    making_factors: Tensor
    rewards: Tensor
    weights: Tensor
    keys: Tensor
    places: Tensor


def arms_by_samples(batches: Sequence[ArmSamples]) -> Tensor:
    """The keys of the arms with most samples, sorted: at most ARMS_MAX [A]; unused rows have UNUSED_KEY.

    The number of rows depends on shapes alone, so that nothing is read back from a GPU; it is at least the number of
    columns of `ArmPosteriors.sought`.
    """
    seen = [torch.where(batch.weights > 0, batch.keys, NO_ARM_KEY).flatten() for batch in batches]
    keys = torch.cat([*seen, seen[0].new_full((SEARCH_COLUMNS,), NO_ARM_KEY)])  # [n]
    ordered = keys.sort().values
    number = (ordered.diff(prepend=ordered[:1]) != 0).cumsum(0)  # [n], of each distinct key
    counts = torch.zeros_like(ordered).index_add(0, number, (ordered != NO_ARM_KEY).to(ordered))  # [n]
    distinct = torch.full_like(ordered, UNUSED_KEY).scatter(0, number, ordered)
    most = counts.topk(min(ARMS_MAX, counts.shape[0]))
    return torch.where(most.values > 0, distinct[most.indices], UNUSED_KEY).sort().values


@final
class ArmPosteriors:
    """Alternates between users' heads and the arms, under a prior whose last FACTORS coefficients are tastes."""

    def __init__(self, batches: Sequence[ArmSamples], keys: Tensor) -> None:
        """For the arms with these keys, from `arms_by_samples`."""
        self._batches = batches
        self._count = keys.shape[0]
        self._keys = keys
        #: The row of each sample's arm [B, S]; the row after the last for an arm that has none.
        self._rows = []
        for batch in batches:
            rows = torch.searchsorted(keys, batch.keys).clip(None, self._count - 1)
            self._rows.append(torch.where(keys[rows] == batch.keys, rows, self._count))
        self._used = keys != UNUSED_KEY

    def start(self, before: SharedEffects) -> SharedEffects:
        """The arms of this table with what is known of them."""
        effects, variances, factors = before.arms.of(self._keys)
        arms = replace(before.arms, keys=self._keys, effects=effects, variances=variances, factors=factors)
        return replace(before, arms=arms)

    def statistics(self, effects: SharedEffects) -> Statistics:
        """Statistics of all users' heads, given the effects."""
        return Statistics.joined(
            [
                self._head_samples(effects, batch, rows).statistics()
                for batch, rows in zip(self._batches, self._rows, strict=True)
            ]
        )

    def _head_samples(self, effects: SharedEffects, batch: ArmSamples, rows: Tensor) -> HeadSamples:
        looks = looks_at(effects.looks, batch.places)
        h = torch.cat([batch.inputs, _factors(effects, batch, rows)], dim=-1)
        rest = _padded(effects.arms.effects)[rows] + double(batch.wide) @ effects.terms.coefficients
        return HeadSamples(h, batch.rewards / looks - rest, looks, batch.weights)

    def _first_place(self, effects: SharedEffects, place: int) -> tuple[Tensor, Tensor, Tensor]:
        """Head inputs [B, S, D], rewards at the first place minus the arm's effect [B, S], and how often they count."""
        samples = self._head_samples(effects, self._batches[place], self._rows[place])
        return samples.inputs, samples.targets, samples.weights * samples.looks.square()

    def round(self, prior: Prior, effects: SharedEffects, user_weights: Tensor) -> tuple[Prior, SharedEffects]:
        """One round of EM: users' heads given the effects; features and effects jointly; factors, of arms and of
        inputs; places."""
        prior = with_tastes(prior.em_step(self.statistics(effects), user_weights))
        mean, covariance = prior.posterior(*self._moments(effects))  # [U, D], [U, D, D]
        users = torch.split(mean, [batch.rewards.shape[0] for batch in self._batches])
        spreads = torch.split(covariance, [batch.rewards.shape[0] for batch in self._batches])
        prior, effects = self.effects_step(prior, effects, users)
        effects = self.factors_step(prior, effects, users, spreads)
        effects = self.input_factors_step(prior, effects, users, spreads)
        return prior, self.looks_step(effects, users, spreads)

    def _moments(self, effects: SharedEffects) -> tuple[Tensor, Tensor]:
        users = self.statistics(effects)
        return users.gram, users.moment

    def effects_step(self, prior: Prior, before: SharedEffects, users: Sequence[Tensor]) -> tuple[Prior, SharedEffects]:
        """Coefficients (μ, β) of all inputs x and the arms' effects b, jointly, given how users differ from μ.

        One after the other, b would take what features explain. b is eliminated: with C_i = Σw + 1/v_b and M_i = Σwx of
        arm i, (μ, β) solves (Σwxxᵀ − ΣMMᵀ/C)(μ, β) = Σwxy − ΣM(Σwy)/C.
        """
        heads_size, noise = self._batches[0].inputs.shape[-1], prior.noise
        arms, terms = before.arms, before.terms
        size = heads_size + terms.spread.shape[0]
        gram, moment = prior.covariance.new_zeros(size, size), prior.mean.new_zeros(size)
        counts = prior.mean.new_zeros(self._count + 1)
        sums, crossed = counts.clone(), counts.new_zeros(self._count + 1, size)
        no_terms = replace(terms, coefficients=0 * terms.coefficients)
        nothing = replace(before, arms=replace(arms, effects=0 * arms.effects), terms=no_terms)
        for place, (batch, rows, heads) in enumerate(zip(self._batches, self._rows, users, strict=True)):
            h, targets, weights = self._first_place(nothing, place)
            away = heads - prior.mean  # [B, D]
            left = (targets - (h @ away.unsqueeze(-1)).squeeze(-1)).flatten()  # [n]
            x, w = torch.cat([batch.inputs, double(batch.wide)], dim=-1).flatten(0, 1), weights.flatten() / noise
            weighted, index = x * w.unsqueeze(-1), rows.flatten()
            gram, moment = gram + weighted.mT @ x, moment + left @ weighted
            counts, sums = counts.index_add(0, index, w), sums.index_add(0, index, w * left)
            crossed = crossed.index_add(0, index, weighted)
        counts, sums, crossed = counts[:-1], sums[:-1], crossed[:-1]  # without arms that have no row
        share = 1 / (counts + 1 / arms.effect_spread)  # [A]
        ridge = torch.cat([(RIDGE_EVENTS / noise).expand(heads_size), 1 / terms.spread])
        ridge[0] = RIDGE_CONSTANT_EVENTS / noise
        known = inverse(gram - (crossed * share.unsqueeze(-1)).mT @ crossed + ridge.diag())  # [D₀ + W, D₀ + W]
        coefficients = known @ (moment - (sums * share) @ crossed)
        effects = share * (sums - crossed @ coefficients)
        pulled = crossed * share.unsqueeze(-1)
        variances = share + ((pulled @ known) * pulled).sum(-1)
        spread = _spread(effects.square() + variances, self._used, FIRST_EFFECT * noise)
        own = coefficients[heads_size:]
        spreads = _own_spreads(own.square() + known.diagonal()[heads_size:], noise)
        terms = replace(terms, coefficients=own, spread=spreads)
        mean = torch.cat([coefficients[:heads_size], prior.mean[heads_size:]])
        arms = replace(arms, effects=effects, variances=variances, effect_spread=spread)
        return replace(prior, mean=mean), replace(before, arms=arms, terms=terms)

    def factors_step(
        self, prior: Prior, effects: SharedEffects, users: Sequence[Tensor], spreads: Sequence[Tensor]
    ) -> SharedEffects:
        """Factors of each arm by ridge regression of what is left on the users' tastes, which are uncertain too."""
        noise, arms = prior.noise, effects.arms
        grams = prior.mean.new_zeros(self._count + 1, FACTORS * FACTORS)
        moments = grams.new_zeros(self._count + 1, FACTORS)
        for place, (batch, rows) in enumerate(zip(self._batches, self._rows, strict=True)):
            gram, moment, weights = self._tastes(prior, effects, place, users[place], spreads[place])
            moment = moment - (double(batch.making_factors) @ effects.terms.factors) @ gram
            weights, index = weights.unsqueeze(-1), rows.flatten()
            each = (weights * gram.flatten(1).unsqueeze(1)).flatten(0, 1)  # [n, r²]
            grams = grams.index_add(0, index, each)
            moments = moments.index_add(0, index, (weights * moment).flatten(0, 1))
        precision = grams[:-1].view(-1, FACTORS, FACTORS) + (1 / arms.factor_spread).diag()
        covariance = inverse(precision)  # [A, r, r]
        factors = _begun((covariance @ moments[:-1].unsqueeze(-1)).squeeze(-1), arms.factors)
        squares = factors.square() + covariance.diagonal(dim1=-2, dim2=-1)
        spread_of_all = _spread(squares, self._used, FIRST_FACTOR * noise)
        return replace(effects, arms=replace(arms, factors=factors, factor_spread=spread_of_all))

    def input_factors_step(
        self, prior: Prior, effects: SharedEffects, users: Sequence[Tensor], spreads: Sequence[Tensor]
    ) -> SharedEffects:
        """V by the same regression, of what the arms' own factors leave on inputs × tastes."""
        noise, terms = prior.noise, effects.terms
        count = terms.factors.shape[0]
        if not count:
            return effects
        precision = (1 / terms.factor_spread).repeat(count).diag().view(count, FACTORS, count, FACTORS)
        moments = torch.zeros_like(terms.factors)
        own = _padded(effects.arms.factors)
        for place, (batch, rows) in enumerate(zip(self._batches, self._rows, strict=True)):
            gram, moment, weights = self._tastes(prior, effects, place, users[place], spreads[place])
            inputs = double(batch.making_factors)  # [B, S, W₀]
            weighted = inputs * weights.unsqueeze(-1)
            moments = moments + weighted.flatten(0, 1).mT @ (moment - own[rows] @ gram).flatten(0, 1)
            precision = precision + torch.einsum("uij,uab->iajb", weighted.mT @ inputs, gram)
        covariance = inverse(precision.reshape(count * FACTORS, -1))
        factors = _begun((covariance @ moments.flatten()).view_as(terms.factors), terms.factors)
        squares = factors.square() + covariance.diagonal().view_as(factors)
        used = torch.ones_like(factors[:, 0], dtype=torch.bool)
        spread = _spread(squares, used, FIRST_FACTOR * noise / count)
        return replace(effects, terms=replace(terms, factors=factors, factor_spread=spread))

    def _tastes(
        self, prior: Prior, effects: SharedEffects, place: int, heads: Tensor, spread: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A batch as regressions on the factors of its samples' arms: E[ppᵀ] [B, r, r] and E[p(y − hᵀw)] [B, S, r] by
        the users' tastes p, without the factors' part, and weights in units of the noise [B, S]."""
        size = self._batches[place].inputs.shape[-1]
        h, targets, weights = self._first_place(effects, place)
        base, tastes = h[..., :size], heads[:, size:]  # [B, S, D₀], [B, r]
        left = targets - (base @ heads[:, :size].unsqueeze(-1)).squeeze(-1)  # [B, S]
        # p and w are correlated.
        moment = tastes.unsqueeze(1) * left.unsqueeze(-1) - base @ spread[:, :size, size:]
        gram = tastes.unsqueeze(-1) * tastes.unsqueeze(-2) + spread[:, size:, size:]
        return gram, moment, weights / prior.noise

    def looks_step(self, before: SharedEffects, users: Sequence[Tensor], spreads: Sequence[Tensor]) -> SharedEffects:
        """e_k by regression of the rewards at place k on what is predicted for the first place, with its variance."""
        arms, evidence = before.arms, LookEvidence.before(before.looks)
        effects, variances = _padded(arms.effects), torch.cat([arms.variances, arms.effect_spread.view(1)])
        for batch, rows, heads, spread in zip(self._batches, self._rows, users, spreads, strict=True):
            h = torch.cat([batch.inputs, _factors(before, batch, rows)], dim=-1)
            first = (h @ heads.unsqueeze(-1)).squeeze(-1) + effects[rows]  # [B, S]
            first = first + double(batch.wide) @ before.terms.coefficients
            square = first.square() + ((h @ spread) * h).sum(-1) + variances[rows]
            evidence = evidence.with_samples(batch.places, batch.weights, batch.rewards, first, square)
        return replace(before, looks=evidence.looks(before.looks))

    def sought(self, prior: Prior, before: SharedEffects, generator: torch.Generator) -> SharedEffects:
        """New factors: singular vectors of what is left of the rewards, users × arms and inputs, by power iteration.

        Factors that begin near 0 would stay there: each side is fitted while the other is small.
        """
        arms, terms = before.arms, before.terms
        nothing = replace(terms, factors=0 * terms.factors)
        without = replace(before, arms=replace(arms, factors=0 * arms.factors), terms=nothing)
        mean = prior.posterior_mean(*self._moments(without))
        residuals = []
        for place, heads in enumerate(torch.split(mean, [batch.rewards.shape[0] for batch in self._batches])):
            h, targets, weights = self._first_place(without, place)
            residuals.append(weights * (targets - (h @ heads.unsqueeze(-1)).squeeze(-1)))  # [B, S]
        # Inputs first: the number of unused rows of arms must not change what they start from.
        count = terms.factors.shape[0]
        found = torch.randn(count + self._count, SEARCH_COLUMNS, generator=generator, dtype=torch.float64).to(mean)
        for _ in range(SEARCH_STEPS):
            of_inputs = found.new_zeros(count, SEARCH_COLUMNS)
            of_arms = found.new_zeros(self._count + 1, SEARCH_COLUMNS)
            for residual, rows, batch in zip(residuals, self._rows, self._batches, strict=True):
                inputs = double(batch.making_factors)
                values = _padded(found[count:])[rows] + inputs @ found[:count]  # [B, S, columns]
                users = (residual.unsqueeze(-1) * values).sum(1)  # [B, columns]
                each = (residual.unsqueeze(-1) * users.unsqueeze(1)).flatten(0, 1)
                of_inputs = of_inputs + inputs.flatten(0, 1).mT @ each
                of_arms = of_arms.index_add(0, rows.flatten(), each)
            found = torch.linalg.qr(torch.cat([of_inputs, of_arms[:-1]])).Q
        # Each factor begins with the variance v_q, whether arms or inputs make it.
        first, used = FIRST_FACTOR * prior.noise, self._used.sum()
        spread = torch.full_like(arms.factor_spread, 1) * first * used / used.clamp_min(1)
        factors = found[:, :FACTORS] * first.sqrt()
        arms = replace(arms, factors=factors[count:] * used.sqrt(), factor_spread=spread)
        spread = torch.full_like(spread, 1) * first / max(1, count)
        return replace(before, arms=arms, terms=replace(terms, factors=factors[:count], factor_spread=spread))


def with_tastes(prior: Prior) -> Prior:
    """The prior with N(0, I), independent of the rest, for the coefficients of factors: they have no scale."""
    size = prior.mean.shape[0] - FACTORS
    mean, covariance = prior.mean.clone(), prior.covariance.clone()
    mean[size:] = 0
    covariance[size:, :] = 0
    covariance[:, size:] = 0
    covariance[size:, size:] = torch.eye(FACTORS, dtype=mean.dtype, device=mean.device)
    return Prior.of(mean, covariance, prior.noise)


def _padded(values: Tensor) -> Tensor:
    """Values of arms [A, …] and one 0 for arms without a row."""
    return torch.cat([values, values.new_zeros(1, *values.shape[1:])])


def _factors(effects: SharedEffects, batch: ArmSamples, rows: Tensor) -> Tensor:
    """Factors of the samples' arms [B, S, r], by their rows [B, S]: their own, and those that their inputs make."""
    own: Tensor = _padded(effects.arms.factors)[rows]
    made: Tensor = double(batch.making_factors) @ effects.terms.factors
    return own + made


def _begun(factors: Tensor, before: Tensor) -> Tensor:
    """Factors [n, r], 0 where they were 0 for all n: they begin with `sought`."""
    return torch.where((before != 0).any(0), factors, 0.0)


def _spread(squares: Tensor, used: Tensor, first: Tensor) -> Tensor:
    """Mean of E[value²] [A, …] over the arms in use [A], with FIRST_ARMS arms of a first value."""
    used = used.view(-1, *(1,) * (squares.dim() - 1))
    total = torch.where(used, squares, 0.0).sum(0) + FIRST_ARMS * first
    spread: Tensor = total / (used.sum() + FIRST_ARMS)
    return spread.clamp_min(LEAST_NOISE)


def _own_spreads(squares: Tensor, noise: Tensor) -> Tensor:
    """v_β [W] from E[β²] [W]: the variance of each term, drawn towards the mean of all terms.

    Few products of arm and context matter. With one variance for all terms, these few would be shrunk like the
    rest (automatic relevance determination: MacKay, "Bayesian Interpolation", 1992).
    """
    together = _spread(squares, torch.ones_like(squares, dtype=torch.bool), FIRST_WIDE * noise)
    return ((squares + TERMS_TOGETHER * together) / (1 + TERMS_TOGETHER)).clamp_min(LEAST_NOISE)


def derive_effects(
    prior: Prior,
    before: SharedEffects,
    batches: Sequence[ArmSamples],
    user_weights: Tensor,
    *,
    seek: bool,
    generator: torch.Generator,
) -> tuple[Prior, SharedEffects]:
    """The prior and the effects after a few rounds of EM; with `seek`, factors are sought anew."""
    posteriors = ArmPosteriors(batches, arms_by_samples(batches))
    effects = posteriors.start(before)
    if seek:
        effects = posteriors.sought(prior, effects, generator)
    for _ in range(ROUNDS_SOUGHT if seek else ROUNDS):
        prior, effects = posteriors.round(prior, effects, user_weights)
    return prior, effects
