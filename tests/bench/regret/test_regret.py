"""Runs are counted and compared correctly, in this process and in others."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from metaban.bench.core.parallel import Failure, run_all
from metaban.bench.core.summaries import CURVE_POINTS
from metaban.bench.regret.method import Method, VisibleRound
from metaban.bench.regret.methods import RIVALS
from metaban.bench.regret.plots import plot_regret
from metaban.bench.regret.regret import (
    FULL_ROUNDS,
    RegretPlan,
    measure_regret,
    print_regret,
    regret_bars,
    regret_results,
    usual_methods,
)
from metaban.bench.regret.runs import Contender, Outcome, Run, execute, play
from metaban.bench.worlds.environments import SyntheticGroups

CONSOLE = Console(quiet=True)


class Recorder(Method):
    """Always chooses the same place, and records the calls."""

    def __init__(self, place: int) -> None:
        self.settings = {"place": place}
        self.place = place
        self.asked: list[VisibleRound] = []
        self.events: list[tuple[str, int]] = []
        self.rewards: dict[int, float] = {}

    def decide(self, asked: VisibleRound, number: int) -> int:
        self.asked.append(asked)
        self.events.append(("decide", number))
        return self.place

    def learn(self, number: int, reward: float) -> None:
        self.events.append(("learn", number))
        self.rewards[number] = reward


def run_of(rounds: int, **conditions: int) -> Run:
    return Run(Contender("recorder", "recorder", **conditions), "synthetic", 1, rounds)  # type: ignore[arg-type]


def outcome(label: str, seed: int, total: float, rounds: int = 4) -> Outcome:
    each = np.full(rounds, total / rounds)
    return Outcome(label, seed, each, 1 - each, np.ones(rounds), 2.0, 3.0, {"of": label})


def test_methods_see_the_same_rounds_whatever_they_choose() -> None:
    first, last = Recorder(0), Recorder(5)
    for method in (first, last):
        play(SyntheticGroups(seed=1), method, run_of(30))
    for one, other in zip(first.asked, last.asked, strict=True):
        assert one.user == other.user
        assert np.array_equal(one.arms, other.arms)
    assert first.rewards != last.rewards


def test_regret_and_rewards_are_those_of_the_chosen_arms() -> None:
    method, reported = Recorder(2), []
    found = play(SyntheticGroups(seed=1), method, run_of(230), reported.append)
    world = SyntheticGroups(seed=1)
    rounds = [world.next_round() for _ in range(230)]
    assert np.allclose(found.regret, [asked.chances.max() - asked.chances[2] for asked in rounds])
    assert np.allclose(found.earned, [asked.chances[2] for asked in rounds])
    assert np.allclose(found.random, [asked.chances.max() - asked.chances.mean() for asked in rounds])
    assert [method.rewards[number] for number in range(230)] == [asked.rewards[2] for asked in rounds]
    assert reported == [100, 100, 30]


def test_rewards_arrive_at_once_or_with_a_delay() -> None:
    prompt, late = Recorder(0), Recorder(0)
    play(SyntheticGroups(seed=1), prompt, run_of(3))
    play(SyntheticGroups(seed=1), late, run_of(5, delay=2))
    assert prompt.events == [(what, number) for number in range(3) for what in ("decide", "learn")]
    assert late.events[:2] == [("decide", 0), ("decide", 1)]
    assert late.events[2:] == [
        ("decide", 2), ("learn", 0), ("decide", 3), ("learn", 1), ("decide", 4), ("learn", 2)
    ]  # fmt: skip
    assert late.rewards == {number: prompt.rewards[number] for number in range(3)}


def test_a_method_that_joins_late_sees_the_later_rounds() -> None:
    all_rounds, later = Recorder(0), Recorder(0)
    play(SyntheticGroups(seed=1, switch_at=4), all_rounds, run_of(10))
    play(SyntheticGroups(seed=1, switch_at=4), later, run_of(6, missed=4))
    for one, other in zip(all_rounds.asked[4:], later.asked, strict=True):
        assert np.array_equal(one.arms, other.arms)


def test_results_compare_default_with_the_best_baseline_paired_by_seed() -> None:
    regrets = {"default": (8.0, 9.0, 10.0), "linucb": (10.0, 10.0, 10.0), "vw": (9.0, 20.0, 30.0), "paper": (1, 1, 1)}
    outcomes = [outcome(name, seed, total) for name, totals in regrets.items() for seed, total in enumerate(totals)]
    found = regret_results(outcomes, [])
    assert found["methods"]["default"]["regret_mean"] == pytest.approx(9)
    assert found["methods"]["default"]["regret_sd"] == pytest.approx(1)
    assert found["methods"]["default"]["regrets"] == pytest.approx([8, 9, 10])
    assert found["best_baseline"] == "linucb"
    assert found["ratio"] == pytest.approx(0.9)
    # Per-seed ratios 0.8, 0.9, 1.0: sd 0.1, and 4.303 is Student's t for two degrees of freedom.
    half = 4.3027 * 0.1 / np.sqrt(3)
    assert found["ratio_interval"] == pytest.approx([0.9 - half, 0.9 + half], abs=1e-4)
    assert found["random"]["regret_mean"] == 4
    assert found["random"]["curve"] == [1, 2, 3, 4]


def test_a_method_with_a_failed_run_is_not_compared() -> None:
    outcomes = [outcome("linucb", 1, 1.0), outcome("vw", 1, 5.0), outcome("vw", 2, 5.0)]
    found = regret_results(outcomes, [Failure("linucb", 2, "ValueError: no")])
    assert set(found["methods"]) == {"vw"}
    assert found["best_baseline"] == "vw"
    assert found["ratio"] is None
    assert found["failures"] == [{"method": "linucb", "seed": 2, "error": "ValueError: no"}]
    assert regret_results([], [])["methods"] == {}


@pytest.mark.parametrize("rounds", [1, 7, 200, 999])
def test_a_curve_is_short_and_ends_with_the_regret(rounds: int) -> None:
    found = regret_results([outcome("vw", seed, 10.0 * seed, rounds) for seed in (1, 2, 3)], [])
    row, places = found["methods"]["vw"], found["curve_rounds"]
    assert len(row["curve"]) == len(places) == min(rounds, CURVE_POINTS)
    assert places[-1] == rounds
    assert (row["curve"][-1], row["curve_least"][-1], row["curve_most"][-1]) == pytest.approx((20, 10, 30))
    assert row["curve"] == pytest.approx([20 * place / rounds for place in places])


def test_bars_are_the_claims_of_the_environment() -> None:
    outcomes = [outcome(name, 1, 80.0) for name in ("default", "default-no-kinds", "shared-net")]
    outcomes += [outcome(name, 1, 100.0) for name in RIVALS] + [outcome("pooled", 1, 6_100.0)]
    found = regret_results(outcomes, [])

    def bars(env: str, rounds: int = FULL_ROUNDS, quick: bool = False) -> dict[str, tuple[float, float, bool]]:
        listed = regret_bars(RegretPlan(env, ("default",), rounds), found, quick=quick)
        return {bar.name: (round(bar.value, 6), bar.limit, bar.holds) for bar in listed}

    assert bars("movielens") == {
        "movielens: default / best baseline (linucb)": (0.8, 0.80, True),
        "movielens: regret of pooled": (6_100, 6_045, False),
    }
    assert bars("service") == {
        "service: default / best baseline (linucb)": (0.8, 0.87, True),
        "service: default / shared-net": (1, 0.80, False),
    }
    assert bars("synthetic") == {
        "synthetic: default / best baseline (linucb)": (0.8, 0.80, True),
        "synthetic: default / default-no-kinds": (1, 0.95, False),
    }
    assert bars("yelp", 500, quick=True) == {
        "yelp: default / best baseline (linucb), 500 rounds, quick": (0.8, 0.94, True)
    }
    for env in ("digits", "categories-50", "categories-200", "revenue"):
        assert bars(env) == {f"{env}: default / best baseline (linucb)": (0.8, 1.0, True)}
    del found["methods"]["vw"]
    assert list(bars("mnist")) == ["mnist: default / best baseline that was run (linucb)"]
    assert "default-no-kinds" in usual_methods("synthetic")
    assert "default-no-kinds" not in usual_methods("yelp")


def test_a_run_that_raises_is_named_and_the_others_end() -> None:
    broken = Contender("broken", "paper", overrides={"nu": 0.5})
    runs = [
        Run(contender, "synthetic", seed, 5) for contender in (broken, Contender.plain("linucb")) for seed in (7, 8)
    ]
    outcomes, failures = run_all(execute, runs, jobs=1, console=CONSOLE)
    assert [(ended.label, ended.seed) for ended in outcomes] == [("linucb", 7), ("linucb", 8)]
    assert [str(failure) for failure in failures] == [
        f"broken, seed {seed}: ValueError: nu must be above 1 and at most 1000000" for seed in (7, 8)
    ]


def test_parallel_runs_have_the_same_results(tmp_path: Path) -> None:
    plan = RegretPlan("synthetic", ("linucb", "paper"), 60, (7, 8))
    console = Console(record=True, width=160, quiet=False, file=(tmp_path / "table").open("w"))
    alone = measure_regret(plan, jobs=1, quick=False, console=CONSOLE)
    report = measure_regret(plan, jobs=2, quick=True, console=console)
    print_regret(report, console)
    report.write(tmp_path / "regret.json")
    plot_regret(report, tmp_path / "plots" / "regret.png")

    found = json.loads((tmp_path / "regret.json").read_text())
    for name in plan.methods:
        row = found["results"]["methods"][name]
        assert row["regrets"] == alone.results["methods"][name]["regrets"]
        assert row["decision_ms"] > 0
        assert row["update_ms"] > 0
        assert row["settings"]
    assert found["settings"]["users"] == 200
    assert found["results"]["best_baseline"] == "linucb"
    assert (tmp_path / "plots" / "regret.png").read_bytes().startswith(b"\x89PNG")
    table = [line.split()[0] for line in console.export_text().splitlines() if line.strip()]
    order = sorted(plan.methods, key=lambda name: found["results"]["methods"][name]["regret_mean"])
    assert table == ["method", *order, "random"]
