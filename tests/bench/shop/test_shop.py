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
from metaban.bench.shop.shop import ShopPlan, variant_results
from metaban.bench.shop.variants import VARIANTS
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
    run = ShopRun(method, "200x150", ShopVariant(), seed, len(clicks))
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
        ],
        1_200,
    )
    row = found["methods"]["metaban"]
    assert row["clicks"] == pytest.approx([700 / 1_200, 1_400 / 1_200])
    assert (row["prefixes"]["500"]["clicks_mean"], row["last_clicks_mean"]) == (0.0, 1.5)
    assert row["prefixes"]["1200"]["clicks"] == row["clicks"]
    assert row["last_clicks_sd"] == pytest.approx(np.sqrt(0.5))
    assert row["curve"][-1] == pytest.approx(1_050)
    # The best rival is chosen for each length.
    assert list(found["comparisons"]) == ["500", "1200"]
    assert found["comparisons"]["500"] == {"best_baseline": "popularity", "ratio": 0.0, "ratio_interval": [0.0, 0.0]}
    whole = found["comparisons"]["1200"]
    assert whole["best_baseline"] == "vw-ids"
    assert whole["ratio"] == pytest.approx(0.75)
    # Ratios of the seeds: 0.5 and 1; 12.706 is Student's t for one degree of freedom.
    half = 12.7062 * np.sqrt(0.125) / np.sqrt(2)
    assert whole["ratio_interval"] == pytest.approx([0.75 - half, 0.75 + half], abs=1e-3)


def test_a_long_run_has_its_first_3000_slates_too() -> None:
    rising = [0.0] * 500 + [1.0] * 2_500 + [3.0] * 7_000
    found = variant_results([outcome("metaban", 1, rising), outcome("ctr-thompson", 1, [1.0] * 10_000)], 10_000)
    assert {length: row["ratio"] for length, row in found["comparisons"].items()} == pytest.approx(
        {"500": 0.0, "3000": 2_500 / 3_000, "10000": 2.35}
    )
    assert found["comparisons"]["3000"]["ratio_interval"] is None  # one seed


def test_moving_rates_are_clicks_over_slates() -> None:
    clicks = np.arange(40.0)
    slates = np.arange(2.0, 41.0, 2.0)  # every second slate
    ends, rates = moving_rates(slates, np.cumsum(clicks)[1::2].tolist())
    assert ends.tolist() == slates[1:].tolist()  # windows of two points, four slates
    assert rates.tolist() == [clicks[int(end) - 4 : int(end)].mean() for end in ends]


@pytest.mark.usefixtures("data")
def test_a_run_prints_its_table_and_writes_what_is_asked_for(tmp_path: Path) -> None:
    result = bench(
        "shop", "--quick", "--slates", "60", "--seeds", "240-249", "--jobs", "1",
        "--variants", "30x6,30x6-clicks-only", "--methods", "metaban,popularity,ctr-thompson,random,oracle", "--check",
        "--json", str(tmp_path / "shop.json"), "--plot", str(tmp_path / "plots"),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "not judged" in result.output
    found = json.loads((tmp_path / "shop.json").read_text())
    assert found["benchmark"] == "shop"
    assert found["settings"]["seeds"] == [240, 241]
    assert found["settings"]["variants"]["30x6-clicks-only"] == {
        "items": 30, "users": 6, "arrivals": False, "features": True, "ids": True, "explained": False,
        "clicks_only": True, "slates": 60,
    }  # fmt: skip
    for variant in found["results"]["variants"].values():
        assert len(variant["methods"]["metaban"]["clicks"]) == 2
        assert variant["methods"]["oracle"]["clicks_mean"] > variant["methods"]["random"]["clicks_mean"]
        compared = variant["comparisons"]["60"]
        assert compared["best_baseline"] in {"popularity", "ctr-thompson"}
        assert compared["ratio"] > 0
        assert len(compared["ratio_interval"]) == 2
    assert [bar["name"] for bar in found["bars"]] == [
        "shop: clicks / best rival that was run, mean of 1 ratio (30x6; 60 slates), quick",
        "shop: clicks / best rival that was run, smallest of 1 ratio (30x6, 60 slates), quick",
        "shop: 30x6-clicks-only: clicks / own clicks in 30x6, where zeros are sent, 60 slates, quick",
    ]
    assert {bar["holds"] for bar in found["bars"]} == {None}
    for name in ("30x6", "30x6-clicks-only"):
        assert (tmp_path / "plots" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("data")
def test_a_bar_that_does_not_hold_fails_a_checked_run(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("--slates", "20", "--seeds", "240", "--jobs", "1")
    names = ("--variant", "30x6", "--methods", "metaban,popularity")
    monkeypatch.setattr("metaban.bench.shop.claims.SMALLEST_RATIO_LIMIT", 100.0)
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
    names = VARIANTS if option == "--variants" else ("vw-ids", "oracle")
    assert all(name in "".join(result.output.split()) for name in names)


def test_a_default_run_has_the_worlds_of_the_claims() -> None:
    plan = ShopPlan()
    assert {name: plan.slates_of(name) for name in plan.variants} == {
        "200x150": 10_000, "1000x150": 10_000, "200x943": 10_000, "1000x943": 10_000, "200x150-arrivals": 10_000,
        "200x150-no-features": 3_000, "200x150-no-ids": 3_000, "200x150-explained": 3_000,
        "200x150-clicks-only": 3_000,
    }  # fmt: skip
    assert ShopPlan(slates=70).slates_of("1000x943") == 70
