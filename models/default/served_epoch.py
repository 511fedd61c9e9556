"""One epoch of the default learner as requests are scored under it.

The asking user and the users of the pool predict from the same head inputs h; the user's head is the posterior under a
mixture of the kinds they may belong to (kinds.py). The score of an arm is mean + α·σ, both of the posterior. Runs on
numpy arrays and on torch tensors (arrays.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import final

from metaban.models.default.arms import ArmLookup, QueryArms
from metaban.models.default.common_part import slate_summary
from metaban.models.default.contributions import posterior_contributions
from metaban.models.default.inputs import ArmInputs
from metaban.models.default.kinds import Kinds
from metaban.models.default.memory import memory_table, residual_terms
from metaban.models.default.notes import Notes
from metaban.models.default.places import looks_at
from metaban.models.default.samples import recency_weight
from metaban.models.default.scoring import group_sizes, memory_correction, predict_arms
from metaban.models.default.served_trunk import ServedTrunk
from metaban.models.default.shared_state import SharedState
from metaban.models.explaining import Agreement, Contributions, without_own_row
from metaban.models.learner import Query, Scores, ServedEpoch
from metaban.models.numerics.arrays import Array, Arrays, cast, double, library_of, symmetric, zeros
from metaban.models.posterior_draws import covariance_root, independent_draws, joint_draws
from metaban.models.settings import PosteriorSettings


@final
@dataclass(frozen=True, slots=True)
class PosteriorEpoch(ServedEpoch):
    """The shared state of an epoch with what all requests need of it."""

    settings: PosteriorSettings
    inputs: ArmInputs
    shared: SharedState
    trunk: ServedTrunk | None  # None on inputs without a trunk
    kinds: Kinds  # the rows in use
    arms: ArmLookup
    coefficients: Array  # β [W] of shared terms in the learner's dtype
    factors: Array  # V [W₀, r], by which the first of these terms make factors, in the learner's dtype
    noise: Array  # σ² [] in the learner's dtype

    def prepare_users(self, own: Arrays) -> Arrays:
        like, shared = own["gram"], self.shared
        # Statistics of users without an event since the last drift are down-weighted.
        weight = recency_weight(own["since"] >= shared.since, like)[:, None]  # [R, 1]
        gram = symmetric(double(own["gram"] * weight), self.inputs.head_size)
        posteriors = self.kinds.posteriors(shared.prior, gram, double(own["moment"] * weight))
        return {
            "head": cast(posteriors.head, like),
            "covariance": cast(posteriors.covariance(), like),
            "memory_table": memory_table(own["kept_arms"], own["kept_weights"] * weight, self.settings.memory_radius),
            "memory_terms": residual_terms(own["kept_residuals"], shared.gain),
        }

    def prepare_draws(self, brief: Arrays) -> Arrays:
        return brief if "root" in brief else {**brief, "root": covariance_root(brief["covariance"])}

    def score(self, pool: Arrays, query: Query) -> Scores:
        own, slates, library, shared = query.own, query.slates, library_of(query.arms), self.shared
        slate, z, predicted = self._encoded(query)
        if not self.settings.heads:
            group_of_one, known = zeros((z.shape[0],), query.own_row) + 1, 0 * predicted
            deviation = library.sqrt(self.noise)
            notes = Notes.array(predicted, predicted, deviation, shared.reach, slate)
            draws = None if query.draws is None else independent_draws(predicted, known, slates, query.draws)
            return Scores(predicted, known, notes, known, group_of_one.__getitem__, draws)
        arms = self._arms(query, z)
        h = self.inputs.head_inputs(shared.basis, z, predicted, arms and arms.factors)  # [N, D]
        mean, variance = predict_arms(h, slates, own)
        apart = None
        reach = self.settings.nu**2 * variance
        agreeing = partial(group_sizes, pool["head"], h, mean, reach, slates.spread(query.own_row))
        if arms is not None:
            mean, variance, apart = mean + arms.effects, variance + arms.variances, arms.variances
        if self.settings.memory:
            known = h[:, : 1 + self.inputs.seen]
            correction, left = memory_correction(known, slates, own, shared.gain, self.settings.memory_radius)
            remembered = cast(shared.prior.noise * left, h)  # [N] variance that is independent for each arm
            mean, variance = mean + cast(correction, h), variance + remembered
            apart = remembered if apart is None else apart + remembered
        sigma, deviation = library.sqrt(variance), library.sqrt(variance + self.noise)
        notes = Notes.array(predicted, mean, deviation, shared.reach, slate)
        draws = None
        if query.draws is not None:
            draws = joint_draws(mean, h, own["root"], apart, slates, query.draws)
        return Scores(mean, self.settings.alpha * sigma, notes, sigma, agreeing, draws)

    def _encoded(self, query: Query) -> tuple[Array, Array, Array]:
        """Slate summaries, standardised arms [N, d] and the trunk's predictions [N]."""
        slate, z = self._standardized(query)
        return slate, z, library_of(z).zeros_like(z[:, 0]) if self.trunk is None else self.trunk.predict(z)

    def _standardized(self, query: Query) -> tuple[Array, Array]:
        """Slate summaries and standardised arms [N, d]."""
        slate = slate_summary(query.arms, query.slates) if self.inputs.removes_common else query.arms[:, :0]
        return slate, self.inputs.standardized(self.shared.basis, query.arms, slate)

    def _arms(self, query: Query, z: Array) -> QueryArms | None:
        """What is known of the arms of a query, standardised [N, d]; None when they have no ids."""
        if not self.settings.arms or (query.arm_keys is None and not self.inputs.wide):
            return None
        arms = self.arms.look_up(zeros((z.shape[0],), query.own_row) if query.arm_keys is None else query.arm_keys)
        if self.inputs.wide:
            terms = self.inputs.wide_inputs(self.shared.basis, z)
            arms.effects = arms.effects + terms @ self.coefficients
            if self.inputs.making_factors:
                arms.factors = arms.factors + self.inputs.factor_inputs(self.shared.basis, terms) @ self.factors
        return arms

    def agreement(self, pool: Arrays, query: Query, rows: Array) -> Agreement:
        _, z, predicted = self._encoded(query)
        if not self.settings.heads:
            strangers = zeros((rows.shape[0], pool["head"].shape[0]), z)
            return Agreement(predicted[rows], 0 * predicted[rows], strangers, strangers > 0)
        # All arms are scored although few are needed: with fewer, sums may round differently than in `score`.
        arms = self._arms(query, z)
        h = self.inputs.head_inputs(self.shared.basis, z, predicted, arms and arms.factors)  # [N, D]
        mean, variance = predict_arms(h, query.slates, query.own)
        prediction, reach = mean[rows], (self.settings.nu**2 * variance)[rows]
        predictions = h[rows] @ pool["head"].mT  # [n, P]
        near = (predictions - prediction[:, None]) ** 2 <= reach[:, None]
        threshold = library_of(reach).sqrt(reach)
        if arms is not None:  # the same for all users
            prediction, predictions = prediction + arms.effects[rows], predictions + arms.effects[rows][:, None]
        return Agreement(prediction, threshold, predictions, without_own_row(near, query.own_row))

    def contributions(self, pool: Arrays, query: Query, rows: Array, agreement: Agreement) -> Contributions:
        z = self._standardized(query)[1][rows]
        nothing = zeros((1, *self.shared.prior.precision.shape), self.shared.prior.precision)
        newborn = cast(self.kinds.posteriors(self.shared.prior, nothing, nothing[:, 0]).head, z)[0]
        arms = None
        if self.settings.heads and self.settings.arms:
            keys = zeros(rows.shape, query.own_row) if query.arm_keys is None else query.arm_keys[rows]
            arms = self.arms.look_up(keys)
        return posterior_contributions(self.settings, self.inputs, self.shared, self.trunk, query.own, newborn, z, arms)

    def looks(self, places: Array) -> Array:
        return looks_at(self.shared.effects.looks, places)
