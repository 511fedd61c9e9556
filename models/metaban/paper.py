"""Meta-Ban, Algorithms 1-3 of "Neural Collaborative Filtering Bandits via Meta Learning", in closed form.

One meta-learner Θ and one learner θ^u per user, all with the network of Eq. 9. For a user and an arm x:

    group       N = {u : |f(x; θ^u) − f(x; θ^{u_t})| ≤ (ν−1)/ν · γ}                                      Eq. 4
    adaptation  Θ_x = Θ₀ − η₂ J₂ Σ_{u∈N} G_u,   G_u = w_u ∇L(θ̂^u) + (λ/√m) sign(θ̂^u)                 Alg. 2, Eq. 5-6
    score       f(x; Θ_x) + α (β₂ ‖g(x; Θ_x) − g(x; Θ₀)‖ + Z₁ + Ū_u)                                   Alg. 1, Lemma 6.5

The published meta gradient is taken at the stored user parameters and does not depend on Θ. With full batches its J₂
steps are therefore identical, and each user's term G_u depends on that user alone: it is computed once after an update
of u, and the adaptation of all arms is one product of the group mask with the stacked G.

`MetaBanLearner` and `MetaBanEpoch` hold what this preset shares with `pooled.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from metaban.models.features import InputParts
from metaban.models.learner import Learner, Query, Scores, State, UserBatch
from metaban.models.metaban.posterior_bonus import fitted_root, initial_root, posterior_deviation
from metaban.models.metaban.served_epoch import ADAPTED_NUMBERS_MAX, MetaBanEpoch
from metaban.models.numerics.arrays import Arrays
from metaban.models.numerics.bias_free_net import (
    Shape,
    factor_distance,
    initial_parameters,
    loss_gradient,
    output_factors,
)
from metaban.models.numerics.normalizer import Moments, winsorize
from metaban.models.numerics.schedule import doubled
from metaban.models.settings import MetaBanSettings


@final
@dataclass(frozen=True, slots=True)
class PaperEpoch(MetaBanEpoch):
    """Scores by networks adapted to the groups; Θ is Θ₀."""

    def score(self, pool: Arrays, query: Query) -> Scores:
        x = self.inputs(query.arms)  # [N, d]
        request = query.request
        others = self.groups(pool, query, x)  # [N, P]
        size = max(1, ADAPTED_NUMBERS_MAX // self.shape.parameters)
        chunks = [slice(start, start + size) for start in range(0, x.shape[0], size)]
        parts = [self.score_arms(pool, query.own, request[arms], x[arms], others[arms]) for arms in chunks]
        mean = torch.cat([part[0] for part in parts])
        if self.settings.bonus == "posterior":
            sigma = posterior_deviation(self.shape, query.own, query.slates, x)
            bonus = self.settings.alpha * sigma
        else:
            sigma = self.settings.beta2 * torch.cat([part[1] for part in parts])  # the arm-dependent term
            bound = self.user_bound(query)[request]  # [N]
            bonus = self.settings.alpha * (sigma + self.settings.z1 + bound)
        notes = x.new_empty((x.shape[0], 0))
        group_size = others.sum(-1) + 1  # [N]
        return Scores(mean, bonus, notes, sigma, group_size.__getitem__, self.draws(query, mean, sigma))

    def score_arms(
        self, pool: Arrays, own: Mapping[str, Tensor], request: Tensor, x: Tensor, others: Tensor
    ) -> tuple[Tensor, Tensor]:
        """f(x; Θ_x) and ‖g(x; Θ_x) − g(x; Θ₀)‖ of n arms (Alg. 1, line 9), both [n]."""
        mean, factors = output_factors(self.shape, self.adapt_meta(pool, own, request, others), x)
        return mean, factor_distance(factors, output_factors(self.shape, self.theta.unsqueeze(0), x)[1])

    def adapt_meta(self, pool: Arrays, own: Mapping[str, Tensor], request: Tensor, others: Tensor) -> Tensor:
        """Algorithm 2 in closed form: Θ_x of n arms [n, p]."""
        members = others.to(self.theta.dtype)  # [n, P]
        total = members @ pool["gradient"] + own["gradient"][request]  # [n, p] ΣG_u
        step = self.settings.meta_rate * self.settings.meta_steps
        if self.settings.rate_schedule == "per-event":
            samples = members @ pool["samples"].clamp_min(1) + own["samples"][request].clamp_min(1)  # [n]
            total = total / samples.unsqueeze(-1)
        adapted: Tensor = self.theta - step * total
        return adapted

    def adapted(self, pool: Arrays, query: Query, members: Tensor) -> Tensor:
        request = torch.zeros_like(members[:, :1].sum(-1))  # [n]
        return self.adapt_meta(pool, query.own, request, members)

    def user_bound(self, query: Query) -> Tensor:
        """Ū_u of Lemma 6.3 for each request [R]; a user without events counts as having one (Alg. 1, line 3)."""
        settings = self.settings
        events: Tensor = query.own_events.clamp_min(1).to(self.theta.dtype)  # [R] μ
        arms = torch.zeros_like(events).index_add(0, query.request, torch.ones_like(query.arms[:, 0]))  # [R] k
        log = (settings.log_constant * events * arms / settings.delta).log().clamp_min(0)
        return (
            (2 * settings.epsilon1 / events).sqrt()
            + 3 * self.shape.depth / (2 * events).sqrt()
            + (1 + settings.xi1) * (2 * log / events).sqrt()
        )


class MetaBanLearner(Learner):
    """Common parts of the presets: network, moments of inputs and user adaptation."""

    def __init__(self, settings: MetaBanSettings, inputs: int, dtype: torch.dtype = torch.float32) -> None:
        self.settings = settings
        self.shape = Shape(inputs, settings.width, settings.depth)
        self.network_size = self.shape.parameters
        self.dtype = dtype
        self.input_size, self.parts = inputs, InputParts.of(inputs)
        #: Whether the bonus is the posterior deviation; user states then hold a root of its covariance.
        self.uses_posterior_bonus = settings.bonus == "posterior"
        self.root_fields = {"root": (settings.width, settings.width)} if self.uses_posterior_bonus else {}

    def initial_shared(self) -> State:
        generator = torch.Generator().manual_seed(self.settings.seed)
        shared = {"theta0": initial_parameters(self.shape, generator, self.dtype)}
        if self.settings.standardize:
            shared["mean"] = torch.zeros(self.shape.inputs, dtype=self.dtype)
            shared["scale"] = torch.ones(self.shape.inputs, dtype=self.dtype)
        return shared

    def refit_due(self, epoch_events: int, total_events: int) -> bool:
        return self.settings.standardize and doubled(epoch_events, total_events)

    def derive(self, shared: State, batches: Sequence[UserBatch], epoch_events: int, total_events: int) -> State:
        if not batches or not self.refit_due(epoch_events, total_events):
            return dict(shared)
        rows = [(batch.features.flatten(0, 1), batch.valid.flatten()) for batch in batches]
        moments = [Moments.of(winsorize(features, valid), valid) for features, valid in rows]
        merged = moments[0]
        for other in moments[1:]:
            merged = merged.merge(other)
        mean, scale = merged.transform()
        return {**shared, "mean": mean.to(self.dtype), "scale": scale.to(self.dtype)}

    def moments(self, shared: Arrays) -> tuple[Tensor, Tensor] | None:
        """Mean and scale of inputs [d], None if these are not standardised."""
        return (shared["mean"], shared["scale"]) if self.settings.standardize else None

    def adapt_users(self, start: Tensor, x: Tensor, batch: UserBatch) -> Tensor:
        """Algorithm 3, lines 2-8, for all users at once: J₁ full-batch steps from `start` [p] → θ̂ [B, p]."""
        share, samples = sample_shares(batch)
        rate = self.settings.user_rate * (1.0 if self.settings.rate_schedule == "per-event" else samples)
        theta = start.expand(x.shape[0], -1)
        for _ in range(self.settings.user_steps):
            theta = theta - rate * self.mean_gradient(theta, x, batch, share)
        return theta

    def mean_gradient(self, theta: Tensor, x: Tensor, batch: UserBatch, share: Tensor) -> Tensor:
        """∇½Σ(f − r)² of each user (Eq. 3), divided by their samples [B, p], with norm at most clip_norm."""
        return torch.renorm(loss_gradient(self.shape, theta, x, batch.rewards, share), 2, 0, self.settings.clip_norm)

    def initial_root(self, shared: State) -> State:
        """State of a user without samples for the bonus `posterior`."""
        return {"root": initial_root(self.shape, shared["theta0"])} if self.uses_posterior_bonus else {}

    def fitted_root(self, theta: Tensor, x: Tensor, batch: UserBatch) -> State:
        """State for the bonus `posterior` of users with learners θ [B, p] and samples x [B, S, d]."""
        if not self.uses_posterior_bonus:
            return {}
        return {"root": fitted_root(self.shape, theta, x, batch.valid, self.settings.noise)}


@final
class PaperLearner(MetaBanLearner):
    """Preset `paper`: the algorithms as published."""

    def __init__(self, settings: MetaBanSettings, inputs: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(settings, inputs, dtype)
        parameters = self.shape.parameters
        self.fields = {"theta": (parameters,), "gradient": (parameters,), "samples": ()}
        self.continues = settings.draw == "uniform"
        self.fields |= self.root_fields
        if self.continues:
            self.fields |= {"checkpoints": (settings.checkpoints, parameters), "fits": ()}

    def initial_user(self, shared: State) -> State:
        theta0 = shared["theta0"]
        state = {"theta": theta0, "gradient": self.penalty(theta0), "samples": torch.zeros_like(theta0[0])}
        if self.settings.draw == "uniform":
            state["checkpoints"] = theta0.expand(self.settings.checkpoints, -1)
            state["fits"] = torch.zeros_like(theta0[0])
        return state | self.initial_root(shared)

    def prepare_epoch(self, shared: Arrays, *, as_numpy: bool = False) -> PaperEpoch:
        return PaperEpoch(self.settings, self.shape, shared["theta0"], self.moments(shared))

    def penalty(self, theta: Tensor) -> Tensor:
        """(λ/√m) sign(θ), the L1 term of Eq. 5, which w_u does not multiply."""
        return self.settings.l1 / math.sqrt(self.shape.width) * theta.sign()

    def fit(self, shared: Arrays, batch: UserBatch, previous: Arrays) -> Arrays:
        epoch = self.prepare_epoch(shared)
        x = epoch.inputs(batch.features)
        latest = self.adapt_users(epoch.theta, x, batch)  # [B, p] θ̂
        share, samples = sample_shares(batch)
        loss = samples * self.mean_gradient(latest, x, batch, share)
        state = {
            "theta": latest,
            "gradient": batch.weight.unsqueeze(-1) * loss + self.penalty(latest),
            "samples": batch.valid.sum(-1).to(self.dtype),
        }
        if self.settings.draw == "uniform":
            state |= self.draw_checkpoint(latest, batch, previous)
        return state | self.fitted_root(state["theta"], x, batch)

    def draw_checkpoint(self, latest: Tensor, batch: UserBatch, previous: Arrays) -> State:
        """Algorithm 3, line 9: θ_t^u uniformly from the stored ones of the checkpoints {θ̂_0 = Θ₀, …, θ̂_μ}."""
        checkpoints = torch.cat([previous["checkpoints"][:, 1:], latest.unsqueeze(1)], dim=1)  # [B, C, p]
        fits = previous["fits"] + 1  # [B]
        kept = (fits + 1).clamp_max(self.settings.checkpoints).to(torch.int64)  # θ̂_0 is one of them
        chosen = self.settings.checkpoints - 1 - batch.draw % kept  # [B]
        rows = torch.arange(latest.shape[0], device=latest.device)
        return {"theta": checkpoints[rows, chosen], "checkpoints": checkpoints, "fits": fits}

    def epoch_due(self, epoch_events: int, total_events: int) -> bool:
        return doubled(epoch_events, total_events)


def sample_shares(batch: UserBatch) -> tuple[Tensor, Tensor]:
    """Weight of each sample in its user's mean, [B, S], and the users' sample counts, at least 1, [B, 1]."""
    valid = batch.valid.to(batch.features.dtype)
    samples = valid.sum(-1, keepdim=True).clamp_min(1)
    return valid / samples, samples
