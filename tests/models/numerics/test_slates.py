"""Flat and padded layouts of slates: against loops, in numpy and torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from metaban.models.numerics.slates import Slates

KINDS = pytest.mark.parametrize("kind", ["numpy", "torch"])
#: dtypes by their numpy names.
DTYPES = pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
PROPERTY = settings(max_examples=40, deadline=None, derandomize=True)
SIZES = st.one_of(
    st.lists(st.integers(1, 5), min_size=1, max_size=6),
    st.integers(1, 4).flatmap(lambda size: st.lists(st.just(size), min_size=1, max_size=5)),
)
SHAPES = st.sampled_from([(), (1,), (3,), (2, 3)])


def numbers(shape: tuple[int, ...], kind: str, dtype: str = "float64") -> Any:
    """Distinct non-zero numbers."""
    array = np.arange(1, 1 + int(np.prod(shape))).reshape(shape).astype(dtype)
    return torch.from_numpy(array) if kind == "torch" else array


def assert_same(found: Any, expected: np.ndarray, kind: str) -> None:
    """Check kind, dtype and numbers."""
    assert isinstance(found, torch.Tensor if kind == "torch" else np.ndarray)
    array = np.asarray(found)
    assert array.dtype == expected.dtype
    assert array.shape == expected.shape
    np.testing.assert_array_equal(array, expected)


def join_members(rows: np.ndarray, sizes: list[int]) -> np.ndarray:
    padded = np.zeros((len(sizes), max(sizes), *rows.shape[1:]), dtype=rows.dtype)
    place = 0
    for request, size in enumerate(sizes):
        for arm in range(size):
            padded[request, arm] = rows[place]
            place += 1
    return padded


def end_to_end(padded: np.ndarray, sizes: list[int]) -> np.ndarray:
    return np.stack([padded[request, arm] for request, size in enumerate(sizes) for arm in range(size)])


@KINDS
@DTYPES
class TestAgainstLoops:
    @PROPERTY
    @given(sizes=SIZES, shape=SHAPES)
    @example(sizes=[1], shape=(3,))
    @example(sizes=[4], shape=(3,))
    @example(sizes=[1, 1, 1], shape=(3,))
    @example(sizes=[1, 5, 1], shape=(2, 3))
    def test_padded(self, kind: str, dtype: str, sizes: list[int], shape: tuple[int, ...]) -> None:
        rows = numbers((sum(sizes), *shape), kind, dtype)
        padded = Slates(sizes).padded(rows)
        assert_same(padded, join_members(np.asarray(rows), sizes), kind)
        for request, size in enumerate(sizes):
            assert not padded[request, size:].any(), "padding is zeros"
            assert padded[request, :size].all(), "no other number is zero"

    @PROPERTY
    @given(sizes=SIZES, shape=SHAPES)
    @example(sizes=[1], shape=(3,))
    @example(sizes=[1, 5, 1], shape=(2, 3))
    def test_flat(self, kind: str, dtype: str, sizes: list[int], shape: tuple[int, ...]) -> None:
        """The padding is left out."""
        padded = numbers((len(sizes), max(sizes), *shape), kind, dtype)
        assert_same(Slates(sizes).flat(padded), end_to_end(np.asarray(padded), sizes), kind)

    @PROPERTY
    @given(sizes=SIZES, shape=SHAPES)
    @example(sizes=[5], shape=(3,))
    def test_padded_and_flat_are_inverse(self, kind: str, dtype: str, sizes: list[int], shape: tuple[int, ...]) -> None:
        rows = numbers((sum(sizes), *shape), kind, dtype)
        slates = Slates(sizes)
        assert_same(slates.flat(slates.padded(rows)), np.asarray(rows), kind)

    @PROPERTY
    @given(sizes=SIZES, shape=SHAPES)
    @example(sizes=[1], shape=())
    @example(sizes=[5], shape=(3,))
    def test_spread(self, kind: str, dtype: str, sizes: list[int], shape: tuple[int, ...]) -> None:
        each = numbers((len(sizes), *shape), kind, dtype)
        found = Slates(sizes).spread(each)
        expected = np.stack([np.asarray(each)[request] for request, size in enumerate(sizes) for _ in range(size)])
        if len(sizes) == 1:
            assert found.shape[0] == 1, "values that are equal for all arms are not repeated"
            expected = expected[:1]
        assert_same(found, expected, kind)

    @PROPERTY
    @given(sizes=SIZES)
    @example(sizes=[1])
    def test_request_and_counts(self, kind: str, dtype: str, sizes: list[int]) -> None:
        like = numbers((2,), kind, dtype)
        asked = [request for request, size in enumerate(sizes) for _ in range(size)]
        assert_same(Slates(sizes).request(like), np.array(asked, dtype=np.int64), kind)
        assert_same(Slates(sizes).counts(like), np.array([[size] for size in sizes], dtype=dtype), kind)


@pytest.mark.parametrize(
    ("sizes", "requests", "width", "alike"),
    [([1], 1, 1, True), ([7], 1, 7, True), ([2, 2, 2], 3, 2, True), ([3, 1, 2], 3, 3, False), ((1, 4), 2, 4, False)],
)
def test_sizes(sizes: list[int], requests: int, width: int, alike: bool) -> None:
    slates = Slates(sizes)
    assert (slates.requests, slates.width, slates.alike) == (requests, width, alike)
