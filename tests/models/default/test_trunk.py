"""The trunk's forward and backward pass against autograd, its optimiser against torch's."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from metaban.models.default.trunk import Trunk, TrunkState


def generator_of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn(trunk: Trunk, rows: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Parameters, inputs and rewards."""
    generator = generator_of(seed)
    flat = torch.randn(trunk.parameters, generator=generator, dtype=torch.float64)
    x = torch.randn(rows, trunk.inputs, generator=generator, dtype=torch.float64)
    return flat, x, torch.rand(rows, generator=generator, dtype=torch.float64)


def modules_of(trunk: Trunk, flat: Tensor) -> list[torch.nn.Sequential]:
    """The members as torch layers: layer by layer, weights of all members row by row, then their biases."""
    widths = [trunk.inputs, *[trunk.width] * trunk.depth, 1]
    layers: list[list[torch.nn.Module]] = [[] for _ in range(trunk.members)]
    start = 0
    for before, after in pairwise(widths):
        linear = [torch.nn.Linear(before, after, dtype=flat.dtype) for _ in layers]
        for parameter in [*(each.weight for each in linear), *(each.bias for each in linear)]:
            end = start + parameter.numel()
            parameter.data = flat[start:end].view_as(parameter).clone()
            start = end
        for member, each in zip(layers, linear, strict=True):
            member += [each, torch.nn.ReLU()]
    assert start == flat.shape[0]
    return [torch.nn.Sequential(*member[:-1]) for member in layers]


SHAPES = [Trunk(1, 1, 1), Trunk(3, 4, 1, 2), Trunk(5, 7, 2), Trunk(4, 6, 3), Trunk(4, 3, 2, 4)]


@pytest.mark.parametrize("trunk", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [1, 9])
def test_predictions_and_gradients_equal_autograd(trunk: Trunk, rows: int) -> None:
    """The prediction is the mean of all members; each member learns by itself."""
    flat, x, rewards = drawn(trunk, rows)
    modules = modules_of(trunk, flat)
    outputs = [module(x).squeeze(-1) for module in modules]
    expected = torch.stack(outputs).mean(0).detach()
    torch.testing.assert_close(trunk.predict(flat, x), expected, rtol=1e-10, atol=1e-10)
    for module, output in zip(modules, outputs, strict=True):
        (output - rewards).square().mean().backward()
        assert all(parameter.grad is not None for parameter in module.parameters())
    gradient = trunk.gradient(flat, x, rewards)
    assert gradient.shape == flat.shape
    for module, of_module in zip(modules, modules_of(trunk, gradient), strict=True):
        for parameter, found in zip(module.parameters(), of_module.parameters(), strict=True):
            torch.testing.assert_close(found.data, parameter.grad, rtol=1e-10, atol=1e-10)


def test_members_are_initialised_differently() -> None:
    trunk = Trunk(6, 8, 2, 3)
    x = torch.randn(20, 6, generator=generator_of(5), dtype=torch.float64)
    said = torch.stack([member(x).squeeze(-1) for member in modules_of(trunk, trunk.initial(generator_of(6), x.dtype))])
    assert said.std(0).min() > 0


def test_arguments_are_not_modified() -> None:
    trunk = SHAPES[2]
    flat, x, rewards = drawn(trunk, 9)
    before = flat.clone(), x.clone(), rewards.clone()
    trunk.predict(flat, x)
    state = TrunkState.fresh(flat)
    state.after(trunk.gradient(flat, x, rewards), 0.1, 0.1)
    assert torch.equal(flat, before[0])
    assert torch.equal(x, before[1])
    assert torch.equal(rewards, before[2])
    assert not state.first.any()
    assert float(state.steps) == 0


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("size", [1.0, 1e-6])  # small enough that the place of ε matters
def test_steps_equal_adamw(size: float, decay: float) -> None:
    trunk, rate = SHAPES[2], 0.01
    flat, _, _ = drawn(trunk, 1)
    parameter = torch.nn.Parameter(flat.clone())
    optimizer = torch.optim.AdamW([parameter], lr=rate, weight_decay=decay)
    state, generator = TrunkState.fresh(flat), generator_of(1)
    for step in range(20):
        gradient = torch.randn(flat.shape, generator=generator, dtype=torch.float64)
        parameter.grad = gradient.sign() * (gradient.abs() + 0.5) * size
        optimizer.step()
        state = state.after(parameter.grad, rate, decay)
        torch.testing.assert_close(state.parameters, parameter.detach(), rtol=0, atol=1e-5 * rate)
        assert float(state.steps) == step + 1


def test_training_can_continue_from_a_stored_state() -> None:
    """The state holds all that a step needs."""
    trunk = SHAPES[1]
    flat, x, rewards = drawn(trunk, 9)
    straight = TrunkState.fresh(flat)
    for _ in range(6):
        straight = straight.after(trunk.gradient(straight.parameters, x, rewards), 0.01, 0.1)
    state = TrunkState.fresh(flat)
    for _ in range(6):
        state = TrunkState(*(value.clone() for value in (state.parameters, state.first, state.second, state.steps)))
        state = state.after(trunk.gradient(state.parameters, x, rewards), 0.01, 0.1)
    assert torch.equal(state.parameters, straight.parameters)


def test_a_function_is_learned() -> None:
    trunk = Trunk(2, 32, 2, 2)
    generator = generator_of(2)
    x = torch.randn(512, 2, generator=generator)
    rewards = ((x[:, 0] * x[:, 1]) > 0).to(x.dtype)
    state = TrunkState.fresh(trunk.initial(generator, torch.float32))
    for _ in range(400):
        rows = torch.randint(512, (128,), generator=generator)
        state = state.after(trunk.gradient(state.parameters, x[rows], rewards[rows]), 0.005, 0.01)
    assert (trunk.predict(state.parameters, x) - rewards).square().mean() < 0.05  # a constant would leave 0.25


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_untrained_trunk_predicts_near_zero_and_reproducibly(dtype: torch.dtype) -> None:
    trunk = Trunk(20, 64, 2, 2)
    first, second = (trunk.initial(generator_of(3), dtype) for _ in range(2))
    assert torch.equal(first, second)
    assert first.shape == (trunk.parameters,)
    assert first.dtype == dtype
    x = torch.randn(200, 20, generator=generator_of(4), dtype=dtype)
    assert trunk.predict(first, x).abs().max() < 0.1
    for weights, offsets in trunk.layers(first)[:-1]:
        bound = weights.shape[-1] ** -0.5
        assert max(weights.abs().max(), offsets.abs().max()) <= bound
        assert weights.abs().max() > 0.95 * bound
