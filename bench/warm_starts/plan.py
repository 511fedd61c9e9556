"""Sizes of `metaban bench fusion`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import final

from metaban.models.fusion.training import FusionSettings


@final
@dataclass(frozen=True, slots=True)
class FusionBenchPlan:
    """Sizes of all parts; each part reads its own."""

    seeds: tuple[int, ...] = (100, 101, 102)
    data: Path | None = None
    #: Folder of the plots.
    plot: Path | None = None
    settings: FusionSettings = field(default_factory=FusionSettings)
    #: Training steps of source networks and of MAML.
    net_steps: int = 1_500
    meta_steps: int = 2_000
    #: Sources and targets of the paper protocol; None is all.
    size: int | None = None
    timed_nets: int = 1_000
    #: Environment with informative profiles: source users, new users, and rounds of each.
    teachers: int = 200
    newcomers: int = 200
    source_rounds: int = 60
    first_rounds: int = 20
    #: MovieLens users on each side; None is half of all.
    raters: int | None = None
    #: Sources of the timed warm starts, and the number of starts.
    start_sources: int = 200
    starts: int = 2_000

    def quick(self) -> FusionBenchPlan:
        """Sizes of a run under two minutes."""
        settings = replace(self.settings, rounds=12)
        small = replace(self, settings=settings, net_steps=500, meta_steps=200, size=100, timed_nets=100)
        small = replace(small, teachers=40, newcomers=40, source_rounds=20, raters=40, starts=200)
        return replace(small, seeds=self.seeds[:1])
