"""What `metaban bench bayes` runs, how often and how large."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import final


@final
@dataclass(frozen=True, slots=True)
class BayesPlan:
    """Sizes of all parts; each takes what concerns it."""

    seeds: tuple[int, ...] = (100, 101, 102)
    data: Path | None = None
    #: Folder for pictures.
    plot: Path | None = None
    #: Meta-updates of every method on sine tasks; tasks in each, and those that errors are measured on.
    meta_steps: int = 2_500
    meta_tasks: int = 5
    test_tasks: int = 400
    #: Meta-updates of the runs that rates and numbers of steps are chosen by.
    tuning_steps: int = 1_000
    #: Steps of inference after which meta-gradients are judged, and tasks of each seed.
    gradient_steps: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    gradient_tasks: int = 100
    #: Rounds that meta-updates are timed in turns for.
    timed_rounds: int = 30

    def quick(self) -> BayesPlan:
        """Under two minutes."""
        small = replace(self, meta_steps=200, tuning_steps=40, test_tasks=100, gradient_tasks=20, timed_rounds=5)
        return replace(small, gradient_steps=self.gradient_steps[:6], seeds=self.seeds[:1])
