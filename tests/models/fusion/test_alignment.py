"""Permutations keep the function, costs are those of Eq. 33, and assignments are optimal."""

from __future__ import annotations

import math
from itertools import permutations, product

import pytest
import torch
from torch import Tensor

from metaban.models.fusion.alignment import (
    Density,
    aligned,
    assignment_costs,
    best_orders,
    contribution_variances,
    first_alignment,
    permuted,
)
from metaban.models.numerics.dense_net import NetShape, rescaled

SHAPES = [
    NetShape((1, 100, 1)),
    NetShape((3, 4, 2)),
    NetShape((2, 5, 3, 4, 1)),
    NetShape((4, 6, 6, 1), offsets=False),
    NetShape((7, 1), offsets=False),
]


def generator_of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn_nets(shape: NetShape, count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, shape.parameters, generator=generator_of(seed), dtype=torch.float64)


def drawn_orders(shape: NetShape, count: int, seed: int = 1) -> dict[int, Tensor]:
    generator = generator_of(seed)
    return {
        place: torch.stack([torch.randperm(width, generator=generator) for _ in range(count)])
        for place, width in enumerate(shape.widths[1:-1])
    }


def module_of(shape: NetShape, net: Tensor) -> torch.nn.Sequential:
    layers: list[torch.nn.Module] = []
    for rows, columns in shape.sizes:
        layers += [torch.nn.Linear(columns, rows, bias=shape.offsets, dtype=net.dtype), torch.nn.ReLU()]
    module = torch.nn.Sequential(*layers[:-1])
    torch.nn.utils.vector_to_parameters(net.clone(), module.parameters())
    return module


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_equal_torch_modules(shape: NetShape) -> None:
    nets = drawn_nets(shape, 3)
    x = torch.randn(6, shape.widths[0], generator=generator_of(2), dtype=torch.float64)
    expected = torch.stack([module_of(shape, net)(x) for net in nets])
    torch.testing.assert_close(shape.outputs(nets, x), expected)
    torch.testing.assert_close(shape.flat(shape.layers(nets)), nets, rtol=0, atol=0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_permuted_and_rescaled_networks_compute_the_same(shape: NetShape) -> None:
    nets = drawn_nets(shape, 5)
    x = torch.randn(9, shape.widths[0], generator=generator_of(2), dtype=torch.float64)
    moved = permuted(shape, nets, drawn_orders(shape, 5))
    for same in (moved, rescaled(shape, nets), rescaled(shape, moved, balance=True)):
        torch.testing.assert_close(shape.outputs(same, x), shape.outputs(nets, x))
    if len(shape.sizes) > 1:
        assert not torch.equal(moved, nets)


def test_rescaled_units_have_the_expected_norms() -> None:
    shape = NetShape((3, 6, 5, 2))
    nets = drawn_nets(shape, 4)
    _, middle, last = shape.layers(rescaled(shape, nets))
    torch.testing.assert_close(last[..., :-1].norm(dim=-2), torch.ones(4, 5, dtype=torch.float64))
    torch.testing.assert_close(middle[..., :-1].norm(dim=-2), torch.ones(4, 6, dtype=torch.float64))
    single = NetShape((3, 6, 2))
    first, last = single.layers(rescaled(single, drawn_nets(single, 4), balance=True))
    torch.testing.assert_close(last[..., :-1].norm(dim=-2), first.norm(dim=-1))


def test_units_without_weights_are_left_alone() -> None:
    shape = NetShape((2, 3, 1))
    nets = torch.zeros(2, shape.parameters)
    for balance in (False, True):
        assert torch.equal(rescaled(shape, nets, balance=balance), nets)


def test_kinds_are_the_same_for_all_units_of_a_layer() -> None:
    shape = NetShape((2, 5, 3, 2))
    kinds = shape.kinds().expand(4, -1)
    assert torch.equal(permuted(shape, kinds, drawn_orders(shape, 4)), kinds)
    assert kinds[0].unique().tolist() == list(range(2 + 1 + 1 + 1 + 2 + 2))
    assert NetShape((4, 1), offsets=False).kinds().tolist() == [0, 1, 2, 3]


def log_density(net: Tensor, means: Tensor, variances: Tensor) -> float:
    """E log N(γ | m, v) over samples, one parameter at a time."""
    total = 0.0
    for mean, variance in zip(means, variances, strict=True):
        for value, m, v in zip(net.tolist(), mean.tolist(), variance.tolist(), strict=True):
            total += -0.5 * (math.log(2 * math.pi * v) + (value - m) ** 2 / v)
    return total / len(means)


@pytest.mark.parametrize("shape", [NetShape((2, 4, 1)), NetShape((1, 4, 2), offsets=False)], ids=str)
def test_the_assignment_is_optimal_among_all_permutations(shape: NetShape) -> None:
    count, samples = 3, 2
    nets = drawn_nets(shape, count)
    means = torch.randn(samples, count, shape.parameters, generator=generator_of(3), dtype=torch.float64)
    variances = torch.rand(samples, count, shape.parameters, generator=generator_of(4), dtype=torch.float64) + 0.1
    found = aligned(shape, nets, Density.expected(means, variances))
    for row in range(count):
        best = max(
            log_density(
                permuted(shape, nets[row : row + 1], {0: torch.tensor([order])})[0], means[:, row], variances[:, row]
            )
            for order in permutations(range(4))
        )
        assert log_density(found[row], means[:, row], variances[:, row]) == pytest.approx(best)


def test_costs_differ_as_log_densities_do() -> None:
    shape = NetShape((2, 4, 3, 1))
    nets = drawn_nets(shape, 2)
    means = torch.randn(3, 2, shape.parameters, generator=generator_of(3), dtype=torch.float64)
    variances = torch.rand(3, 2, shape.parameters, generator=generator_of(4), dtype=torch.float64) + 0.1
    costs = assignment_costs(shape, nets, Density.expected(means, variances), 1)
    order = [2, 0, 1]
    moved = permuted(shape, nets, {1: torch.tensor([order, order])})
    for row in range(2):
        gained = log_density(moved[row], means[:, row], variances[:, row]) - log_density(
            nets[row], means[:, row], variances[:, row]
        )
        change = sum(float(costs[row, u, v]) for v, u in enumerate(order)) - float(costs[row].diagonal().sum())
        assert gained == pytest.approx(-0.5 * change)


def test_sweeps_over_two_layers_never_get_worse_and_reach_the_optimum() -> None:
    shape = NetShape((1, 3, 3, 1))
    net = drawn_nets(shape, 1)
    mean = permuted(shape, net, {0: torch.tensor([[2, 0, 1]]), 1: torch.tensor([[1, 2, 0]])})
    variance = torch.ones_like(mean)
    found = aligned(shape, net, Density.expected(mean[None], variance), sweeps=4)
    orders = list(permutations(range(3)))
    best = max(
        log_density(permuted(shape, net, {0: torch.tensor([a]), 1: torch.tensor([b])})[0], mean, variance)
        for a, b in product(orders, orders)
    )
    before, after = log_density(net[0], mean, variance), log_density(found[0], mean, variance)
    assert before < after <= best + 1e-9


def test_best_orders_give_the_unit_of_each_position() -> None:
    costs = torch.ones(1, 3, 3)
    for unit, place in ((0, 2), (1, 0), (2, 1)):
        costs[0, unit, place] = 0
    assert best_orders(costs).tolist() == [[1, 2, 0]]


def test_a_first_alignment_undoes_shuffling() -> None:
    shape = NetShape((2, 12, 1))
    original = rescaled(shape, drawn_nets(shape, 1)).expand(20, -1)
    noisy = original + 0.01 * drawn_nets(shape, 20, seed=5)
    shuffled = permuted(shape, noisy, drawn_orders(shape, 20))
    profiles = torch.randn(20, 2, generator=generator_of(6), dtype=torch.float64)
    found = first_alignment(shape, shuffled, profiles)
    assert float(shuffled.std(0).mean()) > 0.3
    assert float(found.std(0).mean()) < 0.02


def test_networks_without_hidden_units_are_unchanged() -> None:
    head = NetShape((5, 1), offsets=False)
    nets = drawn_nets(head, 4)
    assert torch.equal(first_alignment(head, nets, torch.zeros(4, 1, dtype=torch.float64)), nets)
    variance = contribution_variances(head, nets, None)
    assert torch.equal(aligned(head, nets, Density.expected(nets[None], variance)), nets)
