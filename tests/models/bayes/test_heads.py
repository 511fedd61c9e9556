"""Meta-gradients of linear heads against autograd of the marginal likelihood, and against EM."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from metaban.models.bayes.heads import heads_gradient, heads_gradient_plus, pull_of_unseen
from metaban.models.default.prior import Prior, Statistics, log_marginal


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def users_of(seed: int, samples: int = 12) -> tuple[Tensor, Tensor]:
    """Inputs [U, S, D] and rewards [U, S]."""
    inputs = normal(30, samples, 3, seed=seed)
    heads = normal(3, seed=seed + 1) + normal(30, 3, seed=seed + 2) * torch.tensor([0.3, 0.6, 1.0], dtype=torch.float64)
    rewards = (inputs @ heads[..., None]).squeeze(-1) + 0.3 * normal(30, samples, seed=seed + 3)
    return inputs, rewards


def statistics(inputs: Tensor, rewards: Tensor) -> Statistics:
    return Statistics.of(inputs, rewards, torch.ones_like(rewards))


def some_prior(seed: int = 0) -> Prior:
    root = normal(3, 3, seed=seed)
    covariance = root @ root.mT + 0.5 * torch.eye(3, dtype=torch.float64)
    return Prior.of(normal(3, seed=seed + 1), covariance, torch.tensor(0.2, dtype=torch.float64))


def autograd_of(prior: Prior, *parts: tuple[float, Statistics]) -> tuple[Tensor, ...]:
    known = [each.clone().requires_grad_() for each in (prior.mean, prior.precision, prior.noise)]
    total = sum(
        (sign * log_marginal(*known, users).sum() for sign, users in parts), torch.zeros((), dtype=torch.float64)
    )
    mean, precision, noise = torch.autograd.grad(total, known)
    return mean, (precision + precision.mT) / 2, noise  # precisions and their gradients are symmetric


def test_head_gradients_equal_those_of_the_marginal_likelihood() -> None:
    inputs, rewards = users_of(0)
    prior, both, train = some_prior(), statistics(inputs, rewards), statistics(inputs[:, :5], rewards[:, :5])
    for found, expected in (
        (heads_gradient(prior, both), autograd_of(prior, (1.0, both))),
        (heads_gradient_plus(prior, train, both), autograd_of(prior, (1.0, both), (-1.0, train))),
    ):
        torch.testing.assert_close((found.mean, found.precision, found.noise), expected, rtol=1e-6, atol=1e-6)


def test_a_step_of_em_is_a_step_along_the_meta_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metaban.models.default.prior.UNSEEN_USERS", 0.0)
    users, prior = statistics(*users_of(0)), some_prior()
    slope, count, better = heads_gradient(prior, users), len(users.events), prior.em_step(users)
    torch.testing.assert_close(better.mean, prior.mean + prior.covariance @ slope.mean / count)
    moved = better.mean - prior.mean
    torch.testing.assert_close(
        better.covariance, prior.covariance - 2 * slope.precision / count - moved[:, None] * moved
    )


def test_em_stops_where_the_meta_gradient_is_zero() -> None:
    users, prior = statistics(*users_of(0)), some_prior()
    started = heads_gradient(prior, users).plus(pull_of_unseen(prior))
    for _ in range(800):
        prior = prior.em_step(users)
    left = heads_gradient(prior, users).plus(pull_of_unseen(prior))
    for before, after in (
        (started.mean, left.mean),
        (started.precision, left.precision),
        (started.noise, left.noise),
    ):
        assert float(before.abs().max()) > 1e-2
        assert float(after.abs().max()) < 1e-6


def test_l2_without_training_samples_equals_l1() -> None:
    users, prior = statistics(*users_of(0)), some_prior()
    nothing = Statistics(*(torch.zeros_like(each) for each in (users.gram, users.moment, users.squares, users.events)))
    whole, plus = heads_gradient(prior, users), heads_gradient_plus(prior, nothing, users)
    torch.testing.assert_close((whole.mean, whole.precision), (plus.mean, plus.precision))
