"""Settings of baselines: the grid, the choice, and the recorded settings in the package."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from metaban.bench.baselines import BASELINES, build_baseline
from metaban.bench.regret import tuning
from metaban.bench.regret.tuning import (
    FIRST_LOOK_DIVISOR,
    SETTINGS_FILE,
    SLOW_DIVISOR,
    SLOW_WORLDS,
    GridTrial,
    candidates,
    tune,
    tuned_settings,
    tuning_rounds,
    tuning_seeds,
)
from metaban.bench.worlds.environments import ENVIRONMENTS

#: Seeds of reported results.
REPORTED = range(100, 103)


def silent() -> Console:
    return Console(file=io.StringIO())


@pytest.mark.parametrize("env", ENVIRONMENTS)
@pytest.mark.parametrize("method", sorted(BASELINES))
def test_chosen_settings_are_of_the_grid_and_build(env: str, method: str) -> None:
    settings = tuned_settings(env, method)
    entry = json.loads(SETTINGS_FILE.read_text("utf-8"))[env][method]
    assert settings in candidates(entry.get("as_in", env), method)
    build_baseline(method, users=2, dimension=3, seed=0, settings=settings)


def test_chosen_settings_say_how_they_were_chosen() -> None:
    chosen = json.loads(SETTINGS_FILE.read_text("utf-8"))
    for env, methods in chosen.items():
        assert not set(tuning_seeds(env)) & set(REPORTED)
        for method, entry in methods.items():
            if "as_in" in entry:
                assert set(entry) == {"as_in"}
                assert "settings" in chosen[entry["as_in"]][method]
            else:
                assert entry["seeds"] == list(tuning_seeds(env))
                assert 0 < entry["regret"] < entry["rounds"]


def test_settings_that_are_not_recorded_are_refused() -> None:
    with pytest.raises(ValueError, match="metaban bench tune"):
        tuned_settings("synthetic", "oracle")
    with pytest.raises(ValueError, match="oracle"):
        tune(["synthetic"], ["oracle"], None, 2, 1, silent())


def test_grid() -> None:
    assert len(candidates("yelp", "linucb")) == 3 * 4 * 2
    assert len(candidates("yelp", "neuralucb-one")) == 3 * 4
    assert len(candidates("yelp", "club")) == 3 * 4 * 2 * 4
    assert {settings["standardize"] for settings in candidates("mnist", "club")} == {False}


def test_lowest_regret_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    def regret(trial: GridTrial) -> float:
        length = 5_000 // SLOW_DIVISOR if trial.env in SLOW_WORLDS else 5_000
        assert trial.rounds in (length // FIRST_LOOK_DIVISOR, length)
        seen.add((trial.env, trial.seed))
        return abs(trial.settings["regularization"] - 0.1) + abs(trial.settings["exploration"] - 0.01) + 0.26

    seen: set[tuple[str, int]] = set()
    monkeypatch.setattr(tuning, "play", regret)
    found = tune(["synthetic", "mnist", "digits"], ["neuralucb-one", "club"], None, 5_000, 1, silent())
    assert seen == {("synthetic", 50), ("mnist", 50), ("digits", 200), ("digits", 201), ("digits", 202)}
    for env in ("synthetic", "mnist", "digits"):
        assert found[env]["neuralucb-one"]["settings"] == {"regularization": 0.1, "exploration": 0.01}
        assert found[env]["club"]["settings"].items() >= {"regularization": 0.1, "exploration": 0.01}.items()
        assert found[env]["club"]["regret"] == 0.3


def test_the_mean_over_seeds_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    def regret(trial: GridTrial) -> float:
        lucky = trial.seed == 200 and trial.settings["exploration"] == 1.0
        return 0.1 if lucky else 2.0 + trial.settings["exploration"]

    monkeypatch.setattr(tuning, "play", regret)
    found = tune(["revenue"], ["linucb"], None, 100, 1, silent())["revenue"]["linucb"]
    assert (found["settings"]["exploration"], found["regret"]) == (0.001, 2.0)
    assert found["seeds"] == [200, 201, 202]


def test_slow_searches_are_shorter() -> None:
    assert tuning_rounds("mnist", "linucb", 10_000) == tuning_rounds("digits", "club", 10_000) == 2_000
    assert tuning_rounds("digits", "linucb", 10_000) == tuning_rounds("revenue", "club", 10_000) == 10_000


def test_tuning_in_two_processes_has_the_same_result() -> None:
    def found(jobs: int) -> dict[str, Any]:
        return tune(["synthetic"], ["linucb"], None, 20, jobs, silent())

    alone = found(1)
    assert alone == found(2)
    assert set(alone["synthetic"]["linucb"]) == {"settings", "seeds", "rounds", "regret"}
    assert alone["synthetic"]["linucb"]["settings"] in candidates("synthetic", "linucb")
