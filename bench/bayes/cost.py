"""Memory and time of a meta-update by the number of inner steps: GEM-BML+ against MAML.

Memory is the peak allocated during one meta-update beyond what was allocated before: the running sum of allocations and
releases that torch's profiler records on the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from metaban.bench.bayes.plan import BayesPlan
from metaban.bench.bayes.tasks import SETTINGS, SHAPE, draw, fresh_net, maml_gradient
from metaban.bench.core.report import Bar
from metaban.bench.core.timing import Race, take_turns
from metaban.models.bayes.gem import GemSettings, GemTrainer
from metaban.models.bayes.inference import Gaussian, InnerSettings, NetLikelihood
from metaban.models.numerics.hardware import one_thread

STEPS: Final = (1, 2, 4, 8, 16, 32, 64)
TIMED_STEPS: Final = 16
TASKS: Final = 15

#: Limits of the claims: memory at the most inner steps over that at the fewest, and time over MAML's.
MEMORY_LIMIT, MAML_GROWTH, TIME_LIMIT = 1.05, 8.0, 0.5


def measure_cost(plan: BayesPlan, quick: bool, console: Console) -> tuple[dict[str, Any], list[Bar]]:
    """Memory of both at every number of inner steps, and times taken in turns at one of them."""
    # The profiler logs each start and stop otherwise.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with one_thread():
        peaks = {name: {str(steps): peak_bytes(work) for steps, work in works(name).items()} for name in SIDES}
        sides = {name: works(name)[TIMED_STEPS] for name in SIDES}
        above, below = take_turns({name: _call(work) for name, work in sides.items()}, rounds=plan.timed_rounds)
    race = Race(above, below)
    found = {"memory": "peak of live bytes allocated by one meta-update (torch.profiler, CPU)", "tasks": TASKS}
    results: dict[str, Any] = {**found, "peak_bytes": peaks, "time": race.to_json()}
    _print(results, console)
    if plan.plot is not None:
        _plot(peaks, plan.plot)
    return results, cost_bars(results, quick=quick)


def works(name: str) -> dict[int, Callable[[], object]]:
    """By method, a meta-update as a function of inner steps: that many on ten points, one on ten others; same tasks."""
    return {steps: SIDES[name](steps) for steps in STEPS}


def _gem(steps: int) -> Callable[[], object]:
    """GEM-BML+ with weights drawn at each step."""
    generator = torch.Generator().manual_seed(0)
    theta, batch = fresh_net(generator), draw(SETTINGS[0], generator, (TASKS,))
    support = NetLikelihood(SHAPE, batch.x, batch.y, 5.0, local=False)
    query = NetLikelihood(SHAPE, batch.other_x, batch.other_y, 5.0, local=False)
    inner = InnerSettings(steps=steps, rate=1e-3)
    trainer = GemTrainer(Gaussian(theta, torch.full_like(theta, 1e-3)), GemSettings(True, inner, query_steps=1))
    return lambda: trainer.step(support, query, generator)


def _maml(steps: int) -> Callable[[], object]:
    """MAML through all steps, and its Adam step."""
    generator = torch.Generator().manual_seed(0)
    theta, batch = fresh_net(generator), draw(SETTINGS[0], generator, (TASKS,))
    descent = torch.optim.Adam([theta], lr=1e-3)

    def work() -> None:
        theta.grad = maml_gradient(theta, batch, 1e-3, steps)
        descent.step()

    return work


SIDES: Final[Mapping[str, Callable[[int], Callable[[], object]]]] = {"GEM-BML+": _gem, "MAML": _maml}


def _call(work: Callable[[], object]) -> Callable[[int], object]:
    return lambda number: work()


def peak_bytes(work: Callable[[], object]) -> int:
    """Peak bytes allocated during the work beyond those allocated before it."""
    work()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    kept = seen.profiler
    events = [] if kept is None or kept.kineto_results is None else kept.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    live = most = 0
    for _, change in changes:
        live += change
        most = max(most, live)
    return most


def cost_bars(results: Mapping[str, Any], *, quick: bool) -> list[Bar]:
    """Bars of this part."""
    note = ", quick" if quick else ""
    peaks, (least, most) = results["peak_bytes"], (str(STEPS[0]), str(STEPS[-1]))
    growth = {name: peaks[name][most] / peaks[name][least] for name in peaks}
    span = f"{most} inner steps / {least}"
    return [
        Bar(f"memory of a meta-update, {span}, GEM-BML+{note}", growth["GEM-BML+"], "<=", MEMORY_LIMIT),
        Bar(f"memory of a meta-update, {span}, MAML{note}", growth["MAML"], ">=", MAML_GROWTH),
        Bar(f"time at {TIMED_STEPS} inner steps, GEM-BML+ / MAML{note}", results["time"]["ratio"], "<=", TIME_LIMIT),
    ]


def _print(results: Mapping[str, Any], console: Console) -> None:
    table = Table("inner steps", *[f"{name}, MB" for name in SIDES], box=None, pad_edge=False)
    for steps in map(str, STEPS):
        table.add_row(steps, *[f"{results['peak_bytes'][name][steps] / 1e6:.2f}" for name in SIDES])
    console.print(table)
    race = results["time"]
    low, high = race["interval"]
    console.print(
        f"a meta-update with {TIMED_STEPS} inner steps: GEM-BML+ {race['above']['p50_ms']:.1f} ms, "
        f"MAML {race['below']['p50_ms']:.1f} ms, ratio {race['ratio']:.2f} ({low:.2f} to {high:.2f})",
        highlight=False,
    )


def _plot(peaks: Mapping[str, Mapping[str, int]], folder: Path) -> None:
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, row in peaks.items():
        axes.plot([int(steps) for steps in row], [value / 1e6 for value in row.values()], marker="o", label=name)
    axes.set(xlabel="inner steps", ylabel="peak memory of a meta-update, MB", xscale="log", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(folder / "bayes-cost.png", dpi=150)
