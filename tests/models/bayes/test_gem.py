"""GEM-BML against loops, autograd, sampling and known priors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

import pytest
import torch
from torch import Tensor

from metaban.models.bayes.gem import (
    GemSettings,
    GemTrainer,
    gaussian_gradient,
    gaussian_gradient_plus,
    meta_gradient,
    sampled_gradient,
)
from metaban.models.bayes.inference import (
    AnyLikelihood,
    Gaussian,
    InnerSettings,
    Likelihood,
    NetLikelihood,
    infer,
    infer_by_steps,
)
from metaban.models.numerics.dense_net import NetShape
from tests.models.bayes import literal_gem

SHAPE = NetShape((2, 5, 4, 1))
TASKS, POINTS = 3, 6


def randoms(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=randoms(seed), dtype=torch.float64)


def gaussian(*size: int, seed: int = 0) -> Gaussian:
    return Gaussian(normal(*size, seed=seed), (0.3 * normal(*size, seed=seed + 1)).exp() * 0.1)


def net_likelihood(shape: NetShape = SHAPE, seed: int = 5, noise: float = 0.5) -> NetLikelihood:
    x = normal(TASKS, POINTS, shape.widths[0], seed=seed)
    return NetLikelihood(shape, x, normal(TASKS, POINTS, seed=seed + 1), noise)


# Inference


@pytest.mark.parametrize("shape", [SHAPE, NetShape((2, 5, 1), offsets=False), NetShape((2, 1))])
def test_log_likelihood_gradient_equals_autograd(shape: NetShape) -> None:
    data, nets = net_likelihood(shape), normal(TASKS, shape.parameters)
    said = shape.outputs(nets, data.x).squeeze(-1)
    torch.testing.assert_close(data.at(nets), (said - data.y).square().sum(-1) / -1.0)
    torch.testing.assert_close(data.slope(nets), Likelihood.slope(data, nets))


@pytest.mark.parametrize("shape", [SHAPE, NetShape((2, 5, 1), offsets=False)])
def test_local_reparameterisation_equals_the_loop(shape: NetShape) -> None:
    data, around = net_likelihood(shape), gaussian(TASKS, shape.parameters)
    found = data.slopes(around.mean, around.variance.sqrt(), randoms(3))
    same, epsilons = randoms(3), []
    for rows, _ in shape.sizes:
        epsilons.append(torch.empty(TASKS, POINTS, rows, dtype=torch.float64).normal_(generator=same))
    for task in range(TASKS):
        mean = around.mean[task].clone().requires_grad_()
        sd = around.variance[task].sqrt().requires_grad_()
        value = literal_gem.local_reparameterisation(
            shape, mean, sd, data.x[task], data.y[task], data.noise, [each[task] for each in epsilons]
        )
        expected = torch.autograd.grad(value, (mean, sd))
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours[task], theirs)


def test_both_sampling_methods_have_the_same_mean_gradient() -> None:
    data = net_likelihood(NetShape((2, 3, 1)))
    around = gaussian(TASKS, data.shape.parameters)
    count = 20_000
    many = NetLikelihood(data.shape, data.x.expand(count, -1, -1, -1), data.y, data.noise)
    mean, sd = (each.expand(count, *each.shape) for each in (around.mean, around.variance.sqrt()))
    local, weights = many.slopes(mean, sd, randoms(1)), replace(many, local=False).slopes(mean, sd, randoms(2))
    for ours, theirs in zip(local, weights, strict=True):
        error = (ours.var(0) / count + theirs.var(0) / count).sqrt()
        assert float(((ours.mean(0) - theirs.mean(0)) / error.clamp_min(1e-12)).abs().max()) < 5
    # Local reparameterisation reduces the variance of the gradient.
    assert float(local[0].var(0).mean()) < float(weights[0].var(0).mean())


@dataclass(frozen=True, slots=True)
@final
class Quadratic(Likelihood):
    """Quadratic log-likelihood with a known expectation: log p(D|θ) = slopeᵀθ − ½ Σ curvature θ²."""

    slope_at_0: Tensor
    curvature: Tensor

    @property
    def tasks(self) -> int:
        return self.slope_at_0.shape[-2]

    def at(self, theta: Tensor) -> Tensor:
        return (self.slope_at_0 * theta - 0.5 * self.curvature * theta.square()).sum(-1)

    def slopes(self, mean: Tensor, sd: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        return self.slope(mean), -self.curvature * sd


def quadratic() -> Quadratic:
    return Quadratic(normal(TASKS, 4, seed=7) * 3, normal(TASKS, 4, seed=8).square() + 1)


def test_inference_ascends_the_elbo_and_converges_to_the_posterior() -> None:
    prior, data = gaussian(4).for_tasks(TASKS), quadratic()
    found = infer(prior, data, InnerSettings(steps=7, rate=0.01))
    for task in range(TASKS):
        mean, variance = literal_gem.variational(
            prior.mean[task],
            prior.variance[task].sqrt(),
            data.slope_at_0[task],
            data.curvature[task],
            0.01,
            7,
        )
        torch.testing.assert_close(found.mean[task], mean)
        torch.testing.assert_close(found.variance[task], variance)
    precision = 1 / prior.variance + data.curvature
    exact = (data.slope_at_0 + prior.mean / prior.variance) / precision
    for settings in (
        InnerSettings(steps=300, rate=0.03),
        InnerSettings(steps=600, rate=0.02, optimiser="adam"),
        InnerSettings(steps=100, rate=0.2, whitened=True),
    ):
        end = infer(prior, data, settings)
        torch.testing.assert_close(end.mean, exact, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(end.variance, 1 / precision, rtol=1e-4, atol=1e-5)


def test_adam_equals_torch() -> None:
    prior, data = gaussian(4).for_tasks(TASKS), quadratic()
    found = infer(prior, data, InnerSettings(steps=9, rate=0.05, optimiser="adam", point=True, prior_weight=0.0))
    theta = prior.mean.clone().requires_grad_()
    descent = torch.optim.Adam([theta], lr=0.05, maximize=True)
    for _ in range(9):
        descent.zero_grad()
        data.at(theta).sum().backward()  # type: ignore[no-untyped-call]
        descent.step()
    torch.testing.assert_close(found.mean, theta.detach())


def test_stacked_runs_with_own_rates_are_independent() -> None:
    data, prior = net_likelihood(), gaussian(2, SHAPE.parameters)
    rates = torch.tensor([0.01, 0.002], dtype=torch.float64)[:, None, None]
    inner = InnerSettings(steps=4, rate=rates, point=True, prior_weight=0.5, whitened=True, cut=0.7)
    stacked = infer(prior.for_tasks(TASKS), data, inner)
    for run in range(2):
        alone = Gaussian(prior.mean[run], prior.variance[run]).for_tasks(TASKS)
        found = infer(alone, data, replace(inner, rate=float(rates[run])))
        torch.testing.assert_close(stacked.mean[run], found.mean)


def test_stepwise_posteriors_equal_inference_and_hold_no_graph() -> None:
    data, prior = net_likelihood(), gaussian(SHAPE.parameters)
    prior.mean.requires_grad_()
    inner = InnerSettings(steps=3, rate=0.001)
    steps = list(infer_by_steps(prior.for_tasks(TASKS), data, inner, randoms(4)))
    end = infer(prior.for_tasks(TASKS), data, inner, randoms(4))
    assert len(steps) == 3
    nowhere = infer(prior.for_tasks(TASKS), data, replace(inner, steps=0))
    torch.testing.assert_close(nowhere.variance, prior.for_tasks(TASKS).variance)
    torch.testing.assert_close(steps[-1].mean, end.mean)
    assert not end.mean.requires_grad
    assert not end.variance.requires_grad


# Meta-gradients


def test_closed_form_meta_gradient_equals_autograd() -> None:
    prior, train, both = gaussian(4), gaussian(4, seed=20), gaussian(4, seed=30)

    def expected(posterior: Gaussian, mean: Tensor, precision: Tensor) -> Tensor:
        away = (posterior.mean - mean).square() + posterior.variance
        return 0.5 * (precision.log() - precision * away).sum()

    mean, precision = prior.mean.clone().requires_grad_(), (1 / prior.variance).requires_grad_()
    first = torch.autograd.grad(expected(both, mean, precision), (mean, precision))
    found = gaussian_gradient(prior, both)
    torch.testing.assert_close((found.mean, found.precision), first)
    change = expected(both, mean, precision) - expected(train, mean, precision)
    plus = gaussian_gradient_plus(prior, train, both)
    torch.testing.assert_close((plus.mean, plus.precision), torch.autograd.grad(change, (mean, precision)))
    # Gradient with respect to the log variance.
    log_variance = prior.variance.log().requires_grad_()
    (slope,) = torch.autograd.grad(expected(both, prior.mean, (-log_variance).exp()), log_variance)
    torch.testing.assert_close(found.log_variance(prior), slope)


def test_sampled_meta_gradient_agrees_with_the_closed_form() -> None:
    prior = gaussian(4)
    train, both = gaussian(TASKS, 4, seed=20), gaussian(TASKS, 4, seed=30)

    def log_prior(known: dict[str, Tensor], theta: Tensor) -> Tensor:
        return Gaussian(known["mean"], 1 / known["precision"]).log_density(theta)

    known, count = {"mean": prior.mean, "precision": 1 / prior.variance}, 100_000
    ours = [sampled_gradient(log_prior, known, each.draws(count, randoms(6))) for each in (train, both)]
    exact = gaussian_gradient(prior.for_tasks(TASKS), both)
    torch.testing.assert_close(ours[1]["mean"], exact.mean.sum(0), rtol=0.01, atol=0.05)
    torch.testing.assert_close(ours[1]["precision"], exact.precision.sum(0), rtol=0.01, atol=0.02)
    plus = gaussian_gradient_plus(prior.for_tasks(TASKS), train, both)
    for name, closed in (("mean", plus.mean), ("precision", plus.precision)):
        torch.testing.assert_close(ours[1][name] - ours[0][name], closed.sum(0), rtol=0.01, atol=0.05)


def test_meta_gradient_follows_the_subroutines() -> None:
    prior, support, query = gaussian(SHAPE.parameters), net_likelihood(), net_likelihood(seed=9)
    inner = InnerSettings(steps=3, rate=0.002)
    same = randoms(2)
    train = infer(prior.for_tasks(TASKS), support, inner, same)
    both = infer(train, query, replace(inner, steps=2), same)
    for plus in (False, True):
        found = meta_gradient(prior, support, query, GemSettings(plus, inner, query_steps=2), randoms(2))
        start = prior.for_tasks(TASKS)
        expected = gaussian_gradient_plus(start, train, both) if plus else gaussian_gradient(start, both)
        torch.testing.assert_close(found.mean, expected.mean)
        torch.testing.assert_close(found.precision, expected.precision)


def test_point_posteriors_give_reptile() -> None:
    """Section 4: with point posteriors and a fixed prior, GEM-BML is Reptile, step by step."""
    theta, noise = normal(SHAPE.parameters) / 2, 0.5
    inner = InnerSettings(steps=2, rate=0.01, point=True, prior_weight=0.0)
    trainer = GemTrainer(
        Gaussian(theta, torch.ones_like(theta)),
        GemSettings(inner=inner, rate=0.3, variance_rate=0.0),
        optimiser=torch.optim.SGD,
    )
    for step in range(3):
        support, query = net_likelihood(seed=10 * step, noise=noise), net_likelihood(seed=10 * step + 5, noise=noise)
        batches = [
            [(support.x[task], support.y[task])] * 2 + [(query.x[task], query.y[task])] * 2 for task in range(TASKS)
        ]
        theta = literal_gem.reptile(theta, SHAPE, batches, 0.01, 0.3, noise)
        trainer.step(support, query)
        torch.testing.assert_close(trainer.prior.mean, theta)
    torch.testing.assert_close(trainer.prior.variance, torch.ones_like(theta))


@pytest.mark.parametrize("plus", [False, True])
def test_training_recovers_the_prior_of_the_tasks(plus: bool) -> None:
    """Each task is two noisy observations of θ ~ N(μ, v): posteriors are Gaussian and VI reaches them."""
    random, dimension, tasks = randoms(1), 3, 400
    mean, variance = normal(dimension, seed=2), torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
    theta = mean + variance.sqrt() * torch.randn(tasks, dimension, generator=random, dtype=torch.float64)
    looks = theta + torch.randn(2, tasks, dimension, generator=random, dtype=torch.float64)
    support, query = (Quadratic(each, torch.ones_like(each)) for each in looks)
    inner = InnerSettings(steps=8, rate=0.4, whitened=True)
    start = Gaussian(torch.zeros(dimension, dtype=torch.float64), torch.ones(dimension, dtype=torch.float64))
    trainer = GemTrainer(start, GemSettings(plus, inner, rate=0.05, variance_rate=0.5))
    for _ in range(80):
        trainer.step(support, query)
    torch.testing.assert_close(trainer.prior.mean, mean, rtol=0, atol=0.25)
    torch.testing.assert_close(trainer.prior.variance, variance, rtol=0.4, atol=0.1)


def test_variance_step_length_follows_the_current_rate() -> None:
    start, data = gaussian(4), quadratic()
    changes = []
    for rate in (0.2, 0.05, 0.0):
        trainer = GemTrainer(start, GemSettings(inner=InnerSettings(rate=0.01), variance_rate=0.2))
        trainer.variance_rate = rate
        trainer.step(data, data)
        changes.append((trainer.prior.variance / start.variance).log())
    assert float(changes[0].abs().min()) > 1e-4
    torch.testing.assert_close(changes[1], changes[0] / 4)
    torch.testing.assert_close(changes[2], torch.zeros_like(changes[2]))


def test_a_custom_likelihood_is_used_as_given() -> None:
    data, prior = net_likelihood(), gaussian(SHAPE.parameters).for_tasks(TASKS)
    inner = InnerSettings(steps=3, rate=0.01, point=True)
    found = infer(prior, AnyLikelihood(TASKS, data.at), inner)
    torch.testing.assert_close(found.mean, infer(prior, data, inner).mean)
