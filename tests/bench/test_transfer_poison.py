"""Poisoned teachers, at sizes for tests: who is poisoned, what they report, whose regret counts, and the claim."""

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

from bench import transfer_poison
from bench.data import movielens_ratings
from bench.environments import Round, build_environment
from bench.harness import Choice, LocalLoop
from bench.report import Report
from bench.transfer_plan import TransferPlan
from bench.transfer_poison import (
    ABSENT,
    CONDITIONS,
    CONTRARY,
    HONEST,
    NO_WEIGHTS,
    WEIGHTS,
    Condition,
    Played,
    Trial,
    compared,
    contrary,
    measure_poison,
    play,
    poison_bars,
    poisoned_users,
    silenced,
    turned_around,
)
from models.teaching import Teaching
from models.threads import one_thread

QUIET = Console(quiet=True)
USERS, ROUNDS = 20, 120


@pytest.fixture(autouse=True)
def films(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few users and films, played in this process: another one would not know them."""
    random = np.random.default_rng(0)
    scores = np.where(random.random((USERS, 60)) < 0.3, 5.0, 2.0)
    monkeypatch.setattr("bench.environments.movielens_ratings", lambda folder: scores)

    def here(play: Callable[[Trial], Played], trials: Sequence[Trial]) -> Iterator[Played]:
        return map(play, trials)

    monkeypatch.setattr(transfer_poison, "side_by_side", here)
    with one_thread():
        yield


@pytest.fixture
def learned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Choice, float]]:
    """Everything that loops are taught."""
    found: list[tuple[str, Choice, float]] = []
    learn = LocalLoop.learn

    def noted(self: LocalLoop, user_id: str, choice: Choice, reward: float) -> None:
        found.append((user_id, choice, reward))
        learn(self, user_id, choice, reward)

    monkeypatch.setattr(LocalLoop, "learn", noted)
    return found


def rounds_of(seed: int) -> list[Round]:
    world = build_environment("service", seed=seed)
    return [world.next_round() for _ in range(ROUNDS)]


class TestPoison:
    def test_three_users_in_ten_by_the_seed(self) -> None:
        flags = poisoned_users(100, 300)
        assert (flags.shape, flags.sum()) == ((300,), 90)
        assert np.array_equal(flags, poisoned_users(100, 300))
        assert not np.array_equal(flags, poisoned_users(101, 300))

    def test_turned_around_is_one_less_the_reward(self) -> None:
        asked = Round(0, np.eye(3), np.array([0.0, 1.0, 0.25]), np.array([0.0, 1.0, 0.25]))
        assert [turned_around(asked, arm) for arm in range(3)] == [1.0, 0.0, 0.75]

    def test_contrary_is_one_arm_on_the_other_side_of_the_slate(self) -> None:
        # Seen from their middle, (5, 0), the arms are a cross; seen from the origin, the last is the farthest from all.
        arms = np.array([[6.0, 0.0], [4.8, 1.0], [5.2, -1.0], [4.0, 0.0]])
        liked = np.array([1.0, 0.0, 0.0, 0.0])
        assert [contrary(Round(0, arms, liked, liked), arm) for arm in range(4)] == [0.0, 0.0, 0.0, 1.0]
        other = liked[[1, 0, 2, 3]]
        assert [contrary(Round(0, arms, other, other), arm) for arm in range(4)] == [0.0, 0.0, 1.0, 0.0]


class TestPlay:
    def test_the_reference_leaves_out_the_rounds_of_the_poisoned(
        self, learned: list[tuple[str, Choice, float]]
    ) -> None:
        played = play(Trial(ABSENT, 7, ROUNDS))
        poisoned, rounds = poisoned_users(7, USERS), rounds_of(7)
        assert [user for user, _, _ in learned] == [asked.user_id for asked in rounds if not poisoned[asked.user]]
        assert 0 < len(learned) < ROUNDS
        assert (played.users, played.poisoned) == (USERS, 6)

    @pytest.mark.parametrize("condition", [HONEST, WEIGHTS, CONTRARY], ids=lambda condition: condition.label)
    def test_the_poisoned_report_something_else_and_the_regret_of_the_others_counts(
        self, condition: Condition, learned: list[tuple[str, Choice, float]]
    ) -> None:
        played = play(Trial(condition, 7, ROUNDS))
        poisoned = poisoned_users(7, USERS)
        assert len(learned) == ROUNDS
        for asked, (user, choice, reward), regret in zip(rounds_of(7), learned, played.regret, strict=True):
            assert user == asked.user_id
            if poisoned[asked.user] and condition.report is not None:
                assert (reward, regret) == (condition.report(asked, choice.arm), 0.0)
            else:
                assert reward == asked.rewards[choice.arm]
                assert regret == (0.0 if poisoned[asked.user] else 1.0 - asked.rewards[choice.arm])

    def test_so_few_users_silence_nobody_so_weights_change_nothing(self) -> None:
        weighed, unweighed = (play(Trial(condition, 7, ROUNDS)) for condition in (WEIGHTS, NO_WEIGHTS))
        assert np.array_equal(weighed.regret, unweighed.regret)
        assert weighed.silent.tolist() == [[0, 0]]


class TestSilenced:
    @staticmethod
    def loop(teaching: Teaching | None) -> LocalLoop:
        """Users 0, 1, 2 … are of kinds 0, 1, 0, 1 …"""
        shared: dict[str, torch.Tensor] = {}
        learner = SimpleNamespace(
            teaching=lambda shared: teaching, kinds=lambda shared, batch: torch.arange(len(batch)) % 2
        )
        return cast(LocalLoop, SimpleNamespace(teaching=lambda users: (learner, shared, users)))

    def test_whoever_is_of_a_kind_without_weight(self) -> None:
        found = silenced(self.loop(Teaching(torch.tensor([1.0, 0.0]), 0.3, 0.1, True)), ["a", "b", "c"])
        assert found.tolist() == [False, True, False]

    def test_nobody_where_weights_are_not_in_use(self) -> None:
        loop = self.loop(Teaching(torch.tensor([1.0, 0.0]), 0.3, 0.1, False))
        assert silenced(loop, ["a", "b"]).tolist() == [False, False]

    def test_nobody_before_kinds_are_told_apart(self) -> None:
        assert silenced(self.loop(None), ["a", "b"]).tolist() == [False, False]


def played(regret: float, silent: list[list[int]]) -> Played:
    return Played(np.full(500, regret / 500), np.array(silent), np.zeros(2), 0.2, 0.1, 10, 3)


class TestClaim:
    @pytest.mark.parametrize(("regret", "holds"), [(220.0, False), (210.0, True)])
    def test_is_a_ratio_of_means(self, regret: float, holds: bool) -> None:
        nobody = [[0, 0], [0, 0]]
        by_label = {each.label: [played(150.0, nobody), played(250.0, nobody)] for each in CONDITIONS}
        by_label[WEIGHTS.label] = [played(regret - 100, [[0, 4], [3, 1]]), played(regret + 100, nobody)]
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
        assert [bar.name for bar in bars] == ["poison: regret with weights / without the poisoned, quick"]
        assert (tmp_path / "transfer-poison.png").stat().st_size > 1_000
        Report("transfer", {}, results, bars, True).write(tmp_path / "report.json")
        assert json.loads((tmp_path / "report.json").read_text())["results"]["poisoned"] == 6

    def test_without_data_it_says_what_is_missing(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        movielens_ratings.cache_clear()
        monkeypatch.setattr("bench.environments.movielens_ratings", movielens_ratings)
        results, bars = measure_poison(replace(TransferPlan(), data=tmp_path), True, QUIET)
        assert "movielens-100k" in results["skipped"]
        assert not bars
