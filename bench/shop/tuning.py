"""Settings of the rivals, by search on seeds that are not reported.

A coordinate search: from the first value of every axis, each axis in turn takes the value with the most clicks, until a
pass over all axes changes nothing. `rival_settings.json` records the result by rival and variant; a variant without a
search of its own uses the settings of the plain shop of its size, or of `200x150`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console

from metaban.bench.core.parallel import run_all
from metaban.bench.shop.players import VOWPAL
from metaban.bench.shop.runs import ShopRun, execute
from metaban.bench.shop.variants import WORLDS, variant_of
from metaban.bench.worlds.shop import Shop

#: Seeds and slates of the search.
TUNING_SEEDS: Final = (200, 201, 202)
TUNING_SLATES: Final = 3_000

#: Passes over the axes at most.
PASSES_MAX: Final = 2

Axes = Mapping[str, Sequence[float | str | bool]]

#: Axes by rival; the search starts from the first values.
AXES: Final[dict[str, Axes]] = {
    "ctr-thompson": {
        "prior_rate": (0.15, 0.05, 0.1, 0.3),
        "prior_shows": (30.0, 2.0, 10.0, 100.0),
        "width": (0.5, 1.0, 0.25, 0.1),
        "decay": (1.0, 0.85),
    },
    VOWPAL: {
        "interactions": (
            "ui ci ug",
            "ui ci",
            "ui ug",
            "ui",
            "ug",
            "ui ut",
            "ui ug ut",
            "ui ug ct",
            "ui ut ct",
            "ui ci ug ut",
            "ui ug ut cg ct",
            "ug ct",
            "ci ct",
        ),
        "learning_rate": (2.0, 0.5, 1.0, 4.0, 8.0),
        "coin": (False, True),
        "power_t": (0.5, 0.25),
        "l2": (0.0, 1e-6, 1e-5),
        "metadata": (True, False),
        "position": (False, True),
        "rank": (0, 4),
        "epsilon": (0.02, 0.0, 0.01, 0.05),
    },
    "linucb-hybrid": {
        "exploration": (0.1, 0.0, 0.03, 0.3),
        "regularization": (10.0, 1.0, 3.0, 30.0, 100.0),
        "split": ("user", "item"),
        "decay": (1.0, 0.85),
    },
    "icf-thompson": {
        "draw_scale": (0.5, 1.0, 0.25, 0.1),
        "item_deviation": (0.1, 0.05, 0.2, 0.4),
        "noise_deviation": (0.35, 0.2, 0.6),
        "rank": (4, 2, 8),
        "decay": (1.0, 0.85),
    },
}


def tune_rival(
    method: str,
    *,
    data: Path | None,
    jobs: int,
    console: Console,
    slates: int = TUNING_SLATES,
    seeds: Sequence[int] = TUNING_SEEDS,
    variant_name: str = WORLDS[0],
) -> dict[str, Any]:
    """The best settings of a rival, the seeds and slates of the search, its clicks a slate, and the settings tried."""
    world = variant_of(variant_name)
    Shop(world, seed=seeds[0], data=data)  # raises DataMissing before any run
    axes = AXES[method]
    best: dict[str, float | str | bool] = {name: values[0] for name, values in axes.items()}
    tried: dict[tuple[float | str | bool, ...], float] = {}
    for _ in range(PASSES_MAX):
        before = dict(best)
        for axis, values in axes.items():
            candidates = [{**best, axis: value} for value in values]
            fresh = [settings for settings in candidates if tuple(settings.values()) not in tried]
            runs = [
                ShopRun(method, variant_name, world, seed, slates, data, settings)
                for settings in fresh
                for seed in seeds
            ]
            outcomes, failures = run_all(execute, runs, jobs=jobs, console=console, unit="slates")
            if failures:
                raise RuntimeError(f"a run of the search failed: {failures[0]}")
            clicks = np.array([outcome.clicks.mean() for outcome in outcomes]).reshape(len(fresh), len(seeds)).mean(1)
            tried |= {tuple(each.values()): float(mean) for each, mean in zip(fresh, clicks, strict=True)}
            best = max(candidates, key=lambda settings: tried[tuple(settings.values())])
            found = ", ".join(
                f"{value} {tried[tuple(each.values())]:.3f}" for value, each in zip(values, candidates, strict=True)
            )
            console.print(f"{method}, {axis}: {found}", highlight=False, markup=False, soft_wrap=True)
        if best == before:
            break
    clicks_best = round(tried[tuple(best.values())], 4)
    return {"settings": best, "seeds": list(seeds), "slates": slates, "clicks": clicks_best, "tried": len(tried)}
