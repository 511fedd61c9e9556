"""Stacked networks against one network at a time, and closed forms against autograd."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from metaban.models.numerics.bias_free_net import (
    Shape,
    forward,
    gradient_distance,
    gradient_norm,
    initial_parameters,
    loss_gradient,
    predict_all,
)
from tests.models.literal import gradient, layers, network

DEPTHS = (2, 3, 4, 5)
PROPERTY = settings(max_examples=40, deadline=None, derandomize=True)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Small networks, down to a single input and a single unit."""
    return Shape(draw(st.integers(1, 6)), draw(st.integers(1, 9)), draw(st.integers(2, 5)))


def population(shape: Shape, count: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """This many different networks, [count, p]."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [initial_parameters(shape, generator, dtype) for _ in range(count)]
    return torch.stack(drawn) if drawn else torch.zeros((0, shape.parameters), dtype=dtype)


def normal(*size: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal numbers, the same for the same seed."""
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def one(shape: Shape, theta: Tensor, x: Tensor) -> Tensor:
    """f of one network on one input."""
    return network(x, theta, shape.width, shape.depth)


def output_gradient(shape: Shape, theta: Tensor, x: Tensor) -> Tensor:
    """g(x;θ) by autograd."""
    return gradient(lambda point: one(shape, point, x), theta)


@pytest.mark.parametrize(("inputs", "width", "depth"), [(0, 1, 2), (1, 0, 2), (1, 1, 1)])
def test_a_network_without_inputs_or_hidden_units_is_refused(inputs: int, width: int, depth: int) -> None:
    with pytest.raises(ValueError, match="network needs"):
        Shape(inputs, width, depth)


@pytest.mark.parametrize("depth", DEPTHS)
def test_the_parameters_are_the_matrices_row_after_row(depth: int) -> None:
    shape = Shape(3, 4, depth)
    assert shape.parameters == 4 * 3 + (depth - 2) * 16 + 4
    theta = torch.arange(shape.parameters, dtype=torch.float64)
    first, *_, last = layers(theta, 3, 4, depth)
    assert first[1].tolist() == [3.0, 4.0, 5.0]
    assert last[0].tolist() == theta[-4:].tolist()
    # One unit of the first layer reads only x[2]; all later weights are one.
    theta = torch.zeros(shape.parameters, dtype=torch.float64)
    theta[1 * 3 + 2] = 2.0
    theta[12:] = 1.0
    x = torch.tensor([[[5.0, 7.0, 3.0], [5.0, 7.0, -3.0]]], dtype=torch.float64)
    expected = [6.0 * 4 ** (depth - 2), 0.0]
    assert forward(shape, theta.unsqueeze(0), x).tolist() == [expected]


@PROPERTY
@given(shape=shapes(), networks=st.integers(0, 4), samples=st.integers(0, 4), seed=st.integers(0, 2**31))
def test_forward_equals_each_network_on_each_of_its_inputs(
    shape: Shape, networks: int, samples: int, seed: int
) -> None:
    theta = population(shape, networks, seed)
    x = normal(networks, samples, shape.inputs, seed=seed + 1)
    result = forward(shape, theta, x)
    assert result.shape == (networks, samples)
    for b in range(networks):
        for s in range(samples):
            torch.testing.assert_close(result[b, s], one(shape, theta[b], x[b, s]), rtol=1e-10, atol=1e-12)


@PROPERTY
@given(shape=shapes(), networks=st.integers(0, 4), inputs=st.integers(0, 4), seed=st.integers(0, 2**31))
def test_predict_all_equals_every_network_on_every_input(shape: Shape, networks: int, inputs: int, seed: int) -> None:
    theta = population(shape, networks, seed)
    x = normal(inputs, shape.inputs, seed=seed + 1)
    result = predict_all(shape, theta, x)
    assert result.shape == (inputs, networks)
    for n in range(inputs):
        for p in range(networks):
            torch.testing.assert_close(result[n, p], one(shape, theta[p], x[n]), rtol=1e-10, atol=1e-12)


@PROPERTY
@given(shape=shapes(), networks=st.integers(1, 4), samples=st.integers(0, 4), seed=st.integers(0, 2**31))
def test_loss_gradient_equals_autograd(shape: Shape, networks: int, samples: int, seed: int) -> None:
    theta = population(shape, networks, seed)
    x = normal(networks, samples, shape.inputs, seed=seed + 1)
    rewards = normal(networks, samples, seed=seed + 2)
    weight = normal(networks, samples, seed=seed + 3).abs()
    if samples:
        weight[0, 0] = 0.0
    result = loss_gradient(shape, theta, x, rewards, weight)
    assert result.shape == theta.shape
    for b in range(networks):

        def loss(point: Tensor, b: int = b) -> Tensor:
            total = torch.zeros((), dtype=torch.float64)
            for s in range(samples):
                total = total + 0.5 * weight[b, s] * (one(shape, point, x[b, s]) - rewards[b, s]) ** 2
            return total

        torch.testing.assert_close(result[b], gradient(loss, theta[b]), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("depth", DEPTHS)
def test_loss_gradient_equals_torch_func(depth: int) -> None:
    shape = Shape(5, 7, depth)
    theta = population(shape, 6, depth)
    x, rewards, weight = normal(6, 8, 5, seed=1), normal(6, 8, seed=2), normal(6, 8, seed=3).abs()

    def loss(point: Tensor, inputs: Tensor, targets: Tensor, each: Tensor) -> Tensor:
        predicted = forward(shape, point.unsqueeze(0), inputs.unsqueeze(0)).squeeze(0)
        return 0.5 * (each * (predicted - targets) ** 2).sum()

    expected = torch.func.vmap(torch.func.grad(loss))(theta, x, rewards, weight)
    torch.testing.assert_close(loss_gradient(shape, theta, x, rewards, weight), expected)


@PROPERTY
@given(shape=shapes(), count=st.integers(1, 4), seed=st.integers(0, 2**31), shared=st.booleans())
def test_gradient_distance_and_norm_equal_autograd(shape: Shape, count: int, seed: int, shared: bool) -> None:
    a = population(shape, count, seed)
    b = population(shape, 1, seed + 1)[0] if shared else population(shape, count, seed + 1)
    x = normal(count, shape.inputs, seed=seed + 2)
    distance = gradient_distance(shape, a, b, x)
    norm = gradient_norm(shape, a, x)
    assert distance.shape == norm.shape == (count,)
    for n in range(count):
        own = output_gradient(shape, a[n], x[n])
        other = output_gradient(shape, b if shared else b[n], x[n])
        torch.testing.assert_close(distance[n], (own - other).norm(), rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(norm[n], own.norm(), rtol=1e-9, atol=1e-12)


def test_the_gradient_at_a_kink_equals_autograd() -> None:
    shape = Shape(2, 3, 3)
    theta = population(shape, 1, 0)
    x = torch.zeros((1, 2), dtype=torch.float64)  # every pre-activation is exactly 0
    result = loss_gradient(shape, theta, x.unsqueeze(0), torch.ones((1, 1)).double(), torch.ones((1, 1)).double())
    assert result.tolist() == [[0.0] * shape.parameters]
    assert gradient_norm(shape, theta, x).tolist() == [output_gradient(shape, theta[0], x[0]).norm().item()]


@pytest.mark.parametrize("depth", DEPTHS)
def test_the_distance_of_a_network_to_itself_is_zero(depth: int) -> None:
    shape = Shape(6, 16, depth)
    theta = population(shape, 5, depth, torch.float32)
    x = normal(5, 6, seed=depth, dtype=torch.float32)
    assert gradient_distance(shape, theta, theta, x).tolist() == [0.0] * 5


@pytest.mark.parametrize("noise", [1e-2, 1e-4])
@pytest.mark.parametrize("width", [8, 100])
@pytest.mark.parametrize("depth", DEPTHS)
def test_the_distance_of_near_networks_does_not_cancel(depth: int, width: int, noise: float) -> None:
    """Computed as ‖a‖² + ‖b‖² − 2⟨a, b⟩ it would be rounding noise, or the root of a negative number."""
    shape = Shape(10, width, depth)
    count = 64
    a = population(shape, count, 11, torch.float32)
    b = a + noise * normal(count, shape.parameters, seed=12, dtype=torch.float32)
    x = normal(count, 10, seed=13, dtype=torch.float32)

    def output(theta: Tensor, inputs: Tensor) -> Tensor:
        return forward(shape, theta.unsqueeze(0), inputs.view(1, 1, -1)).squeeze()

    each = torch.func.vmap(torch.func.grad(output))
    exact = (each(a.double(), x.double()) - each(b.double(), x.double())).norm(dim=1)
    result = gradient_distance(shape, a, b, x)
    assert result.isfinite().all()
    assert (exact > 0).sum() > count // 2  # a narrow deep network may be dead at an input
    assert ((result.double() - exact).abs() <= 1e-2 * exact).all()


@pytest.mark.parametrize("noise", [1e-6, 1e-7, 1e-8])
def test_the_distance_of_nearly_equal_networks_is_finite_and_small(noise: float) -> None:
    shape = Shape(10, 32, 4)
    a = population(shape, 64, 21, torch.float32)
    b = a + noise * normal(64, shape.parameters, seed=22, dtype=torch.float32)
    x = normal(64, 10, seed=23, dtype=torch.float32)
    result = gradient_distance(shape, a, b, x)
    assert result.isfinite().all()
    assert (result >= 0).all()
    assert (result <= 1e-3 * gradient_norm(shape, a, x)).all()


@pytest.mark.parametrize("depth", DEPTHS)
def test_initial_parameters_have_the_variances_of_section_5(depth: int) -> None:
    shape = Shape(60, 80, depth)
    drawn = torch.stack(
        [initial_parameters(shape, torch.Generator().manual_seed(seed), torch.float64) for seed in range(40)]
    )
    for index, matrix in enumerate(zip(*(layers(row, 60, 80, depth) for row in drawn), strict=True)):
        values = torch.stack(matrix).flatten()
        variance = (1 if index == depth - 1 else 2) / 80
        count = values.numel()
        # Five standard errors of a mean and of a variance.
        assert abs(values.mean().item()) < 5 * math.sqrt(variance / count)
        assert abs(values.var().item() / variance - 1) < 5 * math.sqrt(2 / count)


def test_initial_parameters_depend_on_the_generator_alone() -> None:
    shape = Shape(4, 5, 3)
    first = initial_parameters(shape, torch.Generator().manual_seed(5), torch.float32)
    torch.manual_seed(0)
    again = initial_parameters(shape, torch.Generator().manual_seed(5), torch.float32)
    other = initial_parameters(shape, torch.Generator().manual_seed(6), torch.float32)
    assert first.dtype == torch.float32
    assert first.tolist() == again.tolist()
    assert first.tolist() != other.tolist()
