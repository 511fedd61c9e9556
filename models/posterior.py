"""The default learner: Meta-Ban's shape with posteriors in place of gradient steps.

    meta-learner   a shared trunk p(x), trained on replayed samples, and a prior N(μ, Σ) over heads     trunk.py, prior.py
    user learner   an exact posterior over w_u on h(x) = [1, x, p(x)], and a memory of its own arms     prior.py, memory.py
    groups         centres of users who agree; per arm, those centres that agree with the user on it    prior.py
    adaptation     the group supplies the prior of the decision, the user's own rewards the rest
    score          mean + α·σ, both of the posterior

p enters a head as it was when the arm was chosen (it is noted with the decision): computed later, by a trunk that has
since learned from that very reward, it would tell the head the answer. For the same reason groups are judged by what
they foresaw: the predictions with and without them are noted too, and the guard λ weighs one against the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from models.encoding import bins_for, centring, even_edges, piecewise, principal_directions, quantile_edges
from models.learner import Learner, Query, Scores, State, UserBatch, newest
from models.memory import GAINS, KERNEL_NUMBERS_MAX, foresight, kernel, recall
from models.metaban import doubled
from models.normalizer import Moments, standardize, winsorize
from models.prior import Groups, Prior, Statistics, find_groups
from models.settings import PosteriorSettings
from models.trunk import Trunk, TrunkState

#: What is noted of a decision: the trunk's prediction, and the head's without and with groups.
TRUNK, ALONE, TOGETHER = range(3)
#: Users that groups are made of, those with the most events; one centre each.
VOICES_MAX = 256
#: Applied events from which groups are looked for.
GROUPS_FROM_EVENTS = 256
#: Shifts of the centres, and steps of EM after a refit and otherwise.
SHIFT_STEPS = 4
EM_STEPS_REFIT, EM_STEPS = 12, 2
#: Largest evidence, in nats, that the guard takes for or against groups.
GUARD_REACH = 30.0
#: Evidence, in nats, from which the memory is believed at all.
GAIN_EVIDENCE = 3.0


@final
class PosteriorLearner(Learner):
    """Posterior heads on a shared trunk."""

    noted = 3

    def __init__(self, settings: PosteriorSettings, inputs: int, dtype: torch.dtype = torch.float32) -> None:
        self.settings = settings
        self.inputs_expected = inputs
        self.dtype = dtype
        self.bins = bins_for(inputs, settings.bins, settings.codes_max)
        self.narrowed = inputs > settings.head_inputs_max
        #: Numbers of an input that heads and memory see.
        self.seen = settings.head_directions if self.narrowed else inputs
        self.head_size = self.seen + 2
        self.trunk = Trunk(inputs * (1 + self.bins), settings.width, settings.depth)
        kept = settings.memory_samples
        self.fields = {
            "gram": (self.head_size, self.head_size),
            "moment": (self.head_size,),
            "head": (self.head_size,),
            "kept_heads": (kept, self.head_size),
            "kept_rewards": (kept,),
            "kept_valid": (kept,),
        }

    def initial_shared(self) -> State:
        generator = torch.Generator().manual_seed(self.settings.seed)
        prior = Prior.initial(self.head_size)
        inputs = self.inputs_expected
        shared = {
            "mean": torch.zeros(inputs, dtype=self.dtype),
            "scale": torch.ones(inputs, dtype=self.dtype),
            "trunk": self.trunk.initial(generator, self.dtype),
            "prior_mean": prior.mean,
            "prior_covariance": prior.covariance,
            "prior_precision": prior.precision,
            "noise": prior.noise,
            "centres": torch.zeros(VOICES_MAX, self.head_size, dtype=torch.float64),
            "voices": torch.zeros(VOICES_MAX, dtype=torch.float64),
            "guard": torch.zeros((), dtype=torch.float64),
            "gain": torch.tensor(self.settings.first_gain, dtype=torch.float64),
        }
        state = TrunkState.fresh(shared["trunk"])
        shared |= {"trunk_first": state.first, "trunk_second": state.second, "trunk_steps": state.steps}
        if self.bins:
            shared["edges"] = even_edges(inputs, self.bins).to(self.dtype)
        if self.narrowed:
            directions = torch.randn(inputs, self.seen, generator=generator, dtype=self.dtype)
            shared["directions"] = directions / inputs**0.5
        return shared

    def newborn(self, shared: State) -> State:
        zeros = {name: shared["trunk"].new_zeros(shape) for name, shape in self.fields.items()}
        return {**zeros, "head": shared["prior_mean"].to(self.dtype)}

    # -- inputs

    def codes(self, shared: State, z: Tensor) -> Tensor:
        """What the trunk sees of standardised inputs [..., d]."""
        return torch.cat([z, piecewise(z, shared["edges"])], dim=-1) if self.bins else z

    def heads(self, shared: State, z: Tensor, predicted: Tensor) -> Tensor:
        """h = [1, x, p]: z [..., d], predicted [...] → [..., D]."""
        x = z @ shared["directions"] if self.narrowed else z
        return torch.cat([torch.ones_like(x[..., :1]), x, predicted.unsqueeze(-1)], dim=-1)

    def standardized(self, shared: State, raw: Tensor) -> Tensor:
        """Raw inputs [..., d] in standard deviations."""
        return standardize(raw, shared["mean"], shared["scale"])

    # -- users

    def fit(self, shared: State, batch: UserBatch, previous: State) -> State:
        h = self.heads(shared, self.standardized(shared, batch.features), batch.phi[..., TRUNK])  # [B, S, D]
        users = Statistics.of(h, batch.rewards, batch.valid)
        index, real = newest(batch.valid, self.settings.memory_samples)
        kept = h.gather(1, index.unsqueeze(-1).expand(-1, -1, self.head_size))
        return {
            "gram": users.gram.to(self.dtype),
            "moment": users.moment.to(self.dtype),
            "head": self._believed_head(shared, users.gram, users.moment).to(self.dtype),
            "kept_heads": kept * real.unsqueeze(-1),
            "kept_rewards": batch.rewards.gather(1, index) * real,
            "kept_valid": real.to(self.dtype),
        }

    def _believed_head(self, shared: State, gram: Tensor, moment: Tensor) -> Tensor:
        """The mean head of users with statistics [B, …], groups weighed by the guard: [B, D]."""
        prior, groups = _prior(shared), _groups(shared)
        alone, _ = prior.posterior(gram, moment)
        if not self.settings.groups:
            return alone
        belief, heads, _ = groups.beliefs(prior, self.settings.group_spread, gram, moment)
        return alone.lerp((belief.unsqueeze(1) @ heads).squeeze(1), shared["guard"])

    # -- requests

    def score(self, shared: State, pool: State, query: Query) -> Scores:
        z = self.standardized(shared, query.arms)  # [N, d]
        predicted = self.trunk.predict(shared["trunk"], self.codes(shared, z))  # [N]
        if not self.settings.trunk:
            predicted = torch.zeros_like(predicted)
        h32 = self.heads(shared, z, predicted)  # [N, D]
        if not self.settings.heads:
            return self._scores(predicted, torch.zeros_like(predicted), predicted, predicted, predicted, 0)
        h = h32.to(torch.float64)
        prior, request = _prior(shared), query.request
        gram, moment = query.own["gram"].to(torch.float64), query.own["moment"].to(torch.float64)
        head, covariance = prior.posterior(gram, moment)  # [R, D], [R, D, D]
        alone = (h * head[request]).sum(-1)  # [N]
        variance = (h * (covariance[request] @ h.unsqueeze(-1)).squeeze(-1)).sum(-1)
        together, mean = alone, alone
        if self.settings.groups:
            together, group_variance, group_head = self._grouped(shared, prior, gram, moment, h, request)
            together = torch.where(shared["voices"].any(), together, alone)
            mean = alone.lerp(together, shared["guard"])
            variance = variance.lerp(group_variance, shared["guard"])
            head = head.lerp(group_head, shared["guard"])
        reach = self.settings.nu * variance.clamp_min(0).sqrt()  # [N]
        agreeing = (h32 @ pool["head"].mT - mean.unsqueeze(-1).to(self.dtype)).abs() <= reach.unsqueeze(-1)  # [N, P]
        if agreeing.shape[1]:
            themselves = torch.arange(agreeing.shape[1], device=h.device) == query.own_row[request].unsqueeze(-1)
            agreeing = agreeing & ~themselves
        if self.settings.memory:
            correction, left = self._remembered(shared, query, h32, head.to(self.dtype))
            mean = mean + correction
            variance = variance + prior.noise * left
        bonus = self.settings.alpha * variance.clamp_min(0).sqrt()
        return self._scores(mean, bonus, predicted, alone, together, agreeing.sum(-1))

    def _scores(
        self, mean: Tensor, bonus: Tensor, predicted: Tensor, alone: Tensor, together: Tensor, others: Tensor | int
    ) -> Scores:
        phi = torch.stack([predicted.to(torch.float64), alone.to(torch.float64), together.to(torch.float64)], dim=-1)
        size = torch.ones_like(predicted, dtype=torch.int64) + others
        return Scores(mean.to(self.dtype), bonus.to(self.dtype), size, phi.to(self.dtype))

    def _grouped(
        self, shared: State, prior: Prior, gram: Tensor, moment: Tensor, h: Tensor, request: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Mean and variance [N] of arms h [N, D] when groups supply the prior, and the users' mean heads [R, D]."""
        groups = _groups(shared)
        belief, heads, covariance = groups.beliefs(prior, self.settings.group_spread, gram, moment)
        own = (h * (covariance[request] @ h.unsqueeze(-1)).squeeze(-1)).sum(-1)  # [N]
        said = (heads[request] @ h.unsqueeze(-1)).squeeze(-1)  # [N, Q]
        weight = belief[request]  # [N, Q]
        mean = (weight * said).sum(-1)
        spread = (weight * (said - mean.unsqueeze(-1)).square()).sum(-1)
        return mean, own + spread, (belief.unsqueeze(1) @ heads).squeeze(1)

    def _remembered(self, shared: State, query: Query, h: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        """Correction [N] and share of the noise's variance left [N] by the users' memories."""
        gain = shared["gain"].to(self.dtype)
        own = query.own
        residuals = own["kept_rewards"] - (own["kept_heads"] @ head.unsqueeze(-1)).squeeze(-1)  # [R, S]
        residuals = residuals * own["kept_valid"]
        kept = own["kept_heads"][..., 1:-1]  # [R, S, c]
        x = h[:, 1:-1]
        corrections, lefts = [], []
        step = max(1, KERNEL_NUMBERS_MAX // max(1, kept.shape[1] * self.seen))
        for start in range(0, x.shape[0], step):
            rows = query.request[start : start + step]
            near = kernel(x[start : start + step].unsqueeze(1), kept[rows], self.settings.memory_radius).squeeze(1)
            near = near * own["kept_valid"][rows]  # [n, S]
            correction, left = recall(near, residuals[rows], gain)
            corrections.append(correction)
            lefts.append(left)
        return torch.cat(corrections).to(torch.float64), torch.cat(lefts).to(torch.float64)

    # -- epochs

    def epoch_due(self, epoch_events: int, total_events: int) -> bool:
        wait = max(self.settings.epoch_events, int(self.settings.epoch_growth * total_events))
        return total_events - epoch_events >= wait or doubled(epoch_events, total_events)

    def refit_due(self, epoch_events: int, total_events: int) -> bool:
        return doubled(epoch_events, total_events)

    def derive(self, shared: State, batches: Sequence[UserBatch], epoch_events: int, total_events: int) -> State:
        if not batches:
            return dict(shared)
        refit = self.refit_due(epoch_events, total_events)
        derived = self._standardised_anew(shared, batches) if refit else dict(shared)
        derived |= self._trained(derived, batches, epoch_events, total_events)
        heads = [
            self.heads(derived, self.standardized(derived, batch.features), batch.phi[..., TRUNK]) for batch in batches
        ]
        users = Statistics.joined(
            [Statistics.of(h, batch.rewards, batch.valid) for h, batch in zip(heads, batches, strict=True)]
        )
        prior = _prior(derived)
        for _ in range(EM_STEPS_REFIT if refit else EM_STEPS):
            prior = prior.improved(users)
        derived |= {
            "prior_mean": prior.mean,
            "prior_covariance": prior.covariance,
            "prior_precision": prior.precision,
            "noise": prior.noise,
        }
        if self.settings.groups and total_events >= GROUPS_FROM_EVENTS:
            derived |= self._grouped_anew(prior, users, batches)
        if self.settings.memory and refit:
            derived["gain"] = self._gain(prior, users, heads, batches)
        return derived

    def _standardised_anew(self, shared: State, batches: Sequence[UserBatch]) -> State:
        rows = [(batch.features.flatten(0, 1), batch.valid.flatten()) for batch in batches]
        merged = Moments.of(winsorize(*rows[0]), rows[0][1])
        for features, valid in rows[1:]:
            merged = merged.merge(Moments.of(winsorize(features, valid), valid))
        mean, scale = centring(merged)
        derived = {**shared, "mean": mean.to(self.dtype), "scale": scale.to(self.dtype)}
        z = self.standardized(derived, torch.cat([features[valid] for features, valid in rows]))
        if self.bins:
            derived["edges"] = quantile_edges(z, self.bins)
        if self.narrowed:
            derived["directions"] = principal_directions(z, self.seen)
        return derived

    def _trained(self, shared: State, batches: Sequence[UserBatch], epoch_events: int, total_events: int) -> State:
        """The trunk after its share of steps on samples drawn from all there are."""
        state = TrunkState(shared["trunk"], shared["trunk_first"], shared["trunk_second"], shared["trunk_steps"])
        if not self.settings.trunk:
            return {}
        features = torch.cat([batch.features[batch.valid] for batch in batches])  # [n, d]
        rewards = torch.cat([batch.rewards[batch.valid] for batch in batches])  # [n]
        generator = torch.Generator().manual_seed((self.settings.seed << 32) + total_events)
        wanted = round((total_events - epoch_events) * self.settings.steps_per_event)
        for _ in range(min(max(1, wanted), self.settings.epoch_steps_max)):
            drawn = torch.randint(features.shape[0], (self.settings.replayed,), generator=generator)
            drawn = drawn.to(features.device)
            x = self.codes(shared, self.standardized(shared, features[drawn]))
            gradient = self.trunk.gradient(state.parameters, x, rewards[drawn])
            state = state.after(gradient, self.settings.trunk_rate, self.settings.trunk_decay)
        return {
            "trunk": state.parameters,
            "trunk_first": state.first,
            "trunk_second": state.second,
            "trunk_steps": state.steps,
        }

    def _grouped_anew(self, prior: Prior, users: Statistics, batches: Sequence[UserBatch]) -> State:
        loudest = users.events.argsort(descending=True, stable=True)[:VOICES_MAX]
        groups = find_groups(prior, users.rows(loudest), self.settings.group_spread, SHIFT_STEPS)
        missing = VOICES_MAX - groups.centres.shape[0]
        pad = groups.centres.new_zeros
        return {
            "centres": torch.cat([groups.centres, pad(missing, self.head_size)]),
            "voices": torch.cat([groups.log_weight.exp(), pad(missing)]),
            "guard": sum_guard(batches, prior.noise),
        }

    def _gain(self, prior: Prior, users: Statistics, heads: Sequence[Tensor], batches: Sequence[UserBatch]) -> Tensor:
        """The memory's gain that would have foreseen users' residuals best."""
        means, _ = prior.posterior(users.gram, users.moment)  # [U, D]
        errors, start = torch.zeros(len(GAINS), dtype=torch.float64, device=means.device), 0
        for h, batch in zip(heads, batches, strict=True):
            own = means[start : start + h.shape[0]].to(self.dtype)
            start += h.shape[0]
            residuals = (batch.rewards - (h @ own.unsqueeze(-1)).squeeze(-1)) * batch.valid
            errors += foresight(h[..., 1:-1], residuals, batch.valid, self.settings.memory_radius)
        # Where hardly anything repeats, errors differ by chance: nothing is believed without evidence.
        worth = (errors[0] - errors) / (2 * prior.noise)  # [gains], in nats
        best = torch.where(worth.max() >= GAIN_EVIDENCE, worth.argmax(), torch.zeros_like(worth.argmax()))
        return torch.tensor(GAINS, dtype=torch.float64, device=means.device)[best]


def sum_guard(batches: Sequence[UserBatch], noise: Tensor) -> Tensor:
    """λ in [0, 1]: how much better groups foresaw the newer half of each user's rewards than the head alone did."""
    evidence = torch.zeros((), dtype=torch.float64, device=noise.device)
    for batch in batches:
        place = torch.arange(batch.valid.shape[1], device=noise.device)
        newer = batch.valid & (place >= batch.valid.sum(-1, keepdim=True) // 2)  # [B, S]
        rewards = batch.rewards.to(torch.float64)
        alone = (rewards - batch.phi[..., ALONE]).square()
        together = (rewards - batch.phi[..., TOGETHER]).square()
        evidence = evidence + ((alone - together) * newer).sum()
    return (evidence / (2 * noise)).clamp(-GUARD_REACH, GUARD_REACH).sigmoid()


def _prior(shared: State) -> Prior:
    return Prior(shared["prior_mean"], shared["prior_covariance"], shared["prior_precision"], shared["noise"])


def _groups(shared: State) -> Groups:
    """The centres. Before there are any, the guard is 0 and nothing of this is used; it only has to be finite."""
    voices = shared["voices"]
    return Groups(shared["centres"], torch.where(voices.any(), voices.log(), torch.zeros_like(voices)))
