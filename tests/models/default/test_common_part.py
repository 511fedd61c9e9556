"""Common part of a slate's arms: against loops, on known ratios, and for columns without information."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from metaban.models.default.common_part import fit_common_effect, remove_common, slate_summary
from metaban.models.numerics.slates import Slates
from tests.models.literal_default import literal_ratio
from tests.models.worlds import assert_close

BOTH = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
PROPERTY = settings(max_examples=40, deadline=None, derandomize=True)
SLATES = st.lists(st.integers(1, 6), min_size=1, max_size=6)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def requests_of(counts: list[int]) -> Tensor:
    """The request of each arm [N], for requests of these sizes."""
    return torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))


def offered(arms: Tensor, counts: list[int]) -> Tensor:
    """The slate of each arm: size and mean [N, 1 + d]."""
    offer: Tensor = slate_summary(arms, Slates(counts))
    return offer.expand(arms.shape[0], -1)


def effects(ratio: Tensor, counts: list[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Arms [N, d] of requests of these sizes with σ² = 1 and τ² = ratio [d], and the requests' effects [R, d]."""
    common = normal(len(counts), ratio.shape[0], seed=seed) * ratio.sqrt()
    return common[requests_of(counts)] + normal(sum(counts), ratio.shape[0], seed=seed + 1), common


def chosen(arms: Tensor, counts: list[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    """One arm of each request, chosen at random, and its slate: [R, d] and [R, 1 + d]."""
    size = torch.tensor(counts)
    share = torch.rand(len(counts), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows = size.cumsum(0) - size + (share * size).to(torch.int64)
    return arms[rows], offered(arms, counts)[rows]


def slates(count: int, smallest: int = 1, largest: int = 8) -> list[int]:
    """Sizes of this many requests."""
    sizes: list[int] = torch.randint(
        smallest, largest + 1, (count,), generator=torch.Generator().manual_seed(count)
    ).tolist()
    return sizes


# ---------------------------------------------------------------------- size and mean of a slate


@BOTH
@PROPERTY
@given(counts=SLATES, d=st.integers(1, 4), seed=st.integers(0, 2**31))
def test_slate_sizes_and_means_equal_the_loop(counts: list[int], d: int, seed: int, dtype: torch.dtype) -> None:
    """Including requests of one arm."""
    request = requests_of(counts)
    arms = normal(len(request), d, seed=seed).to(dtype)
    offer = offered(arms, counts)
    in_numpy = slate_summary(arms.numpy(), Slates(counts))
    np.testing.assert_allclose(in_numpy, slate_summary(arms, Slates(counts)).numpy(), rtol=1e-6, atol=1e-12)
    assert offer.dtype == dtype
    assert offer.shape == (len(request), 1 + d)
    for row, asked in enumerate(request.tolist()):
        rows = [other for other in range(len(request)) if request[other] == asked]
        assert offer[row, 0] == len(rows) == counts[asked]
        for column in range(d):
            mean = sum(arms[other, column].item() for other in rows) / len(rows)
            assert offer[row, 1 + column].item() == pytest.approx(mean, abs=TOLERANCE[dtype])


@BOTH
@pytest.mark.parametrize("arms", [1, 2, 7])
def test_a_single_request_equals_the_batched_one(arms: int, dtype: torch.dtype) -> None:
    rows = normal(arms + 3, 4).to(dtype)
    alone = offered(rows[:arms], [arms])
    assert_close(alone, offered(rows, [arms, 3])[:arms], TOLERANCE[dtype])


# ---------------------------------------------------------------------- removal of the common part


@BOTH
@PROPERTY
@given(
    counts=SLATES,
    ratios=st.lists(st.sampled_from([0.0, 0.1, 1.0, 30.0, 1e6]), min_size=1, max_size=4),
    seed=st.integers(0, 2**31),
)
def test_the_remainder_equals_the_formula(
    counts: list[int], ratios: list[float], seed: int, dtype: torch.dtype
) -> None:
    d = len(ratios)
    arms, centre = normal(sum(counts), d, seed=seed).to(dtype), normal(d, seed=seed + 1).to(dtype)
    offer = offered(arms, counts)
    left = remove_common(arms, offer, torch.tensor(ratios, dtype=dtype), centre)
    assert left.dtype == dtype
    for row, asked in enumerate(requests_of(counts).tolist()):
        for column, ratio in enumerate(ratios):
            share = counts[asked] * ratio / (counts[asked] * ratio + 1)
            away = offer[row, 1 + column].item() - centre[column].item()
            expected = arms[row, column].item() - share * away
            assert left[row, column].item() == pytest.approx(expected, abs=TOLERANCE[dtype])


@BOTH
def test_ratio_zero_leaves_arms_unchanged(dtype: torch.dtype) -> None:
    counts = [1, 5, 2]
    arms = (normal(8, 3) * torch.tensor([1e-20, 1.0, 1e30]) + torch.tensor([0.0, 1e6, 0.0])).to(dtype)
    offer = offered(arms, counts)
    nothing = torch.zeros(3, dtype=dtype)
    assert torch.equal(remove_common(arms, offer, nothing, normal(3).to(dtype)), arms)
    partly = torch.tensor([0.0, 2.0, 0.0], dtype=dtype)
    left = remove_common(arms, offer, partly, nothing)
    assert torch.equal(left[:, [0, 2]], arms[:, [0, 2]])
    assert not torch.isclose(left[:, 1], arms[:, 1]).any()


def test_leading_dimensions_stay() -> None:
    counts = slates(12)
    arms, offer = chosen(normal(sum(counts), 3), counts)
    ratio, centre = torch.tensor([0.0, 0.5, 2.0], dtype=torch.float64), normal(3)
    flat = remove_common(arms, offer, ratio, centre)
    assert torch.equal(remove_common(arms.view(3, 4, 3), offer.view(3, 4, 4), ratio, centre), flat.view(3, 4, 3))


@pytest.mark.parametrize("ratio", [0.1, 0.5, 4.0])
@pytest.mark.parametrize("arms", [1, 3, 10])
def test_the_true_ratio_minimises_the_error_of_the_effect(arms: int, ratio: float) -> None:
    """E(ĉ − c)² = (1 − ρ)²τ² + ρ²σ²/k is least at ρ = kτ²/(kτ² + σ²)."""
    counts, columns = [arms] * 4_000, 10
    truth = torch.full((columns,), ratio, dtype=torch.float64)
    rows, common = effects(truth, counts, seed=arms)
    offer, sought = offered(rows, counts), common[requests_of(counts)]

    def miss(assumed: Tensor) -> float:
        taken = rows - remove_common(rows, offer, assumed, torch.zeros(columns, dtype=torch.float64))
        return (taken - sought).square().mean().item()

    least = miss(truth)
    assert least == pytest.approx(ratio / (arms * ratio + 1), rel=4 * (2 / 40_000) ** 0.5)
    for factor in (0.5, 2.0):
        off = arms * factor * ratio / (arms * factor * ratio + 1) - arms * ratio / (arms * ratio + 1)
        assert miss(factor * truth) > least
        assert miss(factor * truth) - least == pytest.approx(off**2 * (ratio + 1 / arms), rel=0.25)


# ---------------------------------------------------------------------- estimate of the ratio


@BOTH
@PROPERTY
@given(
    counts=st.lists(st.integers(1, 6), min_size=2, max_size=30).filter(lambda counts: max(counts) > 1),
    ratio=st.sampled_from([0.0, 0.3, 5.0]),
    weights=st.sampled_from([[1.0], [1.0, 0.05], [1.0, 0.0, 2.5]]),
    seed=st.integers(0, 2**31),
)
def test_the_ratio_equals_the_loop(
    counts: list[int], ratio: float, weights: list[float], seed: int, dtype: torch.dtype
) -> None:
    arms, _ = effects(torch.full((3,), ratio, dtype=torch.float64), counts, seed)
    picked, offer = (value.to(dtype) for value in chosen(arms + 3, counts, seed))
    offer[:, 1:] += 0.1 * (offer[:, :1] == 1)  # rounding in the notes must not count as a difference between arms
    weight = [weights[place % len(weights)] for place in range(len(counts))]
    found, centre = fit_common_effect(picked, offer, torch.tensor(weight, dtype=dtype))
    assert found.dtype == centre.dtype == torch.float64
    expected, middle = literal_ratio(
        picked.double().numpy(), offer.double().numpy(), torch.tensor(weight, dtype=dtype).tolist()
    )
    assert_close(found, torch.tensor(expected, dtype=torch.float64), 1e-9)
    assert_close(centre, torch.tensor(middle, dtype=torch.float64), 1e-9)


@BOTH
@pytest.mark.parametrize("smallest", [1, 2, 6])
@pytest.mark.parametrize("ratio", [0.2, 1.0, 5.0, 100.0])
def test_a_known_ratio_is_recovered(ratio: float, smallest: int, dtype: torch.dtype) -> None:
    """Each column is a separate experiment: the estimates scatter around the truth as they should."""
    counts, columns = slates(4_000, smallest), 50
    arms, _ = effects(torch.full((columns,), ratio, dtype=torch.float64), counts)
    shift = 10 * normal(columns, seed=5)
    picked, offer = (value.to(dtype) for value in chosen(arms + shift, counts))
    found, centre = fit_common_effect(picked, offer, torch.ones(4_000))
    # A ratio of two mean squares of about 4,000 terms each, minus the share of σ² in a mean.
    error = (ratio + sum(1 / count for count in counts) / 4_000) * (2 * 2 / 4_000) ** 0.5
    assert (found - ratio).abs().max() < 5 * error
    assert (found.mean() - ratio).abs() < 4 * found.std() / columns**0.5
    assert 0.7 * error < found.std() < 1.5 * error
    assert (centre - shift).abs().max() < 5 * ((ratio + 1) / 4_000) ** 0.5


@BOTH
def test_independent_arms_have_a_ratio_near_zero(dtype: torch.dtype) -> None:
    counts, columns = slates(4_000, 2), 50
    arms, _ = effects(torch.zeros(columns, dtype=torch.float64), counts)
    picked, offer = (value.to(dtype) for value in chosen(arms, counts))
    found, _ = fit_common_effect(picked, offer, torch.ones(4_000))
    error = sum(1 / count for count in counts) / 4_000 * (2 * 2 / 4_000) ** 0.5
    assert (found >= 0).all()
    assert (found == 0).sum() >= columns // 4  # about half of the estimates fall below 0 and are cut off there
    assert found.max() < 5 * error


def test_neither_units_nor_origin_of_a_column_matter() -> None:
    counts = slates(300)
    arms, _ = effects(torch.full((3,), 0.7, dtype=torch.float64), counts)
    arms = arms[:, :1].expand(-1, 3)
    units, origin = torch.tensor([1.0, 1e-12, -1e12]).double(), torch.tensor([0.0, 1e-9, 1e15]).double()
    ratio, centre = fit_common_effect(*chosen(arms * units + origin, counts), torch.ones(300))
    assert ratio[0] > 0.3
    assert_close(ratio, ratio[:1].expand(3), 1e-9)
    assert_close((centre - origin) / units, centre[:1].expand(3), 1e-9)


@BOTH
def test_columns_constant_within_requests_are_unchanged(dtype: torch.dtype) -> None:
    """All arms of a request have the same value there: removing the common part would leave nothing."""
    counts = slates(200)
    arms, _ = effects(torch.full((4,), 2.0, dtype=torch.float64), counts)
    of_request = normal(200, 2, seed=7)[requests_of(counts)]
    arms[:, 1] = of_request[:, 0]
    arms[:, 3] = 20 + 3 * of_request[:, 1]
    arms = arms.to(dtype)
    ratio, centre = fit_common_effect(*chosen(arms, counts), torch.ones(200))
    assert (ratio > 0).tolist() == [True, False, True, False]
    offer = offered(arms, counts)
    left = remove_common(arms, offer, ratio.to(dtype), centre.to(dtype))
    assert torch.equal(left[:, [1, 3]], arms[:, [1, 3]])


@BOTH
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -1e6, 1e30, 1e-30])
def test_constant_columns_stay_finite(value: float, dtype: torch.dtype) -> None:
    counts = slates(100)
    arms, _ = effects(torch.full((2,), 2.0, dtype=torch.float64), counts)
    arms[:, 1] = value
    arms = arms.to(dtype)
    ratio, centre = fit_common_effect(*chosen(arms, counts), torch.ones(100))
    assert ratio.isfinite().all()
    assert ratio[0] > 1
    left = remove_common(arms, offered(arms, counts), ratio.to(dtype), centre.to(dtype))
    torch.testing.assert_close(left[:, 1], arms[:, 1], rtol=1e-5, atol=0)


@BOTH
def test_slates_of_one_arm_are_unchanged(dtype: torch.dtype) -> None:
    arms = normal(50, 3).to(dtype)
    offer = offered(arms, [1] * 50)
    ratio, centre = fit_common_effect(arms, offer, torch.ones(50))
    assert ratio.tolist() == [0.0] * 3
    assert_close(centre, arms.double().mean(0), TOLERANCE[dtype])
    assert torch.equal(remove_common(arms, offer, ratio.to(dtype), centre.to(dtype)), arms)


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_very_few_samples(rows: int) -> None:
    arms, offer = chosen(normal(12, 2), [4, 4, 4])
    ratio, centre = fit_common_effect(arms[:rows], offer[:rows], torch.ones(rows))
    assert ratio.isfinite().all()
    assert (ratio >= 0).all()
    assert_close(centre, offer[:rows, 1:].mean(0) if rows else torch.zeros(2), 1e-12)


@BOTH
def test_samples_of_weight_zero_have_no_effect(dtype: torch.dtype) -> None:
    """Padding holds any finite number, also slate sizes below 1."""
    counts = slates(80)
    arms, _ = effects(torch.tensor([0.0, 1.0, 9.0], dtype=torch.float64), counts)
    picked, offer = (value.to(dtype) for value in chosen(arms, counts))
    expected = fit_common_effect(picked, offer, torch.ones(80))
    garbage = (1e9 * normal(40, 7, seed=9)).to(dtype)
    garbage[::4] = 0.0
    order = torch.randperm(120, generator=torch.Generator().manual_seed(0))
    found = fit_common_effect(
        torch.cat([picked, garbage[:, :3]])[order],
        torch.cat([offer, garbage[:, 3:]])[order],
        torch.cat([torch.ones(80), torch.zeros(40)])[order],
    )
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, 1e-12)
    unweighted = fit_common_effect(garbage[:, :3], garbage[:, 3:], torch.zeros(40))
    assert not any(value.any() for value in unweighted)


def test_a_weight_of_two_equals_two_samples() -> None:
    counts = slates(60)
    arms, _ = effects(torch.tensor([0.5, 3.0], dtype=torch.float64), counts)
    picked, offer = chosen(arms, counts)
    weights = 1 + torch.arange(60) % 3
    found = fit_common_effect(picked, offer, weights)
    rows = torch.arange(60).repeat_interleave(weights)
    repeated = fit_common_effect(picked[rows], offer[rows], torch.ones(120))
    for one, other in zip(found, repeated, strict=True):
        assert_close(one, other, 1e-10)
