"""The latency benchmark: its reference equals that of the tests, ratios of sides in turns, and a small real run."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from metaban.bench.cli import bench_app
from metaban.bench.core.local_loop import plain_layout
from metaban.bench.core.report import Report
from metaban.bench.core.timing import Race, Side, take_turns
from metaban.bench.regret.method import VisibleRound
from metaban.bench.regret.methods import LearnerMethod, build_method, unavailable
from metaban.bench.serving.latency import (
    Budget,
    LatencyPlan,
    latency_bars,
    measure_latency,
    plot_latency,
    print_latency,
)
from metaban.bench.serving.populations import (
    DefaultPopulation,
    Disagreement,
    PaperPopulation,
    check_decision,
    everything,
    random_arms,
)
from metaban.bench.serving.roofline import Machine, bound_of, bytes_a_user, decision_parts
from metaban.bench.worlds.environments import SyntheticGroups
from metaban.models.default.arms import FACTORS
from metaban.models.default.kinds import KINDS_MAX
from metaban.models.default.learner import PosteriorLearner
from metaban.models.features import assemble
from metaban.models.numerics.hardware import one_thread
from metaban.models.settings import PosteriorSettings
from metaban.service.engine.model.types import ScoreRequest
from tests.models.literal import LiteralMetaBan, LiteralSettings

SMALL = LatencyPlan(
    users=4, arms=3, dimension=3, decision_samples=2, decision_rounds=2, updated_users=3, update_samples=2,
    update_rounds=2, fast_calls=2, warm_events=20, events=40, block=5, few_users=20, many_users=60, crowd_rounds=4,
    roofline_rounds=2, copied_bytes=1 << 16,
)  # fmt: skip


@pytest.fixture(scope="module")
def report() -> Report:
    return measure_latency(SMALL, quick=True, console=Console(record=True))


# ---------------------------------------------------------------------- the reference


@pytest.fixture
def population() -> PaperPopulation:
    return PaperPopulation.random(users=12, samples=3, dimension=4, seed=5)


def test_the_reference_is_the_literal_one(population: PaperPopulation) -> None:
    """The frozen copy and `tests/models/literal.py` give the same parameters, groups, means and bonuses."""
    population.serve()
    copy, settings = population.reference, population.learner.settings
    names = set(LiteralSettings.__dataclass_fields__) - {"inputs", "samples_kept", "checkpoints"}
    literal = LiteralMetaBan(
        LiteralSettings(inputs=5, **{name: getattr(settings, name) for name in names}), population.shared["theta0"]
    )
    for user, observations in copy.observations.items():
        for x, reward in observations:
            literal.observe(user, x, reward)
        torch.testing.assert_close(copy.gradient_descent_user(user), literal.users[user].fitted, rtol=0, atol=0)
        copy.train(user)
    arms = list(torch.from_numpy(assemble(plain_layout(4), random_arms(np.random.default_rng(1), 6, 4).tolist(), None)))
    found, expected = copy.recommend("user-3", arms), literal.recommend("user-3", arms)
    assert [arm.members for arm in found] == [arm.members for arm in expected]
    assert len({arm.members for arm in found}) > 1
    assert [arm.mean for arm in found] == [arm.mean for arm in expected]
    assert [arm.bonus for arm in found] == pytest.approx([arm.bonus for arm in expected], rel=1e-6)


def test_the_fast_decision_is_checked_against_the_reference(population: PaperPopulation) -> None:
    served = population.serve()
    inputs = assemble(plain_layout(4), random_arms(np.random.default_rng(1), 6, 4).tolist(), None)
    chosen = served.choose_one(ScoreRequest("user-3", inputs), everything)
    arms = population.reference.recommend("user-3", list(torch.from_numpy(inputs)))
    assert check_decision(chosen, arms) < 1e-5
    with pytest.raises(Disagreement, match="differ"):
        check_decision(chosen, [replace(arms[0], mean=arms[0].mean + 2e-4), *arms[1:]])
    with pytest.raises(Disagreement, match="members"):
        check_decision(chosen, [replace(arms[0], members=frozenset()), *arms[1:]])


def test_the_fast_fit_is_checked_against_the_reference(population: PaperPopulation) -> None:
    assert population.check_fits() < 1e-5
    (x, reward), *rest = population.reference.observations["user-3"]
    population.reference.observations["user-3"] = [(x, reward + 0.5), *rest]  # type: ignore[index]
    with pytest.raises(Disagreement):
        population.check_fits()


# ---------------------------------------------------------------------- ratios


def test_sides_take_turns_and_the_first_round_does_not_count() -> None:
    done: list[str] = []
    sides = take_turns(
        {"a": lambda number: done.append(f"a{number}"), "b": lambda number: done.append(f"b{number}")},
        rounds=2,
        calls=(1, 2),
        between=lambda turn: done.append(f"end {turn}"),
    )
    assert done == ["a0", "b0", "b1", "end 0", "a1", "b2", "b3", "end 1", "a2", "b4", "b5", "end 2"]
    assert [(side.name, side.times.shape) for side in sides] == [("a", (2, 1)), ("b", (2, 2))]


def test_a_machine_that_slows_down_does_not_change_a_ratio() -> None:
    drift = np.linspace(1, 10, 50)[:, None]
    found = Race(Side("above", 3 * drift), Side("below", drift))
    assert found.ratio == pytest.approx(3)
    assert found.interval() == pytest.approx((3, 3))


def test_an_interval_holds_the_ratio_and_narrows_with_rounds() -> None:
    random = np.random.default_rng(0)
    widths = []
    for rounds in (20, 2_000):
        above, below = random.lognormal(np.log(2), 0.3, (rounds, 1)), random.lognormal(0, 0.3, (rounds, 3))
        found = Race(Side("above", above), Side("below", below))
        low, high = found.interval()
        assert low <= found.ratio <= high
        widths.append(high - low)
    assert low <= 2 <= high
    assert widths[1] < widths[0] / 3


def test_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


# ---------------------------------------------------------------------- the roofline and sizes


def test_the_bound_is_the_slower_of_reading_and_computing() -> None:
    learner = PosteriorLearner(PosteriorSettings(), 21)
    parts = decision_parts(learner, requests=2, arms=10, pool=100)
    data, single = sum(part.bytes for part in parts), sum(part.single for part in parts)
    double = sum(part.double for part in parts)
    assert bound_of(parts, Machine(1.0, 1e30, 1e30)) == pytest.approx(data)
    assert bound_of(parts, Machine(1e30, 2.0, 1e30)) == pytest.approx(single / 2)
    assert bound_of(parts, Machine(1e30, 2.0, 4.0)) == pytest.approx(single / 2 + double / 4)


def test_work_is_counted_from_shapes() -> None:
    learner = PosteriorLearner(PosteriorSettings(width=8, bins=0), 5)
    one, many = (
        {part.name: part for part in decision_parts(learner, requests=count, arms=3, pool=7)} for count in (1, 6)
    )
    with FlopCounterMode(display=False) as counter:
        learner.trunk.predict(learner.initial_shared()["trunk"], torch.zeros(3, learner.trunk.inputs))
    assert one["trunk"].single == counter.get_total_flops() + 3 * 2 * 5  # and the standardisation of 3 arms
    size = 5 + 15 + 2 + FACTORS  # inputs, their products, the constant, the trunk's prediction, the arm's factors
    assert one["agreement"].single == 7 * (2 * size + 3)  # of the chosen arm
    assert one["agreement"].bytes == 4 * 7 * size
    assert one["heads"].single == 3 * (15 + 2 * size**2 + 4 * size)
    for name, part in one.items():
        assert (many[name].single, many[name].double) == (6 * part.single, 6 * part.double)
        assert part.bytes <= many[name].bytes < 6 * part.bytes or name in ("heads", "memory")  # users' own numbers


@pytest.mark.parametrize("inputs", [21, 794])
def test_bytes_a_user_are_those_of_their_tensors(inputs: int) -> None:
    learner = PosteriorLearner(PosteriorSettings(), inputs)
    initial_user = learner.initial_user(learner.initial_shared())
    assert bytes_a_user(learner) == sum(tensor.nbytes for tensor in initial_user.values())


# ---------------------------------------------------------------------- what is measured


def test_users_are_held_in_the_pool_and_as_guests() -> None:
    crowd = DefaultPopulation.random(dimension=3, seed=1)
    served = crowd.serve(1_500, pool=40)
    assert len(served) == 1_500
    inputs = assemble(plain_layout(3), random_arms(np.random.default_rng(1), 2, 3).tolist(), None)
    pooled, guest, stranger = served.score([ScoreRequest(user, inputs) for user in ("user-7", "user-1007", "nobody")])
    assert guest.mean.tolist() == pytest.approx(pooled.mean.tolist(), abs=1e-6)  # a copy of the same user
    assert stranger.mean.tolist() != pytest.approx(pooled.mean.tolist(), abs=1e-6)
    assert crowd.learner.clusters(crowd.shared) == KINDS_MAX
    assert (pooled.user_events, guest.user_events, stranger.user_events) == (8, 8, 0)


def test_learning_is_split_where_epochs_really_are() -> None:
    world = SyntheticGroups(seed=3, users=4, arms=3, dimension=3)
    method = build_method("default", world, env="synthetic", seed=3)
    assert isinstance(method, LearnerMethod)
    budget, served = Budget(3), method.loop._served
    for number in range(140):
        asked, before = world.next_round(), served.epoch_number
        arm = method.decide(VisibleRound(asked.user, asked.arms), number)
        budget.learn(method, number, asked, arm)
        assert budget.summary()["epochs"] == served.epoch_number >= before
    found = budget.summary()
    assert served.epoch_number >= 3
    assert len(found["fit_ms"]) + len(found["epoch_ms"]) == found["events"] == 140
    assert found["cpu_ms_an_event"] == pytest.approx((sum(found["fit_ms"]) + sum(found["epoch_ms"])) / 140, rel=1e-3)
    assert found["fit_ms_an_event"] + found["epoch_ms_an_event"] == pytest.approx(found["cpu_ms_an_event"])


@pytest.mark.skipif(unavailable("vw") is not None, reason="needs the extra vw")
def test_a_small_run_measures_and_reports(report: Report, tmp_path: Path) -> None:
    console = Console(record=True, width=200)
    print_latency(report, console)
    report.write(tmp_path / "latency.json")
    plot_latency(report, tmp_path / "latency.png")
    found = json.loads((tmp_path / "latency.json").read_text())
    assert found["settings"] == asdict(SMALL) | {"threads": 1, "reference": "tests/models/literal.py at c40884b"}
    looped = {name: [2, 4] for name in ("paper_decision", "paper_decision_anew", "paper_updates")}
    for name, calls in (looped | {"vowpal": [15, 15], "crowd": [4, 4]}).items():
        race = found["results"][name]
        assert [len(race[side]["times_ms"]) for side in ("above", "below")] == calls
        assert race["ratio"] == pytest.approx(race["above"]["p50_ms"] / race["below"]["p50_ms"])
        assert race["interval"][0] <= race["interval"][1]
    assert found["results"]["training"]["events"] == 40
    assert [row["requests"] for row in found["results"]["roofline"]["rows"]] == [1, 64]
    assert set(found["results"]["bytes_a_user"]["default"]) == {"20", "793"}
    assert len(found["bars"]) == 5
    assert all("quick" in bar["name"] for bar in found["bars"])
    assert (tmp_path / "latency.png").read_bytes().startswith(b"\x89PNG")
    text = console.export_text()
    assert all(word in text for word in ("c40884b", "Vowpal Wabbit", "64 requests", "bytes per user"))


@pytest.mark.parametrize("slower", ["paper_decision", "paper_updates", "vowpal", "crowd", "training"])
def test_every_claim_can_fail(slower: str) -> None:
    good: dict[str, Any] = {
        "paper_decision": {"ratio": 100.0},
        "paper_updates": {"ratio": 50.0},
        "vowpal": {"ratio": 1.0},
        "crowd": {"ratio": 1.5},
        "training": {"cpu_ms_an_event": 2.0},
    }
    assert all(bar.holds for bar in latency_bars(SMALL, good, quick=False))
    (key,) = good[slower]
    factor = 0.99 if slower.startswith("paper") else 1.01
    bars = latency_bars(SMALL, good | {slower: {key: good[slower][key] * factor}}, quick=False)
    assert [bar.holds for bar in bars].count(False) == 1


def test_the_command_fails_when_checked_and_does_without_vowpal_wabbit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "vowpalwabbit", None)  # as if it were not installed
    monkeypatch.setattr("metaban.bench.serving.latency.LatencyPlan", lambda: SMALL)
    monkeypatch.setattr("metaban.bench.serving.latency.CROWD_RATIO", 0.0)
    result = CliRunner().invoke(
        bench_app, ["latency", "--check", "--json", str(tmp_path / "out.json")], env={"COLUMNS": "200"}
    )
    assert result.exit_code == 1, result.output
    assert "skipped the comparison with Vowpal Wabbit: Vowpal Wabbit is not installed" in result.output
    found = json.loads((tmp_path / "out.json").read_text())
    assert "vowpal" not in found["results"]
    assert found["results"]["default_decision"]["calls"] == 15
    assert len(found["bars"]) == 4
