"""Functions for code that runs on numpy arrays and on torch tensors.

A request is dozens of operations on a few hundred numbers. On a CPU the overhead of each call dominates, and torch's is
several times numpy's; on a GPU only torch works. Scoring is therefore written once for both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

#: A numpy array or a torch tensor; one computation uses one of the two.
Array: TypeAlias = Any

#: Arrays by name, as scoring takes them.
Arrays = Mapping[str, Array]

#: Longest mask that is summed without packing.
COUNTED_AT_ONCE = 256

#: numpy would convert a Python number at every call.
_ZERO = np.zeros((), dtype=np.float32)


def library_of(array: Array) -> Any:
    """The module (numpy or torch) of this array."""
    return torch if isinstance(array, Tensor) else np


def packed(tensor: Tensor) -> Array:
    """A contiguous numpy copy of a CPU tensor, for arrays that are used often."""
    return np.ascontiguousarray(tensor.numpy())


def as_arrays(tensors: Mapping[str, Tensor]) -> dict[str, Array]:
    """numpy arrays that share the memory of CPU tensors."""
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def joined(parts: Sequence[Mapping[str, Array]]) -> Mapping[str, Array]:
    """Rows of several mappings, concatenated by name; a single one is returned as it is."""
    if len(parts) == 1:
        return parts[0]
    return {name: library_of(first).concatenate([part[name] for part in parts]) for name, first in parts[0].items()}


def stacked(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Arrays of one shape as one [n, …]; a single one is not copied."""
    return arrays[0][None] if len(arrays) == 1 else np.stack(arrays)


def numpy_kind(dtype: torch.dtype) -> type[np.floating[Any]]:
    """The numpy type for a torch type."""
    return np.float64 if dtype == torch.float64 else np.float32


def on_device(like: Array) -> dict[str, Any]:
    """Keyword arguments that create an array on the device of another."""
    return {"device": like.device} if isinstance(like, Tensor) else {}


def zeros(shape: tuple[int, ...], like: Array) -> Array:
    """Zeros with the type and device of another array."""
    return like.new_zeros(shape) if isinstance(like, Tensor) else np.zeros(shape, like.dtype)


def double(array: Array) -> Array:
    """As float64."""
    return array.to(torch.float64) if isinstance(array, Tensor) else array.astype(np.float64, copy=False)


def cast(array: Array, like: Array) -> Array:
    """In the dtype of another array."""
    return array.to(like.dtype) if isinstance(array, Tensor) else array.astype(like.dtype, copy=False)


def like_kind(array: NDArray[Any], like: Array) -> Array:
    """A numpy array in the library, dtype and device of another array."""
    return torch.from_numpy(array).to(like) if isinstance(like, Tensor) else array.astype(like.dtype, copy=False)


def chosen(array: Array, index: Array) -> Array:
    """Select places [B, n] along S of [B, S, …]: [B, n, …]."""
    rows = library_of(array).arange(array.shape[0], **on_device(array))
    return array[rows[:, None], index]


def upper_triangle(matrix: Array) -> Array:
    """The upper triangle of symmetric matrices [..., D, D], row by row: [..., D(D + 1)/2]."""
    side = matrix.shape[-1]
    if isinstance(matrix, Tensor):
        rows, columns = torch.triu_indices(side, side, device=matrix.device)
        return matrix[..., rows, columns]
    return matrix.reshape(*matrix.shape[:-2], -1).take(_triangle_places(side)[0], -1)


def symmetric(triangle: Array, side: int) -> Array:
    """The inverse of `upper_triangle`."""
    if isinstance(triangle, Tensor):
        matrix = zeros((*triangle.shape[:-1], side, side), triangle)
        rows, columns = torch.triu_indices(side, side, device=triangle.device)
        matrix[..., rows, columns] = matrix[..., columns, rows] = triangle
        return matrix
    return triangle.take(_triangle_places(side)[1], -1)


@lru_cache(maxsize=16)
def _triangle_places(side: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The place in a matrix of each number of its triangle [D(D + 1)/2], and the reverse [D, D]."""
    rows, columns = np.triu_indices(side)
    places = np.zeros((side, side), dtype=np.intp)
    places[rows, columns] = places[columns, rows] = np.arange(len(rows))
    return rows * side + columns, places


def inverse(matrix: Array) -> Array:
    """Inverse of symmetric positive definite matrices [..., D, D]; NaN for one that is singular."""
    if isinstance(matrix, Tensor):
        factor, failed = torch.linalg.cholesky_ex(matrix)
        # NaN on the diagonal makes the whole inverse NaN.
        factor.diagonal(dim1=-2, dim2=-1).masked_fill_((failed != 0)[..., None], torch.nan)
        return torch.cholesky_inverse(factor)
    try:
        return np.linalg.inv(matrix)
    except np.linalg.LinAlgError:  # does not say which; the others must not fail
        each = matrix.reshape(-1, *matrix.shape[-2:])
        return np.stack([_inverse_or_nan(one) for one in each]).reshape(matrix.shape)


def _inverse_or_nan(matrix: Array) -> Array:
    try:
        return np.linalg.inv(matrix)
    except np.linalg.LinAlgError:
        return np.full_like(matrix, np.nan)


def lower_factor(matrix: Array) -> tuple[Array, Array]:
    """Cholesky factors L of matrices [..., D, D], and for which of them it exists, bool [...]."""
    if isinstance(matrix, Tensor):
        factor, failed = torch.linalg.cholesky_ex(matrix)
        return factor, failed == 0
    try:
        return np.linalg.cholesky(matrix), np.ones(matrix.shape[:-2], dtype=np.bool_)
    except np.linalg.LinAlgError:  # does not say which; the others are valid
        found = [_factor_or_nan(one) for one in matrix.reshape(-1, *matrix.shape[-2:])]
        factor = np.stack(found).reshape(matrix.shape)
        return factor, np.isfinite(factor).all((-2, -1))


def _factor_or_nan(matrix: Array) -> Array:
    try:
        return np.linalg.cholesky(matrix)
    except np.linalg.LinAlgError:
        return np.full_like(matrix, np.nan)


def rectified(array: Array) -> Array:
    """max(0, x), in place."""
    return array.relu_() if isinstance(array, Tensor) else np.maximum(array, _ZERO, out=array)


def exponential(array: Array) -> Array:
    """exp(x), in place."""
    return array.exp_() if isinstance(array, Tensor) else np.exp(array, out=array)


def dots(one: Array, other: Array) -> Array:
    """Dot products over the last dimension."""
    return torch.linalg.vecdot(one, other) if isinstance(one, Tensor) else np.vecdot(one, other)


def count_true(mask: Array) -> Array:
    """Number of true values in the last dimension, int64."""
    if isinstance(mask, Tensor):
        return mask.sum(-1)
    if mask.ndim == 2 and mask.shape[0] == 1:  # one chosen arm, the usual case
        return np.array([np.count_nonzero(mask)])
    if mask.shape[-1] <= COUNTED_AT_ONCE:
        return mask.sum(-1)
    # sum() converts every value first, which takes longer than computing the mask.
    return np.bitwise_count(np.packbits(mask, axis=-1)).sum(-1, dtype=np.int64)


def at_most(array: Array, high: int) -> Array:
    """min(x, high)."""
    return array.clamp_max(high) if isinstance(array, Tensor) else np.minimum(array, high)


def bounded(array: Array, low: Array | float, high: Array | float) -> Array:
    """min(max(x, low), high), in place."""
    if isinstance(array, Tensor):
        return array.clip_(low, high)
    np.maximum(array, low, out=array)  # the same as np.clip with less overhead
    return np.minimum(array, high, out=array)


def softmax(logits: Array) -> Array:
    """Over the last dimension."""
    library = library_of(logits)
    shares = library.exp(logits - library.amax(logits, -1)[..., None])
    return shares / shares.sum(-1)[..., None]
