"""Time to train fusion, with and without alignment, and time of a warm start."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from rich.console import Console

from metaban.bench.core.report import Bar
from metaban.bench.warm_starts.newcomers import Contest, starter_of
from metaban.bench.warm_starts.plan import FusionBenchPlan
from metaban.bench.warm_starts.sine_nets import SHAPE, fresh_nets, output_inputs
from metaban.bench.worlds.data import DataMissing, sine_nets
from metaban.bench.worlds.profiles import ProfileWorld
from metaban.models.fusion.training import FusionSettings, fit_fusion
from metaban.models.numerics.hardware import one_thread, use_threads
from metaban.service.engine.model.warm_starts import NEAREST_STORED

#: Cores that the claim is about.
CORES = 2

#: Limits of the claims.
SECONDS_LIMIT, COST_LIMIT, START_MS_LIMIT = 120.0, 2.0, 5.0

#: Rounds that the sources of timed warm starts play; the time does not depend on what they have learned.
START_ROUNDS = 3
BARELY_TRAINED = FusionSettings(rounds=1, round_steps=2)


def measure_timing(plan: FusionBenchPlan, quick: bool, console: Console) -> tuple[dict[str, Any], list[Bar]]:
    """Train with and without alignment on two cores; without the data, random networks, which cost the same."""
    try:
        known = sine_nets(plan.data)
        profiles, nets = torch.from_numpy(known[0])[: plan.timed_nets], torch.from_numpy(known[1])[: plan.timed_nets]
    except DataMissing:
        generator = torch.Generator().manual_seed(0)
        nets = fresh_nets(plan.timed_nets, generator)
        profiles = torch.rand(len(nets), 2, generator=generator)
    inputs = output_inputs()
    found: dict[str, Any] = {"nets": len(nets), "parameters": SHAPE.parameters}
    before = torch.get_num_threads()
    use_threads(CORES)
    try:
        for name, align in (("aligned", True), ("unaligned", False)):
            began, used = time.perf_counter(), time.process_time()
            fit = fit_fusion(profiles, nets, SHAPE, replace(plan.settings, align=align), seed=0, inputs=inputs)
            found[f"{name}_seconds"] = time.perf_counter() - began
            found[f"{name}_cpu_seconds"] = time.process_time() - used
            found[f"{name}_bounds"] = fit.bounds
            console.print(
                f"training, {name}: {len(nets):,} networks in {found[f'{name}_seconds']:.0f} s", highlight=False
            )
            tail = max(1, len(fit.bounds) // 10)
            gained = fit.bounds[-1] - fit.bounds[0]
            found[f"{name}_last_tenth"] = (fit.bounds[-1] - fit.bounds[-1 - tail]) / gained if gained else 0.0
    finally:
        use_threads(before)
    found["start_ms"] = _start_ms(plan)
    console.print("warm start: p50 {p50:.2f} ms, p99 {p99:.2f} ms".format(**found["start_ms"]), highlight=False)
    note = ", quick" if quick else ""
    cost = found["aligned_seconds"] / found["unaligned_seconds"]
    return found, [
        Bar(f"seconds for {len(nets):,} networks, aligned{note}", found["aligned_seconds"], "<=", SECONDS_LIMIT),
        Bar(f"seconds: aligned / unaligned{note}", cost, "<=", COST_LIMIT),
        Bar(f"ms of a warm start in a request, p99{note}", found["start_ms"]["p99"], "<=", START_MS_LIMIT),
    ]


def _start_ms(plan: FusionBenchPlan) -> dict[str, float]:
    """Milliseconds that a request spends on a new profile: the start, and the nearest sources for its explanation."""
    count = plan.start_sources
    world = ProfileWorld(seed=0, users=2 * count)
    starter = starter_of(Contest(world, count, count, 0, START_ROUNDS, plan.first_rounds, settings=BARELY_TRAINED))
    taken = []
    with one_thread():
        for number in range(plan.starts):
            profile = world.profiles[count + number % count]
            began = time.perf_counter()
            starter.start(profile)
            starter.nearest(profile, NEAREST_STORED)
            taken.append(1_000 * (time.perf_counter() - began))
    p50, p99 = np.percentile(taken, [50, 99])
    return {"p50": float(p50), "p99": float(p99)}
