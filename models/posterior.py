"""The default learner: Meta-Ban's shape with posteriors in place of gradient steps.

    meta-learner  a shared trunk p(x), trained on replayed samples, and a prior N(μ, Σ) over heads   trunk.py, prior.py
    user learner  an exact posterior over w_u on h(x) = [1, x, x⊗x, p(x)], and a memory of its arms  prior.py, memory.py
    groups        kinds of users, found by who explains whose rewards                                prior.py
    adaptation    the groups a user may belong to supply the prior of the decision                   judging.py
    score         mean + α·σ, both of the posterior

p enters a head as it was when the arm was chosen (it is noted with the decision): computed later, by a trunk that has
since learned from that very reward, it would tell the head the answer. For the same reason groups are judged by what
they foresaw: the predictions with and without them are noted too, and the guard λ weighs one against the other. The
trunk is told who asks by the head that the user had at that moment, so that it can learn what kinds of users want.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, final

import torch
from torch import Tensor

from models.arrays import Array, as_arrays, cast, chosen, double, library_of, packed, rectified, zeros
from models.encoding import (
    ROWS_MAX,
    bins_for,
    centring,
    even_edges,
    pair_products,
    pieces,
    piecewise,
    principal_directions,
    products_for,
    quantile_edges,
    turned_towards,
)
from models.judging import Beliefs, believe, count_agreeing, foretold, remember
from models.learner import Arrays, Learner, Query, Scores, State, UserBatch, newest
from models.memory import FIRST_GAIN, half_squares, in_radii
from models.metaban import doubled
from models.normalizer import Moments, standardize, winsorize
from models.offer import common_ratio, on_offer, without_common
from models.prior import NO_GROUP, Groups, Prior, Statistics, find_groups
from models.settings import PosteriorSettings
from models.trunk import Trunk, TrunkState
from models.upkeep import (
    ALONE,
    EMBEDDED,
    FADED,
    TOGETHER,
    TRUNK,
    Samples,
    gain_of,
    guard_of,
    sample_weights,
    tastes_changed,
)

#: Largest coordinate of a user's embedding, in deviations of the prior.
EMBEDDING_REACH = 4.0
#: Users that groups are made of, those with the most events; one centre each.
VOICES_MAX = 256
#: Applied events from which groups are looked for.
GROUPS_FROM_EVENTS = 256
#: Seeds that a generator takes.
SEEDS = 1 << 63
#: Shifts of the centres, and steps of EM after a refit and otherwise.
SHIFT_STEPS = 4
EM_STEPS_REFIT, EM_STEPS = 12, 2


@final
class PosteriorLearner(Learner):
    """Posterior heads on a shared trunk."""

    knows_numpy = True

    def __init__(self, settings: PosteriorSettings, inputs: int, dtype: torch.dtype = torch.float32) -> None:
        self.settings = settings
        self.inputs_expected = inputs
        self.dtype = dtype
        self.bins = bins_for(inputs, settings.bins, settings.codes_max)
        self.narrowed = inputs > settings.head_inputs_max
        #: Numbers of an input that heads and memory see.
        self.seen = settings.head_directions if self.narrowed else inputs
        #: Products of two of them that heads see as well, where they are few.
        self.products = 0 if self.narrowed else products_for(self.seen, settings.products_max)
        self.head_size = 1 + self.seen + self.products + 1
        #: Numbers that tell the trunk who asks: the user's head without its coefficient of p.
        self.embedded = self.head_size - 1 if settings.embed else 0
        #: Wide inputs are often one thing in many cuts, so what a request's arms share is taken out of them.
        self.apart = settings.apart and self.narrowed
        #: Behind the embedding, what was on offer: count and mean.
        self.offered_from = EMBEDDED + self.embedded
        self.noted = self.offered_from + (1 + inputs if self.apart else 0)
        self.trunk = Trunk(inputs * (1 + self.bins) + self.embedded, settings.width, settings.depth)
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
        inputs = self.inputs_expected
        shared = {
            "mean": torch.zeros(inputs, dtype=self.dtype),
            "scale": torch.ones(inputs, dtype=self.dtype),
            "trunk": self.trunk.initial(generator, self.dtype),
            **_stored(prior),
            "group_pull": torch.zeros(VOICES_MAX, self.head_size, dtype=torch.float64),
            "group_offset": torch.full((VOICES_MAX,), NO_GROUP, dtype=torch.float64),
            "group_share": torch.tensor(self.settings.group_spread, dtype=torch.float64),
            "guard": torch.zeros((), dtype=torch.float64),
            "gain": torch.tensor(FIRST_GAIN, dtype=torch.float64),
            "epoch": torch.zeros((), dtype=torch.float64),
            "since": torch.zeros((), dtype=torch.float64),
        }
        state = TrunkState.fresh(shared["trunk"])
        shared |= {"trunk_first": state.first, "trunk_second": state.second, "trunk_steps": state.steps}
        if self.bins:
            shared["edges"] = even_edges(inputs, self.bins).to(self.dtype)
        if self.apart:
            shared["common_ratio"] = torch.zeros(inputs, dtype=self.dtype)
            shared["common_centre"] = torch.zeros(inputs, dtype=self.dtype)
        if self.narrowed:
            directions = torch.randn(inputs, self.seen, generator=generator, dtype=self.dtype)
            shared["directions"] = directions / inputs**0.5
        return shared

    def newborn(self, shared: State) -> State:
        zeros = {name: shared["trunk"].new_zeros(shape) for name, shape in self.fields.items()}
        nothing = shared["prior_precision"].new_zeros
        head = self._believed(shared, nothing(1, *self.fields["gram"]), nothing(1, self.head_size)).head
        return {**zeros, "head": head.squeeze(0).to(self.dtype), "since": shared["since"].to(self.dtype)}

    def codes(self, shared: Arrays, z: Array) -> Array:
        """What the trunk sees of standardised inputs [..., d]."""
        if not self.bins:
            return z
        begin, rate = shared["pieces"] if "pieces" in shared else pieces(shared["edges"])
        return library_of(z).concatenate([z, piecewise(z, begin, rate)], -1)

    def embedding(self, shared: Arrays, heads: Array) -> Array:
        """Who asks, to the trunk: users' mean heads [R, D] around the prior's, in its deviations → [R, e]."""
        mean, covariance = shared["prior_mean"][: self.embedded], shared["prior_covariance"]
        deviation = library_of(heads).sqrt(covariance.diagonal()[: self.embedded])
        away = (heads[:, : self.embedded] - cast(mean, heads)) / cast(deviation, heads)
        return away.clip(-EMBEDDING_REACH, EMBEDDING_REACH)

    def heads(self, shared: Arrays, z: Array, predicted: Array) -> Array:
        """h = [1, x, products of x where they are few, p]: z [..., d], predicted [...] → [..., D]."""
        x = z @ shared["directions"] if self.narrowed else z
        h = zeros((*x.shape[:-1], self.head_size), z)
        h[..., 0], h[..., 1 : 1 + self.seen], h[..., -1] = 1, x, predicted
        if self.products:
            h[..., 1 + self.seen : -1] = pair_products(x)
        return h

    def own_part(self, shared: Arrays, raw: Array, offer: Array) -> Array:
        """Raw inputs [..., d] without what they shared with the arms on offer [..., 1 + d], where that is looked at."""
        return without_common(raw, offer, shared["common_ratio"], shared["common_centre"]) if self.apart else raw

    def standardized(self, shared: Arrays, raw: Array, offer: Array) -> Array:
        """The same in standard deviations."""
        return standardize(self.own_part(shared, raw, offer), shared["mean"], shared["scale"])

    def offer(self, notes: Array) -> Array:
        """What was on offer, out of what was noted [..., q] → [..., 1 + d], or [..., 0] where that is not looked at."""
        return notes[..., self.offered_from :]

    def batch_heads(self, shared: Arrays, batch: UserBatch) -> Array:
        """h of a batch's samples [B, S, D]."""
        z = self.standardized(shared, batch.features, self.offer(batch.phi))
        return self.heads(shared, z, batch.phi[..., TRUNK])

    def fit(self, shared: Arrays, batch: UserBatch, previous: Arrays) -> Arrays:
        h = self.batch_heads(shared, batch)  # [B, S, D]
        weights = sample_weights(batch, shared["since"])  # [B, S]
        users = Statistics.of(h, batch.rewards, weights)
        index, real = newest(batch.valid, self.settings.memory_samples)
        return {
            "gram": cast(users.gram, h),
            "moment": cast(users.moment, h),
            "head": cast(self._believed(shared, users.gram, users.moment).head, h),
            "kept_heads": chosen(h, index[..., None]) * real[..., None],
            "kept_rewards": chosen(batch.rewards, index) * real,
            "kept_weights": chosen(weights, index) * real,
            "since": cast(zeros((h.shape[0],), h) + shared["since"], h),
        }

    def _believed(self, shared: Arrays, gram: Array, moment: Array) -> Beliefs:
        return believe(stored_prior(shared), self._groups(shared), shared["guard"], gram, moment)

    def _groups(self, shared: Arrays) -> Groups | None:
        if not self.settings.groups:
            return None
        pull, offset = shared["group_pull"], shared["group_offset"]
        if not isinstance(offset, Tensor):  # a tensor may be on a GPU, which is not to be waited for
            count = int((offset > NO_GROUP / 2).sum())
            pull, offset = pull[:count], offset[:count]
            if not count:
                return None
        return Groups(pull, offset, shared["group_share"])

    def outline(self, shared: State, *, as_numpy: bool = False) -> dict[str, Any]:
        arrays: dict[str, Any] = dict(as_arrays(shared)) if as_numpy else dict(shared)
        (first, offset), *rest = self.trunk.layers(shared["trunk"])
        arms = first.shape[1] - self.embedded
        # Who asks is the same for all arms of a request, so that part of the first layer stands apart.
        layers = [(first[:, :arms].mT, offset), *((weight.mT, offset) for weight, offset in rest)]
        asking = first[:, arms:].mT
        return arrays | {
            "layers": [(packed(weight), packed(offset)) for weight, offset in layers] if as_numpy else layers,
            "asking": packed(asking) if as_numpy else asking,
            "pieces": pieces(arrays["edges"]) if self.bins else None,
        }

    def brief(self, outline: Any, own: Arrays) -> Arrays:
        library, like = library_of(own["gram"]), own["gram"]
        # Whoever has had no event since tastes changed: what they were fitted to has faded meanwhile.
        weight = cast(library.where(own["since"] >= outline["since"], 1.0, FADED), like)[:, None]  # [R, 1]
        beliefs = self._believed(outline, double(own["gram"] * weight[..., None]), double(own["moment"] * weight))
        embedding = self.embedding(outline, own["head"])
        residuals = own["kept_rewards"] - (own["kept_heads"] @ cast(beliefs.head, like)[..., None])[..., 0]
        kept = in_radii(own["kept_heads"][..., 1 : 1 + self.seen], self.settings.memory_radius)
        return {
            "heads": cast(library.stack([beliefs.alone, beliefs.together, beliefs.head], -1), like),  # [R, D, 3]
            "covariance": cast(beliefs.covariance(), like),
            "embedding": embedding,
            "asked": embedding @ outline["asking"] + outline["layers"][0][1],
            "kept_inputs": kept,
            "kept_squares": half_squares(kept),
            "kept_residuals": double(residuals),
            "kept_weights": double(own["kept_weights"] * weight),
        }

    def score_briefed(self, outline: Any, pool: Arrays, query: Query) -> Scores:
        own, slates, library = query.own, query.slates, library_of(query.arms)
        offer = on_offer(query.arms, slates) if self.apart else query.arms[:, :0]
        z = self.standardized(outline, query.arms, offer)  # [N, d]
        notes = zeros((z.shape[0], self.noted), z)
        notes[:, EMBEDDED : self.offered_from], notes[:, self.offered_from :] = slates.spread(own["embedding"]), offer
        if self.settings.trunk:
            predicted = foretold(outline["layers"], self.codes(outline, z), slates.spread(own["asked"]))  # [N]
        else:
            predicted = library.zeros_like(z[:, 0])
        if not self.settings.heads:
            nobody = zeros((z.shape[0],), query.own_row) + 1
            notes[:, :EMBEDDED] = predicted[:, None]
            return Scores(predicted, 0 * predicted, nobody, notes)
        h = self.heads(outline, z, predicted)  # [N, D]
        side_by_side = slates.padded(h)  # [R, K, D]
        said = slates.flat(side_by_side @ own["heads"])  # [N, 3]
        variance = rectified(slates.flat(((side_by_side @ own["covariance"]) * side_by_side).sum(-1)))
        notes[:, TRUNK], notes[:, ALONE : TOGETHER + 1] = predicted, said[:, :2]
        mean = said[:, 2]
        reach = self.settings.nu * library.sqrt(variance)
        group_size = count_agreeing(pool["head"], h, mean, reach, slates.spread(query.own_row))
        if self.settings.memory:
            correction, left = remember(
                h[:, 1 : 1 + self.seen], slates, own, outline["gain"], self.settings.memory_radius
            )
            mean, variance = mean + correction, variance + cast(outline["noise"] * left, variance)
        return Scores(mean, self.settings.alpha * library.sqrt(variance), group_size, notes)

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
        if refit:
            derived |= self._standardised_anew(derived, batches, samples)
        if self.settings.trunk:
            wanted = round((total_events - epoch_events) * self.settings.steps_per_event)
            derived |= self._trained(derived, samples, min(max(1, wanted), self.settings.epoch_steps_max), total_events)
        heads = [self.batch_heads(derived, batch) for batch in batches]
        users = Statistics.joined(
            [
                Statistics.of(h, batch.rewards, sample_weights(batch, derived["since"]))
                for h, batch in zip(heads, batches, strict=True)
            ]
        )
        prior = stored_prior(derived)
        for _ in range(EM_STEPS_REFIT if refit else EM_STEPS):
            prior = prior.improved(users)
        derived |= _stored(prior)
        if self.settings.groups and total_events >= GROUPS_FROM_EVENTS:
            derived |= self._grouped_anew(prior, users)
            derived["guard"] = guard_of(batches, prior.noise, derived["since"])
        if self.settings.memory and refit:
            derived["gain"] = gain_of(prior, users, heads, batches, self.seen, self.settings.memory_radius)
        return {**derived, "epoch": shared["epoch"] + 1}

    def _watched(self, shared: State, samples: Samples) -> State:
        """After a change of tastes, samples from before it fade and the prior is learned from scratch."""
        changed = tastes_changed(samples, shared["epoch"], shared["since"])
        anew = {**_stored(Prior.initial(self.head_size)), "since": shared["epoch"] + 1}
        return shared | {
            name: torch.where(changed, value.to(shared[name]), shared[name]) for name, value in anew.items()
        }

    def _standardised_anew(self, shared: State, batches: Sequence[UserBatch], samples: Samples) -> State:
        derived = {}
        if self.apart:
            ratio, centre = common_ratio(samples.features, self.offer(samples.notes), samples.weights)
            derived = {"common_ratio": ratio.to(self.dtype), "common_centre": centre.to(self.dtype)}
        own = [self.own_part(derived, batch.features, self.offer(batch.phi)).flatten(0, 1) for batch in batches]
        valid = [batch.valid.flatten() for batch in batches]
        moments = [Moments.of(winsorize(rows, real), real) for rows, real in zip(own, valid, strict=True)]
        mean, scale = centring(reduce(Moments.merge, moments))
        derived |= {"mean": mean.to(self.dtype), "scale": scale.to(self.dtype)}
        rows = samples.spread(ROWS_MAX)
        seen, offer = samples.features[rows], self.offer(samples.notes[rows])
        z = self.standardized(derived, seen, offer)
        if self.bins:
            derived["edges"] = quantile_edges(z, self.bins)
        if self.narrowed:
            before = self.standardized(shared, seen, offer) @ shared["directions"]
            derived["directions"] = turned_towards(z, principal_directions(z, self.seen), before)
        return derived

    def _trained(self, shared: State, samples: Samples, steps: int, total_events: int) -> State:
        """The trunk after so many steps on samples drawn from all there are."""
        state = TrunkState(shared["trunk"], shared["trunk_first"], shared["trunk_second"], shared["trunk_steps"])
        generator = torch.Generator().manual_seed(((self.settings.seed << 32) + total_events) % SEEDS)
        shares = torch.rand(steps, self.settings.replayed, generator=generator, dtype=torch.float64)
        drawn = samples.at(shares.to(samples.weights.device))  # [steps, replayed]
        for rows in drawn:
            notes = samples.notes[rows]
            codes = self.codes(shared, self.standardized(shared, samples.features[rows], self.offer(notes)))
            x = torch.cat([codes, notes[:, EMBEDDED : self.offered_from]], dim=-1)
            gradient = self.trunk.gradient(state.parameters, x, samples.rewards[rows])
            state = state.after(gradient, self.settings.trunk_rate, self.settings.trunk_decay)
        return {
            "trunk": state.parameters,
            "trunk_first": state.first,
            "trunk_second": state.second,
            "trunk_steps": state.steps,
        }

    def _grouped_anew(self, prior: Prior, users: Statistics) -> State:
        loudest = users.events.argsort(descending=True, stable=True)[:VOICES_MAX]
        share = torch.full_like(prior.noise, self.settings.group_spread)
        groups = find_groups(prior, users.rows(loudest), share, SHIFT_STEPS)
        missing = VOICES_MAX - groups.offset.shape[0]
        return {
            "group_pull": torch.cat([groups.pull, groups.pull.new_zeros(missing, self.head_size)]),
            "group_offset": torch.cat([groups.offset, groups.offset.new_full((missing,), NO_GROUP)]),
            "group_share": share,
        }


def stored_prior(shared: Arrays) -> Prior:
    """The prior of an epoch."""
    return Prior(shared["prior_mean"], shared["prior_covariance"], shared["prior_precision"], shared["noise"])


def _stored(prior: Prior) -> State:
    return {
        "prior_mean": prior.mean,
        "prior_covariance": prior.covariance,
        "prior_precision": prior.precision,
        "noise": prior.noise,
    }
