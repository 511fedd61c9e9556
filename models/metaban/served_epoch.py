"""What `paper` and `pooled` have in common when requests are scored: standardised inputs, groups, explanations."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from metaban.models.explaining import Agreement, Contributions, without_own_row
from metaban.models.learner import Query, ServedEpoch
from metaban.models.numerics.arrays import Arrays, double
from metaban.models.numerics.bias_free_net import Shape, forward, input_gradient, predict_all
from metaban.models.numerics.normalizer import standardize, unit
from metaban.models.posterior_draws import independent_draws
from metaban.models.settings import MetaBanSettings

#: Largest number of hidden units of the pool's networks in memory. Blocks of this size are returned to the operating
#: system when freed; many smaller ones would stay in the allocator.
HIDDEN_NUMBERS_MAX = 1 << 24

#: Largest number of parameters of adapted networks in memory; larger queries are scored in chunks of arms.
ADAPTED_NUMBERS_MAX = 1 << 24


def relative_groups(pool_predictions: Tensor, own_predictions: Tensor, threshold: float) -> Tensor:
    """Eq. 4: members of the requesting user's group for each arm, [N, P] and [N] → bool [N, P]."""
    return (pool_predictions - own_predictions.unsqueeze(-1)).abs() <= threshold


@dataclass(frozen=True, slots=True)
class MetaBanEpoch(ServedEpoch):
    """The meta-learner Θ [p] before it is adapted to a group, and mean and scale of inputs [d], None if unused."""

    settings: MetaBanSettings
    shape: Shape
    theta: Tensor
    moments: tuple[Tensor, Tensor] | None

    @property
    def threshold(self) -> float:
        """(ν − 1)/ν · γ of Eq. 4: the largest difference of predictions within a group."""
        return (self.settings.nu - 1) / self.settings.nu * self.settings.gamma

    def inputs(self, raw: Tensor) -> Tensor:
        """Network inputs from raw inputs [..., d]."""
        x = standardize(raw, *self.moments) if self.moments else raw
        return unit(x) * self.settings.input_norm if self.settings.input_norm else x

    def groups(self, pool: Arrays, query: Query, x: Tensor) -> Tensor:
        """Eq. 4 for every arm of a query, x [N, d]: the group without the requesting user, bool [N, P].

        The requesting user is a member by definition and joins with the state in the query, which may be newer than the
        pool's row; so their row is masked.
        """
        near = relative_groups(*self.predictions(pool, query, x), self.threshold)
        rows = torch.arange(near.shape[1], device=near.device)
        themselves: Tensor = rows == query.own_row[query.request].unsqueeze(-1)
        return near & ~themselves

    def predictions(self, pool: Arrays, query: Query, x: Tensor) -> tuple[Tensor, Tensor]:
        """Predictions of all users of the pool [N, P] and of the requesting users [N] for arms x [N, d]."""
        own = forward(self.shape, query.own["theta"][query.request], x.unsqueeze(1)).squeeze(1)  # [N]
        size = max(1, HIDDEN_NUMBERS_MAX // max(1, pool["theta"].shape[0] * self.shape.width))
        return torch.cat([predict_all(self.shape, pool["theta"], arms) for arms in torch.split(x, size)]), own

    def agreement(self, pool: Arrays, query: Query, rows: Tensor) -> Agreement:
        # All arms are computed although few are needed: with fewer, sums may round differently than in scoring.
        predictions, own = self.predictions(pool, query, self.inputs(query.arms))
        members = self.members(without_own_row(relative_groups(predictions, own, self.threshold), query.own_row))
        return Agreement(own[rows], torch.full_like(own[rows], self.threshold), predictions[rows], members[rows])

    def members(self, near: Tensor) -> Tensor:
        """Group members of the arms of one request, given the users near the requesting one, both bool [N, P]."""
        return near

    @abstractmethod
    def adapted(self, pool: Arrays, query: Query, members: Tensor) -> Tensor:
        """The networks Θ [n, p] that score n arms of one request, given their groups, bool [n, P]."""

    def contributions(self, pool: Arrays, query: Query, rows: Tensor, agreement: Agreement) -> Contributions:
        """As in `ServedEpoch`; `user` is what the adaptation to the user and their group changes.

        Columns are of the network's own input, of fixed length: a network without biases is the sum of its terms.
        """
        x, size = self.inputs(query.arms[rows]), max(1, ADAPTED_NUMBERS_MAX // self.shape.parameters)
        means, gradients = [], []
        for arms, members in zip(torch.split(x, size), torch.split(agreement.members, size), strict=True):
            theta = self.adapted(pool, query, members)
            means.append(forward(self.shape, theta, arms.unsqueeze(1)).squeeze(1))
            gradients.append(input_gradient(self.shape, theta, arms))
        shared = double(forward(self.shape, self.theta.unsqueeze(0), x.unsqueeze(0)).squeeze(0))
        nothing = torch.zeros_like(shared)
        return Contributions(
            columns=double(torch.cat(gradients)) * double(x),
            intercept=nothing,
            shared=shared,
            user=double(torch.cat(means)) - shared,
            arm=nothing,
            taste=nothing,
            memory=nothing,
        )

    def draws(self, query: Query, mean: Tensor, sigma: Tensor) -> Tensor | None:
        """Posterior draws [N, M] if requested; independent, because Meta-Ban has no joint posterior."""
        if query.draws is None:
            return None
        drawn: Tensor = independent_draws(mean, sigma, query.slates, query.draws)
        return drawn
