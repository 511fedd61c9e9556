"""Inputs of trunk and heads, and how a refit changes them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from metaban.models.default.inputs import (
    NARROWEST_BIN,
    SMALLEST_VARIANCE,
    Ramps,
    bins_for,
    centre_and_scale,
    even_edges,
    pair_products,
    piecewise,
    principal_directions,
    products_for,
    quantile_edges,
    rotated_towards,
)
from metaban.models.default.learner import PosteriorLearner
from metaban.models.default.notes import Notes
from metaban.models.features import InputParts
from metaban.models.numerics.normalizer import Moments, repeated_share, standardize
from tests.models.default_worlds import (
    WIDE,
    UserHistory,
    as_array,
    batch_of,
    generator_of,
    kinds,
    past_arm_views,
    small,
    users_of_related_slates,
)
from tests.models.literal_default import literal_ratio
from tests.models.worlds import assert_close

BOTH = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
WIDTHS = pytest.mark.parametrize("changes", [{}, WIDE], ids=["narrow", "wide"])


def test_inputs_are_unchanged_between_refits() -> None:
    learner = PosteriorLearner(small(**WIDE), 3)
    people = users_of_related_slates(learner, 12, 8, generator_of(7), torch.full((3,), 2.0))
    batch = batch_of(people, torch.float32)
    shared = learner.derive(learner.initial_shared(), [batch], 0, 300)
    notes = batch.phi.clone()
    Notes(notes).slate[..., 1:] += 1
    changed = replace(batch, features=batch.features * 3 + 1, phi=notes)
    later = learner.derive(shared, [changed], 300, 364)
    for name in ("mean", "scale", "edges", "directions", "gain", "common_ratio", "common_centre"):
        assert torch.equal(later[name], shared[name])
    assert not torch.equal(later["trunk"], shared["trunk"])
    refitted = learner.derive(shared, [changed], 500, 512)
    for name in ("mean", "scale", "common_ratio", "common_centre"):
        assert not torch.equal(refitted[name], shared[name])


@pytest.mark.parametrize("changes", [{}, WIDE, {**WIDE, "apart": False}], ids=["narrow", "wide", "wide, not apart"])
def test_standardised_inputs_have_no_mean_and_unit_deviation(changes: dict[str, int]) -> None:
    """For wide inputs this holds after the common part is removed, as the learner sees them."""
    learner = PosteriorLearner(small(**changes), 3, torch.float64)
    generator = generator_of(8)
    shared_part = torch.full((3,), 2.0)
    people = (
        users_of_related_slates(learner, 30, 8, generator, shared_part)
        if learner.inputs.removes_common
        else kinds(learner, 30, 8, generator)
    )
    for person in people:
        for values in past_arm_views(learner, person):
            values *= torch.tensor([5.0, 0.01, 1.0])
            values += torch.tensor([100.0, 0.0, -3.0])
    shared = learner.derive(learner.initial_shared(), [batch_of(people)], 0, 16)
    features, notes = (torch.cat([getattr(person, name) for person in people]) for name in ("features", "phi"))
    z = learner.inputs.standardized(shared, features, Notes(notes).slate)
    assert_close(z.mean(0), torch.zeros(3), 1e-8)
    assert_close(z.std(0, correction=0), torch.ones(3), 1e-8)
    as_they_came = (features - features.mean(0)) / features.std(0, correction=0)
    assert torch.allclose(z, as_they_came, atol=1e-6) != learner.inputs.removes_common
    assert_close(shared["edges"][:, 0], z.amin(0), 1e-8)
    assert_close(shared["edges"][:, -1], z.amax(0), 1e-8)
    if learner.inputs.narrowed:
        seen = z @ shared["directions"]
        assert_close(seen.mT @ seen / len(z), torch.eye(2), 1e-8)


def test_new_directions_are_rotated_to_match_the_old() -> None:
    """Compared with the old view of the samples, including the old common part: any further rotation would be worse."""
    learner = PosteriorLearner(small(**WIDE), 3, torch.float64)
    ratio = torch.tensor([0.2, 3.0, 1.0], dtype=torch.float64)
    people = users_of_related_slates(learner, 30, 8, generator_of(21), ratio)
    before = learner.derive(learner.initial_shared(), [batch_of(people)], 0, 16)
    people += users_of_related_slates(learner, 20, 8, generator_of(22), ratio.flip(0))
    after = learner.derive(before, [batch_of(people)], 16, 32)
    features, notes = (torch.cat([getattr(person, name) for person in people]) for name in ("features", "phi"))
    old, new = (
        learner.inputs.standardized(shared, features, Notes(notes).slate) @ shared["directions"]
        for shared in (before, after)
    )
    likeness = new.mT @ old  # the best rotation makes this symmetric and positive
    assert_close(likeness, likeness.mT, 1e-8)
    assert torch.linalg.eigvalsh(likeness).min() > 0


@BOTH
def test_a_refit_estimates_the_common_part_of_slates(dtype: torch.dtype) -> None:
    """Estimated from all samples by weight, near the truth."""
    learner = PosteriorLearner(small(**WIDE), 4, dtype)
    truth = torch.tensor([0.0, 0.5, 4.0, 30.0], dtype=torch.float64)
    people = users_of_related_slates(learner, 60, 40, generator_of(17), truth)
    since = 2
    shared = learner.initial_shared() | {"since": torch.tensor(float(since), dtype=torch.float64)}
    batches = [batch_of(people[:20], dtype), batch_of(people[20:], dtype, padding=3)]
    derived = learner.derive(shared, batches, 0, 2_400)
    assert derived["since"] == since
    features, notes = (torch.cat([getattr(person, name) for person in people]) for name in ("features", "phi"))
    epochs = torch.cat([person.epochs for person in people]).tolist()
    weights = [1.0 if epoch >= since else 0.05 for epoch in epochs]
    ratio, centre = literal_ratio(as_array(features), as_array(Notes(notes).slate), weights)
    tolerance = 1e-8 if dtype == torch.float64 else 1e-5
    assert_close(derived["common_ratio"], torch.tensor(ratio, dtype=torch.float64), tolerance)
    assert_close(derived["common_centre"], torch.tensor(centre, dtype=torch.float64), tolerance)
    assert derived["common_ratio"].dtype == derived["common_centre"].dtype == dtype
    # Half of 2 400 samples count: errors of (τ² + σ²/k)/σ² are about √(4/1 200) of it.
    away = (derived["common_ratio"].double() - truth) / (truth + 0.5)
    assert away.abs().max() < 4 * (4 / 1_200) ** 0.5


def test_single_arm_slates_have_no_common_part() -> None:
    """A slate of one arm says nothing about common parts: the epoch equals that of a learner that removes none."""
    learner = PosteriorLearner(small(**WIDE), 3, torch.float64)
    people = kinds(learner, 12, 8, generator_of(18))
    for person in people:
        Notes(person.phi).slate[:] = torch.cat([torch.ones(8, 1), person.features], dim=1)
    derived = learner.derive(learner.initial_shared(), [batch_of(people)], 0, 512)
    assert not derived["common_ratio"].any()
    unaware = PosteriorLearner(small(apart=False, **WIDE), 3, torch.float64)
    for person in people:
        person.phi = person.phi[:, : Notes.COUNT]
    expected = unaware.derive(unaware.initial_shared(), [batch_of(people)], 0, 512)
    assert set(derived) - set(expected) == {"common_ratio", "common_centre"}
    for name in expected:
        assert torch.equal(derived[name], expected[name])


def test_the_noted_slate_has_no_other_effect() -> None:
    """The noted slate reaches trunk and heads only through the common part; without one it has no effect."""
    learner = PosteriorLearner(small(**WIDE), 3, torch.float64)
    shared = learner.initial_shared()
    batch = batch_of(kinds(learner, 12, 8, generator_of(19)))
    other = batch.phi.clone()
    Notes(other).slate[..., 1:] += torch.randn(12, 8, 3, generator=generator_of(20), dtype=torch.float64)
    assert not shared["common_ratio"].any()  # unchanged between refits
    one, same = (learner.derive(shared, [replace(batch, phi=phi)], 300, 364) for phi in (batch.phi, other))
    for name in one:
        assert torch.equal(one[name], same[name])
    shared["common_ratio"] += 1
    one, another = (learner.derive(shared, [replace(batch, phi=phi)], 300, 364) for phi in (batch.phi, other))
    for name in ("trunk", "prior_mean", "prior_covariance"):
        assert not torch.allclose(one[name], another[name])


# ---------------------------------------------------------------------- encoding


def rows_of(count: int, d: int, seed: int = 0) -> Tensor:
    return torch.randn(count, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def moments_of(rows: Tensor) -> Moments:
    return Moments.of(rows, torch.ones(rows.shape[0], dtype=torch.bool))


def repeats_of(rows: Tensor) -> Tensor:
    return repeated_share(rows, torch.ones(rows.shape[0], dtype=torch.bool))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**31), d=st.integers(1, 4), bins=st.integers(2, 6), rows=st.integers(1, 30))
def test_codes_equal_the_loop(seed: int, d: int, bins: int, rows: int) -> None:
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


def test_a_layer_on_ramps_equals_the_layer_on_inputs_and_codes() -> None:
    z, edges = rows_of(30, 3), quantile_edges(rows_of(50, 3, 1), 4)
    weight, offset = a_first_layer(3 + 3 * 4)
    ramps = Ramps.of(edges)
    folded, shifted = ramps.layer(weight, offset)
    expected = torch.cat([z, piecewise(z, edges)], -1) @ weight + offset
    torch.testing.assert_close(ramps.values(z) @ folded + shifted, expected)
    in_numpy = ramps.packed()
    np.testing.assert_array_equal(in_numpy.values(z.numpy()), ramps.values(z).numpy())


def test_the_gradient_of_ramps_equals_central_differences() -> None:
    z, edges = rows_of(30, 3), quantile_edges(rows_of(50, 3, 1), 4)
    ramps, weight = Ramps.of(edges), a_first_layer(3 * 5)[0]
    found = ramps.gradient(z, weight[:, 0].expand(30, -1))
    for column in range(3):
        step = torch.zeros_like(z)
        step[:, column] = 1e-7
        rise = (ramps.values(z + step) - ramps.values(z - step)) @ weight[:, 0] / 2e-7
        torch.testing.assert_close(found[:, column], rise, atol=1e-6, rtol=1e-6)


def test_codes_are_monotonic() -> None:
    edges = quantile_edges(rows_of(200, 1), 8)
    z = torch.linspace(-5, 5, 400, dtype=torch.float64).unsqueeze(-1)
    codes = piecewise(z, edges)
    assert (codes.diff(dim=0) >= 0).all()
    assert (codes[0] == -0.5).all()
    assert (codes[-1] == 0.5).all()
    # Between the outer edges, different inputs have different codes.
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
def test_edges_increase_even_with_few_distinct_values(values: list[float], rows: int) -> None:
    z = torch.tensor(values, dtype=torch.float64).repeat(rows)[:rows].unsqueeze(-1)
    edges = quantile_edges(z, 6)
    assert (edges.diff(dim=1) >= NARROWEST_BIN * 0.999).all()
    codes = piecewise(z, edges)
    assert codes.isfinite().all()
    assert codes.unique(dim=0).shape[0] == z.unique().shape[0]  # different values still have different codes


def test_edges_keep_the_type_of_the_rows() -> None:
    assert quantile_edges(rows_of(9, 2).to(torch.float32), 3).dtype == torch.float32


def test_initial_edges_are_evenly_spaced() -> None:
    edges = even_edges(2, 4)
    assert edges.tolist() == [[-2.0, -1.0, 0.0, 1.0, 2.0]] * 2
    edges[0, 0] = 7.0
    assert edges[1, 0] == -2.0  # columns share no memory


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
    # These directions hold the most variance: what is left is the variance of the two smallest.
    values = torch.linalg.eigvalsh(mixed.mT @ mixed / 3_000)
    basis = torch.linalg.qr(directions).Q
    left = mixed - mixed @ basis @ basis.mT
    torch.testing.assert_close(left.square().sum() / 3_000, values[:2].sum())


def test_directions_without_variance_are_not_scaled_up() -> None:
    rows = rows_of(100, 2) @ rows_of(2, 5, 1)  # rank 2
    directions = principal_directions(rows, 4)
    assert directions.isfinite().all()
    assert directions.norm(dim=0).max() <= SMALLEST_VARIANCE**-0.5 * 1.001
    assert ((rows @ directions).square().mean(0) < 1.001).all()


def test_directions_of_a_single_row_are_finite() -> None:
    assert principal_directions(rows_of(1, 5).to(torch.float32), 3).isfinite().all()


# ---------------------------------------------------------------------- centre_and_scale


def test_centred_columns_have_no_mean_and_unit_deviation() -> None:
    rows = rows_of(500, 3) * torch.tensor([1e-3, 1.0, 1e4]) + torch.tensor([5.0, -2.0, 1e6])
    z = standardize(rows, *centre_and_scale(moments_of(rows), repeats_of(rows)))
    torch.testing.assert_close(z.mean(0), torch.zeros(3, dtype=torch.float64), atol=1e-8, rtol=0)
    torch.testing.assert_close(z.std(0, correction=0), torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("value", [0.0, 5.0, -1e6, 1e30])
def test_constant_columns_become_zero(value: float) -> None:
    rows = torch.full((20, 1), value, dtype=torch.float64)
    mean, scale = centre_and_scale(moments_of(rows), repeats_of(rows))
    assert scale.tolist() == [1.0]
    assert not standardize(rows, mean, scale).any()
    single = rows.to(torch.float32)
    assert not standardize(single, mean.to(torch.float32), scale.to(torch.float32)).any()


def test_a_column_that_only_rounding_moves_stays_small() -> None:
    """A column that varies only by rounding counts as constant and is not scaled up."""
    rows = 1e9 + 64 * torch.randint(-3, 4, (200, 1), generator=torch.Generator().manual_seed(0)).to(torch.float64)
    assert standardize(rows, *centre_and_scale(moments_of(rows), repeats_of(rows))).abs().max() < 5


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9, 0.99])
def test_a_tag_is_about_one_however_many_arms_have_it(share: float) -> None:
    rows = (torch.arange(1_000) < 1_000 * share).to(torch.float64).unsqueeze(-1)
    mean, scale = centre_and_scale(moments_of(rows), repeats_of(rows))
    assert 0.7 < scale.item() < 1.01
    for factor, shift in ((1e-3, 5.0), (-40.0, 1e4)):  # units of an input do not matter
        other = factor * rows + shift
        z = standardize(other, *centre_and_scale(moments_of(other), repeats_of(other)))
        torch.testing.assert_close(z.abs(), standardize(rows, mean, scale).abs())


def test_products_hold_every_pair_once() -> None:
    found = pair_products(torch.tensor([[2.0, 3.0, -1.0], [0.0, 1.0, 5.0]]))
    assert found.tolist() == [[3.0, 6.0, -2.0, 8.0, -3.0, 0.0], [-1.0, 0.0, 0.0, 0.0, 5.0, 24.0]]
    assert [products_for(3, 6), products_for(3, 5), products_for(9, 48), products_for(10, 48)] == [6, 0, 45, 0]
    drawn = torch.randn(20_000, 4, generator=torch.Generator().manual_seed(1))
    assert pair_products(drawn).mean(0).abs().max() < 0.05  # zero on average for standardised inputs


def test_rotated_directions_keep_rows_as_before() -> None:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(400, 6, generator=generator, dtype=torch.float64)
    rows[:, 1] *= 3
    directions = principal_directions(rows, 3)
    flipped = directions[:, [2, 0, 1]] * torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64)
    turned = rotated_towards(rows, flipped, rows @ directions)
    assert torch.allclose(turned, directions, atol=1e-9)
    other = rotated_towards(rows, directions, torch.randn(400, 3, generator=generator, dtype=torch.float64))
    seen = rows @ other  # a rotation keeps whitened columns white
    assert torch.allclose(seen.mT @ seen, (rows @ directions).mT @ (rows @ directions), atol=1e-6)


def crossed_people(learner: PosteriorLearner, users: int, samples: int, places: int) -> list[UserHistory]:
    """Users in a context of two numbers, the second constant; arm and context have `places` each, few of them used.

    An arm with a 1 in column 1 earns more in one context and less in the other; column 2 means nothing.
    """
    generator, people = generator_of(3), []
    for _ in range(users):
        features = torch.zeros(samples, learner.input_size, dtype=torch.float64)
        features[:, 1:3] = torch.randint(2, (samples, 2), generator=generator).double()
        features[:, places + 1] = torch.randint(2, (samples,), generator=generator).double()
        features[:, places + 2] = 1
        agrees = features[:, 1] == features[:, places + 1]
        rewards = 0.2 + 0.5 * agrees + 0.1 * torch.randn(samples, generator=generator, dtype=torch.float64)
        notes = torch.zeros(samples, learner.noted, dtype=torch.float64)
        people.append(UserHistory(features, rewards, notes, torch.zeros(samples, dtype=torch.int64)))
    return people


@pytest.mark.parametrize("places", [4, 32, 256], ids=lambda places: f"{places} places")
def test_a_context_ranks_arms(places: int) -> None:
    """Whatever the number of places, all users learn which product of arm and context earns more."""
    parts = InputParts(2 * places + 1, places, places, hashed=True)
    learner = PosteriorLearner(small(head_inputs_max=8, trunk=False, memory=False), parts, torch.float64)
    shared = learner.initial_shared()
    for events in (128, 512, 1_100):
        shared = learner.derive(shared, [batch_of(crossed_people(learner, 20, 20, places))], events // 2, events)
    first, second = shared["wide_factors"]
    best = int(shared["arm_wide"].abs().argmax())
    assert (int(first[best]), int(second[best])) == (1, places + 1)
    others = shared["arm_wide"].abs().sort().values[-2]
    assert shared["arm_wide"][best] > max(0.1, 10 * others), "terms that mean nothing have variances of their own"
    assert len(set(zip(first.tolist(), second.tolist(), strict=True))) == learner.inputs.wide


def test_heads_see_the_most_active_places() -> None:
    places = 64
    learner = PosteriorLearner(
        small(head_inputs_max=4, head_directions=2), InputParts(places, places, hashed=True), torch.float64
    )
    assert learner.inputs.seen == 4
    people = kinds(learner, 6, 20, generator_of(5))
    for person in people:
        used = person.features[:, [3, 17, 40]].clone()
        person.features.zero_()
        person.features[:, [3, 17, 40]] = used
        person.features[0, 50] = 1  # once a user
    shared = learner.derive(learner.initial_shared(), [batch_of(people)], 0, 128)
    assert shared["head_columns"].tolist() == [3, 17, 40, 50]
    z = learner.inputs.standardized(shared, people[0].features, people[0].features[:, :0])
    h = learner.inputs.head_inputs(shared, z, z[:, 0])
    assert torch.equal(h[:, 1:5], z[:, [3, 17, 40, 50]])


def test_coefficients_of_terms_survive_a_refit() -> None:
    """Terms are chosen again at a refit: those that stay keep their coefficients, whatever their order."""
    parts = InputParts(9, 4, 4, hashed=True)
    learner = PosteriorLearner(small(head_inputs_max=8), parts, torch.float64)
    shared = learner.initial_shared()
    batch = batch_of(crossed_people(learner, 8, 10, 4))
    refitted = learner.derive(shared, [batch], 100, 128)
    swapped = {name: refitted[name].clone() for name in ("wide_factors", "arm_wide", "arm_wide_spread")}
    for name in swapped:
        swapped[name] = swapped[name].flip(-1)
    one, other = (learner.derive(given, [batch], 200, 256) for given in (refitted, refitted | swapped))
    for name in ("arm_wide", "arm_wide_spread", "prior_mean"):
        torch.testing.assert_close(one[name], other[name])
