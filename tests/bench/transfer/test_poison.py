"""The part `poison` at small sizes: who is poisoned, what they send, whose regret counts, and the bar."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from rich.console import Console

from metaban.bench.core.local_loop import LocalLoop, LoopDecision
from metaban.bench.core.report import Report
from metaban.bench.transfer import poison as transfer_poison
from metaban.bench.transfer.plan import TransferPlan
from metaban.bench.transfer.poison import (
    ABSENT,
    CONDITIONS,
    CONTRARY,
    HONEST,
    NO_WEIGHTS,
    WEIGHTS,
    Condition,
    PoisonResult,
    PoisonTrial,
    compared,
    contrary,
    inverted,
    measure_poison,
    play,
    poison_bars,
    poisoned_users,
    silenced,
)
from metaban.bench.worlds.data import movielens_ratings
from metaban.bench.worlds.environments import EnvironmentRound, build_environment
from metaban.models.learner import Influence
from metaban.models.numerics.hardware import one_thread

QUIET = Console(quiet=True)
USERS, ROUNDS = 20, 120


@pytest.fixture(autouse=True)
def films(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few users and films; runs in this process, since another would not see them."""
    random = np.random.default_rng(0)
    scores = np.where(random.random((USERS, 60)) < 0.3, 5.0, 2.0)
    monkeypatch.setattr("metaban.bench.worlds.environments.movielens_ratings", lambda folder: scores)

    def here(play: Callable[[PoisonTrial], PoisonResult], trials: Sequence[PoisonTrial]) -> Iterator[PoisonResult]:
        return map(play, trials)

    monkeypatch.setattr(transfer_poison, "run_parallel", here)
    with one_thread():
        yield


@pytest.fixture
def learned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, LoopDecision, float]]:
    """All rewards that loops learn."""
    found: list[tuple[str, LoopDecision, float]] = []
    learn = LocalLoop.learn

    def noted(self: LocalLoop, user_id: str, choice: LoopDecision, reward: float) -> None:
        found.append((user_id, choice, reward))
        learn(self, user_id, choice, reward)

    monkeypatch.setattr(LocalLoop, "learn", noted)
    return found


def rounds_of(seed: int) -> list[EnvironmentRound]:
    world = build_environment("service", seed=seed)
    return [world.next_round() for _ in range(ROUNDS)]


class TestPoison:
    def test_three_users_in_ten_by_the_seed(self) -> None:
        flags = poisoned_users(100, 300)
        assert (flags.shape, flags.sum()) == ((300,), 90)
        assert np.array_equal(flags, poisoned_users(100, 300))
        assert not np.array_equal(flags, poisoned_users(101, 300))

    def test_inverted_is_one_minus_the_reward(self) -> None:
        asked = EnvironmentRound(0, np.eye(3), np.array([0.0, 1.0, 0.25]), np.array([0.0, 1.0, 0.25]))
        assert [inverted(asked, arm) for arm in range(3)] == [1.0, 0.0, 0.75]

    def test_contrary_is_one_arm_on_the_other_side_of_the_slate(self) -> None:
        # Relative to their mean, (5, 0), the arms form a cross; relative to the origin, the last is the farthest from
        # all.
        arms = np.array([[6.0, 0.0], [4.8, 1.0], [5.2, -1.0], [4.0, 0.0]])
        liked = np.array([1.0, 0.0, 0.0, 0.0])
        assert [contrary(EnvironmentRound(0, arms, liked, liked), arm) for arm in range(4)] == [0.0, 0.0, 0.0, 1.0]
        other = liked[[1, 0, 2, 3]]
        assert [contrary(EnvironmentRound(0, arms, other, other), arm) for arm in range(4)] == [0.0, 0.0, 1.0, 0.0]


class TestPlay:
    def test_the_reference_leaves_out_the_rounds_of_the_poisoned(
        self, learned: list[tuple[str, LoopDecision, float]]
    ) -> None:
        played = play(PoisonTrial(ABSENT, 7, ROUNDS))
        poisoned, rounds = poisoned_users(7, USERS), rounds_of(7)
        assert [user for user, _, _ in learned] == [asked.user_id for asked in rounds if not poisoned[asked.user]]
        assert 0 < len(learned) < ROUNDS
        assert (played.users, played.poisoned) == (USERS, 6)

    @pytest.mark.parametrize("condition", [HONEST, WEIGHTS, CONTRARY], ids=lambda condition: condition.label)
    def test_the_poisoned_report_something_else_and_the_regret_of_the_others_counts(
        self, condition: Condition, learned: list[tuple[str, LoopDecision, float]]
    ) -> None:
        played = play(PoisonTrial(condition, 7, ROUNDS))
        poisoned = poisoned_users(7, USERS)
        assert len(learned) == ROUNDS
        for asked, (user, choice, reward), regret in zip(rounds_of(7), learned, played.regret, strict=True):
            assert user == asked.user_id
            if poisoned[asked.user] and condition.report is not None:
                assert (reward, regret) == (condition.report(asked, choice.arm), 0.0)
            else:
                assert reward == asked.rewards[choice.arm]
                assert regret == (0.0 if poisoned[asked.user] else 1.0 - asked.rewards[choice.arm])

    def test_few_users_silence_none_so_weights_change_nothing(self) -> None:
        weighed, unweighed = (play(PoisonTrial(condition, 7, ROUNDS)) for condition in (WEIGHTS, NO_WEIGHTS))
        assert np.array_equal(weighed.regret, unweighed.regret)
        assert weighed.silent.tolist() == [[0, 0]]


class TestSilenced:
    @staticmethod
    def loop(influence: Influence | None) -> LocalLoop:
        """Users 0, 1, 2 … are of kinds 0, 1, 0, 1 …"""
        shared: dict[str, torch.Tensor] = {}
        learner = SimpleNamespace(
            influence=lambda shared: influence, kinds=lambda shared, batch: torch.arange(len(batch)) % 2
        )
        return cast(LocalLoop, SimpleNamespace(teaching=lambda users: (learner, shared, users)))

    def test_users_of_a_kind_without_weight_are_silenced(self) -> None:
        found = silenced(self.loop(Influence(torch.tensor([1.0, 0.0]), 0.3, 0.1, True)), ["a", "b", "c"])
        assert found.tolist() == [False, True, False]

    def test_no_user_is_silenced_without_weights(self) -> None:
        loop = self.loop(Influence(torch.tensor([1.0, 0.0]), 0.3, 0.1, False))
        assert silenced(loop, ["a", "b"]).tolist() == [False, False]

    def test_no_user_is_silenced_before_there_are_kinds(self) -> None:
        assert silenced(self.loop(None), ["a", "b"]).tolist() == [False, False]


def played(regret: float, silent: list[list[int]]) -> PoisonResult:
    return PoisonResult(np.full(500, regret / 500), np.array(silent), np.zeros(2), 0.2, 0.1, 10, 3)


class TestClaim:
    @pytest.mark.parametrize(("regret", "holds"), [(220.0, False), (210.0, True)])
    def test_is_a_ratio_of_means(self, regret: float, holds: bool) -> None:
        none_silenced = [[0, 0], [0, 0]]
        by_label = {each.label: [played(150.0, none_silenced), played(250.0, none_silenced)] for each in CONDITIONS}
        by_label[WEIGHTS.label] = [played(regret - 100, [[0, 4], [3, 1]]), played(regret + 100, none_silenced)]
        results = compared(by_label)
        (bar,) = poison_bars(results["conditions"], quick=False)
        assert (bar.value, bar.sense, bar.limit) == (pytest.approx(regret / 200), "<=", 1.05)
        assert bar.holds == holds
        row = results["conditions"][WEIGHTS.label]
        assert row["ratio"] == pytest.approx(regret / 200)
        assert row["ratios"] == pytest.approx([(regret - 100) / 150, (regret + 100) / 250])
        assert (row["silent_poisoned"], row["silent_others"]) == ([3, 0], [1, 0])
        assert (row["most_silent_poisoned"], row["most_silent_others"]) == ([3, 0], [4, 0])
        assert results["curve_rounds"] == [250, 500]
        assert row["curve"] == pytest.approx([regret / 2, regret])

    def test_every_condition_is_played_on_every_seed(self, tmp_path: Path) -> None:
        plan = TransferPlan((7, 8), plot=tmp_path, poison_rounds=30)
        results, bars = measure_poison(plan, True, QUIET)
        rows: dict[str, Any] = results["conditions"]
        assert list(rows) == [each.label for each in CONDITIONS]
        assert all(len(row["regrets"]) == 2 and row["regret_mean"] > 0 for row in rows.values())
        assert [bar.name for bar in bars] == ["poison: regret with weights / without the poisoned users, quick"]
        assert (tmp_path / "transfer-poison.png").stat().st_size > 1_000
        Report("transfer", {}, results, bars, True).write(tmp_path / "report.json")
        assert json.loads((tmp_path / "report.json").read_text())["results"]["poisoned"] == 6

    def test_missing_data_is_named(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        movielens_ratings.cache_clear()
        monkeypatch.setattr("metaban.bench.worlds.environments.movielens_ratings", movielens_ratings)
        results, bars = measure_poison(replace(TransferPlan(), data=tmp_path), True, QUIET)
        assert "movielens-100k" in results["skipped"]
        assert not bars
