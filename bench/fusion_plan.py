"""What `metaban bench fusion` runs, how often and how large."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import final

from models.fusion_training import FusionSettings


@final
@dataclass(frozen=True, slots=True)
class FusionPlan:
    """Sizes of all parts; each takes what concerns it."""

    seeds: tuple[int, ...] = (100, 101, 102)
    data: Path | None = None
    #: Folder for pictures.
    plot: Path | None = None
    settings: FusionSettings = field(default_factory=FusionSettings)
    #: Steps that source networks and MAML are trained for.
    net_steps: int = 1_500
    meta_steps: int = 2_000
    #: Sources and targets of the paper protocol; all unless said.
    size: int | None = None
    timed_nets: int = 1_000
    #: Users who teach, users who are new, and rounds of each of them, where profiles tell what users like.
    teachers: int = 200
    newcomers: int = 200
    source_rounds: int = 60
    first_rounds: int = 20
    #: Users of MovieLens on each side; half of all unless said.
    raters: int | None = None
    #: Sources of the warm starts that are timed, and starts.
    start_sources: int = 200
    starts: int = 2_000

    def quick(self) -> FusionPlan:
        """Under two minutes."""
        settings = replace(self.settings, rounds=12)
        small = replace(self, settings=settings, net_steps=500, meta_steps=200, size=100, timed_nets=100)
        small = replace(small, teachers=40, newcomers=40, source_rounds=20, raters=40, starts=200)
        return replace(small, seeds=self.seeds[:1])
