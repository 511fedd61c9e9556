"""Model fusion against other warm starts on sine tasks, before and after adaptation to a few points."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from metaban.bench.core.report import Bar
from metaban.bench.warm_starts.plan import FusionBenchPlan
from metaban.bench.warm_starts.sine_nets import (
    ADAPT_STEPS,
    ADAPT_WITH,
    BANDS,
    SHAPE,
    SineTasks,
    adapted,
    error,
    few_points,
    fresh_nets,
    grid,
    maml,
    output_inputs,
    paper_tasks,
    reptile,
    ridge_nets,
    sine,
    sparse_tasks,
)
from metaban.bench.worlds.data import DataMissing
from metaban.models.fusion.model import FusionModel
from metaban.models.fusion.training import fit_fusion
from metaban.models.numerics.hardware import one_thread

SHOTS: Final = (0, 10, 20)
PROTOCOLS: Final = ("paper", "sparse")

#: Limits of the claims.
PAPER_LIMITS: Final = {0: 0.05, 20: 0.03}

UNALIGNED_LIMIT, NEAREST_LIMIT, RIDGE_LIMIT = 0.5, 0.8, 1.0


def measure_sine(plan: FusionBenchPlan, quick: bool, console: Console) -> tuple[dict[str, Any], list[Bar]]:
    """All methods on all seeds in both protocols."""
    results: dict[str, Any] = {
        "bands": [list(band) for band in BANDS],
        "adapt_steps": ADAPT_STEPS,
        "error": "RMSE over 200 points of [-5, 5] / (max - min of the target there)",
        "protocols": {},
        "skipped": {},
    }
    for protocol in PROTOCOLS:
        rows = []
        for seed in plan.seeds:
            console.print(f"{protocol}, seed {seed}", highlight=False)
            try:
                with one_thread():
                    rows.append(_run(_tasks(protocol, plan, seed), plan, seed, console))
            except DataMissing as missing:
                console.print(f"skipped {protocol}: {missing}", highlight=False, markup=False, soft_wrap=True)
                results["skipped"][protocol] = str(missing)
                break
        if rows:
            results["protocols"][protocol] = _summary(rows)
    _print(results["protocols"], console)
    if plan.plot is not None:
        _plot(results["protocols"], plan.plot)
    return results, sine_bars(results["protocols"], quick=quick)


def _tasks(protocol: str, plan: FusionBenchPlan, seed: int) -> SineTasks:
    if protocol == "paper":
        return paper_tasks(seed, plan.data, plan.size)
    return sparse_tasks(seed, plan.net_steps)


def _run(tasks: SineTasks, plan: FusionBenchPlan, seed: int, console: Console) -> dict[str, Any]:
    """Errors of every method after 0, 10 and 20 points, and curves of one target a band."""
    generator = torch.Generator().manual_seed(seed + 1)
    starts, seconds = _starts(tasks, plan, seed, generator, console)
    # Half of the targets choose how each method adapts; the other half is reported.
    chooses = torch.arange(len(tasks.targets)) % 2 == 0
    errors: dict[str, dict[str, float]] = {
        name: {"0": float(_mean(nets, tasks, ~chooses))} for name, nets in starts.items()
    }
    by_band = {name: _by_band(error(nets, tasks.targets), tasks, ~chooses) for name, nets in starts.items()}
    chosen: dict[str, dict[str, list[Any]]] = {name: {} for name in starts}
    shown: dict[str, Tensor] = {"0-shot": starts["fusion"]}
    for shots in SHOTS[1:]:
        x, y = few_points(tasks.targets, shots, generator)
        for name, nets in starts.items():
            tried = {way: adapted(nets, x, y, *way) for way in ADAPT_WITH}
            way = min(tried, key=lambda way: _finite(_mean(tried[way], tasks, chooses)))
            errors[name][str(shots)] = float(_mean(tried[way], tasks, ~chooses))
            chosen[name][str(shots)] = list(way)
            if name == "fusion":
                shown[f"{shots}-shot"] = tried[way]
    first = [int(torch.nonzero((tasks.bands == band) & ~chooses)[0]) for band in range(len(BANDS))]
    return {
        "errors": errors,
        "by_band": by_band,
        "adapts_with": chosen,
        "fit_seconds": seconds,
        "curves": {
            "x": grid().squeeze(-1).tolist(),
            "targets": tasks.targets[first].tolist(),
            "target": sine(tasks.targets[first], grid()).tolist(),
            **{name: SHAPE.outputs(nets[first], grid()).squeeze(-1).tolist() for name, nets in shown.items()},
        },
    }


def _starts(
    tasks: SineTasks, plan: FusionBenchPlan, seed: int, generator: torch.Generator, console: Console
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The network of each method for each target before adaptation: [n, p]."""
    inputs = output_inputs()
    variants = {
        "fusion": plan.settings,
        "fusion, no alignment": replace(plan.settings, align=False),
    }
    starts, seconds, aligned = {}, {}, tasks.nets
    for name, settings in variants.items():
        began = time.perf_counter()
        fit = fit_fusion(tasks.sources, tasks.nets, SHAPE, settings, seed=seed, inputs=inputs)
        seconds[name] = time.perf_counter() - began
        console.print(f"  {name}: {len(tasks.nets)} networks in {seconds[name]:.0f} s", highlight=False)
        starts[name] = FusionModel(fit.state).predict(tasks.targets).mean
        if name == "fusion":
            aligned = fit.nets
    count, scale = len(tasks.targets), tasks.sources.std(0)
    nearest = torch.cdist(tasks.targets / scale, tasks.sources / scale).argmin(1)
    starts["nearest source"] = tasks.nets[nearest]
    starts["ridge, aligned"] = ridge_nets(tasks.sources, aligned, tasks.targets)
    starts["MAML"] = maml(tasks.sources, generator, plan.meta_steps).expand(count, -1)
    starts["Reptile"] = reptile(tasks.sources, generator, plan.meta_steps).expand(count, -1)
    starts["cold start"] = fresh_nets(count, generator)
    return starts, seconds


def _mean(nets: Tensor, tasks: SineTasks, rows: Tensor) -> Tensor:
    return error(nets[rows], tasks.targets[rows]).mean()


def _finite(value: Tensor) -> float:
    return float(value.nan_to_num(torch.inf))


def _by_band(errors: Tensor, tasks: SineTasks, rows: Tensor) -> list[float]:
    return [float(errors[rows & (tasks.bands == band)].mean()) for band in range(len(BANDS))]


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Means and standard deviations over seeds; curves of the first."""
    methods: dict[str, Any] = {}
    for name in rows[0]["errors"]:
        methods[name] = {"by_band_0_shot": torch.tensor([row["by_band"][name] for row in rows]).mean(0).tolist()}
        for shots in map(str, SHOTS):
            values = torch.tensor([row["errors"][name][shots] for row in rows], dtype=torch.float64)
            spread = float(values.std()) if len(rows) > 1 else 0.0
            methods[name][shots] = {"mean": float(values.mean()), "sd": spread, "values": values.tolist()}
        methods[name]["adapts_with"] = [row["adapts_with"][name] for row in rows]
    return {"methods": methods, "fit_seconds": [row["fit_seconds"] for row in rows], "curves": rows[0]["curves"]}


def sine_bars(protocols: Mapping[str, Any], *, quick: bool) -> list[Bar]:
    """Bars of the protocols and methods that were run."""
    note = ", quick" if quick else ""
    bars = []

    def at(protocol: str, name: str, shots: int) -> float:
        return float(protocols[protocol]["methods"][name][str(shots)]["mean"])

    if "paper" in protocols:
        for shots, limit in PAPER_LIMITS.items():
            bars.append(Bar(f"paper: error of fusion, {shots}-shot{note}", at("paper", "fusion", shots), "<=", limit))
        ratio = at("paper", "fusion", 0) / at("paper", "fusion, no alignment", 0)
        bars.append(Bar(f"paper: fusion aligned / unaligned, 0-shot{note}", ratio, "<=", UNALIGNED_LIMIT))
    if "sparse" in protocols:
        for rival, limit in (("nearest source", NEAREST_LIMIT), ("ridge, aligned", RIDGE_LIMIT)):
            ratio = at("sparse", "fusion", 0) / at("sparse", rival, 0)
            bars.append(Bar(f"sparse: fusion / {rival}, 0-shot{note}", ratio, "<=", limit))
    return bars


def _print(protocols: Mapping[str, Any], console: Console) -> None:
    """One table a protocol, least 0-shot error first."""
    for protocol, found in protocols.items():
        table = Table(f"{protocol}: error", *[f"{shots}-shot" for shots in SHOTS], box=None, pad_edge=False)
        methods = found["methods"]
        for name in sorted(methods, key=lambda name: methods[name]["0"]["mean"]):
            cells = [methods[name][str(shots)] for shots in SHOTS]
            table.add_row(name, *[f"{cell['mean']:.4f} ± {cell['sd']:.4f}" for cell in cells])
        console.print(table)


def _plot(protocols: Mapping[str, Any], folder: Path) -> None:
    """One target a band for each protocol: the target, and the network before and after ten points."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    for protocol, found in protocols.items():
        curves = found["curves"]
        figure = Figure(figsize=(15, 3.2), layout="constrained")
        places = figure.subplots(1, len(curves["targets"]))
        for place, axes in enumerate(places):
            amplitude, phase = curves["targets"][place]
            axes.plot(curves["x"], curves["target"][place], color="black", lw=2.4, label="target")
            axes.plot(curves["x"], curves["0-shot"][place], color="tab:blue", label="0-shot")
            axes.plot(curves["x"], curves["10-shot"][place], "--", color="tab:orange", label="10-shot")
            axes.set(title=f"{amplitude:.2f} sin(x + {phase:.2f})", xlabel="x")
            axes.grid(alpha=0.3)
        places[0].legend()
        figure.savefig(folder / f"fusion-{protocol}.png", dpi=150)
