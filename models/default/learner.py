"""The default learner: the structure of Meta-Ban with posteriors in place of gradient steps.

    meta-learner  a shared trunk p(x), trained on replayed samples, and a prior N(μ, Σ) over heads   trunk.py, prior.py
    arms          an effect and factors of each arm, and how often each place is looked at           arms.py
    user learner  exact posterior over w_u on h = [1, x, x⊗x, p(x), q_i], and a memory of its arms   prior.py, memory.py
    groups        kinds of users: a mixture over their heads                                         kinds.py
    adaptation    the user's prior is the mixture of the kinds they may belong to                        kinds.py
    score         mean + α·σ, both of the posterior                                                  served_epoch.py

A head's input p(x) is the value noted at decision time: a trunk trained on the reward since would leak the label.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from metaban.models.default.arms import (
    FACTORS,
    FACTORS_FROM_EVENTS,
    FIRST_WIDE,
    ArmLookup,
    ArmSamples,
    HeadSamples,
    SharedEffects,
    SharedTerms,
    derive_effects,
    with_tastes,
)
from metaban.models.default.calibration import BINS, COLUMNS, NORMAL_REACH, reliability_and_reach
from metaban.models.default.drift import drift_detected
from metaban.models.default.inputs import ArmInputs
from metaban.models.default.kinds import FROM_EVENTS, Kinds, continued_kinds, found_kinds, search_due
from metaban.models.default.memory import FIRST_GAIN, memory_gain
from metaban.models.default.notes import Notes
from metaban.models.default.places import looks_at
from metaban.models.default.prior import Prior, Statistics, prior_from_state, prior_state
from metaban.models.default.samples import Samples, recency_weight
from metaban.models.default.served_epoch import PosteriorEpoch
from metaban.models.default.served_trunk import ServedTrunk
from metaban.models.default.shared_state import SharedState
from metaban.models.default.trunk import Trunk, TrunkState
from metaban.models.default.warm_start_prior import WarmStartPrior
from metaban.models.features import InputParts
from metaban.models.learner import Learner, State, UserBatch, newest
from metaban.models.numerics.arrays import Array, Arrays, as_arrays, cast, chosen, double, upper_triangle, zeros
from metaban.models.numerics.schedule import doubled
from metaban.models.settings import PosteriorSettings

#: Number of seeds of a torch generator.
SEEDS = 1 << 63

#: EM steps of an epoch with a refit, and of other epochs.
EM_STEPS_REFIT, EM_STEPS = 12, 2


def after_em(prior: Prior, users: Statistics, weights: Tensor, steps: int) -> Prior:
    """The prior after so many EM steps on users with weights w_u [U]."""
    for _ in range(steps):
        prior = with_tastes(prior.em_step(users, weights))
    return prior


@final
class PosteriorLearner(Learner):
    """Posterior heads on a shared trunk."""

    supports_numpy = True
    growing = frozenset({"arm_keys", "arm_effects", "arm_variances", "arm_factors"})

    def __init__(
        self,
        settings: PosteriorSettings,
        inputs: int | InputParts,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.settings = settings
        self.parts = InputParts.of(inputs)
        self.input_size = self.parts.count
        self.dtype = dtype
        self.inputs = ArmInputs(settings, self.parts, dtype)
        self.head_size = self.inputs.head_size
        self.starts = WarmStartPrior(self.inputs, self.input_size)
        self.start_size = self.starts.size
        self.noted = Notes.COUNT + self.inputs.slate_numbers
        self.trunk = Trunk(self.inputs.codes_count, settings.width, settings.depth, settings.members)
        self.network_size = self.trunk.parameters
        kept = settings.memory_samples
        self.fields = {
            "gram": (self.head_size * (self.head_size + 1) // 2,),  # the upper triangle
            "moment": (self.head_size,),
            "head": (self.head_size,),
            "kept_arms": (kept, self.inputs.seen),
            "kept_residuals": (kept,),
            "kept_weights": (kept,),
            "since": (),
        }

    def initial_shared(self) -> State:
        generator = torch.Generator().manual_seed(self.settings.seed)
        nothing = torch.zeros((), dtype=torch.float64)
        prior = with_tastes(Prior.initial(self.head_size))
        return SharedState(
            trunk=TrunkState.fresh(self.trunk.initial(generator, self.dtype)),
            prior=prior,
            effects=self._no_effects(nothing.device),
            kinds=Kinds.none(prior),
            gain=torch.tensor(FIRST_GAIN, dtype=torch.float64),
            epoch=nothing,
            since=nothing.clone(),
            reach=torch.tensor(NORMAL_REACH, dtype=torch.float64),
            reliability=torch.zeros(BINS, COLUMNS, dtype=torch.float64),
            basis=self.inputs.initial(generator),
        ).state()

    def _no_effects(self, device: torch.device) -> SharedEffects:
        """The effects before any event."""
        noise = Prior.initial(self.head_size).noise.to(device)
        return SharedEffects.initial(noise, self.inputs.wide, self.inputs.making_factors)

    def _with_inputs(self, shared: SharedState, basis: State) -> SharedState:
        """New parameters of inputs, and the shared coefficients of those of their terms that are not new."""
        if not self.inputs.wide:
            return replace(shared, basis=shared.basis | basis)
        before, same = shared.effects.terms, self.inputs.same_terms(shared.basis, basis).to(torch.float64)  # [W, W]
        spread = torch.where(same.any(-1), same @ before.spread, FIRST_WIDE * shared.prior.noise)
        making = self.inputs.making_factors
        factors = same[:making, :making] @ before.factors
        terms = SharedTerms(same @ before.coefficients, spread, factors, before.factor_spread)
        return replace(shared, basis=shared.basis | basis, effects=replace(shared.effects, terms=terms))

    def with_epoch_number(self, shared: State, number: int) -> State:
        # Samples carry the epoch of their decision, and drift is measured by epochs.
        return {**shared, "epoch": torch.full_like(shared["epoch"], number)}

    def initial_user(self, shared: State) -> State:
        states = self.warm_started(shared, shared["prior_mean"].new_zeros(1, 0))
        return {name: value.squeeze(0) for name, value in states.items()}

    def warm_started(self, shared: Arrays, starts: Array) -> Arrays:
        # Called for a request: only the records that are needed.
        prior, like, count = prior_from_state(shared), shared["trunk"], starts.shape[0]
        gram, moment = self.starts.statistics(shared, prior, starts)
        head = Kinds.stored(shared).used().posteriors(prior, gram, moment).head
        return {
            **{name: zeros((count, *shape), like) for name, shape in self.fields.items()},
            "gram": cast(upper_triangle(gram), like),
            "moment": cast(moment, like),
            "head": cast(head, like),
            "since": zeros((count,), like) + cast(shared["since"], like),
        }

    def head_samples(self, shared: SharedState, batch: UserBatch) -> HeadSamples:
        """A batch's samples as users' heads learn from them."""
        notes = Notes(batch.phi)
        z = self.inputs.standardized(shared.basis, batch.features, notes.slate)
        effects, _, factors = shared.effects.arms.of(batch.arm_keys)
        if self.inputs.wide:
            terms, known = double(self.inputs.wide_inputs(shared.basis, z)), shared.effects.terms
            effects = effects + terms @ known.coefficients
            factors = factors + self.inputs.factor_inputs(shared.basis, terms) @ known.factors
        h = self.inputs.head_inputs(shared.basis, z, notes.trunk, cast(factors, z))
        looks = cast(looks_at(shared.effects.looks, batch.places), z)
        recent = recency_weight(batch.epochs >= shared.since, batch.rewards) * batch.valid
        return HeadSamples(h, batch.rewards / looks - cast(effects, z), looks, recent)

    def fit(self, shared: Arrays, batch: UserBatch, previous: Arrays) -> Arrays:
        state = SharedState.stored(shared)
        samples = self.head_samples(state, batch)
        h, users = samples.inputs, samples.statistics()
        gram, moment = self.starts.statistics(state.basis, state.prior, batch.starts)
        gram, moment = users.gram + gram, users.moment + moment
        head = cast(state.kinds.used().posteriors(state.prior, gram, moment).head, h)
        index, real = newest(batch.valid, self.settings.memory_samples)
        kept = chosen(h, index)
        return {
            "gram": cast(upper_triangle(gram), h),
            "moment": cast(moment, h),
            "head": head,
            "kept_arms": kept[..., 1 : 1 + self.inputs.seen] * real[..., None],
            "kept_residuals": (chosen(samples.targets, index) - (kept @ head[..., None])[..., 0]) * real,
            "kept_weights": chosen(samples.weights * samples.looks**2, index) * real,
            "since": cast(zeros((h.shape[0],), h) + state.since, h),
        }

    def prepare_epoch(self, shared: State, *, as_numpy: bool = False) -> PosteriorEpoch:
        trunk = None
        if self.inputs.trunk:
            trunk = ServedTrunk.of(self.trunk, shared["trunk"], shared["edges"] if self.inputs.bins else None)
        arrays = SharedState.stored(as_arrays(shared) if as_numpy else shared)
        like = arrays.trunk.parameters
        return PosteriorEpoch(
            settings=self.settings,
            inputs=self.inputs,
            shared=arrays,
            trunk=trunk.packed() if trunk and as_numpy else trunk,
            kinds=arrays.kinds.used(),
            arms=ArmLookup.of(arrays.effects.arms, like),
            coefficients=cast(arrays.effects.terms.coefficients, like),
            factors=cast(arrays.effects.terms.factors, like),
            noise=cast(arrays.prior.noise, like),
        )

    def epoch_due(self, epoch_events: int, total_events: int) -> bool:
        wait = max(self.settings.epoch_events, int(self.settings.epoch_growth * total_events))
        return total_events - epoch_events >= wait or doubled(epoch_events, total_events)

    def refit_due(self, epoch_events: int, total_events: int) -> bool:
        return doubled(epoch_events, total_events)

    def derive(self, shared: State, batches: Sequence[UserBatch], epoch_events: int, total_events: int) -> State:
        before = SharedState.stored(shared)
        derived = self._derived(before, batches, epoch_events, total_events) if batches else before
        return replace(derived, epoch=before.epoch + 1).state()

    def _derived(
        self, before: SharedState, batches: Sequence[UserBatch], epoch_events: int, total_events: int
    ) -> SharedState:
        """All parts but the number of the epoch."""
        refit = self.refit_due(epoch_events, total_events)
        samples = Samples.of(batches, before)
        shared = self._after_drift_check(before, samples)
        samples = Samples.of(batches, shared)
        reliability, reach = reliability_and_reach(samples, shared.since)
        shared = replace(shared, reliability=reliability, reach=reach)
        if refit:
            shared = self._with_inputs(shared, self.inputs.derive(shared.basis, samples, samples.notes.slate))
        weights = torch.cat([batch.weight for batch in batches]).to(torch.float64)  # [U]
        if self.settings.arms and self.settings.heads:  # without heads, the trunk explains arms too
            shared = self._with_effects(shared, batches, weights, total_events, refit=refit)
        else:  # what was learned before this part was switched off must not stay
            shared = replace(shared, effects=self._no_effects(shared.prior.noise.device))
        samples = Samples.of(batches, shared)
        heads = [self.head_samples(shared, batch) for batch in batches]
        users = Statistics.joined([head.statistics() for head in heads])
        prior = after_em(shared.prior, users, weights, EM_STEPS_REFIT if refit else EM_STEPS)
        if self.inputs.trunk:
            wanted = round((total_events - epoch_events) * self.settings.steps_per_event)
            steps = min(max(1, wanted), self.settings.epoch_steps_max)
            left = torch.cat([head.targets.flatten() for head in heads])  # what arms do not explain
            taught = replace(samples, rewards=left).weighted_by_user(batches, weights)
            shared = replace(shared, trunk=self._trained_trunk(shared, taught, steps, total_events))
        kinds = Kinds.none(prior)
        if self.settings.kinds and total_events >= FROM_EVENTS:
            if search_due(epoch_events, total_events, refit=refit):
                kinds = found_kinds(
                    prior, users, weights, self._learned_prior, torch.Generator().manual_seed(total_events)
                )
            else:
                kinds = continued_kinds(shared.kinds, prior, users, weights)
        shared = replace(shared, prior=prior, kinds=kinds)
        if self.settings.memory and refit:
            inputs, targets = [head.inputs for head in heads], [head.targets for head in heads]
            radius = self.settings.memory_radius
            gain = memory_gain(prior, kinds, users, inputs, targets, batches, self.inputs.seen, radius)
            shared = replace(shared, gain=gain)
        return shared

    def _learned_prior(self, users: Statistics, weights: Tensor) -> Prior:
        """The prior of these users alone."""
        start = prior_state(with_tastes(Prior.initial(self.head_size)))
        prior = prior_from_state({name: value.to(weights) for name, value in start.items()})
        return after_em(prior, users, weights, EM_STEPS_REFIT)

    def clusters(self, shared: State) -> int:
        return Kinds.stored(shared).count()

    def cluster_of(self, shared: State, batch: UserBatch) -> Tensor:
        state = SharedState.stored(shared)
        return state.kinds.of(state.prior, self.head_samples(state, batch).statistics())

    def _after_drift_check(self, shared: SharedState, samples: Samples) -> SharedState:
        """If drift is detected: down-weight older samples, and learn the prior and kinds from scratch."""
        changed = drift_detected(samples, shared.epoch, shared.since)
        initial, prior = prior_state(with_tastes(Prior.initial(self.head_size))), prior_state(shared.prior)
        restarted = {name: torch.where(changed, initial[name].to(value), value) for name, value in prior.items()}
        # Users were of these kinds before the change.
        spread = torch.where(changed, torch.ones_like(shared.kinds.spread), shared.kinds.spread)
        return replace(
            shared,
            prior=prior_from_state(restarted),
            kinds=replace(shared.kinds, spread=spread),
            since=torch.where(changed, shared.epoch + 1, shared.since),
        )

    def _with_effects(
        self, shared: SharedState, batches: Sequence[UserBatch], weights: Tensor, total_events: int, *, refit: bool
    ) -> SharedState:
        """With new effects, and the prior that fits them."""
        samples = []
        for batch in batches:
            notes = Notes(batch.phi)
            z = self.inputs.standardized(shared.basis, batch.features, notes.slate)
            h = self.inputs.head_inputs(shared.basis, z, notes.trunk)[..., :-FACTORS]
            recent = recency_weight(batch.epochs >= shared.since, batch.rewards) * batch.valid
            wide = self.inputs.wide_inputs(shared.basis, z)
            samples.append(
                ArmSamples(
                    double(h),
                    wide,
                    self.inputs.factor_inputs(shared.basis, wide),
                    double(batch.rewards),
                    double(recent),
                    batch.arm_keys,
                    batch.places,
                )
            )
        prior, effects = derive_effects(
            shared.prior,
            shared.effects,
            samples,
            weights,
            seek=refit and total_events >= FACTORS_FROM_EVENTS,
            generator=torch.Generator().manual_seed(self.settings.seed % SEEDS),
        )
        return replace(shared, prior=prior, effects=effects)

    def _trained_trunk(self, shared: SharedState, samples: Samples, steps: int, total_events: int) -> TrunkState:
        """The trunk after so many steps on replayed samples."""
        state = shared.trunk
        generator = torch.Generator().manual_seed(((self.settings.seed << 32) + total_events) % SEEDS)
        shares = torch.rand(steps, self.settings.replayed, generator=generator, dtype=torch.float64)
        drawn = samples.rows_at(shares.to(samples.weights.device))  # [steps, replayed]
        for rows in drawn:
            z = self.inputs.standardized(shared.basis, samples.features[rows], samples.notes.slate[rows])
            x = self.inputs.codes(shared.basis, z)
            gradient = self.trunk.gradient(state.parameters, x, samples.rewards[rows])
            state = state.after(gradient, self.settings.trunk_rate, self.settings.trunk_decay)
        return state
