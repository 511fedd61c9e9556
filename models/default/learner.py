"""The default learner: the structure of Meta-Ban with posteriors in place of gradient steps.

    meta-learner  a shared trunk p(x), trained on replayed samples, and a prior N(μ, Σ) over heads   trunk.py, prior.py
    arms          an effect and factors of each arm, and how often each place is looked at           arms.py
    user learner  exact posterior over w_u on h = [1, x, x⊗x, p(x), q_i], and a memory of its arms   prior.py, memory.py
    groups        a mixture over users' heads                                                        groups.py
    adaptation    the user's prior is a mixture of the groups they may belong to                     scoring.py
    score         mean + α·σ, both of the posterior

A head's input p(x) is the value noted at decision time: a trunk trained on the reward since would leak the label. For
the same reason groups and the pooled head are evaluated by the predictions noted at decision time: the guard λ weighs
predictions with groups against those without, the trust τ weighs users' heads against the pooled head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from metaban.models.default.arms import (
    FACTORS,
    FACTORS_FROM_EVENTS,
    FIRST_WIDE,
    ArmEffects,
    ArmLookup,
    ArmSamples,
    HeadSamples,
    QueryArms,
    derive_arms,
    with_tastes,
)
from metaban.models.default.calibration import BINS, COLUMNS, NORMAL_REACH, calibration_state
from metaban.models.default.common_part import slate_summary
from metaban.models.default.contributions import posterior_contributions
from metaban.models.default.drift import drift_detected
from metaban.models.default.evidence import group_guard, measured_trust, memory_gain, scheduled_trust
from metaban.models.default.groups import GROUP_USERS_MAX, cluster_of, clusters_found, derive_groups, mixture_due
from metaban.models.default.inputs import ArmInputs, Ramps
from metaban.models.default.memory import FIRST_GAIN, memory_table, residual_terms
from metaban.models.default.notes import Notes
from metaban.models.default.places import looks_at
from metaban.models.default.pooled_head import PooledHead
from metaban.models.default.prior import (
    Groups,
    Prior,
    Statistics,
    groups_from_state,
    groups_state,
    prior_from_state,
    prior_state,
)
from metaban.models.default.samples import Samples, recency_weight
from metaban.models.default.scoring import (
    HeadPosteriors,
    group_sizes,
    head_posteriors,
    memory_correction,
    predict_arms,
    trunk_prediction,
)
from metaban.models.default.trunk import Trunk, TrunkState
from metaban.models.default.warm_start_prior import WarmStartPrior
from metaban.models.explaining import Agreement, Contributions, without_own_row
from metaban.models.features import InputParts
from metaban.models.learner import Learner, Query, Scores, State, UserBatch, newest
from metaban.models.numerics.arrays import (
    Array,
    Arrays,
    as_arrays,
    cast,
    chosen,
    double,
    library_of,
    packed,
    symmetric,
    upper_triangle,
    zeros,
)
from metaban.models.numerics.schedule import doubled
from metaban.models.posterior_draws import covariance_root, independent_draws, joint_draws
from metaban.models.settings import PosteriorSettings

#: Groups are derived from this many applied events on.
GROUPS_FROM_EVENTS = 256

#: The same for the pooled head with wide inputs: principal directions of few samples hardly separate arms.
WIDE_POOLED_FROM_EVENTS = 256

#: Number of seeds of a torch generator.
SEEDS = 1 << 63

#: EM steps of an epoch with a refit, and of other epochs.
EM_STEPS_REFIT, EM_STEPS = 12, 2


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
        prior = with_tastes(Prior.initial(self.head_size))
        shared = {
            **TrunkState.fresh(self.trunk.initial(generator, self.dtype)).state(),
            **prior_state(prior),
            **PooledHead.initial(self.head_size).state(),
            **self._no_arms(),
            **groups_state(Groups.none(self.head_size, self.settings.group_spread), GROUP_USERS_MAX),
            "group_mixture": torch.zeros((), dtype=torch.float64),
            "guard": torch.zeros((), dtype=torch.float64),
            "gain": torch.tensor(FIRST_GAIN, dtype=torch.float64),
            "epoch": torch.zeros((), dtype=torch.float64),
            "since": torch.zeros((), dtype=torch.float64),
            "reach": torch.tensor(NORMAL_REACH, dtype=torch.float64),
            "reliability": torch.zeros(BINS, COLUMNS, dtype=torch.float64),
        }
        return shared | self.inputs.initial(generator)

    def _no_arms(self) -> State:
        """The state of arms before any event."""
        return ArmEffects.initial(Prior.initial(self.head_size).noise, self.inputs.wide).state()

    def _with_inputs(self, shared: State, inputs: State) -> State:
        """New parameters of inputs, and the shared coefficients of those of their terms that are not new."""
        if not self.inputs.wide:
            return inputs
        same = self.inputs.same_terms(shared, inputs).to(torch.float64)  # [W, W]
        spread = torch.where(same.any(-1), same @ shared["arm_wide_spread"], FIRST_WIDE * shared["noise"])
        return inputs | {"arm_wide": same @ shared["arm_wide"], "arm_wide_spread": spread}

    def with_epoch_number(self, shared: State, number: int) -> State:
        # Samples carry the epoch of their decision, and drift is measured by epochs.
        return {**shared, "epoch": torch.full_like(shared["epoch"], number)}

    def initial_user(self, shared: State) -> State:
        states = self.warm_started(shared, shared["prior_mean"].new_zeros(1, 0))
        return {name: value.squeeze(0) for name, value in states.items()}

    def warm_started(self, shared: Arrays, starts: Array) -> Arrays:
        like, count = shared["trunk"], starts.shape[0]
        gram, moment = self.starts.statistics(shared, prior_from_state(shared), starts)
        return {
            **{name: zeros((count, *shape), like) for name, shape in self.fields.items()},
            "gram": cast(upper_triangle(gram), like),
            "moment": cast(moment, like),
            "head": cast(self._head(shared, gram, moment), like),
            "since": zeros((count,), like) + cast(shared["since"], like),
        }

    def head_samples(self, shared: Arrays, batch: UserBatch) -> HeadSamples:
        """A batch's samples as users' heads learn from them."""
        notes = Notes(batch.phi)
        z = self.inputs.standardized(shared, batch.features, notes.slate)
        effects, _, factors = ArmEffects.stored(shared).of(batch.arm_keys)
        if self.inputs.wide:
            effects = effects + double(self.inputs.wide_inputs(shared, z)) @ shared["arm_wide"]
        h = self.inputs.head_inputs(shared, z, notes.trunk, cast(factors, z))
        looks = cast(looks_at(shared["arm_looks"], batch.places), z)
        recent = recency_weight(batch.epochs >= shared["since"], batch.rewards) * batch.valid
        return HeadSamples(h, batch.rewards / looks - cast(effects, z), looks, recent)

    def fit(self, shared: Arrays, batch: UserBatch, previous: Arrays) -> Arrays:
        samples = self.head_samples(shared, batch)
        h, users = samples.inputs, samples.statistics()
        gram, moment = self.starts.statistics(shared, prior_from_state(shared), batch.starts)
        gram, moment = users.gram + gram, users.moment + moment
        head = cast(self._head(shared, gram, moment), h)
        index, real = newest(batch.valid, self.settings.memory_samples)
        kept = chosen(h, index)
        return {
            "gram": cast(upper_triangle(gram), h),
            "moment": cast(moment, h),
            "head": head,
            "kept_arms": kept[..., 1 : 1 + self.inputs.seen] * real[..., None],
            "kept_residuals": (chosen(samples.targets, index) - (kept @ head[..., None])[..., 0]) * real,
            "kept_weights": chosen(samples.weights * samples.looks**2, index) * real,
            "since": cast(zeros((h.shape[0],), h) + shared["since"], h),
        }

    def _posteriors(self, shared: Arrays, gram: Array, moment: Array) -> HeadPosteriors:
        return head_posteriors(prior_from_state(shared), self._groups(shared), shared["guard"], gram, moment)

    def _head(self, shared: Arrays, gram: Array, moment: Array) -> Array:
        pooled = PooledHead.stored(shared)
        return pooled.blend(pooled.with_user_levels(gram, moment), self._posteriors(shared, gram, moment).head)

    def _groups(self, shared: Arrays) -> Groups | None:
        return groups_from_state(shared) if self.settings.groups else None

    def prepare_epoch(self, shared: State, *, as_numpy: bool = False) -> dict[str, Any]:
        arrays: dict[str, Any] = dict(as_arrays(shared)) if as_numpy else dict(shared)
        (first, offset), *rest = self.trunk.layers(shared["trunk"])
        first, offset = first.flatten(0, 1), offset.flatten()  # all members see the same inputs: one layer
        ramps = Ramps.of(shared["edges"]) if self.inputs.bins else None
        seen = ramps.layer(first.mT, offset) if ramps else (first.mT, offset)
        *hidden, (last, level) = rest
        layers = [
            seen,
            *((weight.mT, offset.flatten()) for weight, offset in hidden),
            (last.flatten() / self.trunk.members, level.mean()),
        ]
        return arrays | {
            "layers": [(packed(weight), packed(offset)) for weight, offset in layers] if as_numpy else layers,
            "ramps": ramps.packed() if ramps and as_numpy else ramps,
            "arms": ArmLookup.of(ArmEffects.stored(arrays), arrays["trunk"]),
            "wide_weights": cast(arrays["arm_wide"], arrays["trunk"]),
            "noise_held": cast(arrays["noise"], arrays["trunk"]),
        }

    def prepare_users(self, outline: Any, own: Arrays) -> Arrays:
        library, like = library_of(own["gram"]), own["gram"]
        # Statistics of users without an event since the last drift are down-weighted.
        weight = recency_weight(own["since"] >= outline["since"], like)[:, None]  # [R, 1]
        gram, moment = symmetric(double(own["gram"] * weight), self.head_size), double(own["moment"] * weight)
        posteriors, pooled = self._posteriors(outline, gram, moment), PooledHead.stored(outline)
        pooled_heads = pooled.with_user_levels(gram, moment)
        head = pooled.blend(pooled_heads, posteriors.head)
        return {
            "heads": cast(
                library.stack([pooled_heads, posteriors.alone, posteriors.together, head], -1), like
            ),  # [R, D, 4]
            "covariance": cast(pooled.exploration_covariance(posteriors.covariance()), like),
            "memory_table": memory_table(own["kept_arms"], own["kept_weights"] * weight, self.settings.memory_radius),
            "memory_terms": residual_terms(own["kept_residuals"], outline["gain"]),
        }

    def prepare_draws(self, brief: Arrays) -> Arrays:
        return brief if "root" in brief else {**brief, "root": covariance_root(brief["covariance"])}

    def score_prepared(self, outline: Any, pool: Arrays, query: Query) -> Scores:
        own, slates, library = query.own, query.slates, library_of(query.arms)
        slate, z, predicted = self._encoded(outline, query)
        if not self.settings.heads:
            group_of_one, known = zeros((z.shape[0],), query.own_row) + 1, 0 * predicted
            deviation = library.sqrt(outline["noise_held"])
            notes = Notes.array(predicted, predicted[:, None], predicted, deviation, outline["reach"], slate)
            draws = None if query.draws is None else independent_draws(predicted, known, slates, query.draws)
            return Scores(predicted, known, notes, known, group_of_one.__getitem__, draws)
        arms = self._arms(outline, query, z)
        h = self.inputs.head_inputs(outline, z, predicted, arms and arms.factors)  # [N, D]
        predictions_of_heads, variance = predict_arms(h, query.slates, own)
        mean, apart = predictions_of_heads[:, -1], None
        reach = self.settings.nu**2 * variance
        agreeing = partial(group_sizes, pool["head"], h, mean, reach, slates.spread(query.own_row))
        if arms is not None:
            predictions_of_heads = predictions_of_heads + arms.effects[:, None]
            mean, variance, apart = mean + arms.effects, variance + arms.variances, arms.variances
        if self.settings.memory:
            known = h[:, : 1 + self.inputs.seen]
            correction, left = memory_correction(known, slates, own, outline["gain"], self.settings.memory_radius)
            remembered = cast(outline["noise"] * left, h)  # [N] variance that is independent for each arm
            mean, variance = mean + cast(correction, h), variance + remembered
            apart = remembered if apart is None else apart + remembered
        sigma = library.sqrt(variance)
        deviation = library.sqrt(variance + outline["noise_held"])
        notes = Notes.array(predicted, predictions_of_heads[:, :-1], mean, deviation, outline["reach"], slate)
        draws = None
        if query.draws is not None:
            draws = joint_draws(mean, h, own["root"], apart, slates, query.draws)
        return Scores(mean, self.settings.alpha * sigma, notes, sigma, agreeing, draws)

    def _encoded(self, outline: Any, query: Query) -> tuple[Array, Array, Array]:
        """Slate summaries, standardised arms [N, d] and the trunk's predictions [N]."""
        slate, z = self._standardized(outline, query)
        if not self.inputs.trunk:
            return slate, z, library_of(z).zeros_like(z[:, 0])
        ramps = outline["ramps"]
        return slate, z, trunk_prediction(outline["layers"], ramps.values(z) if ramps else z)

    def _standardized(self, outline: Any, query: Query) -> tuple[Array, Array]:
        """Slate summaries and standardised arms [N, d]."""
        slate = slate_summary(query.arms, query.slates) if self.inputs.removes_common else query.arms[:, :0]
        return slate, self.inputs.standardized(outline, query.arms, slate)

    def _arms(self, outline: Any, query: Query, like: Array) -> QueryArms | None:
        """What is known of the arms of a query; None when they have no ids."""
        if not self.settings.arms or (query.arm_keys is None and not self.inputs.wide):
            return None
        keys = zeros((like.shape[0],), query.own_row) if query.arm_keys is None else query.arm_keys
        arms: QueryArms = outline["arms"].look_up(keys)
        if self.inputs.wide:
            arms.effects = arms.effects + self.inputs.wide_inputs(outline, like) @ outline["wide_weights"]
        return arms

    def agreement(self, outline: Any, pool: Arrays, query: Query, rows: Array) -> Agreement:
        _, z, predicted = self._encoded(outline, query)
        if not self.settings.heads:
            strangers = zeros((rows.shape[0], pool["head"].shape[0]), z)
            return Agreement(predicted[rows], 0 * predicted[rows], strangers, strangers > 0)
        # All arms are scored although few are needed: with fewer, sums may round differently than in `score_prepared`.
        arms = self._arms(outline, query, z)
        h = self.inputs.head_inputs(outline, z, predicted, arms and arms.factors)  # [N, D]
        predictions_of_heads, variance = predict_arms(h, query.slates, query.own)
        prediction, reach = predictions_of_heads[:, -1][rows], (self.settings.nu**2 * variance)[rows]
        predictions = h[rows] @ pool["head"].mT  # [n, P]
        near = (predictions - prediction[:, None]) ** 2 <= reach[:, None]
        threshold = library_of(reach).sqrt(reach)
        if arms is not None:  # the same for all users
            prediction, predictions = prediction + arms.effects[rows], predictions + arms.effects[rows][:, None]
        return Agreement(prediction, threshold, predictions, without_own_row(near, query.own_row))

    def contributions(
        self, outline: Any, pool: Arrays, query: Query, rows: Array, agreement: Agreement
    ) -> Contributions:
        z = self._standardized(outline, query)[1][rows]
        newborn = self.prepare_users(outline, self.warm_started(outline, zeros((1, 0), outline["prior_mean"])))
        arms = None
        if self.settings.heads and self.settings.arms:
            keys = zeros(rows.shape, query.own_row) if query.arm_keys is None else query.arm_keys[rows]
            arms = outline["arms"].look_up(keys)
        return posterior_contributions(self.settings, self.inputs, outline, query.own, newborn, z, arms)

    def looks(self, outline: Any, places: Array) -> Array:
        return looks_at(outline["arm_looks"], places)

    def epoch_due(self, epoch_events: int, total_events: int) -> bool:
        wait = max(self.settings.epoch_events, int(self.settings.epoch_growth * total_events))
        return total_events - epoch_events >= wait or doubled(epoch_events, total_events)

    def refit_due(self, epoch_events: int, total_events: int) -> bool:
        return doubled(epoch_events, total_events)

    def derive(self, shared: State, batches: Sequence[UserBatch], epoch_events: int, total_events: int) -> State:
        if not batches:
            return {**shared, "epoch": shared["epoch"] + 1}
        refit = self.refit_due(epoch_events, total_events)
        samples = Samples.of(batches, shared)
        derived = self._after_drift_check(shared, samples)
        samples = Samples.of(batches, derived)
        derived |= calibration_state(samples, derived["since"])
        if refit:
            derived |= self._with_inputs(derived, self.inputs.derive(derived, samples, samples.notes.slate))
        weights = torch.cat([batch.weight for batch in batches]).to(torch.float64)  # [U]
        if self.settings.arms and self.settings.heads:  # without heads, the trunk explains arms too
            derived |= self._derived_arms(derived, batches, weights, total_events, refit=refit)
        else:  # what was learned before this part was switched off must not stay
            derived |= {name: value.to(shared["noise"].device) for name, value in self._no_arms().items()}
        samples = Samples.of(batches, derived)
        heads = [self.head_samples(derived, batch) for batch in batches]
        users = Statistics.joined([head.statistics() for head in heads])
        prior = prior_from_state(derived)
        for _ in range(EM_STEPS_REFIT if refit else EM_STEPS):
            prior = with_tastes(prior.em_step(users, weights))
        if self.inputs.trunk:
            wanted = round((total_events - epoch_events) * self.settings.steps_per_event)
            steps = min(max(1, wanted), self.settings.epoch_steps_max)
            left = torch.cat([head.targets.flatten() for head in heads])  # what arms do not explain
            taught = replace(samples, rewards=left).weighted_by_user(batches, weights)
            derived |= self._trained_trunk(derived, taught, steps, total_events)
        if self.settings.groups and total_events >= GROUPS_FROM_EVENTS:
            seek, spread = mixture_due(epoch_events, total_events, refit=refit), self.settings.group_spread
            derived |= derive_groups(
                derived, prior, users, weights, spread=spread, seek=seek, total_events=total_events
            )
            derived["guard"] = group_guard(batches, prior.noise, derived)
        derived |= prior_state(prior)
        pooled_from = WIDE_POOLED_FROM_EVENTS if self.inputs.narrowed else 0
        if self.settings.heads and self.settings.plain and total_events >= pooled_from:
            earned = measured_trust(batches, prior.noise, derived)
            trust = scheduled_trust(earned, samples, total_events, rare=not self.inputs.narrowed)
            derived |= PooledHead.fitted(users, weights, self.inputs.seen, prior, trust).state()
        if self.settings.memory and refit:
            inputs, targets = [head.inputs for head in heads], [head.targets for head in heads]
            derived["gain"] = memory_gain(
                prior, users, inputs, targets, batches, self.inputs.seen, self.settings.memory_radius
            )
        return {**derived, "epoch": shared["epoch"] + 1}

    def clusters(self, shared: State) -> int:
        return clusters_found(shared)

    def cluster_of(self, shared: State, batch: UserBatch) -> Tensor:
        return cluster_of(shared, self.head_samples(shared, batch).statistics())

    def _after_drift_check(self, shared: State, samples: Samples) -> State:
        """If drift is detected: down-weight older samples and learn the prior from scratch."""
        changed = drift_detected(samples, shared["epoch"], shared["since"])
        initial = with_tastes(Prior.initial(self.head_size))
        restart = {**prior_state(initial), "since": shared["epoch"] + 1}
        restart["group_mixture"] = torch.zeros_like(shared["group_mixture"])  # its centres belong to the old prior
        return shared | {
            name: torch.where(changed, value.to(shared[name]), shared[name]) for name, value in restart.items()
        }

    def _derived_arms(
        self, derived: State, batches: Sequence[UserBatch], weights: Tensor, total_events: int, *, refit: bool
    ) -> State:
        """The arms' posteriors, and the prior that fits them."""
        samples = []
        for batch in batches:
            notes = Notes(batch.phi)
            z = self.inputs.standardized(derived, batch.features, notes.slate)
            h = self.inputs.head_inputs(derived, z, notes.trunk)[..., :-FACTORS]
            recent = recency_weight(batch.epochs >= derived["since"], batch.rewards) * batch.valid
            samples.append(
                ArmSamples(
                    double(h),
                    self.inputs.wide_inputs(derived, z),
                    double(batch.rewards),
                    double(recent),
                    batch.arm_keys,
                    batch.places,
                )
            )
        prior, effects = derive_arms(
            prior_from_state(derived),
            ArmEffects.stored(derived),
            samples,
            weights,
            seek=refit and total_events >= FACTORS_FROM_EVENTS,
            generator=torch.Generator().manual_seed(self.settings.seed % SEEDS),
        )
        return effects.state() | prior_state(prior)

    def _trained_trunk(self, shared: State, samples: Samples, steps: int, total_events: int) -> State:
        """The trunk after so many steps on replayed samples."""
        state = TrunkState.stored(shared)
        generator = torch.Generator().manual_seed(((self.settings.seed << 32) + total_events) % SEEDS)
        shares = torch.rand(steps, self.settings.replayed, generator=generator, dtype=torch.float64)
        drawn = samples.rows_at(shares.to(samples.weights.device))  # [steps, replayed]
        for rows in drawn:
            z = self.inputs.standardized(shared, samples.features[rows], samples.notes.slate[rows])
            x = self.inputs.codes(shared, z)
            gradient = self.trunk.gradient(state.parameters, x, samples.rewards[rows])
            state = state.after(gradient, self.settings.trunk_rate, self.settings.trunk_decay)
        return state.state()
