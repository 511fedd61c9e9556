"""How long it takes to train fusion, with and without alignment, and to make a warm start of a profile."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from rich.console import Console

from bench.data import DataMissing, sine_nets
from bench.fusion_plan import FusionPlan
from bench.profile_world import ProfileWorld
from bench.report import Bar
from bench.sine import SHAPE, fresh_nets, output_inputs
from bench.warm_starts import Contest, starter_of
from models.fusion_training import FusionSettings, fit_fusion
from models.threads import one_thread, use_threads
from service.warm_starts import NEAREST_TOLD

#: Cores of the claim.
CORES = 2
#: The claims.
SECONDS_LIMIT, COST_LIMIT, START_MS_LIMIT = 120.0, 2.0, 5.0
#: Rounds of sources whose warm starts are timed: how much they have learned, or fusion of them, costs no time.
START_ROUNDS = 3
BARELY_TRAINED = FusionSettings(rounds=1, round_steps=2)


def measure_timing(plan: FusionPlan, quick: bool, console: Console) -> tuple[dict[str, Any], list[Bar]]:
    """Training with and without alignment on two cores; random networks cost the same where there are none."""
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


def _start_ms(plan: FusionPlan) -> dict[str, float]:
    """What a request waits for when a profile is new: a start, and the nearest sources to tell of it."""
    count = plan.start_sources
    world = ProfileWorld(seed=0, users=2 * count)
    starter = starter_of(Contest(world, count, count, 0, START_ROUNDS, plan.first_rounds, settings=BARELY_TRAINED))
    taken = []
    with one_thread():
        for number in range(plan.starts):
            profile = world.profiles[count + number % count]
            began = time.perf_counter()
            starter.start(profile)
            starter.nearest(profile, NEAREST_TOLD)
            taken.append(1_000 * (time.perf_counter() - began))
    p50, p99 = np.percentile(taken, [50, 99])
    return {"p50": float(p50), "p99": float(p99)}
