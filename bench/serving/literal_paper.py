"""Meta-Ban as printed in its paper, with loops: the reference of `metaban bench latency`.

One user, one arm, one sample at a time, every gradient from torch.autograd; nothing is stacked or derived by hand, and
no fast code is used. A frozen copy of a part of `tests/models/literal.py`, which an installed package does not contain;
equation and line numbers are the paper's. Inputs are prepared by the caller, and w_u is 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor

from metaban.models.settings import MetaBanSettings

#: Commit of `tests/models/literal.py` that this was copied from.
FROZEN_FROM: Final = "c40884b"

#: Input of a played arm, and its reward.
Observation = tuple[Tensor, float]


@final
@dataclass(frozen=True, slots=True)
class ReferenceArm:
    """Result of Algorithm 1 for one arm (lines 7 to 9): its group, f(x; Θ_x), and α·UCB."""

    members: frozenset[str]
    mean: float
    bonus: float


def network(x: Tensor, theta: Tensor, width: int, depth: int) -> Tensor:
    """Eq. 9: f(x; θ) = W_L σ(W_{L−1} σ(… σ(W_1 x))), a scalar; x is one vector."""
    shapes = [(width, x.numel())] + [(width, width)] * (depth - 2) + [(1, width)]
    activation, start = x, 0
    for place, (rows, columns) in enumerate(shapes):
        matrix = theta[start : start + rows * columns].reshape(rows, columns)
        start += rows * columns
        activation = matrix @ activation
        if place < depth - 1:
            activation = torch.relu(activation)
    return activation[0]


def gradient(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """Gradient of a function at a point, by autograd."""
    point = at.detach().clone().requires_grad_(True)
    (result,) = torch.autograd.grad(function(point), point)
    return result.detach()


@final
class ReferenceMetaBan:
    """Algorithms 1 to 3 for users with given observations; all users are in the pool."""

    def __init__(
        self, settings: MetaBanSettings, theta0: Tensor, observations: Mapping[str, Sequence[Observation]]
    ) -> None:
        self.settings = settings
        self.theta0 = theta0.detach().clone()
        self.observations = observations
        #: θ̂^u of every user, set by `gradient_descent_user`.
        self.fitted: dict[str, Tensor] = dict.fromkeys(observations, self.theta0)

    def recommend(self, user: str, arms: Sequence[Tensor]) -> list[ReferenceArm]:
        """Algorithm 1, lines 5 to 10: each arm's group, adapted meta-learner and bound."""
        return [self._arm(user, x, len(arms)) for x in arms]

    def _arm(self, user: str, x: Tensor, arms: int) -> ReferenceArm:
        settings = self.settings
        own = float(self.f(x, self.fitted[user]))
        threshold = (settings.nu - 1) / settings.nu * settings.gamma
        members = []
        for name, theta in self.fitted.items():
            if abs(float(self.f(x, theta)) - own) <= threshold or name == user:
                members.append(name)
        adapted = self.gradient_descent_meta(members)
        change = self.g(x, adapted) - self.g(x, self.theta0)
        bound = settings.beta2 * float(change.norm()) + settings.z1 + self.user_bound(user, arms)
        return ReferenceArm(frozenset(members), float(self.f(x, adapted)), settings.alpha * bound)

    def gradient_descent_meta(self, group: Sequence[str]) -> Tensor:
        """Algorithm 2: J₂ steps from Θ₀ along the gradient of Eq. 5 at the stored user parameters (Eq. 6)."""
        settings = self.settings
        rate = settings.meta_rate
        if settings.rate_schedule == "per-event":
            rate = rate / sum(max(1, len(self.observations[name])) for name in group)
        meta = self.theta0.clone()
        for _ in range(settings.meta_steps):
            points = {name: self.fitted[name].detach().clone().requires_grad_(True) for name in group}
            for part in torch.autograd.grad(self.meta_loss(points), list(points.values())):
                meta = meta - rate * part
        return meta

    def meta_loss(self, points: Mapping[str, Tensor]) -> Tensor:
        """Eq. 5 (line 8) as a function of the users' parameters: Σ_u L(θ̂^u) + (λ/√m) Σ_u ‖θ̂^u‖₁."""
        loss = self.theta0.new_zeros(())
        for name, theta in points.items():
            loss = loss + self.loss(name, theta)
        for theta in points.values():
            loss = loss + self.settings.l1 / math.sqrt(self.settings.width) * theta.abs().sum()
        return loss

    def train(self, user: str) -> None:
        """Algorithm 3: a new θ̂^u."""
        self.fitted[user] = self.gradient_descent_user(user)

    def gradient_descent_user(self, user: str) -> Tensor:
        """θ_(J₁): J₁ full-batch steps from Θ₀ on the user's own observations."""
        rate = self.settings.user_rate
        if self.settings.rate_schedule == "per-event":
            rate = rate / max(1, len(self.observations[user]))
        theta = self.theta0.clone()
        for _ in range(self.settings.user_steps):
            theta = theta - rate * gradient(lambda point: self.loss(user, point), theta)
        return theta

    def f(self, x: Tensor, theta: Tensor) -> Tensor:
        """Eq. 9."""
        return network(x, theta, self.settings.width, self.settings.depth)

    def g(self, x: Tensor, theta: Tensor) -> Tensor:
        """g(x; θ) = ∂f(x; θ)/∂θ."""
        return gradient(lambda point: self.f(x, point), theta)

    def loss(self, user: str, theta: Tensor) -> Tensor:
        """Eq. 3: ½ Σ (f(x; θ) − r)² over the user's observations."""
        total = theta.new_zeros(())
        for x, reward in self.observations[user]:
            total = total + 0.5 * (self.f(x, theta) - reward) ** 2
        return total

    def user_bound(self, user: str, arms: int) -> float:
        """Ū_u of Eq. 11 for a choice among this many arms."""
        settings = self.settings
        mu = max(1, len(self.observations[user]))
        logarithm = max(0.0, math.log(settings.log_constant * mu * arms / settings.delta))
        return (
            math.sqrt(2 * settings.epsilon1 / mu)
            + 3 * settings.depth / math.sqrt(2 * mu)
            + (1 + settings.xi1) * math.sqrt(2 * logarithm / mu)
        )
