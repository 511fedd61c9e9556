"""Merged moments equal the moments of all rows together, as numpy computes them."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metaban.models.numerics.normalizer import LARGEST_DEVIATION, Moments, repeated_share, standardize, unit, winsorize


def moments(rows: np.ndarray, valid: np.ndarray | None = None) -> Moments:
    real = np.ones(len(rows), dtype=np.bool_) if valid is None else valid
    return Moments.of(torch.from_numpy(rows), torch.from_numpy(real))


def merged(parts: list[np.ndarray]) -> Moments:
    whole = moments(parts[0])
    for part in parts[1:]:
        whole = whole.merge(moments(part))
    return whole


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 7), min_size=1, max_size=6).filter(lambda sizes: sum(sizes) > 0),
    columns=st.integers(1, 4),
    shift=st.sampled_from([0.0, 1.0, -1e3, 1e6, 1e12]),
    spread=st.sampled_from([1e-3, 1.0, 1e5]),
    seed=st.integers(0, 2**32 - 1),
)
def test_merged_equals_numpy_on_everything(
    sizes: list[int], columns: int, shift: float, spread: float, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    parts = [shift + spread * generator.normal(size=(size, columns)) for size in sizes]
    rows = np.concatenate(parts)
    whole = merged(parts)
    assert whole.count.item() == len(rows)
    np.testing.assert_allclose(whole.mean.numpy(), rows.mean(0), rtol=1e-12, atol=1e-9 * spread)
    deviations = rows - rows.mean(0)
    # Around such a large mean, float64 resolves deviations only to this accuracy.
    resolution = 4 * np.finfo(np.float64).eps * abs(shift)
    tolerance = len(rows) * resolution * (2 * np.abs(deviations).max() + resolution)
    np.testing.assert_allclose(whole.squares.numpy(), (deviations**2).sum(0), rtol=1e-9, atol=tolerance + 1e-18)
    backwards = merged(parts[::-1])
    np.testing.assert_allclose(backwards.mean.numpy(), whole.mean.numpy(), rtol=1e-12, atol=1e-9 * spread)


def test_padding_rows_do_not_count() -> None:
    rows = np.random.default_rng(3).normal(size=(6, 2))
    valid = np.array([True, False, True, True, False, False])
    padded = rows.copy()
    padded[~valid] = 1e30
    found = moments(padded, valid)
    np.testing.assert_allclose(found.mean.numpy(), rows[valid].mean(0))
    np.testing.assert_allclose((found.squares / found.count).sqrt().numpy(), rows[valid].std(0))


def test_no_rows_change_nothing() -> None:
    empty = moments(np.zeros((0, 2)))
    mean, scale = empty.transform()
    assert mean.tolist() == [0, 0]
    assert scale.tolist() == [1, 1]
    rows = np.array([[1.0, 2.0], [3.0, 5.0]])
    for both in (empty.merge(moments(rows)), moments(rows).merge(empty), empty.merge(empty).merge(moments(rows))):
        np.testing.assert_allclose(both.mean.numpy(), rows.mean(0))
        np.testing.assert_allclose(both.squares.numpy(), rows.var(0) * 2)


def test_a_large_mean_does_not_cancel_the_spread() -> None:
    rows = 1e9 + np.random.default_rng(5).normal(scale=1e5, size=(500, 1))
    mean, scale = merged(np.split(rows, 10)).transform()
    np.testing.assert_allclose(mean.numpy(), rows.mean(0), rtol=1e-12)
    np.testing.assert_allclose(scale.numpy(), rows.std(0), rtol=1e-9)


def test_constant_columns_are_passed_through() -> None:
    varied = np.random.default_rng(7).normal(size=50)
    rows = np.stack([np.ones(50), varied, np.zeros(50), np.full(50, -2.5), np.full(50, 0.1, dtype=np.float32)], axis=1)
    mean, scale = merged(np.split(rows, 5)).transform()
    np.testing.assert_allclose(mean.numpy(), [0, varied.mean(), 0, 0, 0], atol=1e-12)
    np.testing.assert_allclose(scale.numpy(), [1, varied.std(), 1, 1, 1])
    seen = standardize(torch.from_numpy(rows), mean, scale)
    np.testing.assert_array_equal(seen[:, [0, 2, 3, 4]].numpy(), rows[:, [0, 2, 3, 4]])


def test_one_row_is_constant() -> None:
    mean, scale = moments(np.array([[4.0, -1.0]])).transform()
    assert mean.tolist() == [0, 0]
    assert scale.tolist() == [1, 1]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=2, max_size=2),
        min_size=1,
        max_size=12,
    )
)
def test_any_float32_input_is_standardised_to_finite_numbers(values: list[list[float]]) -> None:
    rows = np.array(values, dtype=np.float32)
    mean, scale = (tensor.to(torch.float32) for tensor in moments(rows).transform())
    seen = standardize(torch.from_numpy(rows), mean, scale)
    assert seen.isfinite().all()
    assert (seen.abs() <= LARGEST_DEVIATION).all()


def test_standardised_inputs_have_no_mean_and_unit_spread() -> None:
    rows = torch.from_numpy(np.random.default_rng(9).normal(3.0, 2.0, size=(400, 3)))
    seen = standardize(rows, *moments(rows.numpy()).transform())
    np.testing.assert_allclose(seen.mean(0).numpy(), 0, atol=1e-9)
    np.testing.assert_allclose(seen.std(0, unbiased=False).numpy(), 1, rtol=1e-9)


def test_one_outlier_does_not_blank_its_column() -> None:
    rows = torch.randn(64, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows[5, 1] = 1e30
    rows[7, 2] = -1e30
    valid = torch.ones(64, dtype=torch.bool)
    mean, scale = Moments.of(winsorize(rows, valid), valid).transform()
    assert mean.abs().max() < 1
    assert scale.max() < 5
    assert torch.equal(winsorize(rows, valid)[:, 0], rows[:, 0])


def test_padding_has_no_effect_on_winsorize() -> None:
    rows = torch.tensor([[1.0], [2.0], [3.0], [1e9]])
    valid = torch.tensor([True, True, True, False])
    assert winsorize(rows, valid)[:3].flatten().tolist() == [1.0, 2.0, 3.0]


def test_rare_values_are_not_outliers() -> None:
    rows = torch.zeros(100, 1)
    rows[3] = 1.0
    assert torch.equal(winsorize(rows, torch.ones(100, dtype=torch.bool)), rows.double())


@given(
    values=st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=6),
    scale=st.sampled_from([1.0, 1e-20, 1e7]),
)
def test_inputs_of_any_size_become_unit_vectors(values: list[float], scale: float) -> None:
    x = torch.tensor(values, dtype=torch.float32) * scale
    found = unit(x).double()
    if x.abs().max() < 1e-37:
        assert found.norm() <= 1.0 + 1e-5
    else:
        assert abs(found.norm().item() - 1) < 1e-5
        direction = x.double() / x.double().norm()
        assert torch.allclose(found, direction, atol=1e-5)


@settings(max_examples=80, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=2), max_size=12),
    seed=st.integers(0, 2**32 - 1),
)
def test_repeated_share_counts_as_a_loop_does(rows: list[list[int]], seed: int) -> None:
    valid = np.random.default_rng(seed).random(len(rows)) < 0.8
    values = torch.tensor(rows, dtype=torch.float64).view(-1, 2)
    found = repeated_share(values, torch.from_numpy(valid))
    for column in range(2):
        kept = [row[column] for row, real in zip(rows, valid, strict=True) if real]
        most = max(map(kept.count, kept), default=1)
        assert found[column].item() == (most - 1) / max(1, len(kept))


def test_numbers_that_all_differ_repeat_nothing() -> None:
    rows = torch.randn(1_000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert not repeated_share(rows, torch.ones(1_000, dtype=torch.bool)).any()
