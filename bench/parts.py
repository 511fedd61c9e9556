"""Benchmarks of several parts, each of which can be run by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from rich.console import Console

from bench.report import Bar

Plan = TypeVar("Plan")
#: Runs a part, shows its tables and draws its pictures where the plan says so; gives its results and claims.
Part: TypeAlias = Callable[[Plan, bool, Console], tuple[dict[str, Any], list[Bar]]]


def run_parts(
    parts: Mapping[str, Part[Plan]], chosen: Sequence[str], plan: Plan, *, quick: bool, console: Console
) -> tuple[dict[str, Any], list[Bar]]:
    """Results by part, and all claims, of some parts run one after the other."""
    results: dict[str, Any] = {}
    bars: list[Bar] = []
    for name in chosen:
        results[name], found = parts[name](plan, quick, console)
        bars += found
    return results, bars
