"""One linear vector for the target and all chosen sources: Theorem 2.2 of task modeling, in closed form.

    B̂ = (Σ X_iᵀX_i)⁻¹ Σ X_iᵀY_i                       Eq. 28 and the line after it

Sums over sets are one product of indicator vectors with Gram matrices, so hundreds of sets cost one batched solve.

Letters in shape comments: k sources, n sets, D inputs, m samples, B parts of those held out.
"""

from __future__ import annotations

from typing import Final, final

import torch
from torch import Tensor

from metaban.models.transfer.task_modeling import SubsetLosses

#: Numbers in the Gram matrices of sets that are solved at once; bounds memory.
SOLVED_MAX: Final = 4_000_000


@final
class PooledLosses(SubsetLosses):
    """Mean squared error of a vector that the target shares with a set of sources."""

    def __init__(
        self,
        gram: Tensor,
        moment: Tensor,
        target_gram: Tensor,
        target_moment: Tensor,
        validation: tuple[Tensor, Tensor],
        held_out: tuple[Tensor, Tensor],
        *,
        parts: int = 8,
    ) -> None:
        """XᵀX [k, D, D] and XᵀY [k, D] of sources, the target's [D, D] and [D]; inputs [m, D] and outcomes [m]."""
        self.sources = gram.shape[0]
        self._gram = gram.double().flatten(1)  # [k, D·D]
        self._moment = moment.double()  # [k, D]
        self._target_gram = target_gram.double()  # [D, D]
        self._target_moment = target_moment.double()  # [D]
        self._validation = (validation[0].double(), validation[1].double())
        self._held_out = (held_out[0].double(), held_out[1].double())
        if min(len(validation[1]), len(held_out[1])) < 1:
            raise ValueError("the target has no validation or held-out samples")
        self._parts = max(1, min(parts, len(held_out[1])))

    def vectors(self, members: Tensor) -> Tensor:
        """B̂ of sets [n, k]: [n, D]."""
        size = len(self._target_moment)
        chunk = max(1, SOLVED_MAX // size**2)
        return torch.cat([self._solved(rows.to(self._gram)) for rows in torch.split(members, chunk)])

    def _solved(self, rows: Tensor) -> Tensor:
        size = len(self._target_moment)
        gram = (rows @ self._gram).view(-1, size, size) + self._target_gram  # [n, D, D]
        moment = rows @ self._moment + self._target_moment  # [n, D]
        # A tiny ridge, so that inputs that never vary get a coefficient of 0.
        floor = 1e-9 * gram.diagonal(dim1=1, dim2=2).mean(1)  # [n]
        gram = gram + floor[:, None, None] * torch.eye(size, dtype=gram.dtype, device=gram.device)
        vectors: Tensor = torch.linalg.solve(gram, moment)  # [n, D]
        return vectors

    def validation(self, members: Tensor) -> Tensor:
        x, y = self._validation  # [m, D], [m]
        squares = (self.vectors(members) @ x.T - y).square()  # [n, m]
        return squares.mean(1)

    def held_out(self, members: Tensor) -> Tensor:
        x, y = self._held_out  # [m, D], [m]
        squares = (self.vectors(members) @ x.T - y).square()  # [n, m]
        return torch.stack([part.mean(1) for part in squares.tensor_split(self._parts, dim=1)], dim=1)
