"""What `metaban bench transfer` runs, how often and how large."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import final

from models.transfer_nets import NetSettings


@final
@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Sizes of all parts; each takes what concerns it."""

    seeds: tuple[int, ...] = (100, 101, 102)
    data: Path | None = None
    #: Folder for pictures.
    plot: Path | None = None
    #: Worlds of linear tasks, from the first seed on; their inputs, and how far unrelated ones lie off, as multiples.
    linear_seeds: int = 20
    dimensions: tuple[int, ...] = (10, 50, 100, 150)
    distances: tuple[float, ...] = (3.0, 2.5, 2.0, 1.5)
    #: MovieLens users that are targets, of each seed, and sources of each of them.
    targets: int = 5
    sources: int = 50
    nets: NetSettings = field(default_factory=NetSettings)
    #: After so few steps a target that learns alone has not overfitted yet, and sources may hurt it.
    brief_steps: int = 100
    #: Sets that judge the surrogate, of the size it was made with, and of each smaller size.
    judges: int = 100
    small_judges: int = 50
    #: Sets trained at once for their time, and of them one by one.
    timed: int = 400
    timed_alone: int = 20
    #: Decisions while some users teach wrong things.
    poison_rounds: int = 10_000

    def quick(self) -> TransferPlan:
        """Under two minutes."""
        small = replace(self, seeds=self.seeds[:1], linear_seeds=5, targets=2, judges=40, small_judges=20)
        return replace(
            small, sources=30, timed_alone=5, poison_rounds=2_000, dimensions=(10, 150), distances=(3.0, 1.5)
        )
