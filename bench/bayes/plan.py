"""Sizes of `metaban bench bayes`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import final


@final
@dataclass(frozen=True, slots=True)
class BayesPlan:
    """Sizes of all parts; each part reads its own."""

    seeds: tuple[int, ...] = (100, 101, 102)
    data: Path | None = None
    #: Folder of the plots.
    plot: Path | None = None
    #: Meta-updates of every method on sine tasks, tasks per meta-update, and test tasks.
    meta_steps: int = 2_500
    meta_tasks: int = 5
    test_tasks: int = 400
    #: Meta-updates of the runs that choose rates and numbers of steps.
    tuning_steps: int = 1_000
    #: Inference steps after which meta-gradients are compared, and tasks of each seed.
    gradient_steps: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    gradient_tasks: int = 100
    #: Rounds of timing, in turns.
    timed_rounds: int = 30

    def quick(self) -> BayesPlan:
        """Sizes of a run under two minutes."""
        small = replace(self, meta_steps=200, tuning_steps=40, test_tasks=100, gradient_tasks=20, timed_rounds=5)
        return replace(small, gradient_steps=self.gradient_steps[:6], seeds=self.seeds[:1])
