"""Functions for numpy arrays and torch tensors: kind and dtype are kept, and both give the same numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from metaban.models.numerics.arrays import (
    COUNTED_AT_ONCE,
    as_arrays,
    at_most,
    bounded,
    cast,
    chosen,
    count_true,
    dots,
    double,
    exponential,
    inverse,
    library_of,
    numpy_kind,
    on_device,
    packed,
    rectified,
    softmax,
    symmetric,
    upper_triangle,
    zeros,
)

KINDS = pytest.mark.parametrize("kind", ["numpy", "torch"])
TYPES = pytest.mark.parametrize("dtype", ["float32", "float64"])


def given(values: Any, kind: str, dtype: str = "float64") -> Any:
    """An array of that kind."""
    array = np.array(values, dtype=dtype)
    return torch.from_numpy(array) if kind == "torch" else array


def assert_same(found: Any, expected: Any, kind: str, dtype: str, tolerance: float = 0.0) -> None:
    """Check kind, dtype and numbers."""
    assert isinstance(found, torch.Tensor if kind == "torch" else np.ndarray)
    assert np.asarray(found).dtype == np.dtype(dtype)
    assert np.asarray(found).shape == np.shape(expected)
    np.testing.assert_allclose(np.asarray(found), expected, rtol=tolerance, atol=tolerance)


def covariances(count: int, size: int) -> np.ndarray:
    """Symmetric positive definite matrices, some of them badly conditioned."""
    rows = np.random.default_rng(0).normal(size=(count, size + 2, size)) * np.logspace(0, 2, size)
    found: np.ndarray = rows.swapaxes(-1, -2) @ rows
    return found


@KINDS
@pytest.mark.parametrize("size", [0, 1, COUNTED_AT_ONCE, COUNTED_AT_ONCE + 1, 2_051])
def test_true_values_are_counted(kind: str, size: int) -> None:
    mask = np.random.default_rng(size).random((3, size)) < [[0.0], [0.4], [1.1]]
    for rows in (mask, mask[1:2], mask[2:], mask[:0]):
        expected = [sum(row) for row in rows.tolist()]
        assert_same(count_true(given(rows, kind, "bool")), expected, kind, "int64")


class TestInverse:
    @pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3)])
    @pytest.mark.parametrize("size", [1, 2, 7])
    def test_numpy_and_torch_agree(self, shape: tuple[int, ...], size: int) -> None:
        matrix = covariances(int(np.prod(shape)), size).reshape(*shape, size, size)
        found = inverse(matrix)
        assert_same(found, inverse(torch.from_numpy(matrix)).numpy(), "numpy", "float64", 1e-9)
        np.testing.assert_allclose(found @ matrix, np.broadcast_to(np.eye(size), matrix.shape), atol=1e-9)

    @KINDS
    @TYPES
    def test_the_type_stays(self, kind: str, dtype: str) -> None:
        assert_same(inverse(given([[[2, 0], [0, 4]]], kind, dtype)), [[[0.5, 0], [0, 0.25]]], kind, dtype, 1e-6)

    @pytest.mark.parametrize(
        "broken",
        [np.zeros((3, 3)), np.ones((3, 3)), np.diag([1.0, 0.0, 2.0]), np.full((3, 3), np.nan), np.full((3, 3), np.inf)],
        ids=["zeros", "ones", "a row of zeros", "nan", "infinite"],
    )
    @pytest.mark.parametrize("place", [0, 2, 4])
    def test_one_singular_matrix_does_not_affect_others(self, broken: np.ndarray, place: int) -> None:
        sound = covariances(4, 3)
        with np.errstate(all="ignore"):  # as callers do
            found = inverse(np.insert(sound, place, broken, axis=0))
        assert np.isnan(found[place]).all()
        np.testing.assert_allclose(np.delete(found, place, axis=0), np.linalg.inv(sound), rtol=1e-12)

    def test_several_singular_matrices(self) -> None:
        sound = covariances(2, 3)
        found = inverse(np.stack([np.zeros((3, 3)), sound[0], np.ones((3, 3)), sound[1]]))
        assert np.isnan(found[[0, 2]]).all()
        np.testing.assert_allclose(found[[1, 3]], np.linalg.inv(sound), rtol=1e-12)

    @pytest.mark.parametrize("broken", [np.zeros((3, 3)), np.full((3, 3), np.nan)], ids=["singular", "nan"])
    def test_batches_of_batches(self, broken: np.ndarray) -> None:
        """As with groups, where each user has two."""
        sound = covariances(6, 3).reshape(2, 3, 3, 3)
        some = sound.copy()
        some[1, 2] = broken
        found, expected = inverse(some), np.linalg.inv(sound)
        assert np.isnan(found[1, 2]).all()
        expected[1, 2] = np.nan
        np.testing.assert_allclose(found, expected, rtol=1e-12)

    @pytest.mark.parametrize("worse", [np.nan, np.inf])
    def test_one_singular_and_one_not_finite(self, worse: float) -> None:
        sound = covariances(1, 3)
        with np.errstate(all="ignore"):
            found = inverse(np.stack([np.zeros((3, 3)), np.full((3, 3), worse), sound[0]]))
        assert np.isnan(found[:2]).all()
        np.testing.assert_allclose(found[2:], np.linalg.inv(sound), rtol=1e-12)

    def test_a_badly_conditioned_matrix_beside_a_singular_one(self) -> None:
        wide = np.diag([1e20, 1.0, 1e-3])
        np.testing.assert_allclose(inverse(wide[None])[0], np.diag([1e-20, 1.0, 1e3]), rtol=1e-12)
        np.testing.assert_allclose(inverse(np.stack([wide, np.zeros((3, 3))]))[0], inverse(wide), rtol=1e-12)

    def test_the_type_stays_beside_a_singular_one(self) -> None:
        assert inverse(np.stack([np.eye(2), np.zeros((2, 2))]).astype(np.float32)).dtype == np.float32

    def test_one_singular_tensor(self) -> None:
        sound = torch.from_numpy(covariances(1, 3))
        found = inverse(torch.cat([sound, torch.zeros(1, 3, 3, dtype=torch.float64)]))
        torch.testing.assert_close(found[:1], inverse(sound))


@KINDS
@TYPES
class TestBothKinds:
    @pytest.mark.parametrize("largest", [1.0, 1e4, 1e30])
    def test_softmax(self, kind: str, dtype: str, largest: float) -> None:
        logits = given([[0, largest, largest], [-largest, 0, -2 * largest], [5, 5, 5]], kind, dtype)
        before = np.asarray(logits).copy()
        found = softmax(logits)
        assert_same(logits, before, kind, dtype)
        away = np.exp(-largest)
        shares = [[away, 1, 1], [away, 1, away**2], [1, 1, 1]]
        assert_same(found, [np.array(row) / sum(row) for row in shares], kind, dtype, 1e-6)

    def test_softmax_of_a_batch_of_one(self, kind: str, dtype: str) -> None:
        """Over the last dimension; a single group has probability one."""
        assert_same(softmax(given([[[3e8], [-1e9]]], kind, dtype)), [[[1], [1]]], kind, dtype)

    def test_bounded(self, kind: str, dtype: str) -> None:
        values = given([[-np.inf, -3, -2], [0.5, 4, np.inf]], kind, dtype)
        found = bounded(values, -2, 3)
        assert_same(found, [[-2, -2, -2], [0.5, 3, 3]], kind, dtype)
        assert found is values, "in place"
        assert np.isnan(np.asarray(bounded(given([np.nan], kind, dtype), -2, 3))).all()

    def test_rectified(self, kind: str, dtype: str) -> None:
        values = given([[-1e30, -1, 0], [0.5, 4, np.inf]], kind, dtype)
        found = rectified(values)
        assert_same(found, [[0, 0, 0], [0.5, 4, np.inf]], kind, dtype)
        assert found is values, "in place"
        assert np.isnan(np.asarray(rectified(given([np.nan], kind, dtype)))).all()

    def test_exponential(self, kind: str, dtype: str) -> None:
        values = given([[-np.inf, 0.0, 1.0]], kind, dtype)
        found = exponential(values)
        assert_same(found, [[0, 1, np.e]], kind, dtype, 1e-6)
        assert found is values, "in place"

    def test_dots(self, kind: str, dtype: str) -> None:
        one, other = np.arange(12.0).reshape(2, 2, 3), np.arange(6.0).reshape(2, 3) - 2
        found = dots(given(one, kind, dtype), given(other, kind, dtype))
        assert_same(found, (one * other).sum(-1), kind, dtype, 1e-6)

    def test_at_most(self, kind: str, dtype: str) -> None:
        assert_same(at_most(given([-1, 2, 5], kind, dtype), 2), [-1, 2, 2], kind, dtype)

    def test_chosen(self, kind: str, dtype: str) -> None:
        values = np.arange(24.0).reshape(2, 4, 3)
        index = np.array([[3, 0], [1, 1]])
        picked = [[values[row, place] for place in places] for row, places in enumerate(index)]
        deep = chosen(given(values, kind, dtype), given(index, kind, "int64"))
        assert_same(deep, picked, kind, dtype)
        flat = chosen(given(values[..., 0], kind, dtype), given(index, kind, "int64"))
        assert_same(flat, np.array(picked)[..., 0], kind, dtype)

    @pytest.mark.parametrize("other", ["float32", "float64", "int64"])
    def test_cast(self, kind: str, dtype: str, other: str) -> None:
        values = given([1.75, -2.5], kind, dtype)
        found = cast(values, given([0], kind, other))
        assert_same(found, np.array([1.75, -2.5]).astype(other), kind, other)
        assert_same(values, [1.75, -2.5], kind, dtype)

    def test_double(self, kind: str, dtype: str) -> None:
        values = given([0.1, 3e38], kind, dtype)
        assert_same(double(values), np.array([0.1, 3e38], dtype=dtype).astype(np.float64), kind, "float64")
        assert_same(values, np.array([0.1, 3e38], dtype=dtype), kind, dtype)

    def test_zeros(self, kind: str, dtype: str) -> None:
        assert_same(zeros((2, 0, 3), given([1], kind, dtype)), np.zeros((2, 0, 3)), kind, dtype)
        assert_same(zeros((2, 3), given([1], kind, dtype)), np.zeros((2, 3)), kind, dtype)

    def test_the_library_makes_arrays_of_that_kind(self, kind: str, dtype: str) -> None:
        like = given([1], kind, dtype)
        assert_same(library_of(like).arange(3, **on_device(like)), [0, 1, 2], kind, "int64")


class TestTensorsAsArrays:
    def test_they_share_memory(self) -> None:
        tensors = {"a": torch.zeros(2), "b": torch.zeros((), dtype=torch.float64)}
        arrays = as_arrays(tensors)
        tensors["a"][1] = 5
        assert arrays["a"].tolist() == [0, 5]
        assert {name: array.dtype for name, array in arrays.items()} == {"a": np.float32, "b": np.float64}

    def test_packed_is_in_the_order_of_rows(self) -> None:
        tensor = torch.arange(6.0).reshape(2, 3).mT
        array = packed(tensor)
        assert array.flags.c_contiguous
        np.testing.assert_array_equal(array, tensor.numpy())

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_the_same_type_of_numbers(self, dtype: torch.dtype) -> None:
        assert torch.from_numpy(np.zeros(1, numpy_kind(dtype))).dtype == dtype


@KINDS
@TYPES
@pytest.mark.parametrize("side", [1, 2, 5])
def test_symmetric_matrices_have_a_triangle(kind: str, dtype: str, side: int) -> None:
    matrices = covariances(3, side)
    expected = [[matrix[row, column] for row in range(side) for column in range(row, side)] for matrix in matrices]
    triangle = upper_triangle(given(matrices, kind, dtype))
    assert_same(triangle, np.array(expected, dtype=dtype), kind, dtype)
    assert_same(symmetric(triangle, side), matrices.astype(dtype), kind, dtype)
