"""`metaban bench transfer`: its bars, its tasks, and small runs of all parts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from metaban.bench.cli import bench_app
from metaban.bench.transfer.command import PARTS, measure_transfer
from metaban.bench.transfer.linear import NEAR, RELATED, SOURCES, linear_world, mean_effects
from metaban.bench.transfer.plan import TransferPlan
from metaban.bench.transfer.selection import OURS, RIVALS, selection_bars
from metaban.bench.transfer.surrogate import judged
from metaban.bench.transfer.tasks import RATERS, film_factors, rated_losses
from metaban.bench.worlds.data import DataMissing, movielens_ratings
from metaban.models.transfer.nets import NetSettings

QUIET = Console(quiet=True)
TINY = TransferPlan(
    (7,), linear_seeds=1, dimensions=(10, 20), distances=(3.0, 1.5), targets=2, sources=6,
    nets=NetSettings(hidden=4, steps=20), judges=12, small_judges=5, timed=12, timed_alone=2,
)  # fmt: skip


@pytest.fixture
def ratings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Films of two kinds, and users who like one kind."""
    random = np.random.default_rng(0)
    kinds = np.where(np.arange(400) < 200, 1.0, -1.0)
    likes = np.where(np.arange(260) % 2 == 0, 1.0, -1.0)
    scores = np.clip(np.round(3 + 1.5 * likes[:, None] * kinds + random.normal(size=(260, 400))), 1, 5)
    seen = random.random((260, 400)) < np.linspace(1.0, 0.2, 260)[:, None]
    film_factors.cache_clear()
    monkeypatch.setattr("metaban.bench.transfer.tasks.movielens_ratings", lambda folder: np.where(seen, scores, 0.0))
    yield tmp_path
    film_factors.cache_clear()


class TestWorlds:
    def test_related_sources_are_nearer(self) -> None:
        away = linear_world(3, 400, 3.0)[1].norm(dim=1)
        assert len(away) == SOURCES
        assert away[:RELATED].tolist() == pytest.approx([NEAR * math.sqrt(400)] * RELATED, rel=0.15)
        assert away[RELATED:].tolist() == pytest.approx([3 * NEAR * math.sqrt(400)] * (SOURCES - RELATED), rel=0.15)

    def test_mean_effects_are_means_over_all_sets(self) -> None:
        away = torch.randn(8, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        every = [set(chosen) for chosen in combinations(range(8), 5)]
        expected = []
        for source in range(8):
            squares = [float(away[list(chosen)].sum(0).square().sum()) for chosen in every if source in chosen]
            expected.append(sum(squares) / len(squares))
        assert mean_effects(away).tolist() == pytest.approx(expected)

    def test_tasks_are_users_and_no_factor_knows_them(self, ratings: Path) -> None:
        active, factors = film_factors(ratings)
        assert len(set(active.tolist())) == RATERS
        np.testing.assert_allclose(factors.std(0), 1)
        losses = rated_losses(1, 0, 6, ratings, NetSettings(steps=1))
        assert losses.sources == 6
        assert set(losses.tasks.y[losses.tasks.valid].tolist()) <= {1.0, 2.0, 3.0, 4.0, 5.0}
        again, other = (rated_losses(1, number, 6, ratings, NetSettings(steps=1)) for number in (0, 1))
        assert torch.equal(again.tasks.y, losses.tasks.y)
        assert not torch.equal(other.tasks.y, losses.tasks.y)

    def test_a_surrogate_is_judged_by_sets_it_has_not_seen(self, ratings: Path) -> None:
        losses = rated_losses(1, 0, 6, ratings, TINY.nets)
        found = judged(losses, TINY, 1)
        assert len(found["foretold"]) == TINY.judges
        assert -1 <= found["ranks"] <= 1
        assert found["signs_constant"] >= 0.5


def test_claims_are_ratios_of_means() -> None:
    methods: dict[str, Any] = {name: {"mean": 2.0} for name in RIVALS} | {OURS: {"mean": 2.0}}
    methods["all sources"] = {"mean": 1.0}
    bars = selection_bars(methods, quick=False)
    assert [(bar.value, bar.holds) for bar in bars] == [(1.0, True), (2.0, False), (1.0, True), (1.0, True)]


def test_missing_data_is_named(tmp_path: Path) -> None:
    movielens_ratings.cache_clear()
    film_factors.cache_clear()
    with pytest.raises(DataMissing, match="movielens-100k"):
        rated_losses(1, 0, 6, tmp_path, TINY.nets)
    report = measure_transfer(replace(TINY, data=tmp_path), ("surrogate", "selection"), quick=True, console=QUIET)
    assert set(report.results) == {"surrogate", "selection"}
    assert all("movielens-100k" in found["skipped"] for found in report.results.values())
    assert not report.bars


def test_every_part_runs_small_and_is_reported(ratings: Path, tmp_path: Path) -> None:
    plots = tmp_path / "plots"
    plan = replace(TINY, data=ratings, plot=plots)
    report = measure_transfer(plan, ("linear", "surrogate", "selection", "speed"), quick=True, console=QUIET)
    assert all(np.isfinite(bar.value) and bar.name.endswith(", quick") for bar in report.bars)
    assert len(report.bars) == 1 + 3 + 4 + 2
    assert len(report.results["selection"]["runs"]) == 2
    assert report.results["speed"]["job_subsets"] == 400
    names = {"transfer-linear.png", "transfer-surrogate.png", "transfer-selection.png"}
    assert {path.name for path in plots.iterdir()} == names
    report.write(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text())["benchmark"] == "transfer"


def test_the_command_knows_its_parts() -> None:
    result = CliRunner().invoke(bench_app, ["transfer", "--part", "magic"], env={"COLUMNS": "400"})
    assert result.exit_code == 2
    assert "unknown: magic; choose from linear, surrogate, selection, speed" in result.output
    assert set(PARTS) >= {"linear", "surrogate", "selection", "speed"}
