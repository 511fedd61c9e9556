"""Meta-Ban as its paper prints it, slow and obviously right.

Ban, Qi, Wei, He, "Neural Collaborative Filtering Bandits via Meta Learning". One user, one arm, one sample at a time,
every gradient from torch.autograd. Nothing is stacked, collapsed or derived by hand, and nothing is imported from
`models`: the fast code is tested against this, so it must not share its mistakes. Equation, algorithm and line numbers
are the paper's.

Choices where the paper leaves something open:

- T̃ = T (as in Theorem 5.3), w_u = 1 unless given, Algorithms 2 and 3 both start from Θ₀.
- μ = 0 would divide by zero in Eq. 11 (the paper observes one sample of every user first): μ is at least 1 there.
- The constant inside O(μk) of Eq. 11 is a setting; the logarithm is never negative.
- Rates are constant, or fall with the number of observations they are summed over (Eq. 10 lets both fall with t):
  η₁/|T^u| in Algorithm 3 and η₂/Σ_{u∈N} max(1, |T^u|) in Algorithm 2.
- The asking user is a member of all of their groups (their own distance is 0), whether or not the pool holds them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

#: One observation of a user: the input of the played arm, and its reward.
Observation = tuple[Tensor, float]


@dataclass(frozen=True)
class LiteralSettings:
    """The inputs of Algorithm 1 (line 1) and the constants of its bound."""

    inputs: int  # d
    width: int  # m
    depth: int  # L
    user_steps: int = 3  # J₁
    meta_steps: int = 3  # J₂
    user_rate: float = 0.01  # η₁
    meta_rate: float = 0.01  # η₂
    l1: float = 0.001  # λ
    nu: float = 5.0
    gamma: float = 0.4
    alpha: float = 0.1
    beta2: float = 1.0
    z1: float = 0.0
    xi1: float = 2.0
    epsilon1: float = 0.01
    delta: float = 0.1
    log_constant: float = 1.0
    rate_schedule: Literal["constant", "per-event"] = "constant"
    #: How many of a user's last observations are kept; the paper keeps all.
    samples_kept: int | None = None
    #: How many of the last θ̂ the draw of Algorithm 3 line 9 chooses from; the paper keeps all.
    checkpoints: int | None = None


@dataclass
class LiteralUser:
    """The state of one user in Algorithm 1."""

    fitted: Tensor  # θ̂^u_{μ}: where Algorithm 2 takes its gradient
    served: Tensor  # θ^u_{t}: used by Eq. 4 for predictions
    history: list[Tensor]  # θ̂^u_0 … θ̂^u_μ
    observations: list[Observation] = field(default_factory=list)  # T^u_t
    events: int = 0  # μ^u_t
    weight: float = 1.0  # w_u


@dataclass(frozen=True)
class LiteralArm:
    """Results of Algorithm 1 for one arm (lines 7 to 9)."""

    members: frozenset[str]  # N̂_u(x), including the asking user
    distances: dict[str, float]  # |f(x;θ^v) − f(x;θ^u)| for every v of the pool
    adapted: Tensor  # Θ_{t,i}
    mean: float  # f(x;Θ_{t,i})
    bonus: float  # α·UCB_{t,i}
    score: float  # U_{t,i}


def layers(theta: Tensor, inputs: int, width: int, depth: int) -> list[Tensor]:
    """W_1 … W_L out of θ = [vec(W_1), …, vec(W_L)], matrices stored row after row."""
    shapes = [(width, inputs)] + [(width, width)] * (depth - 2) + [(1, width)]
    matrices = []
    start = 0
    for rows, columns in shapes:
        matrices.append(theta[start : start + rows * columns].reshape(rows, columns))
        start += rows * columns
    assert start == theta.numel()
    return matrices


def network(x: Tensor, theta: Tensor, width: int, depth: int) -> Tensor:
    """Eq. 9: f(x;θ) = W_L σ(W_{L−1} σ(… σ(W_1 x))), a number; x is one vector."""
    *hidden, last = layers(theta, x.numel(), width, depth)
    activation = x
    for matrix in hidden:
        activation = torch.relu(matrix @ activation)
    return (last @ activation)[0]


def gradient(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """∇ function, at a point, by autograd."""
    point = at.detach().clone().requires_grad_(True)
    value = function(point)
    if not value.requires_grad:  # a sum over nothing does not depend on the point
        return torch.zeros_like(at)
    (result,) = torch.autograd.grad(value, point)
    return result.detach()


class LiteralMetaBan:
    """Algorithm 1, step by step: requests with their arms, then rewards."""

    def __init__(
        self,
        settings: LiteralSettings,
        theta0: Tensor,
        *,
        prepare: Callable[[Tensor], Tensor] | None = None,
        choose: Callable[[str, int], int] | None = None,
    ) -> None:
        """Start without users.

        `prepare` is applied to every raw input (a normaliser). `choose(user, n)` picks one of n stored θ̂ for Eq. 4;
        without it the latest is served.
        """
        self.settings = settings
        self.theta0 = theta0.detach().clone()
        self.prepare = prepare or (lambda x: x)
        self.choose = choose or (lambda _user, count: count - 1)
        self.users: dict[str, LiteralUser] = {}

    # ------------------------------------------------------------------ Algorithm 1

    def user(self, name: str) -> LiteralUser:
        """Line 2: θ̂_0^u = θ_0^u = Θ₀, μ^u = 0; a user is created at their first request."""
        if name not in self.users:
            start = self.theta0
            self.users[name] = LiteralUser(start.clone(), start.clone(), [start.clone()])
        return self.users[name]

    def recommend(self, user: str, arms: Sequence[Tensor], pool: Iterable[str] | None = None) -> list[LiteralArm]:
        """Lines 5 to 10: each arm's group, adapted meta-learner and bound. N is `pool`, or all users."""
        self.user(user)
        pool_users = list(self.users) if pool is None else list(pool)
        if user not in pool_users:
            pool_users = [*pool_users, user]
        return [self._arm(user, self.prepare(arm), len(arms), pool_users) for arm in arms]

    def observe(self, user: str, arm: Tensor, reward: float) -> None:
        """Lines 12 to 15: one more reward of this user; their learner is trained again."""
        state = self.user(user)
        state.observations.append((arm.detach().clone(), reward))
        if self.settings.samples_kept is not None:
            state.observations = state.observations[-self.settings.samples_kept :]
        state.events += 1
        self.train(user)

    def train(self, user: str) -> None:
        """Algorithm 3 and its line 9: store a new θ̂, then serve one of the stored ones."""
        state = self.user(user)
        state.fitted = self.gradient_descent_user(user)
        state.history.append(state.fitted)
        if self.settings.checkpoints is not None:
            state.history = state.history[-self.settings.checkpoints :]
        state.served = state.history[self.choose(user, len(state.history))]

    def _arm(self, user: str, x: Tensor, arms: int, pool_users: list[str]) -> LiteralArm:
        settings = self.settings
        own = float(self.f(x, self.users[user].served))
        threshold = (settings.nu - 1) / settings.nu * settings.gamma
        distances = {}
        members = []
        for name in pool_users:
            distance = abs(float(self.f(x, self.user(name).served)) - own)
            distances[name] = distance
            if distance <= threshold or name == user:
                members.append(name)
        adapted = self.gradient_descent_meta(members)
        mean = float(self.f(x, adapted))
        change = self.g(x, adapted) - self.g(x, self.theta0)
        length = math.sqrt(sum(part**2 for part in change.tolist()))
        bound = settings.beta2 * length + settings.z1 + self.user_bound(user, arms)
        bonus = settings.alpha * bound
        return LiteralArm(frozenset(members), distances, adapted, mean, bonus, mean + bonus)

    # ------------------------------------------------------------------ Algorithm 2

    def gradient_descent_meta(self, group: Sequence[str]) -> Tensor:
        """Θ_(J₂): J₂ steps from Θ₀ along the gradient of Eq. 5 at the stored user parameters (Eq. 6)."""
        settings = self.settings
        rate = settings.meta_rate
        if settings.rate_schedule == "per-event":
            rate = rate / sum(max(1, len(self.users[name].observations)) for name in group)
        meta = self.theta0.clone()
        for _ in range(settings.meta_steps):
            points = {name: self.users[name].fitted.detach().clone().requires_grad_(True) for name in group}
            loss = self.meta_loss(points)
            for part in torch.autograd.grad(loss, list(points.values())):
                meta = meta - rate * part
        return meta

    def meta_loss(self, points: dict[str, Tensor]) -> Tensor:
        """Eq. 5 (line 8) as a function of the users' parameters: Σ_u w_u·L(θ̂^u) + (λ/√m) Σ_u ‖θ̂^u‖₁."""
        settings = self.settings
        loss = torch.zeros((), dtype=self.theta0.dtype)
        for name, theta in points.items():
            loss = loss + self.users[name].weight * self.loss(name, theta)
        for theta in points.values():
            loss = loss + settings.l1 / math.sqrt(settings.width) * theta.abs().sum()
        return loss

    def user_term(self, user: str) -> Tensor:
        """One user's term in the gradient of Eq. 5."""
        return gradient(lambda theta: self.meta_loss({user: theta}), self.user(user).fitted)

    # ------------------------------------------------------------------ Algorithm 3

    def gradient_descent_user(self, user: str) -> Tensor:
        """θ_(J₁): J₁ full-batch steps from Θ₀ on the user's own observations."""
        settings = self.settings
        rate = settings.user_rate
        if settings.rate_schedule == "per-event":
            rate = rate / max(1, len(self.user(user).observations))
        theta = self.theta0.clone()
        for _ in range(settings.user_steps):
            theta = theta - rate * gradient(lambda point: self.loss(user, point), theta)
        return theta

    # ------------------------------------------------------------------ network, loss and bound

    def f(self, x: Tensor, theta: Tensor) -> Tensor:
        """Eq. 9 on a prepared input."""
        return network(x, theta, self.settings.width, self.settings.depth)

    def g(self, x: Tensor, theta: Tensor) -> Tensor:
        """g(x;θ) = ∂f(x;θ)/∂θ."""
        return gradient(lambda point: self.f(x, point), theta)

    def loss(self, user: str, theta: Tensor) -> Tensor:
        """Eq. 3: ½ Σ (f(x;θ) − r)² over the user's observations."""
        total = torch.zeros((), dtype=theta.dtype)
        for raw, reward in self.user(user).observations:
            total = total + 0.5 * (self.f(self.prepare(raw), theta) - reward) ** 2
        return total

    def user_bound(self, user: str, arms: int) -> float:
        """Ū_u of Eq. 11 for a choice among this many arms."""
        settings = self.settings
        mu = max(1, self.user(user).events)
        logarithm = max(0.0, math.log(settings.log_constant * mu * arms / settings.delta))
        return (
            math.sqrt(2 * settings.epsilon1 / mu)
            + 3 * settings.depth / math.sqrt(2 * mu)
            + (1 + settings.xi1) * math.sqrt(2 * logarithm / mu)
        )
