"""Who teaches: kinds of users, and how much the samples of each count in what the others learn, w_u of Eq. 5 of the
Meta-Ban paper. `models.teachers` finds both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor


@final
@dataclass(frozen=True, slots=True, eq=False)
class Teaching:
    """Of K kinds of users: what an epoch says of who teaches the others."""

    #: What the samples of each kind count in what others learn [K]: 1 until measured.
    weights: Tensor
    #: What that saves users who had no part in the choice, in nats a user, and its standard error; 0 until measured.
    gain: float
    gain_error: float
    #: Whether that is how samples count now: not where groups tell users apart.
    in_use: bool

    @property
    def kinds(self) -> int:
        """K."""
        return self.weights.shape[0]
