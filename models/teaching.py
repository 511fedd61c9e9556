"""Who teaches whom: kinds of users, and how much the samples of each count in what the others learn in groups.

w_u of Eq. 5 of the Meta-Ban paper, with the weights that task modeling (`models.transfer`) finds: for each kind of
users as the target, the other kinds are the sources.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor


@final
@dataclass(frozen=True, slots=True, eq=False)
class Teaching:
    """Of K kinds of users: what an epoch says of who teaches whom."""

    #: Share of the samples of kind j that counts for kind i [K, K]; 1 on the diagonal, and everywhere until measured.
    weights: Tensor
    #: By how much held-out losses of kind i fell with these weights [K], and the standard error of it; 0 if not at all.
    gain: Tensor
    gain_error: Tensor

    @property
    def kinds(self) -> int:
        """K."""
        return self.weights.shape[0]
