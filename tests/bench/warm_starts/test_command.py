"""`metaban bench fusion`: its bars, environments with profiles, and small runs of all parts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from metaban.bench.warm_starts.command import PARTS, measure_fusion
from metaban.bench.warm_starts.first_rounds import PROFILE_LIMITS, start_bars, summary
from metaban.bench.warm_starts.newcomers import (
    CONTEXT,
    COPIED,
    FUSION,
    METHODS,
    NEAREST,
    PRIOR,
    RANDOM,
    RIDGE,
    Contest,
    ContestResult,
    compete,
    nearest_rows,
    ridge,
)
from metaban.bench.warm_starts.plan import FusionBenchPlan
from metaban.bench.warm_starts.sine import sine_bars
from metaban.bench.warm_starts.sine_nets import (
    SHAPE,
    error,
    fresh_nets,
    grid,
    paper_tasks,
    sine,
    sparse_tasks,
    trained_nets,
)
from metaban.bench.worlds.data import DataMissing
from metaban.bench.worlds.profiles import ARMS, ProfileWorld
from metaban.models.fusion.training import FusionSettings

TINY = FusionSettings(processes=2, inducing=6, batch=16, rounds=2, round_steps=3, realign_rounds=1)
QUIET = Console(quiet=True)


def shots(zero: float, twenty: float = 1.0) -> dict[str, Any]:
    return {"0": {"mean": zero}, "20": {"mean": twenty}}


class TestSine:
    def test_claims_are_about_ratios_of_the_same_run(self) -> None:
        protocols = {
            "paper": {"methods": {"fusion": shots(0.04, 0.02), "fusion, no alignment": shots(0.1)}},
            "sparse": {
                "methods": {"fusion": shots(0.03), "nearest source": shots(0.03), "ridge, aligned": shots(0.05)}
            },
        }
        found = [(bar.value, bar.holds) for bar in sine_bars(protocols, quick=False)]
        assert found == [
            (0.04, True),
            (0.02, True),
            (pytest.approx(0.4), True),
            (pytest.approx(1.0), False),
            (pytest.approx(0.6), True),
        ]

    def test_an_error_is_a_share_of_the_target_s_range(self) -> None:
        flat = torch.zeros(1, SHAPE.parameters)
        for amplitude in (0.5, 4.0):
            task = torch.tensor([[amplitude, 0.7]])
            truth = sine(task, grid())
            expected = truth.square().mean().sqrt() / (truth.max() - truth.min())
            assert float(error(flat, task)) == pytest.approx(float(expected))

    def test_networks_are_trained_each_on_its_own_task(self) -> None:
        tasks = torch.tensor([[1.0, 0.9], [3.0, 2.4]])
        nets = trained_nets(tasks, torch.Generator().manual_seed(0), steps=200)
        assert bool((error(nets, tasks) < 0.08).all())
        assert bool((error(nets.flip(0), tasks) > 0.1).all())

    def test_sparse_targets_lie_between_sources_of_their_band(self) -> None:
        tasks = sparse_tasks(1, 2)
        for target in tasks.targets:
            same = tasks.sources[tasks.sources[:, 1] == target[1]]
            gaps = (same[:, 0] - target[0]).abs()
            assert float(gaps.min()) > 0.01 * float(target[0])
            assert bool((same[:, 0] < target[0]).any())
            assert bool((same[:, 0] > target[0]).any())

    def test_without_the_authors_networks_it_says_what_is_missing(self, tmp_path: Path) -> None:
        with pytest.raises(DataMissing, match=r"sine-nets\.npz"):
            paper_tasks(1, tmp_path, None)

    def test_fresh_networks_differ(self) -> None:
        nets = fresh_nets(3, torch.Generator().manual_seed(0))
        assert len({tuple(row) for row in nets.tolist()}) == 3


class TestProfileWorld:
    def test_rounds_belong_to_user_and_number(self) -> None:
        world, again = ProfileWorld(seed=4, users=6), ProfileWorld(seed=4, users=6)
        one, same, other = world.round_of(2, 5), again.round_of(2, 5), world.round_of(2, 6)
        np.testing.assert_array_equal(one.arms, same.arms)
        np.testing.assert_array_equal(one.rewards, same.rewards)
        assert not np.array_equal(one.arms, other.arms)
        assert one.arms.shape == (ARMS, world.dimension)

    def test_near_profiles_like_near_things_and_far_ones_do_not(self) -> None:
        world = ProfileWorld(seed=3, users=600)
        gaps = np.linalg.norm(world.profiles[:, None] - world.profiles, axis=-1)
        alike = world._tastes @ world._tastes.T
        apart = ~np.eye(600, dtype=bool)
        assert alike[apart & (gaps < 0.2)].mean() > 0.6
        assert alike[apart & (gaps < 0.2)].mean() > alike[gaps > 1.5].mean() + 0.4

    def test_chances_are_those_of_the_stated_formula(self) -> None:
        world = ProfileWorld(seed=3, users=4)
        asked = world.round_of(1, 0)
        squares = ((asked.arms - world._tastes[1]) ** 2).sum(1)
        np.testing.assert_allclose(asked.regret(0), max(0.9 * np.exp(-squares / 0.6)) - 0.9 * np.exp(-squares[0] / 0.6))


class TestRivals:
    def test_nearest_is_in_standard_deviations(self) -> None:
        sources = np.array([[0.0, 0.0], [1.0, 1_000.0], [0.9, 0.0]])
        assert nearest_rows(sources, np.array([[1.0, 0.0], [1.0, 990.0]])).tolist() == [2, 1]

    def test_ridge_finds_a_line_and_shrinks_noise(self) -> None:
        random = np.random.default_rng(0)
        profiles, asked = random.normal(size=(60, 2)), random.normal(size=(5, 2))
        line = np.array([[1.0, 2.0, 0.0], [0.5, -1.0, 3.0]])
        np.testing.assert_allclose(ridge(profiles, 4 + profiles @ line, asked), 4 + asked @ line, atol=1e-3)
        noise = random.normal(size=(60, 3))
        assert np.abs(ridge(profiles, noise, asked) - noise.mean(0)).max() < 0.2


class TestNewUsers:
    def test_all_methods_play_the_same_rounds_and_leave_each_other_alone(self) -> None:
        world = ProfileWorld(seed=1, users=40)
        contest = Contest(world, 36, 4, 1, source_rounds=2, first_rounds=3, settings=TINY)
        together = compete(contest, QUIET)
        assert tuple(together.regret) == METHODS
        assert all(len(rounds) == 3 for rounds in together.regret.values())
        alone = compete(replace(contest, methods=(RIDGE, PRIOR)), QUIET)
        assert alone.regret == {name: together.regret[name] for name in (RIDGE, PRIOR)}
        assert alone.guards[RIDGE] == together.guards[RIDGE]

    def test_claims_compare_with_each_rival(self) -> None:
        regret = {FUSION: [1.0, 0.5], PRIOR: [2.0, 1.0], RANDOM: [2.0, 2.0], COPIED: [1.0, 0.4], NEAREST: [1.5, 0.0]}
        found = summary([ContestResult({**regret, RIDGE: [1.5, 0.0], CONTEXT: [1.4, 0.0]}, {})])
        bars = start_bars("profiles", found, PROFILE_LIMITS, quick=True)
        assert {bar.name.removeprefix("profiles: regret of fusion / "): bar.holds for bar in bars} == {
            "meta prior, quick": True,
            "random initialisation, quick": True,
            "nearest source, copied, quick": False,
            "nearest source, quick": True,
            "ridge, quick": True,
            "profile in the context, quick": False,
        }


def test_every_part_runs_small_and_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("metaban.bench.warm_starts.sine_nets.ADAPT_STEPS", 2)
    monkeypatch.setattr("metaban.models.fusion.warm_start_training.HEAD_SETTINGS", TINY)
    # With two threads in each of several processes, synchronisation would take longer than these small fits.
    monkeypatch.setattr("metaban.bench.warm_starts.timing.CORES", 1)
    empty = tmp_path / "data"
    empty.mkdir()
    small = {"teachers": 34, "newcomers": 4, "source_rounds": 1, "first_rounds": 2, "start_sources": 34, "starts": 40}
    plots = tmp_path / "plots"
    plan = FusionBenchPlan((7,), empty, plots, TINY, net_steps=20, meta_steps=2, timed_nets=20, **small)
    report = measure_fusion(plan, tuple(PARTS), quick=True, console=QUIET)
    assert set(report.results) == {"sine", "profiles", "movielens", "timing"}
    assert report.results["sine"]["skipped"].keys() == {"paper"}
    assert "movielens-100k" in report.results["movielens"]["skipped"]
    assert report.results["timing"]["start_ms"]["p99"] > 0
    assert all(np.isfinite(bar.value) and bar.name.endswith(", quick") for bar in report.bars)
    assert len(report.bars) == 2 + 6 + 3
    assert {path.name for path in plots.iterdir()} == {"fusion-sparse.png", "fusion-profiles.png"}
    report.write(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text())["benchmark"] == "fusion"
