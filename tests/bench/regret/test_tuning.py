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
    TUNING_SEED,
    GridTrial,
    candidates,
    tune,
    tuned_settings,
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
    assert settings in candidates(env, method)
    build_baseline(method, users=2, dimension=3, seed=0, settings=settings)


def test_chosen_settings_say_how_they_were_chosen() -> None:
    chosen = json.loads(SETTINGS_FILE.read_text("utf-8"))
    entries = [entry for methods in chosen.values() for entry in methods.values()]
    assert {entry["seed"] for entry in entries} == {TUNING_SEED}
    assert TUNING_SEED not in REPORTED
    assert all(0 < entry["regret"] < entry["rounds"] for entry in entries)


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
        length = 5_000 // SLOW_DIVISOR if trial.env == "mnist" else 5_000
        assert trial.rounds in (length // FIRST_LOOK_DIVISOR, length)
        return abs(trial.settings["regularization"] - 0.1) + abs(trial.settings["exploration"] - 0.01) + 0.26

    monkeypatch.setattr(tuning, "play", regret)
    found = tune(["synthetic", "mnist"], ["neuralucb-one", "club"], None, 5_000, 1, silent())
    for env in ("synthetic", "mnist"):
        assert found[env]["neuralucb-one"]["settings"] == {"regularization": 0.1, "exploration": 0.01}
        assert found[env]["club"]["settings"].items() >= {"regularization": 0.1, "exploration": 0.01}.items()
        assert found[env]["club"]["regret"] == 0.3


def test_tuning_in_two_processes_has_the_same_result() -> None:
    def found(jobs: int) -> dict[str, Any]:
        return tune(["synthetic"], ["linucb"], None, 20, jobs, silent())

    alone = found(1)
    assert alone == found(2)
    assert set(alone["synthetic"]["linucb"]) == {"settings", "seed", "rounds", "regret"}
    assert alone["synthetic"]["linucb"]["settings"] in candidates("synthetic", "linucb")
