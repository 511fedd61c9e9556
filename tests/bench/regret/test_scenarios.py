"""Scenarios measure what they claim; a small run from end to end."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from metaban.bench.regret.plots import plot_scenarios
from metaban.bench.regret.regret import regret_results
from metaban.bench.regret.runs import Curve, Outcome
from metaban.bench.regret.scenarios import RATE_WINDOW, SCENARIOS, ScenarioPlan, measure_scenarios, rounds_to, smoothed


def outcome(label: str, earned: Curve, seed: int = 1) -> Outcome:
    return Outcome(label, seed, 1 - earned, earned, np.ones(len(earned)), 1.0, 1.0, {})


def judge(name: str, outcomes: list[Outcome]) -> list[tuple[float, bool]]:
    results = regret_results(outcomes, [])
    return [(bar.value, bar.holds) for bar in SCENARIOS[name].judge(results, outcomes, len(outcomes[0].earned))]


def test_a_rate_is_smoothed_and_its_first_crossing_found() -> None:
    rates = smoothed(np.array([0.0, 0.0, 1.0, 1.0, 1.0]), 2)
    assert rates.tolist() == [0, 0.5, 1, 1]
    assert rounds_to(rates, 0.5, 2) == 3
    assert rounds_to(rates, 0.9, 2) == 4
    assert rounds_to(rates, 1.1, 2) is None


@pytest.mark.parametrize(("dip", "holds"), [(800, True), (1_900, False)])
def test_recovery_from_a_switch_is_compared_with_a_fresh_start(dip: int, holds: bool) -> None:
    """The fresh start has rewards after 600 rounds, the other learner a given number of rounds after the switch."""
    through, fresh = np.full(10_000, 0.8), np.full(10_000, 0.8)
    through[5_000 : 5_000 + dip] = 0.1
    fresh[:600] = 0.1
    (slower, slower_holds), (level, level_holds) = judge(
        "switch", [outcome("through the switch", through), outcome("fresh start", fresh)]
    )
    # A window reaches 0.72 of 0.8 when 89 of its 100 rounds are after the dip.
    late = int(np.ceil(RATE_WINDOW * (0.72 - 0.1) / 0.7))
    assert slower == pytest.approx((dip + late) / (600 + late))
    assert slower_holds is holds
    assert (level, level_holds) == (pytest.approx(1), True)


def test_a_level_that_is_never_reached_again_does_not_hold() -> None:
    through = np.full(4_000, 0.8)
    through[2_000:] = 0.5
    bars = judge("switch", [outcome("through the switch", through), outcome("fresh start", np.full(4_000, 0.8))])
    assert not bars[0][1]
    assert bars[1] == (pytest.approx(0.625), False)


@pytest.mark.parametrize(
    ("name", "better", "other", "limit"),
    [
        ("delay", "delayed", "immediate", 1.03),
        ("pool", "pool of 256", "pool of everyone", 1.03),
        ("interaction", "with products", "without products", 1.0),
        ("rare", "default", "linucb", 1.0),
    ],
)
def test_ratios_are_the_right_way_round(name: str, better: str, other: str, limit: float) -> None:
    for value, holds in ((limit - 0.02, True), (limit + 0.02, False)):
        outcomes = [outcome(better, 1 - np.full(10, value / 4)), outcome(other, 1 - np.full(10, 0.25))]
        assert judge(name, outcomes) == [(pytest.approx(value), holds)]


def test_contenders_differ_in_what_the_scenario_is_about() -> None:
    made = {name: scenario.contenders("default", 1_000) for name, scenario in SCENARIOS.items()}
    assert [each.delay for each in made["delay"]] == [0, 100]
    assert [each.missed for each in made["switch"]] == [0, 500]
    assert {each.switches["switch_at"] for each in made["switch"]} == {500}
    assert {each.switches["reward_rate"] for each in made["rare"]} == {0.01}
    assert len(made["rare"]) == 10
    assert [each.products for each in made["interaction"]] == [True, False]
    assert [each.candidate_pool for each in made["pool"]] == [256, 10_000]
    assert {1.1, 5.0} < {each.overrides["nu"] for each in made["nu"]}
    assert {each.method for each in made["nu"]} == {"paper"}


def test_a_small_run_measures_and_reports(tmp_path: Path) -> None:
    console = Console(record=True, width=160, file=(tmp_path / "out").open("w"))
    plan = ScenarioPlan(("delay", "switch", "interaction", "nu"), "paper", 40, (5,), tmp_path)
    report = measure_scenarios(plan, jobs=1, quick=True, console=console)
    report.write(tmp_path / "scenarios.json")
    plot_scenarios(report, tmp_path / "plots")

    found = json.loads((tmp_path / "scenarios.json").read_text())
    assert set(found["results"]) == set(plan.names)
    assert set(found["results"]["delay"]["methods"]) == {"immediate", "delayed"}
    assert found["results"]["switch"]["switch"]["rate_before"] > 0
    assert all(bar["name"].endswith(", 40 rounds, quick") for bar in found["bars"])
    assert [bar["name"].split(":")[0] for bar in found["bars"]] == ["delay", "switch", "switch", "interaction"]
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {"delay.png", "switch.png", "interaction.png"}
    assert "skipped nu: movielens-100k-ratings.tsv.gz is not in" in console.export_text()
