"""Settings of the rivals: the search, and the recorded settings in the package."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from metaban.bench.core.parallel import Failure
from metaban.bench.shop import tuning
from metaban.bench.shop.players import SETTINGS_FILE, TUNED, tuned_settings
from metaban.bench.shop.runs import ShopOutcome, ShopRun
from metaban.bench.shop.tuning import AXES, TUNING_SEEDS, TUNING_SLATES, tune_rival
from metaban.bench.shop.variants import VARIANTS
from metaban.bench.worlds.data import DataMissing, data_folder, movielens_ratings
from metaban.bench.worlds.shop import ShopVariant

#: Seeds of reported results.
REPORTED = range(300, 305)


@pytest.mark.parametrize("method", TUNED)
def test_recorded_settings_are_of_the_axes(method: str) -> None:
    searches = json.loads(SETTINGS_FILE.read_text("utf-8"))[method]
    assert "200x150" in searches
    assert set(searches) <= set(VARIANTS)
    for entry in searches.values():
        assert list(entry["settings"]) == list(AXES[method])
        assert all(value in AXES[method][name] for name, value in entry["settings"].items())
        assert entry["seeds"] == list(TUNING_SEEDS)
        assert not set(TUNING_SEEDS) & set(REPORTED)
        assert entry["slates"] == TUNING_SLATES
        assert 0.7 < entry["clicks"] < 2.6


def test_a_variant_without_a_search_has_the_settings_of_the_nearest_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    searches = {"200x150": "a", "1000x943": "b", "200x150-no-ids": "c"}
    recorded = {"vw-ids": {name: {"settings": {"of": value}} for name, value in searches.items()}}
    (tmp_path / "settings.json").write_text(json.dumps(recorded))
    monkeypatch.setattr("metaban.bench.shop.players.SETTINGS_FILE", tmp_path / "settings.json")
    expected = {
        "200x150": "a", "200x150-no-ids": "c", "200x150-arrivals": "a", "1000x943-arrivals": "b", "60x40-no-ids": "a"
    }  # fmt: skip
    assert {name: tuned_settings("vw-ids", name)["of"] for name in expected} == expected


def test_each_axis_takes_the_value_with_the_most_clicks(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        movielens_ratings(data_folder(None))
    except DataMissing as missing:
        pytest.skip(str(missing))
    seen: list[ShopRun] = []

    def scored(
        execute: Callable[..., ShopOutcome], runs: Sequence[ShopRun], **_: Any
    ) -> tuple[list[ShopOutcome], list[Failure]]:
        seen.extend(runs)
        outcomes = []
        for run in runs:
            assert run.settings is not None
            # The best rate depends on the number of shows, so a second pass changes it again.
            goal = 0.3 if run.settings["prior_shows"] == 2.0 else 0.15
            worth = 1 - abs(float(run.settings["prior_rate"]) - goal) + (run.settings["prior_shows"] == 2.0)
            outcomes.append(ShopOutcome(run, np.full(4, worth), 0.0, 0.0, {}))
        return outcomes, []

    monkeypatch.setattr(tuning, "run_all", scored)
    console = Console(file=io.StringIO())
    found = tune_rival("ctr-thompson", data=None, jobs=1, console=console, slates=4, variant_name="60x40-no-ids")
    assert found["settings"]["prior_rate"] == 0.3
    assert found["settings"]["prior_shows"] == 2.0
    assert found["clicks"] == 2.0
    assert found["tried"] * len(TUNING_SEEDS) == len(seen) == len({(str(run.settings), run.seed) for run in seen})
    assert {run.seed for run in seen} == set(TUNING_SEEDS)
    assert {run.variant for run in seen} == {ShopVariant(items=60, users=40, ids=False)}
