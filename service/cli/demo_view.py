"""Shows the demo on a terminal while it runs, as a table at the end, and as a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
from rich.console import Group
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from metaban.service.cli.demo_world import DemoWorld, Rates, Story

#: Rounds of the latest rates and of the smoothing of curves.
WINDOW: Final = 100

#: Bars of the curve on the terminal.
COLUMNS: Final = 48

BARS: Final = " ▁▂▃▄▅▆▇█"


def live(world: DemoWorld, story: Story) -> Panel:
    """The current state."""
    return Panel(
        Group(
            ProgressBar(total=world.rounds, completed=len(story.rounds), width=COLUMNS + 12),
            Text(""),
            _curve("metaban", _blocks(story, learned=True), "green"),
            _curve("random", _blocks(story, learned=False), "yellow"),
            Text(""),
            summary(story),
        ),
        title=f"round {len(story.rounds):,} of {world.rounds:,}",
        width=COLUMNS + 18,
    )


def summary(story: Story) -> Table:
    """The figures so far."""
    table = Table("expected rewards per round", "metaban", "random", "best possible", box=None, pad_edge=False)
    _row(table, f"in the last {min(WINDOW, len(story.rounds))} rounds", story.rates(WINDOW))
    _row(table, "in all rounds", story.rates())
    _row(table, "first decisions for new users", story.rates(first_decisions=True))
    earned, lucky = sum(each.reward for each in story.rounds), sum(each.random_reward for each in story.rounds)
    table.add_row("rewards earned", f"{earned:,.0f}", f"{lucky:,.0f}", "")
    if story.purity:
        pure = f"{np.mean(story.purity):.0%}"
        table.add_row("group members of one taste", pure, f"{story.purity_of_chance:.0%}", "100%")
    if story.rounds:
        sizes = [each.group_size for each in story.rounds[-WINDOW:]]
        table.add_row("users who agree on a choice", f"{np.mean(sizes):.1f}", "", "")
        took = np.median([each.took_ms for each in story.rounds])
        table.add_row("decision, median", f"{took:.1f} ms", "", "")
    if story.fresh_ms:
        table.add_row("reward until served, median", f"{np.median(story.fresh_ms):.0f} ms", "", "")
        table.add_row("reward until served, slowest", f"{max(story.fresh_ms):.0f} ms", "", "")
    return table


def draw(story: Story, path: Path) -> None:
    """Plot the rewards by round, and those of first decisions for new users."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    rounds, newcomers = figure.subplots(1, 2, sharey=True)
    chosen = np.asarray([each.chance for each in story.rounds])
    offered = np.stack([each.question.chances for each in story.rounds])
    curves = {"best possible": offered.max(1), "metaban": chosen, "random": offered.mean(1)}
    first = np.asarray([each.question.is_newcomer for each in story.rounds])
    colours = {"best possible": "grey", "metaban": "tab:green", "random": "tab:orange"}
    for name, values in curves.items():
        window = min(WINDOW, len(values))
        smooth = np.convolve(values, np.ones(window) / window, mode="valid")
        rounds.plot(np.arange(window, len(values) + 1), smooth, color=colours[name], label=name)
        mean_so_far = np.cumsum(values[first]) / np.arange(1, first.sum() + 1)
        newcomers.plot(np.arange(1, first.sum() + 1), mean_so_far, color=colours[name])
    rounds.set(title="all users", xlabel="round", ylabel=f"expected reward, mean of {WINDOW} rounds", ylim=(0, 1))
    newcomers.set(title="first decisions for new users, mean so far", xlabel="new users so far")
    rounds.legend(loc="upper left", frameon=False)
    for axes in (rounds, newcomers):
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _row(table: Table, name: str, rates: Rates) -> None:
    table.add_row(name, f"[green]{rates.service:.3f}[/]", f"{rates.chance:.3f}", f"{rates.best:.3f}")


def _blocks(story: Story, *, learned: bool) -> list[float]:
    """Mean rewards of as many blocks of rounds as there are columns."""
    earned = [each.reward if learned else each.random_reward for each in story.rounds]
    return [float(part.mean()) for part in np.array_split(np.asarray(earned), COLUMNS) if part.size]


def _curve(name: str, values: list[float], colour: str) -> Text:
    bars = "".join(BARS[round(value * (len(BARS) - 1))] for value in values)
    return Text.assemble(f"{name:<9} ", (bars, colour))
