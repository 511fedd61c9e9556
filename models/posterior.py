"""The default learner: Meta-Ban's shape with posteriors in place of gradient steps.

    meta-learner  a shared trunk p(x), trained on replayed samples, and a prior N(μ, Σ) over heads   trunk.py, prior.py
    user learner  an exact posterior over w_u on h(x) = [1, x, x⊗x, p(x)], and a memory of its arms  prior.py, memory.py
    groups        kinds of users, found by who explains whose rewards                                mixture.py
    adaptation    the groups a user may belong to supply the prior of the decision                   judging.py
    score         mean + α·σ, both of the posterior

p enters a head as it was when the arm was chosen (it is noted with the decision): computed later, by a trunk that has
since learned from that very reward, it would tell the head the answer. For the same reason groups are judged by what
they foresaw: the predictions with and without them are noted too, and the guard λ weighs one against the other; so are
those of a plain head for everybody, which decides until users' heads foresee more. The trunk is told who asks by the
head that the user had at that moment, so that it can learn what kinds of users want.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from models.arrays import Array, as_arrays, bounded, cast, chosen, double, library_of, packed, zeros
from models.calibration import BINS, COLUMNS, NORMAL_REACH, judged
from models.drawing import independent_draws, joint_draws, root
from models.encoding import Ramps
from models.explaining import Agreement, Contributions, without_asker
from models.growth import doubled
from models.head_starts import HeadStarts
from models.inputs import ArmInputs
from models.judging import Beliefs, believe, count_agreeing, foretold, remember, said_of
from models.learner import Arrays, Learner, Query, Scores, State, UserBatch, newest
from models.memory import FIRST_GAIN, kept_table, told
from models.mixture import VOICES_MAX, groups_anew, mixture_due
from models.offer import on_offer
from models.plain_head import PlainHead
from models.posterior_parts import posterior_contributions
from models.prior import Groups, Prior, Statistics, groups_state, prior_state, stored_groups, stored_prior
from models.settings import PosteriorSettings
from models.teachers import GROUPS_FORESEE, Kinds, enough_users, kinds_anew, kinds_state, stored_kinds
from models.teaching import Teaching
from models.trunk import Trunk, TrunkState
from models.upkeep import (
    DEVIATION,
    EMBEDDED,
    MEAN,
    PLAIN,
    REACH,
    TOGETHER,
    TRUNK,
    Samples,
    faded,
    gain_of,
    guard_of,
    sample_weights,
    tastes_changed,
    trust_now,
    trust_of,
)

#: Largest coordinate of a user's embedding, in deviations of the prior.
EMBEDDING_REACH = 4.0
#: Applied events from which groups are looked for.
GROUPS_FROM_EVENTS = 256
#: The same for the plain head where inputs are wide: the principal directions of few samples tell arms hardly apart.
WIDE_PLAIN_FROM_EVENTS = 256
#: Seeds that a generator takes.
SEEDS = 1 << 63
#: Steps of EM after a refit and otherwise.
EM_STEPS_REFIT, EM_STEPS = 12, 2


@final
class PosteriorLearner(Learner):
    """Posterior heads on a shared trunk."""

    knows_numpy = True

    def __init__(self, settings: PosteriorSettings, inputs: int, dtype: torch.dtype = torch.float32) -> None:
        self.settings = settings
        self.inputs_expected = inputs
        self.dtype = dtype
        self.inputs = ArmInputs(settings, inputs, dtype)
        self.head_size = self.inputs.head_size
        self.starts = HeadStarts(self.inputs, inputs)
        self.start_size = self.starts.size
        #: Numbers that tell the trunk who asks: the user's head without its coefficient of p.
        self.embedded = self.head_size - 1 if settings.embed else 0
        #: What is noted of an arm ends with what was on offer with it.
        self.offered_from = EMBEDDED + self.embedded
        self.noted = self.offered_from + self.inputs.offered
        self.trunk = Trunk(self.inputs.codes_count + self.embedded, settings.width, settings.depth, settings.members)
        self.network_size = self.trunk.parameters
        kept = settings.memory_samples
        self.fields = {
            "gram": (self.head_size, self.head_size),
            "moment": (self.head_size,),
            "head": (self.head_size,),
            "kept_heads": (kept, self.head_size),
            "kept_rewards": (kept,),
            "kept_weights": (kept,),
            "since": (),
        }

    def initial_shared(self) -> State:
        generator = torch.Generator().manual_seed(self.settings.seed)
        prior = Prior.initial(self.head_size)
        shared = {
            **TrunkState.fresh(self.trunk.initial(generator, self.dtype)).state(),
            **prior_state(prior),
            **PlainHead.initial(self.head_size).state(),
            **kinds_state(Kinds.one(prior)),
            **groups_state(Groups.none(self.head_size, self.settings.group_spread), VOICES_MAX),
            "group_mixture": torch.zeros((), dtype=torch.float64),
            "guard": torch.zeros((), dtype=torch.float64),
            "gain": torch.tensor(FIRST_GAIN, dtype=torch.float64),
            "epoch": torch.zeros((), dtype=torch.float64),
            "since": torch.zeros((), dtype=torch.float64),
            "reach": torch.tensor(NORMAL_REACH, dtype=torch.float64),
            "reliability": torch.zeros(BINS, COLUMNS, dtype=torch.float64),
        }
        return shared | self.inputs.initial(generator)

    def renumbered(self, shared: State, number: int) -> State:
        # Samples tell the epoch they were chosen under, and are judged by how long ago that is.
        return {**shared, "epoch": torch.full_like(shared["epoch"], number)}

    def newborn(self, shared: State) -> State:
        states = self.started(shared, shared["prior_mean"].new_zeros(1, 0))
        return {name: value.squeeze(0) for name, value in states.items()}

    def started(self, shared: Arrays, starts: Array) -> Arrays:
        like, count = shared["trunk"], starts.shape[0]
        gram, moment = self.starts.statistics(shared, stored_prior(shared), starts)
        return {
            **{name: zeros((count, *shape), like) for name, shape in self.fields.items()},
            "gram": cast(gram, like),
            "moment": cast(moment, like),
            "head": cast(self._head(shared, gram, moment), like),
            "since": zeros((count,), like) + cast(shared["since"], like),
        }

    def embedding(self, shared: Arrays, heads: Array) -> Array:
        """Who asks, to the trunk: users' mean heads [R, D] around the prior's, in its deviations → [R, e]."""
        mean, covariance = shared["prior_mean"][: self.embedded], shared["prior_covariance"]
        deviation = library_of(heads).sqrt(covariance.diagonal()[: self.embedded])
        away = (heads[:, : self.embedded] - cast(mean, heads)) / cast(deviation, heads)
        return bounded(away, -EMBEDDING_REACH, EMBEDDING_REACH)

    def offer(self, notes: Array) -> Array:
        """What was on offer, out of what was noted [..., q] → [..., 1 + d], or [..., 0] where that is not looked at."""
        return notes[..., self.offered_from :]

    def batch_heads(self, shared: Arrays, batch: UserBatch) -> Array:
        """h of a batch's samples [B, S, D]."""
        z = self.inputs.standardized(shared, batch.features, self.offer(batch.phi))
        return self.inputs.heads(shared, z, batch.phi[..., TRUNK])

    def fit(self, shared: Arrays, batch: UserBatch, previous: Arrays) -> Arrays:
        h = self.batch_heads(shared, batch)  # [B, S, D]
        weights = sample_weights(batch, shared["since"])  # [B, S]
        users = Statistics.of(h, batch.rewards, weights)
        gram, moment = self.starts.statistics(shared, stored_prior(shared), batch.starts)
        gram, moment = users.gram + gram, users.moment + moment
        index, real = newest(batch.valid, self.settings.memory_samples)
        return {
            "gram": cast(gram, h),
            "moment": cast(moment, h),
            "head": cast(self._head(shared, gram, moment), h),
            "kept_heads": chosen(h, index) * real[..., None],
            "kept_rewards": chosen(batch.rewards, index) * real,
            "kept_weights": chosen(weights, index) * real,
            "since": cast(zeros((h.shape[0],), h) + shared["since"], h),
        }

    def _believed(self, shared: Arrays, gram: Array, moment: Array) -> Beliefs:
        return believe(stored_prior(shared), self._groups(shared), shared["guard"], gram, moment)

    def _head(self, shared: Arrays, gram: Array, moment: Array) -> Array:
        plain = PlainHead.stored(shared)
        return plain.beside(plain.of_users(gram, moment), self._believed(shared, gram, moment).head)

    def _groups(self, shared: Arrays) -> Groups | None:
        return stored_groups(shared) if self.settings.groups else None

    def outline(self, shared: State, *, as_numpy: bool = False) -> dict[str, Any]:
        arrays: dict[str, Any] = dict(as_arrays(shared)) if as_numpy else dict(shared)
        (first, offset), *rest = self.trunk.layers(shared["trunk"])
        first, offset = first.flatten(0, 1), offset.flatten()  # of all members side by side: they see the same
        arms = first.shape[1] - self.embedded
        # Who asks is the same for all arms of a request, so that part of the first layer stands apart.
        ramps = Ramps.of(shared["edges"]) if self.inputs.bins else None
        seen = ramps.layer(first[:, :arms].mT, offset) if ramps else (first[:, :arms].mT, offset)
        *hidden, (last, level) = rest
        layers = [
            seen,
            *((weight.mT, offset.flatten()) for weight, offset in hidden),
            (last.flatten() / self.trunk.members, level.mean()),
        ]
        asking = first[:, arms:].mT
        return arrays | {
            "layers": [(packed(weight), packed(offset)) for weight, offset in layers] if as_numpy else layers,
            "asking": packed(asking) if as_numpy else asking,
            "ramps": ramps.packed() if ramps and as_numpy else ramps,
            "noise_held": cast(arrays["noise"], arrays["trunk"]),
        }

    def brief(self, outline: Any, own: Arrays) -> Arrays:
        library, like = library_of(own["gram"]), own["gram"]
        # Whoever has had no event since tastes changed: what they were fitted to has faded meanwhile.
        weight = faded(own["since"] >= outline["since"], like)[:, None]  # [R, 1]
        gram, moment = double(own["gram"] * weight[..., None]), double(own["moment"] * weight)
        beliefs, everybodys = self._believed(outline, gram, moment), PlainHead.stored(outline)
        plain, embedding = everybodys.of_users(gram, moment), self.embedding(outline, own["head"])
        head = everybodys.beside(plain, beliefs.head)
        residuals = own["kept_rewards"] - (own["kept_heads"] @ cast(head, like)[..., None])[..., 0]
        kept = own["kept_heads"][..., : 1 + self.inputs.seen]
        return {
            "heads": cast(library.stack([plain, beliefs.alone, beliefs.together, head], -1), like),  # [R, D, 4]
            "covariance": cast(everybodys.explored(beliefs.covariance()), like),
            "notes": self._noted_of_all(embedding, outline["reach"]),
            # User by user: in one product of all, rounding would depend on who else is briefed.
            "asked": (embedding[:, None] @ outline["asking"])[:, 0] + outline["layers"][0][1],
            "kept_table": kept_table(kept, own["kept_weights"] * weight, self.settings.memory_radius),
            "kept_told": told(residuals, outline["gain"]),
        }

    def _noted_of_all(self, embedding: Array, reach: Array) -> Array:
        """What is noted alike of all arms of a request: who asks [R, e], and the reach of intervals []; [R, q]."""
        notes = zeros((embedding.shape[0], self.noted), embedding)
        notes[:, EMBEDDED : self.offered_from], notes[:, REACH] = embedding, reach
        return notes

    def brief_draws(self, brief: Arrays) -> Arrays:
        return brief if "root" in brief else {**brief, "root": root(brief["covariance"])}

    def score_briefed(self, outline: Any, pool: Arrays, query: Query) -> Scores:
        own, slates, library = query.own, query.slates, library_of(query.arms)
        offer, z, predicted = self._seen(outline, query)
        notes = slates.copied(own["notes"])
        if self.inputs.apart:
            notes[:, self.offered_from :] = offer
        if not self.settings.heads:
            nobody, known = zeros((z.shape[0],), query.own_row) + 1, 0 * predicted
            notes[:, : MEAN + 1] = predicted[:, None]
            notes[:, DEVIATION] = library.sqrt(outline["noise_held"])
            draws = None if query.draws is None else independent_draws(predicted, known, slates, query.draws)
            return Scores(predicted, known, notes, known, nobody.__getitem__, draws)
        h = self.inputs.heads(outline, z, predicted)  # [N, D]
        said, variance = said_of(h, query.slates, own)
        notes[:, TRUNK], notes[:, PLAIN : TOGETHER + 1] = predicted, said[:, :-1]
        mean, apart = said[:, -1], None
        reach = self.settings.nu**2 * variance
        agreeing = partial(count_agreeing, pool["head"], h, mean, reach, slates.spread(query.own_row))
        if self.settings.memory:
            known = h[:, : 1 + self.inputs.seen]
            correction, left = remember(known, slates, own, outline["gain"], self.settings.memory_radius)
            apart = cast(outline["noise"] * left, h)  # [N] what arms like this one would tell
            mean, variance = mean + cast(correction, h), variance + apart
        sigma = library.sqrt(variance)
        notes[:, MEAN], notes[:, DEVIATION] = mean, library.sqrt(variance + outline["noise_held"])
        draws = None
        if query.draws is not None:
            draws = joint_draws(mean, h, own["root"], apart, slates, query.draws)
        return Scores(mean, self.settings.alpha * sigma, notes, sigma, agreeing, draws)

    def _seen(self, outline: Any, query: Query) -> tuple[Array, Array, Array]:
        """What was on offer with each arm, the arms standardised [N, d], and what the trunk says of them [N]."""
        offer = on_offer(query.arms, query.slates) if self.inputs.apart else query.arms[:, :0]
        z = self.inputs.standardized(outline, query.arms, offer)
        if not self.settings.trunk:
            return offer, z, library_of(z).zeros_like(z[:, 0])
        ramps, asked = outline["ramps"], query.slates.spread(query.own["asked"])
        return offer, z, foretold(outline["layers"], ramps.values(z) if ramps else z, asked)

    def agreement(self, outline: Any, pool: Arrays, query: Query, rows: Array) -> Agreement:
        _, z, predicted = self._seen(outline, query)
        if not self.settings.heads:
            strangers = zeros((rows.shape[0], pool["head"].shape[0]), z)
            return Agreement(predicted[rows], 0 * predicted[rows], strangers, strangers > 0)
        # Of all arms, though few are asked about: of fewer, sums may be rounded otherwise than when they were scored,
        # or counted.
        h = self.inputs.heads(outline, z, predicted)  # [N, D]
        said, variance = said_of(h, query.slates, query.own)
        prediction, reach = said[:, -1][rows], (self.settings.nu**2 * variance)[rows]
        predictions = h[rows] @ pool["head"].mT  # [n, P]
        near = (predictions - prediction[:, None]) ** 2 <= reach[:, None]
        threshold = library_of(reach).sqrt(reach)
        return Agreement(prediction, threshold, predictions, without_asker(near, query.own_row))

    def contributions(
        self, outline: Any, pool: Arrays, query: Query, rows: Array, agreement: Agreement
    ) -> Contributions:
        _, z, predicted = self._seen(outline, query)
        return posterior_contributions(self.settings, self.inputs, outline, query, rows, z[rows], predicted[rows])

    def epoch_due(self, epoch_events: int, total_events: int) -> bool:
        wait = max(self.settings.epoch_events, int(self.settings.epoch_growth * total_events))
        return total_events - epoch_events >= wait or doubled(epoch_events, total_events)

    def refit_due(self, epoch_events: int, total_events: int) -> bool:
        return doubled(epoch_events, total_events)

    def derive(self, shared: State, batches: Sequence[UserBatch], epoch_events: int, total_events: int) -> State:
        if not batches:
            return {**shared, "epoch": shared["epoch"] + 1}
        refit = self.refit_due(epoch_events, total_events)
        samples = Samples.of(batches, shared["since"])
        derived = self._watched(shared, samples)
        samples = Samples.of(batches, derived["since"])
        derived |= judged(samples, derived["since"])
        if refit:
            derived |= self.inputs.anew(derived, samples, self.offer(samples.notes))
        heads = [self.batch_heads(derived, batch) for batch in batches]
        users = Statistics.joined(
            [
                Statistics.of(h, batch.rewards, sample_weights(batch, derived["since"]))
                for h, batch in zip(heads, batches, strict=True)
            ]
        )
        weights = torch.cat([batch.weight for batch in batches]).to(users.events)  # [U]
        prior, kinds, teaching = self._taught(derived, users, weights, epoch_events, total_events, refit=refit)
        if self.settings.trunk:
            wanted = round((total_events - epoch_events) * self.settings.steps_per_event)
            steps = min(max(1, wanted), self.settings.epoch_steps_max)
            derived |= self._trained(derived, samples.taught(batches, teaching), steps, total_events)
        if self.settings.groups and total_events >= GROUPS_FROM_EVENTS:
            seek, spread = mixture_due(epoch_events, total_events, refit=refit), self.settings.group_spread
            derived |= groups_anew(derived, prior, users, teaching, spread=spread, seek=seek, total_events=total_events)
            derived["guard"] = guard_of(batches, prior.noise, derived["since"])
        derived |= prior_state(prior) | kinds_state(kinds)
        plain_from = WIDE_PLAIN_FROM_EVENTS if self.inputs.narrowed else 0
        if self.settings.heads and self.settings.plain and total_events >= plain_from:
            earned = trust_of(batches, prior.noise, derived["since"])
            trust = trust_now(earned, samples, total_events, rare=not self.inputs.narrowed)
            derived |= PlainHead.fitted(users, teaching, self.inputs.seen, prior, trust).state()
        if self.settings.memory and refit:
            derived["gain"] = gain_of(prior, users, heads, batches, self.inputs.seen, self.settings.memory_radius)
        return {**derived, "epoch": shared["epoch"] + 1}

    def kinds(self, shared: State, batch: UserBatch) -> Tensor:
        weights = sample_weights(batch, shared["since"])
        return stored_kinds(shared).kind_of(Statistics.of(self.batch_heads(shared, batch), batch.rewards, weights))

    def teaching(self, shared: State) -> Teaching | None:
        kinds = stored_kinds(shared)
        (gain, error), in_use = kinds.gain.tolist(), float(shared["guard"]) < GROUPS_FORESEE
        return Teaching(kinds.weights, gain, error, in_use) if kinds.told_apart else None

    def _watched(self, shared: State, samples: Samples) -> State:
        """After a change of tastes, samples from before it fade and the prior is learned from scratch."""
        changed = tastes_changed(samples, shared["epoch"], shared["since"])
        initial = Prior.initial(self.head_size)
        anew = {**prior_state(initial), **kinds_state(Kinds.one(initial)), "since": shared["epoch"] + 1}
        anew["group_mixture"] = torch.zeros_like(shared["group_mixture"])  # its centres were of another prior
        return shared | {
            name: torch.where(changed, value.to(shared[name]), shared[name]) for name, value in anew.items()
        }

    def _trained(self, shared: State, samples: Samples, steps: int, total_events: int) -> State:
        """The trunk after so many steps on samples drawn from all there are."""
        state = TrunkState.stored(shared)
        generator = torch.Generator().manual_seed(((self.settings.seed << 32) + total_events) % SEEDS)
        shares = torch.rand(steps, self.settings.replayed, generator=generator, dtype=torch.float64)
        drawn = samples.at(shares.to(samples.weights.device))  # [steps, replayed]
        for rows in drawn:
            notes = samples.notes[rows]
            z = self.inputs.standardized(shared, samples.features[rows], self.offer(notes))
            x = torch.cat([self.inputs.codes(shared, z), notes[:, EMBEDDED : self.offered_from]], dim=-1)
            gradient = self.trunk.gradient(state.parameters, x, samples.rewards[rows])
            state = state.after(gradient, self.settings.trunk_rate, self.settings.trunk_decay)
        return state.state()

    def _taught(
        self, derived: State, users: Statistics, weights: Tensor, epoch_events: int, total_events: int, *, refit: bool
    ) -> tuple[Prior, Kinds, Tensor]:
        """The prior, kinds of users, and w_u [U] of all who teach; who does is measured now and then."""
        prior, kinds = stored_prior(derived), stored_kinds(derived)
        steps = EM_STEPS_REFIT if refit else EM_STEPS
        everyone = kinds.prior
        for _ in range(steps):
            everyone = everyone.improved(users, weights)
        kinds, guard = replace(kinds, prior=everyone), derived["guard"]
        if self.settings.teaching:
            seed = self.settings.seed
            kinds = kinds_anew(kinds, users, guard, epoch_events, total_events, refit=refit, seed=seed)
        if not (self.settings.teaching and enough_users(users) and kinds.any_silent):
            return everyone, kinds, weights
        # Where groups foresee rewards better, users are told apart already, and learn from their own.
        teaching = torch.where(guard < GROUPS_FORESEE, weights * kinds.weights_of(users), weights)  # [U]
        for _ in range(steps):
            prior = prior.improved(users, teaching)
        return prior, kinds, teaching
