"""Notes: the numbers that the default learner stores with a chosen arm and gets back with its reward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from metaban.models.numerics.arrays import Array, zeros


@final
@dataclass(frozen=True, slots=True)
class Notes:
    """The columns of notes [..., q] by name, as views; `stored` is the array, whose columns keep their order."""

    stored: Array

    #: Columns before the slate summary.
    COUNT: ClassVar = 4

    @staticmethod
    def array(trunk: Array, mean: Array, deviation: Array, reach: Array, slate: Array) -> Array:
        """Notes of N arms [N, q], the array alone: it is made for every request.

        Predictions of the trunk [N], the mean [N], the deviation of a reward [N] or [], the reach [] and slate
        summaries [N, …].
        """
        notes = zeros((trunk.shape[0], Notes.COUNT + slate.shape[1]), trunk)
        notes[:, 0], notes[:, 1], notes[:, 2], notes[:, 3] = trunk, mean, deviation, reach
        notes[:, 4:] = slate
        return notes

    @property
    def trunk(self) -> Array:
        """Prediction of the trunk [...]."""
        return self.stored[..., 0]

    @property
    def mean(self) -> Array:
        """The mean [...]."""
        return self.stored[..., 1]

    @property
    def deviation(self) -> Array:
        """Standard deviation of the reward around the mean, noise included [...]."""
        return self.stored[..., 2]

    @property
    def reach(self) -> Array:
        """Half-width of the interval that should hold 9 rewards in 10, in deviations [...]."""
        return self.stored[..., 3]

    @property
    def slate(self) -> Array:
        """Summary of the slate [..., 1 + d] (common_part.py); [..., 0] if there is no common part to remove."""
        return self.stored[..., 4:]
