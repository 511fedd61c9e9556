"""Time of task modeling: all sets in one batch against one by one, and a whole job."""

from __future__ import annotations

import time
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table

from metaban.bench.core.report import Bar
from metaban.bench.transfer.plan import TransferPlan
from metaban.models.numerics.hardware import one_thread
from metaban.models.transfer.nets import NetLosses, NetSettings, TaskTensors
from metaban.models.transfer.task_modeling import TransferSettings, draw_subsets, model_transfer

#: Sources, and inputs of each task: as many as factors of films.
TASKS, SAMPLES, INPUTS = 51, 200, 12

FASTER_LIMIT, JOB_LIMIT_S = 20.0, 60.0

#: Rounds in which both are timed in turns; the fastest counts, since other programs use the machine.
ROUNDS: Final = 3


def some_tasks(seed: int) -> TaskTensors:
    """Random tasks: the time does not depend on what is learned."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((TASKS, SAMPLES, INPUTS), generator=generator)  # [T, m, d]
    vectors = torch.randn((TASKS, INPUTS, 1), generator=generator)  # [T, d, 1]
    y = (x @ vectors).squeeze(-1) + torch.randn((TASKS, SAMPLES), generator=generator)  # [T, m]
    return TaskTensors(
        x, y, torch.ones(TASKS, SAMPLES, dtype=torch.bool), torch.zeros(TASKS, SAMPLES, dtype=torch.int64)
    )


def measure_speed(plan: TransferPlan, quick: bool, console: Console) -> tuple[dict[str, Any], list[Bar]]:
    """Measure on one thread. The time one by one is extrapolated from some of the sets."""
    console.print("speed", highlight=False)
    seed = plan.seeds[0]
    settings = NetSettings(steps=plan.nets.steps)
    losses = NetLosses.from_tasks(some_tasks(seed), 0, "mse", seed=seed, settings=settings)
    size = TransferSettings().subset_size
    members = draw_subsets(losses.sources, size, plan.timed, torch.Generator().manual_seed(seed))  # [n, k]
    few = members[: plan.timed_alone]
    together, single = [], []
    with one_thread():
        losses.validation(few)
        for _ in range(ROUNDS):
            together.append(_seconds(losses, [members]))
            single.append(_seconds(losses, list(few.unsqueeze(1))) / len(few))
        began = time.perf_counter()
        found = model_transfer(losses, TransferSettings(early_stop=False), seed=seed)
        job = time.perf_counter() - began
    alone = min(single) * plan.timed
    results: dict[str, Any] = {
        "sets": plan.timed,
        "timed_one_by_one": plan.timed_alone,
        "together_s": min(together),
        "one_by_one_s": alone,
        "ratio": alone / min(together),
        "rounds": {"together_s": together, "one_s": single},
        "job_s": job,
        "job_subsets": found.subsets,
    }
    table = Table("speed", "seconds", box=None, pad_edge=False)
    table.add_row(f"{plan.timed} sets in one batch", f"{min(together):.2f}")
    table.add_row(f"one by one, extrapolated from {plan.timed_alone}", f"{alone:.1f}")
    table.add_row(f"a whole job of {found.subsets} sets", f"{job:.2f}")
    console.print(table)
    note = ", quick" if quick else ""
    bars = [
        Bar(f"speed: sets in one batch, times faster than one by one{note}", results["ratio"], ">=", FASTER_LIMIT),
        Bar(f"speed: seconds of a whole job, 50 sources{note}", job, "<=", JOB_LIMIT_S),
    ]
    return results, bars


def _seconds(losses: NetLosses, batches: list[torch.Tensor]) -> float:
    began = time.perf_counter()
    for batch in batches:
        losses.validation(batch)
    return time.perf_counter() - began
