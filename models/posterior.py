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
from typing import final

import torch
from torch import Tensor

from models.encoding import (
    ROWS_MAX,
    bins_for,
    centring,
    even_edges,
    pair_products,
    piecewise,
    principal_directions,
    products_for,
    quantile_edges,
    turned_towards,
)
from models.judging import Beliefs, believe, count_agreeing, remember
from models.learner import Learner, Query, Scores, State, UserBatch, newest
from models.memory import FIRST_GAIN
from models.metaban import doubled
from models.normalizer import Moments, standardize, winsorize
from models.offer import common_ratio, on_offer, without_common
from models.prior import NO_GROUP, Groups, Prior, Statistics, find_groups
from models.settings import PosteriorSettings
from models.trunk import Trunk, TrunkState
from models.upkeep import (
    EMBEDDED,
    FADED,
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

    def codes(self, shared: State, z: Tensor) -> Tensor:
        """What the trunk sees of standardised inputs [..., d]."""
        return torch.cat([z, piecewise(z, shared["edges"])], dim=-1) if self.bins else z

    def embedding(self, shared: State, heads: Tensor) -> Tensor:
        """Who asks, to the trunk: users' mean heads [R, D] around the prior's, in its deviations → [R, e]."""
        mean = shared["prior_mean"][: self.embedded].to(self.dtype)
        deviation = shared["prior_covariance"].diagonal()[: self.embedded].sqrt().to(self.dtype)
        away = (heads[:, : self.embedded] - mean) / deviation
        return away.clamp(-EMBEDDING_REACH, EMBEDDING_REACH)

    def heads(self, shared: State, z: Tensor, predicted: Tensor) -> Tensor:
        """h = [1, x, products of x where they are few, p]: z [..., d], predicted [...] → [..., D]."""
        x = z @ shared["directions"] if self.narrowed else z
        parts = [torch.ones_like(x[..., :1]), x, predicted.unsqueeze(-1)]
        if self.products:
            parts.insert(2, pair_products(x))
        return torch.cat(parts, dim=-1)

    def own_part(self, shared: State, raw: Tensor, offer: Tensor) -> Tensor:
        """Raw inputs [..., d] without what they shared with the arms on offer [..., 1 + d], where that is looked at."""
        return without_common(raw, offer, shared["common_ratio"], shared["common_centre"]) if self.apart else raw

    def standardized(self, shared: State, raw: Tensor, offer: Tensor) -> Tensor:
        """The same in standard deviations."""
        return standardize(self.own_part(shared, raw, offer), shared["mean"], shared["scale"])

    def offer(self, notes: Tensor) -> Tensor:
        """What was on offer, out of what was noted [..., q] → [..., 1 + d], or [..., 0] where that is not looked at."""
        return notes[..., self.offered_from :]

    def batch_heads(self, shared: State, batch: UserBatch) -> Tensor:
        """h of a batch's samples [B, S, D]."""
        z = self.standardized(shared, batch.features, self.offer(batch.phi))
        return self.heads(shared, z, batch.phi[..., TRUNK])

    def fit(self, shared: State, batch: UserBatch, previous: State) -> State:
        h = self.batch_heads(shared, batch)  # [B, S, D]
        weights = sample_weights(batch, shared["since"])  # [B, S]
        users = Statistics.of(h, batch.rewards, weights)
        index, real = newest(batch.valid, self.settings.memory_samples)
        kept = h.gather(1, index.unsqueeze(-1).expand(-1, -1, self.head_size))
        return {
            "gram": users.gram.to(self.dtype),
            "moment": users.moment.to(self.dtype),
            "head": self._believed(shared, users.gram, users.moment).head.to(self.dtype),
            "kept_heads": kept * real.unsqueeze(-1),
            "kept_rewards": batch.rewards.gather(1, index) * real,
            "kept_weights": weights.gather(1, index) * real,
            "since": shared["since"].to(self.dtype).expand(h.shape[0]),
        }

    def _believed(self, shared: State, gram: Tensor, moment: Tensor) -> Beliefs:
        groups = _groups(shared) if self.settings.groups else None
        return believe(stored_prior(shared), groups, shared["guard"], gram, moment)

    def brief(self, shared: State, own: State) -> State:
        # Whoever has had no event since tastes changed: what they were fitted to has faded meanwhile.
        weight = torch.where(own["since"] >= shared["since"], 1.0, FADED).to(self.dtype).unsqueeze(-1)  # [R, 1]
        gram, moment = own["gram"] * weight.unsqueeze(-1), own["moment"] * weight
        beliefs = self._believed(shared, gram.to(torch.float64), moment.to(torch.float64))
        head = beliefs.head.to(self.dtype)
        return {
            "alone": beliefs.alone.to(self.dtype),
            "together": beliefs.together.to(self.dtype),
            "head": head,
            "covariance": beliefs.covariance.to(self.dtype),
            "embedding": self.embedding(shared, own["head"]),
            "kept_inputs": own["kept_heads"][..., 1 : 1 + self.seen],
            "kept_residuals": own["kept_rewards"] - (own["kept_heads"] @ head.unsqueeze(-1)).squeeze(-1),
            "kept_weights": own["kept_weights"] * weight,
        }

    def score_briefed(self, shared: State, pool: State, query: Query) -> Scores:
        own, request = query.own, query.request
        offer = on_offer(query.arms, request, query.requests) if self.apart else query.arms[:, :0]
        z = self.standardized(shared, query.arms, offer)  # [N, d]
        asking = own["embedding"][request]  # [N, e]
        if self.settings.trunk:
            x = torch.cat([self.codes(shared, z), asking], dim=-1)
            predicted = self.trunk.predict(shared["trunk"], x)  # [N]
        else:
            predicted = torch.zeros_like(z[:, 0])
        if not self.settings.heads:
            nobody = torch.ones_like(predicted, dtype=torch.int64)
            phi = torch.cat([predicted.unsqueeze(-1).expand(-1, EMBEDDED), asking, offer], dim=-1)
            return Scores(predicted, torch.zeros_like(predicted), nobody, phi)
        h = self.heads(shared, z, predicted)  # [N, D]
        heads = torch.stack([own["alone"], own["together"], own["head"]], dim=-1)  # [R, D, 3]
        if query.requests == 1:  # products instead of gathered matrices
            said, away = h @ heads[0], h @ own["covariance"][0]
        else:
            said = (h.unsqueeze(1) @ heads[request]).squeeze(1)  # [N, 3]
            away = (h.unsqueeze(1) @ own["covariance"][request]).squeeze(1)  # [N, D]
        alone, together, mean = said.unbind(-1)
        variance = (away * h).sum(-1).clamp_min(0)
        reach = self.settings.nu * variance.sqrt()
        group_size = count_agreeing(pool["head"], h, mean, reach, query.own_row[request])
        if self.settings.memory:
            gain, noise = shared["gain"].to(self.dtype), shared["noise"].to(self.dtype)
            correction, left = remember(h[:, 1 : 1 + self.seen], request, own, gain, self.settings.memory_radius)
            mean, variance = mean + correction, torch.addcmul(variance, left, noise)
        return Scores(
            mean,
            variance.sqrt() * self.settings.alpha,
            group_size,
            torch.column_stack([predicted, alone, together, asking, offer]),
        )

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


def stored_prior(shared: State) -> Prior:
    """The prior of an epoch."""
    return Prior(shared["prior_mean"], shared["prior_covariance"], shared["prior_precision"], shared["noise"])


def _stored(prior: Prior) -> State:
    return {
        "prior_mean": prior.mean,
        "prior_covariance": prior.covariance,
        "prior_precision": prior.precision,
        "noise": prior.noise,
    }


def _groups(shared: State) -> Groups:
    return Groups(shared["group_pull"], shared["group_offset"], shared["group_share"])
