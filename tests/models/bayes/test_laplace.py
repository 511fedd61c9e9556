"""Curvature, evidence, draws and predictive variance against dense autograd matrices, one task at a time."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal
from torch.func import hessian, jacrev  # type: ignore[attr-defined]

from metaban.models.bayes.curvature import Structure, output_factors
from metaban.models.bayes.laplace import (
    BernoulliOutputs,
    GaussianOutputs,
    Laplace,
    OutputLikelihood,
    TaskBatch,
    adapted,
    laplace,
    log_evidence,
    loss,
    loss_gradient,
    mode,
    objective,
    objective_gradient,
)
from metaban.models.default.prior import Prior, Statistics
from metaban.models.numerics.bias_free_net import Shape, forward, initial_parameters
from metaban.models.numerics.dense_net import NetShape
from tests.models.bayes.dense_laplace import (
    DAMPING,
    LIKELIHOODS,
    SHAPES,
    STRUCTURES,
    TASKS,
    by_likelihood,
    by_shape,
    by_structure,
    dense,
    dense_inverse,
    dense_log_det,
    drawn,
    layer_positions,
    net_outputs,
    plain_shape,
    task_loss,
    world,
)


@by_shape
@by_likelihood
def test_losses_and_gradients_equal_autograd(shape: NetShape, likelihood: OutputLikelihood) -> None:
    nets, batch = world(shape)
    values, slopes = loss(shape, nets, batch, likelihood), loss_gradient(shape, nets, batch, likelihood)
    for task in range(TASKS):
        value = task_loss(shape, batch, task, likelihood)
        torch.testing.assert_close(values[task], value(nets[task]))
        torch.testing.assert_close(slopes[task], jacrev(value)(nets[task]))


@by_shape
@by_structure
@by_likelihood
def test_curvature_equals_the_dense_matrix(shape: NetShape, structure: Structure, likelihood: OutputLikelihood) -> None:
    """Log determinant, H⁻¹v and predictive variance of all tasks at once, against one dense matrix per task."""
    nets, batch = world(shape)
    fitted = laplace(shape, nets, batch, likelihood, structure, DAMPING)
    x, vectors = drawn(TASKS, 4, shape.widths[0], seed=8), drawn(TASKS, shape.parameters, seed=9)
    log_det, solved = fitted.curvature.log_det(), fitted.curvature.solved(vectors)
    mean, variance = fitted.predicted(x)
    for task in range(TASKS):
        matrix = dense(shape, nets[task], batch, task, likelihood, structure)
        inverse = dense_inverse(matrix)
        torch.testing.assert_close(log_det[task], dense_log_det(matrix))
        torch.testing.assert_close(solved[task], inverse @ vectors[task])
        rows = jacrev(lambda point, task=task: net_outputs(shape, point, x[task]))(nets[task])  # [4, C, p]
        torch.testing.assert_close(mean[task], net_outputs(shape, nets[task], x[task]))
        torch.testing.assert_close(variance[task], torch.einsum("ncp,pq,ncq->nc", rows, inverse, rows))


@by_structure
def test_each_layer_may_have_its_own_damping(structure: Structure) -> None:
    shape, likelihood = SHAPES[1], LIKELIHOODS[0]
    nets, batch = world(shape)
    damping = torch.tensor([0.3, 5.0, 40.0], dtype=torch.float64)
    fitted = laplace(shape, nets, batch, likelihood, structure, damping)
    x = drawn(TASKS, 4, 2, seed=8)
    found = log_evidence(fitted, nets[0], batch, likelihood, damping)
    for task in range(TASKS):
        matrix = dense(shape, nets[task], batch, task, likelihood, structure, damping)
        rows = jacrev(lambda point, task=task: net_outputs(shape, point, x[task]))(nets[task])  # [4, C, p]
        variance = torch.einsum("ncp,pq,ncq->nc", rows, dense_inverse(matrix), rows)
        torch.testing.assert_close(fitted.predicted(x)[1][task], variance)
        # Eq. 8: log p(D|θ̂) + log N(θ̂; θ, 1/τ) + ½(covered·log 2π − log det H).
        evidence = -task_loss(shape, batch, task, likelihood)(nets[task]) - 0.5 * dense_log_det(matrix)
        for at, tau in list(zip(layer_positions(shape), damping, strict=True))[
            -1 if structure == "last-layer" else 0 :
        ]:
            away = (nets[task] - nets[0])[at.flatten()]
            evidence = evidence + (Normal(0.0, tau**-0.5).log_prob(away) + 0.5 * math.log(2 * math.pi)).sum()
        torch.testing.assert_close(found[task], evidence)


@by_structure
def test_the_mode_is_where_the_gradient_vanishes_whatever_the_damping(structure: Structure) -> None:
    shape, likelihood = NetShape((2, 3, 1)), LIKELIHOODS[0]
    nets, batch = world(shape)
    damping = torch.tensor([200.0, 2.0], dtype=torch.float64)
    found = mode(shape, nets[0], batch, likelihood, structure, damping, steps=300, rate=0.3)
    slope = loss_gradient(shape, found, batch, likelihood)
    for at, tau in list(zip(layer_positions(shape), damping, strict=True))[-1 if structure == "last-layer" else 0 :]:
        pull = (slope + tau * (found - nets[0]))[:, at.flatten()]
        torch.testing.assert_close(pull, torch.zeros_like(pull), atol=1e-5, rtol=0)


@by_shape
@by_likelihood
def test_layer_blocks_equal_the_hessian(shape: NetShape, likelihood: OutputLikelihood) -> None:
    """A ReLU network is linear in each layer, so a per-layer block of the Gauss-Newton matrix is the exact Hessian."""
    nets, batch = world(shape)
    for task in range(TASKS):
        true = hessian(task_loss(shape, batch, task, likelihood))(nets[task])
        whole = dense(shape, nets[task], batch, task, likelihood, "full")
        for at in map(Tensor.flatten, layer_positions(shape)):
            damping = DAMPING * torch.eye(len(at), dtype=torch.float64)
            torch.testing.assert_close(whole[at[:, None], at], true[at[:, None], at] + damping)


def test_without_residuals_the_curvature_equals_the_hessian() -> None:
    shape, likelihood = SHAPES[1], LIKELIHOODS[0]
    nets, batch = world(shape)
    outputs, _ = output_factors(shape, nets, batch.x)
    exact = TaskBatch(batch.x, outputs, batch.weight)
    log_det = laplace(shape, nets, exact, likelihood, "full", DAMPING).curvature.log_det()
    for task in range(TASKS):
        true = hessian(task_loss(shape, exact, task, likelihood))(nets[task])
        torch.testing.assert_close(log_det[task], torch.logdet(true + DAMPING * torch.eye(len(true))))


@by_structure
def test_draws_have_the_inverse_curvature_for_covariance(structure: Structure) -> None:
    shape, likelihood, count = NetShape((2, 3, 2)), LIKELIHOODS[0], 40_000
    nets, batch = world(shape)
    fitted = laplace(shape, nets, batch, likelihood, structure, DAMPING)
    draws = fitted.draws(count, torch.Generator().manual_seed(1))
    assert draws.shape == (TASKS, count, shape.parameters)
    for task in range(TASKS):
        covariance = dense_inverse(dense(shape, nets[task], batch, task, likelihood, structure))
        scale = covariance.diagonal().sqrt()
        error = (draws[task].T.cov() - covariance).abs()
        # An entry of a sample covariance has a deviation of at most √2 σ_i σ_j / √n.
        assert (error <= 6 * scale.outer(scale) * math.sqrt(2 / count) + 1e-12).all()
        assert ((draws[task].mean(0) - nets[task]).abs() <= 6 * scale / math.sqrt(count) + 1e-12).all()


def test_structures_that_hold_all_of_h_give_the_same_draws() -> None:
    """A linear head with one output is a last layer and one Kronecker product: all three structures hold the full H."""
    shape = NetShape((3, 1))
    nets, batch = world(shape)
    found = {kind: laplace(shape, nets, batch, LIKELIHOODS[0], kind, DAMPING) for kind in STRUCTURES}
    x = drawn(TASKS, 5, 3, seed=4)
    for kind in ("last-layer", "kronecker"):
        torch.testing.assert_close(found[kind].curvature.log_det(), found["full"].curvature.log_det())
        torch.testing.assert_close(found[kind].predicted(x)[1], found["full"].predicted(x)[1])
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    full, last = (found[kind].draws(7, each) for kind, each in zip(("full", "last-layer"), generators, strict=True))
    torch.testing.assert_close(full, last)


@by_structure
@by_likelihood
def test_batched_tasks_equal_single_tasks(structure: Structure, likelihood: OutputLikelihood) -> None:
    shape = SHAPES[1]
    nets, batch = world(shape)
    together = laplace(shape, nets, batch, likelihood, structure, DAMPING)
    x = drawn(TASKS, 4, 2, seed=8)
    mean, variance = together.predicted(x)
    for task in range(TASKS):
        count = int(batch.weight[task].sum())  # and without padding
        part = slice(task, task + 1)
        alone_batch = TaskBatch(batch.x[part, :count], batch.targets[part, :count], batch.weight[part, :count])
        alone = laplace(shape, nets[part], alone_batch, likelihood, structure, DAMPING)
        torch.testing.assert_close(alone.predicted(x[part]), (mean[part], variance[part]))
        torch.testing.assert_close(alone.curvature.log_det(), together.curvature.log_det()[part])


@by_shape
@by_structure
def test_without_samples_the_curvature_is_the_damping(shape: NetShape, structure: Structure) -> None:
    nets, batch = world(shape)
    empty = TaskBatch(batch.x, batch.targets, torch.zeros_like(batch.weight))
    fitted = laplace(shape, nets, empty, LIKELIHOODS[0], structure, DAMPING)
    covered = fitted.curvature.covered
    assert covered == (layer_positions(shape)[-1].numel() if structure == "last-layer" else shape.parameters)
    expected = torch.full((TASKS,), covered * math.log(float(DAMPING)), dtype=torch.float64)
    torch.testing.assert_close(fitted.curvature.log_det(), expected)
    torch.testing.assert_close(log_evidence(fitted, nets[0], empty, LIKELIHOODS[0], DAMPING)[0], expected[0] * 0)


@by_structure
def test_more_damping_gives_less_variance(structure: Structure) -> None:
    nets, batch = world(SHAPES[0])
    x = drawn(TASKS, 4, 2, seed=8)
    found = [laplace(SHAPES[0], nets, batch, LIKELIHOODS[0], structure, DAMPING * by) for by in (1, 10, 1e9)]
    variances = [fitted.predicted(x)[1] for fitted in found]
    assert (variances[0] > variances[1]).all()
    assert (variances[2] < 1e-6).all()
    assert all((fitted.curvature.log_det() > 0).all() for fitted in found[1:])


def test_float32_networks_are_evaluated_in_float64() -> None:
    shape = SHAPES[1]
    nets, batch = world(shape)
    x = drawn(TASKS, 4, 2, seed=8)
    narrow = TaskBatch(batch.x.float(), batch.targets.float(), batch.weight.float())
    for structure in STRUCTURES:
        exact = laplace(shape, nets, batch, LIKELIHOODS[0], structure, DAMPING)
        single = laplace(shape, nets.float(), narrow, LIKELIHOODS[0], structure, DAMPING)
        mean, variance = single.predicted(x.float())
        assert (mean.dtype, variance.dtype) == (torch.float32, torch.float64)
        torch.testing.assert_close(variance, exact.predicted(x)[1], rtol=1e-4, atol=1e-5)
        assert single.draws(2, torch.Generator()).dtype == torch.float32


def test_a_task_that_overflowed_does_not_fail_the_others() -> None:
    shape = SHAPES[0]
    nets, batch = world(shape)
    x = drawn(TASKS, 4, 2, seed=8)
    batch.x[1, 0, 0] = torch.nan
    for structure in ("full", "diagonal", "last-layer"):
        _, variance = laplace(shape, nets, batch, LIKELIHOODS[0], structure, DAMPING).predicted(x)
        assert variance[[0, 2]].isfinite().all()
        assert not variance[1].isfinite().any()


# ---------------------------------------------------------------------- known truth


def test_a_linear_head_has_the_exact_posterior_of_the_default_learner() -> None:
    """Mean and covariance equal those of `metaban.models.default.prior` for a prior of any mean and covariance."""
    shape, noise = NetShape((4, 1), offsets=False), torch.tensor(0.2, dtype=torch.float64)
    spread = drawn(4, 4, seed=3)
    prior = Prior.of(drawn(4, seed=2), spread @ spread.T + torch.eye(4), noise)
    _, batch = world(shape)
    users = Statistics.of(batch.x, batch.targets[..., 0], batch.weight)
    mean, covariance = prior.posterior(users.gram, users.moment)
    found = mode(shape, prior.mean, batch, GaussianOutputs(noise), "full", prior.precision)
    torch.testing.assert_close(found, mean)
    fitted = laplace(shape, found, batch, GaussianOutputs(noise), "full", prior.precision)
    torch.testing.assert_close(fitted.curvature.log_det(), -torch.logdet(covariance))
    x = drawn(TASKS, 5, 4, seed=7)
    torch.testing.assert_close(fitted.predicted(x)[1][..., 0], torch.einsum("bni,bij,bnj->bn", x, covariance, x))


@pytest.mark.parametrize("structure", ["full", "last-layer", "kronecker"])
def test_the_evidence_of_a_linear_head_is_the_density_of_its_targets(structure: Structure) -> None:
    """Eq. 8 is exact for Gaussian outputs and a linear head: r ~ N(Hθ, HHᵀ/τ + σ²I)."""
    shape, likelihood = NetShape((4, 1), offsets=False), GaussianOutputs(torch.tensor(0.2, dtype=torch.float64))
    start, (_, batch) = drawn(4, seed=2), world(shape)
    nets = mode(shape, start, batch, likelihood, structure, DAMPING)
    fitted = laplace(shape, nets, batch, likelihood, structure, DAMPING)
    found = log_evidence(fitted, start, batch, likelihood, DAMPING)
    for task in range(TASKS):
        count = int(batch.weight[task].sum())
        rows = batch.x[task, :count]
        covariance = rows @ rows.T / DAMPING + likelihood.noise * torch.eye(count, dtype=torch.float64)
        true = MultivariateNormal(rows @ start, covariance).log_prob(batch.targets[task, :count, 0])
        torch.testing.assert_close(found[task], true)


def test_the_mode_of_a_last_layer_is_the_ridge_solution() -> None:
    shape, likelihood = SHAPES[1], GaussianOutputs(torch.tensor(0.2, dtype=torch.float64))
    nets, batch = world(shape)
    found = mode(shape, nets[0], batch, likelihood, "last-layer", DAMPING)
    slope = loss_gradient(shape, found, batch, likelihood) + DAMPING * (found - nets[0])
    last = layer_positions(shape)[-1].flatten()
    torch.testing.assert_close(slope[:, last], torch.zeros_like(slope[:, last]), atol=1e-9, rtol=0)
    kept = torch.ones(shape.parameters, dtype=torch.bool)
    kept[last] = False
    assert (found[:, kept] == nets[0, kept]).all()


def test_the_mode_of_a_logistic_head_is_where_its_gradient_vanishes() -> None:
    shape = NetShape((3, 1))
    nets, batch = world(shape)
    found = mode(shape, nets[0] * 0, batch, BernoulliOutputs(), "full", DAMPING, steps=20)
    slope = loss_gradient(shape, found, batch, BernoulliOutputs()) + DAMPING * found
    torch.testing.assert_close(slope, torch.zeros_like(slope), atol=1e-10, rtol=0)


def test_a_bias_free_net_as_a_dense_net() -> None:
    shape = Shape(3, 5, 4)
    theta = torch.stack([initial_parameters(shape, torch.Generator().manual_seed(s), torch.float64) for s in range(2)])
    x = drawn(2, 6, 3, seed=1)
    outputs, _ = output_factors(plain_shape(shape), theta, x)
    torch.testing.assert_close(outputs[..., 0], forward(shape, theta, x))
    assert plain_shape(shape).parameters == shape.parameters


# ---------------------------------------------------------------------- Algorithm 2


@by_structure
@by_likelihood
def test_meta_objective_and_gradient_equal_the_loop(structure: Structure, likelihood: OutputLikelihood) -> None:
    """Objective against a loop over tasks; gradient against finite differences of that loop."""
    shape, rate, steps, weight = NetShape((2, 4, 1)), 0.02, 2, 0.3
    start, (_, batch), (_, judged) = drawn(shape.parameters, seed=5), world(shape), world(shape, seed=20)

    def written_out(theta: Tensor) -> Tensor:
        found = []
        for task in range(TASKS):
            value, net = task_loss(shape, batch, task, likelihood), theta
            for _ in range(steps):
                net = net - rate * jacrev(value)(net)
            later = task_loss(shape, judged, task, likelihood)(net)
            found.append(later + weight * dense_log_det(dense(shape, net, batch, task, likelihood, structure)))
        return torch.stack(found)

    values, gradient = objective_gradient(
        shape, start, batch, judged, likelihood, structure, DAMPING, weight=weight, rate=rate, steps=steps
    )
    torch.testing.assert_close(values, written_out(start))
    for seed in range(2):
        along = drawn(shape.parameters, seed=30 + seed) * 1e-6
        change = (written_out(start + along).sum() - written_out(start - along).sum()) / 2
        torch.testing.assert_close(gradient @ along / 1e-6, change / 1e-6, rtol=1e-5, atol=1e-6)


def test_meta_training_by_the_gradient_lowers_the_objective() -> None:
    shape, likelihood = NetShape((1, 6, 1)), GaussianOutputs(torch.tensor(0.5, dtype=torch.float64))
    start, (_, batch), (_, judged) = drawn(shape.parameters, seed=5), world(shape), world(shape, seed=20)
    sums = []
    for _ in range(20):
        values, gradient = objective_gradient(
            shape, start, batch, judged, likelihood, "kronecker", DAMPING, weight=0.1, rate=0.01, steps=1
        )
        sums.append(float(values.sum()))
        start = start - 0.005 * gradient
    assert all(after < before for before, after in pairwise(sums))


def test_adapting_without_samples_returns_the_start() -> None:
    shape = SHAPES[0]
    nets, batch = world(shape)
    assert (adapted(shape, nets[0], batch, LIKELIHOODS[0], rate=0.1, steps=0) == nets[0]).all()
    fitted = Laplace(shape, nets, laplace(shape, nets, batch, LIKELIHOODS[0], "diagonal", DAMPING).curvature)
    plain = objective(fitted, batch, LIKELIHOODS[0], 0.0)
    torch.testing.assert_close(plain, loss(shape, nets, batch, LIKELIHOODS[0]))
