"""What networks and heads see of an input: codes against a loop, edges, directions, constant columns."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.encoding import (
    NARROWEST_BIN,
    SMALLEST_VARIANCE,
    Ramps,
    bins_for,
    centring,
    even_edges,
    pair_products,
    piecewise,
    principal_directions,
    products_for,
    quantile_edges,
    turned_towards,
)
from models.normalizer import Moments, standardize


def rows_of(count: int, d: int, seed: int = 0) -> Tensor:
    return torch.randn(count, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def moments_of(rows: Tensor) -> Moments:
    return Moments.of(rows, torch.ones(rows.shape[0], dtype=torch.bool))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**31), d=st.integers(1, 4), bins=st.integers(2, 6), rows=st.integers(1, 30))
def test_codes_are_the_looped_ones(seed: int, d: int, bins: int, rows: int) -> None:
    z = rows_of(rows, d, seed)
    edges = quantile_edges(rows_of(40, d, seed + 1), bins)
    codes = piecewise(z, edges)
    assert codes.shape == (rows, d * bins)
    for row in range(rows):
        for column in range(d):
            for piece in range(bins):
                low, high = edges[column, piece].item(), edges[column, piece + 1].item()
                expected = min(max((z[row, column].item() - low) / (high - low), 0.0), 1.0) - 0.5
                assert codes[row, column * bins + piece].item() == pytest.approx(expected, abs=1e-12)


def test_codes_keep_leading_dimensions() -> None:
    z, edges = rows_of(24, 3), even_edges(3, 4).to(torch.float64)
    torch.testing.assert_close(piecewise(z.view(2, 3, 4, 3), edges), piecewise(z, edges).view(2, 3, 4, 12))


def a_first_layer(inputs: int) -> tuple[Tensor, Tensor]:
    return rows_of(inputs, 5, seed=3), rows_of(5, 1, seed=4).squeeze(-1)


def test_a_layer_on_ramps_is_the_layer_on_inputs_and_codes() -> None:
    z, edges = rows_of(30, 3), quantile_edges(rows_of(50, 3, 1), 4)
    weight, offset = a_first_layer(3 + 3 * 4)
    ramps = Ramps.of(edges)
    folded, shifted = ramps.layer(weight, offset)
    expected = torch.cat([z, piecewise(z, edges)], -1) @ weight + offset
    torch.testing.assert_close(ramps.values(z) @ folded + shifted, expected)
    in_numpy = ramps.packed()
    np.testing.assert_array_equal(in_numpy.values(z.numpy()), ramps.values(z).numpy())


def test_the_gradient_of_ramps_is_that_of_central_differences() -> None:
    z, edges = rows_of(30, 3), quantile_edges(rows_of(50, 3, 1), 4)
    ramps, weight = Ramps.of(edges), a_first_layer(3 * 5)[0]
    found = ramps.gradient(z, weight[:, 0].expand(30, -1))
    for column in range(3):
        step = torch.zeros_like(z)
        step[:, column] = 1e-7
        rise = (ramps.values(z + step) - ramps.values(z - step)) @ weight[:, 0] / 2e-7
        torch.testing.assert_close(found[:, column], rise, atol=1e-6, rtol=1e-6)


def test_codes_never_fall_when_the_input_rises() -> None:
    edges = quantile_edges(rows_of(200, 1), 8)
    z = torch.linspace(-5, 5, 400, dtype=torch.float64).unsqueeze(-1)
    codes = piecewise(z, edges)
    assert (codes.diff(dim=0) >= 0).all()
    assert (codes[0] == -0.5).all()
    assert (codes[-1] == 0.5).all()
    # Between the outer edges no two inputs look the same.
    inside = (z > edges[0, 0]).squeeze(-1) & (z < edges[0, -1]).squeeze(-1)
    assert (codes[inside].sum(-1).diff() > 0).all()


def test_edges_hold_equal_shares_of_the_rows() -> None:
    z = rows_of(4_001, 3)
    edges = quantile_edges(z, 8)
    assert edges.shape == (3, 9)
    torch.testing.assert_close(edges[:, 0], z.amin(0))
    torch.testing.assert_close(edges[:, -1], z.amax(0))
    for column in range(3):
        counts = torch.histogram(z[:, column].contiguous(), edges[column].contiguous()).hist
        assert (counts - 4_001 / 8).abs().max() <= 2


@pytest.mark.parametrize("values", [[0.0], [0.0, 1.0], [-1.0, 0.0, 2.0]])
@pytest.mark.parametrize("rows", [1, 2, 50])
def test_edges_increase_even_where_few_values_are(values: list[float], rows: int) -> None:
    z = torch.tensor(values, dtype=torch.float64).repeat(rows)[:rows].unsqueeze(-1)
    edges = quantile_edges(z, 6)
    assert (edges.diff(dim=1) >= NARROWEST_BIN * 0.999).all()
    codes = piecewise(z, edges)
    assert codes.isfinite().all()
    assert codes.unique(dim=0).shape[0] == z.unique().shape[0]  # what differs still looks different


def test_edges_keep_the_type_of_the_rows() -> None:
    assert quantile_edges(rows_of(9, 2).to(torch.float32), 3).dtype == torch.float32


def test_first_edges_are_even() -> None:
    edges = even_edges(2, 4)
    assert edges.tolist() == [[-2.0, -1.0, 0.0, 1.0, 2.0]] * 2
    edges[0, 0] = 7.0
    assert edges[1, 0] == -2.0  # no memory shared between columns


@pytest.mark.parametrize(
    ("inputs", "bins", "most", "expected"),
    [(1, 16, 384, 16), (24, 16, 384, 16), (25, 16, 384, 15), (192, 16, 384, 2), (193, 16, 384, 0), (5, 0, 384, 0),
     (5, 1, 384, 0), (5, 2, 384, 2), (5, 16, 0, 0)],
)  # fmt: skip
def test_bins_of_a_column(inputs: int, bins: int, most: int, expected: int) -> None:
    assert bins_for(inputs, bins, most) == expected


# ---------------------------------------------------------------------- directions


def test_directions_whiten() -> None:
    rows = rows_of(3_000, 6) @ torch.diag(torch.tensor([3.0, 2.0, 1.0, 0.5, 0.2, 0.1], dtype=torch.float64))
    mixed = rows @ torch.linalg.qr(rows_of(6, 6, 1)).Q
    directions = principal_directions(mixed, 4)
    assert directions.shape == (6, 4)
    seen = mixed @ directions
    torch.testing.assert_close(seen.mT @ seen / 3_000, torch.eye(4, dtype=torch.float64))
    # Of all four directions these hold the most variance: what is left is that of the two smallest.
    values = torch.linalg.eigvalsh(mixed.mT @ mixed / 3_000)
    basis = torch.linalg.qr(directions).Q
    left = mixed - mixed @ basis @ basis.mT
    torch.testing.assert_close(left.square().sum() / 3_000, values[:2].sum())


def test_directions_without_variance_are_not_blown_up() -> None:
    rows = rows_of(100, 2) @ rows_of(2, 5, 1)  # rank 2
    directions = principal_directions(rows, 4)
    assert directions.isfinite().all()
    assert directions.norm(dim=0).max() <= SMALLEST_VARIANCE**-0.5 * 1.001
    assert ((rows @ directions).square().mean(0) < 1.001).all()


def test_directions_of_a_single_row_are_finite() -> None:
    assert principal_directions(rows_of(1, 5).to(torch.float32), 3).isfinite().all()


# ---------------------------------------------------------------------- centring


def test_centred_columns_have_no_mean_and_unit_deviation() -> None:
    rows = rows_of(500, 3) * torch.tensor([1e-3, 1.0, 1e4]) + torch.tensor([5.0, -2.0, 1e6])
    z = standardize(rows, *centring(moments_of(rows)))
    torch.testing.assert_close(z.mean(0), torch.zeros(3, dtype=torch.float64), atol=1e-8, rtol=0)
    torch.testing.assert_close(z.std(0, correction=0), torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("value", [0.0, 5.0, -1e6, 1e30])
def test_constant_columns_become_zero(value: float) -> None:
    rows = torch.full((20, 1), value, dtype=torch.float64)
    mean, scale = centring(moments_of(rows))
    assert scale.tolist() == [1.0]
    assert not standardize(rows, mean, scale).any()
    single = rows.to(torch.float32)
    assert not standardize(single, mean.to(torch.float32), scale.to(torch.float32)).any()


def test_a_column_that_only_rounding_moves_stays_small() -> None:
    """Counted as constant, though its last bits differ: they must not fill the whole range of an input."""
    rows = 1e9 + 64 * torch.randint(-3, 4, (200, 1), generator=torch.Generator().manual_seed(0)).to(torch.float64)
    assert standardize(rows, *centring(moments_of(rows))).abs().max() < 5


def test_products_are_of_every_pair_once() -> None:
    found = pair_products(torch.tensor([[2.0, 3.0, -1.0], [0.0, 1.0, 5.0]]))
    assert found.tolist() == [[3.0, 6.0, -2.0, 8.0, -3.0, 0.0], [-1.0, 0.0, 0.0, 0.0, 5.0, 24.0]]
    assert [products_for(3, 6), products_for(3, 5), products_for(9, 48), products_for(10, 48)] == [6, 0, 45, 0]
    drawn = torch.randn(20_000, 4, generator=torch.Generator().manual_seed(1))
    assert pair_products(drawn).mean(0).abs().max() < 0.05  # on average nothing, for standardised inputs


def test_turned_directions_show_rows_as_before() -> None:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(400, 6, generator=generator, dtype=torch.float64)
    rows[:, 1] *= 3
    directions = principal_directions(rows, 3)
    flipped = directions[:, [2, 0, 1]] * torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64)
    turned = turned_towards(rows, flipped, rows @ directions)
    assert torch.allclose(turned, directions, atol=1e-9)
    other = turned_towards(rows, directions, torch.randn(400, 3, generator=generator, dtype=torch.float64))
    seen = rows @ other  # a rotation: what was white stays white
    assert torch.allclose(seen.mT @ seen, (rows @ directions).mT @ (rows @ directions), atol=1e-6)
