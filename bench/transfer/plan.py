"""Sizes of `metaban bench transfer`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import final

from metaban.models.transfer.nets import NetSettings


@final
@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Sizes of all parts; each part reads its own."""

    seeds: tuple[int, ...] = (100, 101, 102)
    data: Path | None = None
    #: Folder of the plots.
    plot: Path | None = None
    #: Worlds of linear tasks, from the first seed on; their inputs, and distances of unrelated sources as multiples of
    #: a.
    linear_seeds: int = 20
    dimensions: tuple[int, ...] = (10, 50, 100, 150)
    distances: tuple[float, ...] = (3.0, 2.5, 2.0, 1.5)
    #: MovieLens users that are targets of each seed, and sources of each target.
    targets: int = 5
    sources: int = 50
    nets: NetSettings = field(default_factory=NetSettings)
    #: Few training steps: a target that learns alone has not overfitted yet, and sources may hurt it.
    brief_steps: int = 100
    #: Sets to evaluate the surrogate with: of the size it was fitted on, and of each smaller size.
    judges: int = 100
    small_judges: int = 50
    #: Sets timed in one batch, and how many of them are timed one by one.
    timed: int = 400
    timed_alone: int = 20

    def quick(self) -> TransferPlan:
        """Sizes of a run under two minutes."""
        small = replace(self, seeds=self.seeds[:1], linear_seeds=5, targets=2, judges=40, small_judges=20)
        return replace(small, sources=30, timed_alone=5, dimensions=(10, 150), distances=(3.0, 1.5))
