"""The part `fewshot`: its tasks, evaluation and tuning, and a small run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from metaban.bench.bayes import fewshot as bayes_fewshot
from metaban.bench.bayes.fewshot import (
    CLAIMED,
    NOISE,
    NOISE_FACTOR,
    QUANTILES,
    SHAPE,
    WAYS,
    FittedStart,
    Sizes,
    Way,
    adapt,
    draw_points,
    draw_tasks,
    evidence,
    fewshot_bars,
    judged,
    measure_fewshot,
    meta_learned,
    truth,
    tuned,
)
from metaban.bench.bayes.plan import BayesPlan
from metaban.models.numerics.hardware import one_thread


def generator(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def start() -> FittedStart:
    with one_thread():
        return meta_learned(Sizes(meta_steps=8), generator())


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three steps to a mode, on one thread."""
    monkeypatch.setattr(bayes_fewshot, "MODE_STEPS", {"last-layer": (1, 1.0), "kronecker": (3, 0.3)})
    with one_thread():
        yield


def test_tasks_are_noisy_sines() -> None:
    tasks = draw_tasks(400, generator())
    assert (tasks.amin(0) >= torch.tensor([0.1, 0.0])).all()
    assert (tasks.amax(0) <= torch.tensor([5.0, math.pi])).all()
    batch = draw_points(tasks, 20, generator(2))
    left = batch.targets - truth(tasks, batch.x)
    assert float(left.std()) == pytest.approx(NOISE, rel=0.05)
    assert float(truth(torch.tensor([[2.0, 0.5]]), torch.tensor([[[0.25]]]))) == pytest.approx(2 * math.sin(0.75))


@pytest.mark.parametrize(("scale", "coverage"), [(1.0, 0.9), (0.5, 0.589), (2.0, 0.999)])
def test_a_right_deviation_is_calibrated_and_a_wrong_one_is_not(scale: float, coverage: float) -> None:
    """Normal targets, predicted with the right deviation, half and double: Φ gives the coverage of the intervals."""
    targets = torch.randn(40_000, generator=generator(), dtype=torch.float64) * 3
    found = judged(torch.zeros_like(targets), torch.full_like(targets, (3 * scale) ** 2), targets)
    assert found["coverage"] == pytest.approx(coverage, abs=0.01)
    assert (found["miscalibration"] < 0.01) == (scale == 1.0)
    assert found["rmse"] == pytest.approx(3, rel=0.02)
    assert len(found["shares_below"]) == len(QUANTILES)


def test_tuning_goes_on_until_the_evidence_no_longer_rises(start: FittedStart) -> None:
    batch = draw_points(draw_tasks(3, generator(3)), 10, generator(4))
    for way in (WAYS["last-layer"], Way("kronecker", 1e4)):
        off = replace(start, noise=start.noise * 3, damping=torch.tensor([1e4, 1e4, float(start.damping[-1])]).double())
        found = tuned(off, batch, way)
        assert evidence(found, batch, way.structure).mean() > evidence(off, batch, way.structure).mean()
        for factor in (NOISE_FACTOR, 1 / NOISE_FACTOR):  # the number that is tuned last
            other = replace(found, noise=found.noise * factor)
            assert evidence(other, batch, way.structure).mean() <= evidence(found, batch, way.structure).mean()
        assert found.damping[:-1].tolist() == [way.lower] * 2


def test_lower_layers_are_fixed_unless_all_adapt(start: FittedStart) -> None:
    batch = draw_points(draw_tasks(5, generator(3)), 10, generator(4))
    last = SHAPE.layers(start.start)[-1].numel()
    still, moved = adapt(start, batch, "last-layer").point, adapt(start, batch, "kronecker").point
    assert (still[:, :-last] == start.start[:-last]).all()
    assert (moved[:, :-last] != start.start[:-last]).any()


def test_claims_use_the_worst_seed() -> None:
    found = {"coverage": [0.9, 0.96, 0.8], "miscalibration": [0.01, 0.06, 0.02]}
    bars = fewshot_bars(dict.fromkeys(WAYS, found), quick=False)
    assert [(bar.value, bar.holds) for bar in bars[:3]] == [(0.8, False), (0.96, False), (0.06, False)]
    assert len(bars) == 3 * len(CLAIMED)


def test_a_small_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bayes_fewshot, "QUICK", Sizes(meta_steps=4, tuning=3, tuning_lower=2, judged=4, points=10))
    results, bars = measure_fewshot(BayesPlan(seeds=(50,), plot=tmp_path / "new"), True, Console(quiet=True))
    assert set(results["ways"]) == {*WAYS, "noise alone"}
    assert bars
    assert all(bar.name.endswith("quick") for bar in bars)
    assert all(0 <= row["coverage"][0] <= 1 and len(row["rmse"]) == 1 for row in results["ways"].values())
    assert (tmp_path / "new" / "fewshot.png").stat().st_size > 10_000
