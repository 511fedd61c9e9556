"""Loss of a target with the sources that task modeling selects, against other selections, on MovieLens users."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table

from metaban.bench.core.report import Bar
from metaban.bench.transfer.affinity import best_first, gradient_similarity
from metaban.bench.transfer.plan import TransferPlan
from metaban.bench.transfer.tasks import rated_losses
from metaban.bench.worlds.data import DataMissing
from metaban.models.numerics.hardware import one_thread
from metaban.models.transfer.nets import NetLosses
from metaban.models.transfer.task_modeling import TransferSettings, model_transfer

OURS: Final = "task modeling"

ALONE, EVERYTHING, PAIRS, GRADIENTS = "target alone", "all sources", "pairwise affinity", "gradient similarity"

RIVALS: Final = (ALONE, EVERYTHING, PAIRS, GRADIENTS)

#: Limit of the loss over any rival's.
LIMIT: Final = 1.0


def measure_selection(plan: TransferPlan, quick: bool, console: Console) -> tuple[dict[str, Any], list[Bar]]:
    """Held-out losses by method, of all targets of all seeds."""
    rows = []
    for seed in plan.seeds:
        for number in range(plan.targets):
            try:
                losses = rated_losses(seed, number, plan.sources, plan.data, plan.nets)
            except DataMissing as missing:
                console.print(f"skipped selection: {missing}", highlight=False, markup=False, soft_wrap=True)
                return {"skipped": str(missing)}, []
            console.print(f"selection, seed {seed}, target {number}", highlight=False)
            with one_thread():
                rows.append({"seed": seed, "target": number, **compared(losses, seed)})
    results: dict[str, Any] = {"methods": _summary(rows, plan.seeds), "runs": rows}
    _print(results["methods"], console)
    if plan.plot is not None:
        _plot(rows, plan.plot)
    return results, selection_bars(results["methods"], quick=quick)


def compared(losses: NetLosses, seed: int) -> dict[str, Any]:
    """Losses of one target by method, and how many sources each selected.

    All methods that select use the same validation samples and the same rule for the number of sources.
    """
    found = model_transfer(losses, TransferSettings(early_stop=False), seed=seed)
    no_source = torch.zeros_like(found.chosen)  # [k]
    chosen = {
        OURS: found.chosen,
        ALONE: no_source,
        EVERYTHING: ~no_source,
        PAIRS: best_first(losses, found.single_gain),
        GRADIENTS: best_first(losses, gradient_similarity(losses)),
    }
    values = losses.held_out(torch.stack(list(chosen.values()))).mean(1)  # [methods]
    return {
        "losses": dict(zip(chosen, values.tolist(), strict=True)),
        "sizes": {name: int(members.sum()) for name, members in chosen.items()},
        "applies": found.applies,
    }


def _summary(rows: list[dict[str, Any]], seeds: tuple[int, ...]) -> dict[str, Any]:
    """Means over targets; standard deviations are those of seeds' means."""
    found = {}
    for name in (OURS, *RIVALS):
        means = [_mean([row["losses"][name] for row in rows if row["seed"] == seed]) for seed in seeds]
        spread = float(torch.tensor(means).std()) if len(means) > 1 else 0.0
        sizes = _mean([float(row["sizes"][name]) for row in rows])
        # Share of targets where no other method was better.
        best = _mean([float(row["losses"][name] <= min(row["losses"].values())) for row in rows])
        found[name] = {"mean": _mean(means), "sd": spread, "values": means, "sources": sizes, "best": best}
    return found


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def selection_bars(methods: dict[str, Any], *, quick: bool) -> list[Bar]:
    """Ratios of means, one bar a rival."""
    note = ", quick" if quick else ""
    ours = float(methods[OURS]["mean"])
    return [Bar(f"selection: {OURS} / {name}{note}", ours / methods[name]["mean"], "<=", LIMIT) for name in RIVALS]


def _print(methods: dict[str, Any], console: Console) -> None:
    table = Table("selection", "squared error", "sources", "share of targets where best", box=None, pad_edge=False)
    for name, row in sorted(methods.items(), key=lambda item: float(item[1]["mean"])):
        table.add_row(name, f"{row['mean']:.4f} ± {row['sd']:.4f}", f"{row['sources']:.1f}", f"{row['best']:.0%}")
    console.print(table)


def _plot(rows: list[dict[str, Any]], folder: Path) -> None:
    """Losses of each target relative to learning alone."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    axes = figure.subplots()
    order = sorted(rows, key=lambda row: float(row["losses"][OURS] / row["losses"][ALONE]))
    for name in (OURS, *RIVALS):
        values = [row["losses"][name] / row["losses"][ALONE] for row in order]
        axes.plot(values, "o-" if name == OURS else "o", ms=5, label=name, alpha=0.8)
    axes.set(xlabel="target", ylabel="squared error / alone", title="MovieLens users, samples held out")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(folder / "transfer-selection.png", dpi=150)
