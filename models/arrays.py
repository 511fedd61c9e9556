"""Code for numpy arrays and torch tensors alike.

A request is dozens of operations on a few hundred numbers: on a CPU what counts is what each call costs before it has
computed anything, and torch's calls cost several times numpy's. On a GPU there is torch only. So whatever judges arms
is written once, for both, with what the two have in common and the few functions here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

#: A numpy array or a torch tensor; all of one computation are of one kind.
Array: TypeAlias = Any
#: Truths that are summed sooner than they are packed.
COUNTED_AT_ONCE = 256
#: To compare with what is no array yet, numpy makes one at every call.
_ZERO = np.zeros((), dtype=np.float32)


def library_of(array: Array) -> Any:
    """The module whose functions take this array."""
    return torch if isinstance(array, Tensor) else np


def packed(tensor: Tensor) -> Array:
    """A numpy array of a CPU tensor's numbers in the order of its rows: what is used often is worth the copy."""
    return np.ascontiguousarray(tensor.numpy())


def as_arrays(tensors: Mapping[str, Tensor]) -> dict[str, Array]:
    """The numpy arrays that share CPU tensors' memory."""
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def joined(parts: Sequence[Mapping[str, Array]]) -> Mapping[str, Array]:
    """The rows of several, name by name; one alone is itself."""
    if len(parts) == 1:
        return parts[0]
    return {name: library_of(first).concatenate([part[name] for part in parts]) for name, first in parts[0].items()}


def stacked(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Arrays of one shape as one [n, …]; one alone is not copied."""
    return arrays[0][None] if len(arrays) == 1 else np.stack(arrays)


def numpy_kind(dtype: torch.dtype) -> type[np.floating[Any]]:
    """The type of numpy's numbers that holds the same."""
    return np.float64 if dtype == torch.float64 else np.float32


def on_device(like: Array) -> dict[str, Any]:
    """What a library's functions have to be told to make an array where another is."""
    return {"device": like.device} if isinstance(like, Tensor) else {}


def zeros(shape: tuple[int, ...], like: Array) -> Array:
    """Of the kind of another array."""
    return like.new_zeros(shape) if isinstance(like, Tensor) else np.zeros(shape, like.dtype)


def double(array: Array) -> Array:
    """In float64."""
    return array.to(torch.float64) if isinstance(array, Tensor) else array.astype(np.float64, copy=False)


def cast(array: Array, like: Array) -> Array:
    """In the type of another array."""
    return array.to(like.dtype) if isinstance(array, Tensor) else array.astype(like.dtype, copy=False)


def like_kind(array: NDArray[Any], like: Array) -> Array:
    """A numpy array as one of the kind and type of another, and where that is."""
    return torch.from_numpy(array).to(like) if isinstance(like, Tensor) else array.astype(like.dtype, copy=False)


def chosen(array: Array, index: Array) -> Array:
    """Of [B, S, …] the places [B, n] that an index names along S: [B, n, …]."""
    rows = library_of(array).arange(array.shape[0], **on_device(array))
    return array[rows[:, None], index]


def inverse(matrix: Array) -> Array:
    """Of symmetric positive definite matrices [..., D, D]; NaN for one that has none."""
    if isinstance(matrix, Tensor):
        factor, failed = torch.linalg.cholesky_ex(matrix)
        # A diagonal of NaN makes NaN of the whole inverse.
        factor.diagonal(dim1=-2, dim2=-1).masked_fill_((failed != 0)[..., None], torch.nan)
        return torch.cholesky_inverse(factor)
    try:
        return np.linalg.inv(matrix)
    except np.linalg.LinAlgError:  # says not of which, and what overflowed must not fail the others
        each = matrix.reshape(-1, *matrix.shape[-2:])
        return np.stack([_inverse_or_nan(one) for one in each]).reshape(matrix.shape)


def _inverse_or_nan(matrix: Array) -> Array:
    try:
        return np.linalg.inv(matrix)
    except np.linalg.LinAlgError:
        return np.full_like(matrix, np.nan)


def lower_factor(matrix: Array) -> tuple[Array, Array]:
    """L with L Lᵀ = matrix of symmetric positive definite [..., D, D], and of which it is one, bool [...]."""
    if isinstance(matrix, Tensor):
        factor, failed = torch.linalg.cholesky_ex(matrix)
        return factor, failed == 0
    try:
        return np.linalg.cholesky(matrix), np.ones(matrix.shape[:-2], dtype=np.bool_)
    except np.linalg.LinAlgError:  # says not of which, and the others are sound
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
    """Products of vectors in the last dimension, summed."""
    return torch.linalg.vecdot(one, other) if isinstance(one, Tensor) else np.vecdot(one, other)


def count_true(mask: Array) -> Array:
    """How many of the last dimension are true, int64."""
    if isinstance(mask, Tensor):
        return mask.sum(-1)
    if mask.ndim == 2 and mask.shape[0] == 1:  # one chosen arm, which is the usual case
        return np.array([np.count_nonzero(mask)])
    if mask.shape[-1] <= COUNTED_AT_ONCE:
        return mask.sum(-1)
    # A sum makes a number of each first, which takes longer than all that led to the mask.
    return np.bitwise_count(np.packbits(mask, axis=-1)).sum(-1, dtype=np.int64)


def at_most(array: Array, high: int) -> Array:
    """min(x, high)."""
    return array.clamp_max(high) if isinstance(array, Tensor) else np.minimum(array, high)


def bounded(array: Array, low: Array | float, high: Array | float) -> Array:
    """min(max(x, low), high), in place."""
    if isinstance(array, Tensor):
        return array.clip_(low, high)
    np.maximum(array, low, out=array)  # np.clip takes longer to find out that it has to do just this
    return np.minimum(array, high, out=array)


def softmax(logits: Array) -> Array:
    """Over the last dimension."""
    library = library_of(logits)
    shares = library.exp(logits - library.amax(logits, -1)[..., None])
    return shares / shares.sum(-1)[..., None]
