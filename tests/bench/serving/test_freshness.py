"""A small real run of the freshness benchmark, and its report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from rich.console import Console

from metaban.bench.cli import parse_seeds
from metaban.bench.core.report import Bar
from metaban.bench.serving.freshness import (
    WATCHED_EVERY,
    FreshnessPlan,
    measure_freshness,
    plot_freshness,
    print_freshness,
)


def test_a_small_run_measures_and_reports(tmp_path: Path) -> None:
    plan = FreshnessPlan(idle_events=4, load_events=20, load_rate=50, users=3)
    console = Console(record=True, width=120)
    report = measure_freshness(plan, [5], quick=True, console=console)
    print_freshness(report, console)
    report.write(tmp_path / "out" / "freshness.json")
    plot_freshness(report, tmp_path / "out" / "freshness.png")

    found = json.loads((tmp_path / "out" / "freshness.json").read_text())
    assert found["benchmark"] == "freshness"
    assert found["quick"] is True
    assert found["settings"]["seeds"] == [5]
    assert len(found["results"]["idle"]["delays_s"]) == 4
    assert len(found["results"]["load"]["delays_s"]) == 20 // WATCHED_EVERY
    for name in ("idle", "load"):
        row = found["results"][name]
        assert 0 < row["p50_s"] <= row["p99_s"] <= row["max_s"]
    for bar in found["bars"]:
        assert set(bar) == {"name", "value", "sense", "limit", "holds"}
        assert bar["holds"] is None
    assert (tmp_path / "out" / "freshness.png").read_bytes().startswith(b"\x89PNG")
    assert "50 events/s" in console.export_text()


@pytest.mark.parametrize(
    ("sense", "value", "holds"), [("<=", 1.0, True), ("<=", 1.1, False), (">=", 1.0, True), (">=", 0.9, False)]
)
def test_a_bar_holds_or_does_not(sense: str, value: float, holds: bool) -> None:
    assert Bar("claim", value, sense, 1.0).holds is holds


@pytest.mark.parametrize(("text", "seeds"), [("100", [100]), ("100-102", [100, 101, 102]), ("1,5-6,9", [1, 5, 6, 9])])
def test_seeds_are_numbers_and_ranges(text: str, seeds: list[int]) -> None:
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "a", "3-1", "1,,2", "1-2-3"])
def test_invalid_seeds_are_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_seeds(text)
