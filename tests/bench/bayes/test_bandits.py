"""Thompson sampling against UCB, and calibration, at small sizes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from metaban.bench.bayes import bandits as bayes_bandits
from metaban.bench.bayes.bandits import (
    SHIPPED,
    THOMPSON,
    UCBS,
    PolicyContender,
    PolicyRecord,
    PolicyTrial,
    goodness_of_fit,
    measure_bandits,
    measure_calibration,
    play,
    reliability,
)
from metaban.bench.bayes.plan import BayesPlan
from metaban.models.numerics.hardware import one_thread

QUIET = Console(quiet=True)
SMALL = BayesPlan(seeds=(50, 51))


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run trials in this process: starting another takes longer than these runs."""

    def all_here(trials: list[PolicyTrial], console: Console) -> list[PolicyRecord]:
        with one_thread():
            return [play(trial) for trial in trials]

    monkeypatch.setattr(bayes_bandits, "play_all", all_here)


def test_thompson_and_ucb_are_compared_on_the_same_rounds() -> None:
    results, bars = measure_bandits(SMALL, True, QUIET, worlds=["synthetic"], rounds=40)
    found = results["worlds"]["synthetic"]
    assert set(found["methods"]) == {each.label for each in (THOMPSON, *UCBS)}
    best = min(found["methods"][each.label]["regret_mean"] for each in UCBS)
    assert found["methods"][found["best_ucb"]]["regret_mean"] == best
    assert found["ratio"] == pytest.approx(found["methods"]["thompson"]["regret_mean"] / best)
    assert [len(row["regrets"]) for row in found["methods"].values()] == [2] * 4
    ratio, fit = bars
    assert (ratio.value, ratio.sense, ratio.limit) == (found["ratio"], "<=", 1.05)
    assert (fit.value, fit.sense, fit.limit) == (found["fit"]["thompson"], ">=", 0.01)
    assert fit.holds
    assert "quick" in ratio.name
    assert found["methods"]["thompson"]["settings"] == THOMPSON.settings()
    assert THOMPSON.settings().keys() == {"policy", "alpha", "draws", "scale"}
    assert SHIPPED.settings() == {"policy": "ucb-floor", "alpha": 0.3, "epsilon": 0.02}


def test_calibration_of_the_learner_as_shipped(tmp_path: Path) -> None:
    results, bars = measure_calibration(replace(SMALL, plot=tmp_path), False, QUIET, worlds=["synthetic"], rounds=40)
    found = results["worlds"]["synthetic"]
    assert found["samples"] == 80
    assert [bar.value for bar in bars] == [found["ece"], found["ece_equal_mass"], *[found["coverage"]] * 2]
    assert [(bar.sense, bar.limit) for bar in bars] == [("<=", 0.05), ("<=", 0.05), (">=", 0.85), ("<=", 0.95)]
    assert (tmp_path / "calibration.png").stat().st_size > 1_000


def test_worlds_without_data_are_skipped(tmp_path: Path) -> None:
    said = Console(record=True, width=200, quiet=False, file=(tmp_path / "said").open("w"))
    for measure in (measure_bandits, measure_calibration):
        results, bars = measure(replace(SMALL, data=tmp_path), True, said)
        assert bars == []
        assert results["worlds"] == {}
        assert set(results["skipped"]) == {"movielens", "service"}
    assert said.export_text().count("skipped movielens") == 2


def record_of(mean: np.ndarray, reward: np.ndarray, reach: float = 0.5) -> PolicyRecord:
    nothing, count = np.zeros(len(mean)), len(mean)
    return PolicyRecord(
        nothing, np.zeros(count, dtype=np.int64), np.ones((count, 1)), mean, nothing + 0.4, nothing + reach, reward, 0
    )


def test_errors_and_coverage_of_predictions() -> None:
    random = np.random.default_rng(1)
    mean = random.uniform(0.2, 0.8, 20_000)
    true = (random.random(20_000) < mean).astype(np.float64)
    found = reliability([record_of(mean, true)])
    assert found["ece"] < 0.01
    assert found["ece_equal_mass"] < 0.02
    assert sum(row["samples"] for row in found["bins_equal_mass"]) == 20_000
    assert {row["samples"] for row in found["bins_equal_mass"]} == {2_000}
    assert found["coverage"] == pytest.approx(float((np.abs(true - mean) <= 0.5).mean()))
    assert found["coverage_of_normal_intervals"] == pytest.approx(
        float((np.abs(true - mean) <= 0.4 * 1.6448536269514722).mean())
    )
    off = reliability([record_of(np.clip(mean + 0.15, 0, 1), true)])
    assert off["ece"] == pytest.approx(0.15, abs=0.01)
    assert off["ece_equal_mass"] == pytest.approx(0.15, abs=0.01)
    assert off["mce"] >= off["ece"]


class TestGoodnessOfFit:
    def drawn(self, chances: np.ndarray, seed: int) -> np.ndarray:
        shares = np.random.default_rng(seed).random(len(chances))[:, None]
        found: np.ndarray = (chances.cumsum(1) < shares).sum(1)
        return found

    def test_places_drawn_with_these_chances_fit(self) -> None:
        random = np.random.default_rng(2)
        chances = random.dirichlet([3.0, 1.0, 0.5, 0.2], 2_000)
        values = np.array([goodness_of_fit(self.drawn(chances, seed), chances) for seed in range(200)])
        assert 0.4 < values.mean() < 0.6, "p is uniform where the hypothesis holds"
        assert (values < 0.1).mean() == pytest.approx(0.1, abs=0.07)

    def test_other_places_do_not_fit(self) -> None:
        random = np.random.default_rng(3)
        chances = random.dirichlet([3.0, 1.0, 0.5, 0.2], 2_000)
        assert goodness_of_fit(chances.argmax(1), chances) < 1e-6
        assert goodness_of_fit(self.drawn(0.9 * chances + 0.1 / 4, 1), chances) < 1e-3

    def test_certain_choices(self) -> None:
        sure = np.eye(3)[np.array([0, 1, 1, 2])]
        assert goodness_of_fit(np.array([0, 1, 1, 2]), sure) == 1.0
        assert goodness_of_fit(np.array([0, 1, 1, 1]), sure) == 0.0


def test_a_trial_records_predictions_made_before_the_reward() -> None:
    trial: dict[str, Any] = {"env": "synthetic", "seed": 50, "rounds": 30}
    with one_thread():
        one, again = (play(PolicyTrial(THOMPSON, **trial)) for _ in range(2))
        other = play(PolicyTrial(PolicyContender("greedy", "ucb", 0.0), **trial))
    np.testing.assert_array_equal(one.mean, again.mean)
    assert one.mislogged == other.mislogged == 0
    assert (one.chances[:, 0] >= one.chances[:, -1]).all()
    np.testing.assert_allclose(one.chances.sum(1), 1)
    rounds = np.arange(30)
    assert (other.chances[rounds, other.place] == other.chances[:, 0]).all(), "an argmax, ties shared"
    assert (one.deviation > 0).all()
    np.testing.assert_allclose(one.reach, 1.6448536 * one.deviation, rtol=1e-5)
    assert set(one.reward.tolist()) <= {0.0, 1.0}
