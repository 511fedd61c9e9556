"""Arms of several requests, concatenated or padded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from metaban.models.numerics.arrays import Array, cast, zeros


@final
@dataclass(frozen=True, slots=True)
class Slates:
    """The number of arms of each of R requests, at least one: concatenated rows [N, …] or padded rows [R, K, …].

    Products over the arms of one request need them padded; padding is zeros.
    """

    sizes: Sequence[int]

    @property
    def requests(self) -> int:
        """R."""
        return len(self.sizes)

    @property
    def width(self) -> int:
        """K, the arms of the largest request."""
        return max(self.sizes)

    @property
    def alike(self) -> bool:
        """Whether all requests have the same number of arms, so that nothing is padded."""
        return len(set(self.sizes)) <= 1

    def padded(self, rows: Array) -> Array:
        """[N, …] → [R, K, …]."""
        if len(self.sizes) == 1:
            return rows[None]
        shape = (self.requests, self.width, *rows.shape[1:])
        if self.alike:
            return rows.reshape(shape)
        padded = zeros((self.requests * self.width, *rows.shape[1:]), rows)
        padded[self._places(rows)] = rows
        return padded.reshape(shape)

    def flat(self, padded: Array) -> Array:
        """[R, K, …] → [N, …]."""
        if len(self.sizes) == 1:
            return padded[0]
        rows = padded.reshape((self.requests * self.width, *padded.shape[2:]))
        return rows if self.alike else rows[self._places(rows)]

    def spread(self, each: Array) -> Array:
        """Values of requests [R, …] broadcast to their arms [N, …]; [1, …] for a single request."""
        if len(self.sizes) == 1:
            return each
        return each[self.request(each)]

    def request(self, like: Array) -> Array:
        """The request of each arm, [N] int64."""
        return self._like(np.repeat(np.arange(self.requests), self.sizes), like)

    def counts(self, like: Array) -> Array:
        """The sizes in the dtype of another array [R, 1]."""
        return cast(self._like(np.array(self.sizes)[:, None], like), like)

    def _places(self, like: Array) -> Array:
        sizes = np.array(self.sizes)
        starts = np.arange(self.requests) * self.width - (np.cumsum(sizes) - sizes)
        return self._like(np.arange(sizes.sum()) + np.repeat(starts, sizes), like)

    @staticmethod
    def _like(index: np.ndarray, like: Array) -> Array:
        return torch.from_numpy(index).to(like.device) if isinstance(like, Tensor) else index
