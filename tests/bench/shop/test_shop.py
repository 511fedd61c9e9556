"""`metaban bench shop`: results, bars, table, JSON and plot."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from metaban.bench.cli import bench_app
from metaban.bench.shop.plots import moving_rates
from metaban.bench.shop.runs import ShopOutcome, ShopRun
from metaban.bench.shop.shop import VARIANTS, ShopPlan, shop_bars, variant_results
from metaban.bench.worlds.data import DataMissing, data_folder, movielens_films, movielens_ratings
from metaban.bench.worlds.shop import ShopVariant


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(bench_app, arguments, env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})


@pytest.fixture
def data() -> None:
    try:
        movielens_films(data_folder(None))
        movielens_ratings(data_folder(None))
    except DataMissing as missing:
        pytest.skip(str(missing))


def outcome(method: str, seed: int, clicks: list[float]) -> ShopOutcome:
    run = ShopRun(method, "plain", ShopVariant(), seed, len(clicks))
    return ShopOutcome(run, np.array(clicks), 1.0, 2.0, {"of": method})


def test_results_compare_with_the_best_rival_paired_by_seed() -> None:
    start = [0.0] * 500
    found = variant_results(
        [
            outcome("metaban", 1, [*start, *([1.0] * 700)]),
            outcome("metaban", 2, [*start, *([2.0] * 700)]),
            outcome("vw-ids", 1, [*start, *([2.0] * 700)]),
            outcome("vw-ids", 2, [*start, *([2.0] * 700)]),
            outcome("popularity", 1, [1.0] * 1_200),
            outcome("popularity", 2, [1.0] * 1_200),
            outcome("oracle", 1, [9.0] * 1_200),
            outcome("oracle", 2, [9.0] * 1_200),
        ]
    )
    row = found["methods"]["metaban"]
    assert row["clicks"] == pytest.approx([700 / 1_200, 1_400 / 1_200])
    assert (row["first_clicks_mean"], row["last_clicks_mean"]) == (0.0, 1.5)
    assert row["last_clicks_sd"] == pytest.approx(np.sqrt(0.5))
    assert row["curve"][-1] == pytest.approx(1_050)
    assert found["best_baseline"] == "vw-ids"
    assert found["ratio"] == pytest.approx(0.75)
    # Ratios of the seeds: 0.5 and 1; 12.706 is Student's t for one degree of freedom.
    half = 12.7062 * np.sqrt(0.125) / np.sqrt(2)
    assert found["ratio_interval"] == pytest.approx([0.75 - half, 0.75 + half], abs=1e-3)


def test_bars_are_the_mean_and_the_smallest_ratio() -> None:
    variants = {"plain": {"ratio": 1.3}, "no-ids": {"ratio": 0.95}, "large": {"ratio": None}}
    bars = shop_bars(ShopPlan(), variants, quick=False)
    assert [(bar.name, round(bar.value, 6), bar.sense, bar.limit, bar.holds) for bar in bars] == [
        ("shop: clicks / best rival, mean of plain, no-ids", 1.125, ">=", 1.1, True),
        ("shop: clicks / best rival, smallest (no-ids)", 0.95, ">=", 1.0, False),
    ]
    assert shop_bars(ShopPlan(), {"large": {"ratio": None}}, quick=False) == []


def test_moving_rates_are_clicks_over_slates() -> None:
    clicks = np.arange(40.0)
    slates = np.arange(2.0, 41.0, 2.0)  # every second slate
    ends, rates = moving_rates(slates, np.cumsum(clicks)[1::2].tolist())
    assert ends.tolist() == slates[1:].tolist()  # windows of two points, four slates
    assert rates.tolist() == [clicks[int(end) - 4 : int(end)].mean() for end in ends]


@pytest.mark.usefixtures("data")
def test_a_run_prints_its_table_and_writes_what_is_asked_for(tmp_path: Path) -> None:
    result = bench(
        "shop", "--quick", "--slates", "60", "--items", "30", "--users", "6", "--seeds", "240-249", "--jobs", "1",
        "--variants", "plain,clicks-only", "--methods", "metaban,popularity,ctr-thompson,random,oracle", "--check",
        "--json", str(tmp_path / "shop.json"), "--plot", str(tmp_path / "shop.png"),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "not judged" in result.output
    found = json.loads((tmp_path / "shop.json").read_text())
    assert found["benchmark"] == "shop"
    assert found["settings"]["seeds"] == [240, 241]
    assert found["settings"]["variants"]["clicks-only"] == {
        "items": 30, "users": 6, "arrivals": False, "features": True, "ids": True, "explained": False,
        "clicks_only": True,
    }  # fmt: skip
    for variant in found["results"]["variants"].values():
        assert len(variant["methods"]["metaban"]["clicks"]) == 2
        assert variant["methods"]["oracle"]["clicks_mean"] > variant["methods"]["random"]["clicks_mean"]
        assert variant["best_baseline"] in {"popularity", "ctr-thompson"}
        assert variant["ratio"] > 0
    assert [bar["holds"] for bar in found["bars"]] == [None, None]
    assert (tmp_path / "shop.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("data")
def test_a_bar_that_does_not_hold_fails_a_checked_run(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("--slates", "20", "--items", "30", "--users", "6", "--seeds", "240", "--jobs", "1")
    names = ("--variant", "plain", "--methods", "metaban,popularity")
    monkeypatch.setattr("metaban.bench.shop.shop.SMALLEST_RATIO_LIMIT", 100.0)
    assert bench("shop", *arguments, *names).exit_code == 0
    assert bench("shop", *arguments, *names, "--check").exit_code == 1


def test_missing_data_is_skipped_in_one_line(tmp_path: Path) -> None:
    result = bench("shop", "--data", str(tmp_path))
    assert result.exit_code == 0
    assert result.output.startswith(f"skipped shop: movielens-100k-ratings.tsv.gz is not in {tmp_path}")
    assert len(result.output.splitlines()) == 1
    assert bench("shop", "--data", str(tmp_path), "--check").exit_code == 1
    tuned = bench("tune-shop", "--data", str(tmp_path), "--methods", "ctr-thompson", "--jobs", "1")
    assert tuned.exit_code == 1
    assert "nothing was tuned" in tuned.output


@pytest.mark.parametrize("option", ["--variants", "--methods"])
def test_unknown_names_are_refused_with_the_known_ones(option: str) -> None:
    result = bench("shop", option, "magic")
    assert result.exit_code == 2
    assert all(name in result.output for name in (VARIANTS if option == "--variants" else ("vw-ids", "oracle")))
