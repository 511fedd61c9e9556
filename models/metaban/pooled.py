"""Preset `pooled`: Meta-Ban as in its authors' public code.

Instead of the published meta gradient, Θ is trained on the pooled samples of the group (here the union of the groups of
a request's arms) by J₂ steps of stochastic gradient descent; the bonus is α ‖g(x; Θ)‖. The authors carry Θ from
decision to decision; here epochs train Θ on all users' samples and each request adapts a copy. The authors also assign
a sample to every member of the group; here it belongs to its user only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from metaban.models.learner import Query, Scores, State, UserBatch, newest
from metaban.models.metaban.paper import MetaBanLearner
from metaban.models.metaban.posterior_bonus import posterior_deviation
from metaban.models.metaban.served_epoch import MetaBanEpoch
from metaban.models.numerics.arrays import Arrays
from metaban.models.numerics.bias_free_net import factor_norm, loss_gradient, output_factors
from metaban.models.numerics.schedule import doubled
from metaban.models.settings import MetaBanSettings

GOLDEN_RATIO = (1 + math.sqrt(5)) / 2


@final
@dataclass(frozen=True, slots=True)
class PooledEpoch(MetaBanEpoch):
    """Scores by Θ trained on the pooled samples of the group."""

    def score(self, pool: Arrays, query: Query) -> Scores:
        x = self.inputs(query.arms)  # [N, d]
        request = query.request
        mask = self.groups(pool, query, x)  # [N, P]
        members = union_by_request(mask, request, query.requests)  # [R, P]
        theta = self.adapt_meta(pool, query, members)[request]  # [N, p]
        mean, factors = output_factors(self.shape, theta, x)
        sigma = (
            posterior_deviation(self.shape, query.own, query.slates, x)
            if self.settings.bonus == "posterior"
            else factor_norm(factors)
        )
        group_size = (members.sum(-1) + 1)[request]  # [N]
        notes = x.new_empty((x.shape[0], 0))
        draws = self.draws(query, mean, sigma)
        return Scores(mean, self.settings.alpha * sigma, notes, sigma, group_size.__getitem__, draws)

    def members(self, near: Tensor) -> Tensor:
        return near.any(0).expand_as(near)

    def adapted(self, pool: Arrays, query: Query, members: Tensor) -> Tensor:
        return self.adapt_meta(pool, query, members[:1]).expand(members.shape[0], -1)

    def adapt_meta(self, pool: Arrays, query: Query, members: Tensor) -> Tensor:
        """J₂ steps of Θ on samples of each request's group; other members bool [R, P] → [R, p]."""
        requests, users = members.shape
        held = torch.cat(
            [members * pool["samples"], query.own["samples"].unsqueeze(-1)], dim=1
        )  # [R, P+1] samples available
        ends = held.cumsum(1)
        total = ends[:, -1:]  # [R, 1]
        theta = self.theta.expand(requests, -1)
        rewards_pool, features_pool = pool["recent_rewards"], pool["recent_features"]
        for step in range(self.settings.meta_steps):
            # Evenly spread places instead of random ones: the same state gives the same decision.
            first = step * self.settings.step_samples
            count = torch.arange(first, first + self.settings.step_samples, device=held.device, dtype=theta.dtype)
            target = (count * (GOLDEN_RATIO - 1) % 1.0) * total  # [R, step_samples]
            member = torch.searchsorted(ends, target, right=True).clamp_max(users)  # [R, step_samples]
            before = ends.gather(1, member) - held.gather(1, member)
            slot = (target - before).to(torch.int64).clamp(0, self.settings.recent_samples - 1)
            rows = torch.arange(requests, device=held.device).unsqueeze(-1)  # [R, 1]
            features = query.own["recent_features"][rows, slot]  # [R, step_samples, d]
            rewards = query.own["recent_rewards"][rows, slot]  # [R, step_samples]
            if users:
                inside = member < users
                row = member.clamp_max(users - 1)
                features = torch.where(inside.unsqueeze(-1), features_pool[row, slot], features)
                rewards = torch.where(inside, rewards_pool[row, slot], rewards)
            weight = (total > 0).to(theta.dtype).expand_as(rewards) / self.settings.step_samples
            gradient = loss_gradient(self.shape, theta, self.inputs(features), rewards, weight)
            theta = theta - self.settings.meta_rate * gradient
        return theta


@final
class PooledLearner(MetaBanLearner):
    """Θ by gradient descent on the group's pooled samples."""

    def __init__(self, settings: MetaBanSettings, inputs: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(settings, inputs, dtype)
        self.fields = {
            "theta": (self.shape.parameters,),
            "recent_features": (settings.recent_samples, inputs),
            "recent_rewards": (settings.recent_samples,),
            "samples": (),
        } | self.root_fields

    def initial_shared(self) -> State:
        shared = super().initial_shared()
        return {**shared, "theta": shared["theta0"]}

    def initial_user(self, shared: State) -> State:
        return {
            "theta": shared["theta"],
            "recent_features": shared["theta"].new_zeros(self.fields["recent_features"]),
            "recent_rewards": shared["theta"].new_zeros(self.fields["recent_rewards"]),
            "samples": torch.zeros_like(shared["theta"][0]),
        } | self.initial_root(shared)

    def prepare_epoch(self, shared: Arrays, *, as_numpy: bool = False) -> PooledEpoch:
        return PooledEpoch(self.settings, self.shape, shared["theta"], self.moments(shared))

    def fit(self, shared: Arrays, batch: UserBatch, previous: Arrays) -> Arrays:
        keep = self.settings.recent_samples
        index, valid = newest(batch.valid, keep)
        real = valid.to(self.dtype)  # [B, keep]
        features = batch.features.gather(1, index.unsqueeze(-1).expand(-1, -1, self.shape.inputs))
        epoch = self.prepare_epoch(shared)
        x = epoch.inputs(batch.features)
        theta = self.adapt_users(epoch.theta, x, batch)
        return {
            "theta": theta,
            "recent_features": features * real.unsqueeze(-1),
            "recent_rewards": batch.rewards.gather(1, index) * real,
            "samples": real.sum(-1),
        } | self.fitted_root(theta, x, batch)

    def epoch_due(self, epoch_events: int, total_events: int) -> bool:
        overdue = total_events - epoch_events >= self.settings.epoch_events
        return overdue or doubled(epoch_events, total_events)

    def derive(self, shared: State, batches: Sequence[UserBatch], epoch_events: int, total_events: int) -> State:
        derived = super().derive(shared, batches, epoch_events, total_events)
        epoch = self.prepare_epoch(derived)
        theta = epoch.theta.unsqueeze(0)  # [1, p]
        for batch in batches:
            x = epoch.inputs(batch.features).flatten(0, 1).unsqueeze(0)  # [1, B·S, d]
            valid = batch.valid.flatten().unsqueeze(0).to(self.dtype)  # [1, B·S]
            weight = valid / valid.sum().clamp_min(1)
            for _ in range(self.settings.meta_steps):
                gradient = loss_gradient(self.shape, theta, x, batch.rewards.flatten().unsqueeze(0), weight)
                theta = theta - self.settings.meta_rate * gradient
        return {**derived, "theta": theta.squeeze(0)}


def union_by_request(mask: Tensor, request: Tensor, requests: int) -> Tensor:
    """Users in the group of any arm of a request: bool [N, P] and [N] → bool [R, P]."""
    votes = torch.zeros((requests, mask.shape[1]), dtype=torch.int64, device=mask.device)
    return votes.index_add(0, request, mask.to(torch.int64)) > 0
