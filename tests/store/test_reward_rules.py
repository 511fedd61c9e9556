"""Reward rules: valid combinations and defaults."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaban.store.reward_rules import REWARD_LIMIT, RewardRange, RewardRules


@pytest.mark.parametrize(
    "wrong",
    [
        {"repeated": "mean"},
        {"repeated": None},
        {"repeated": ["first"]},
        {"reward_min": 1.0},
        {"reward_min": 2, "reward_max": 1},
        {"reward_min": float("nan")},
        {"reward_max": float("inf")},
        {"reward_max": 2 * REWARD_LIMIT},
        {"reward_max": "1"},
        {"reward_max": None},
        {"reward_max": True},
        {"reward_max": 10**400},
        {"default_reward": 1.5, "wait_s": 1},
        {"default_reward": 1.5},
        {"default_reward": -0.5, "reward_min": 1, "reward_max": 5},
        {"default_reward": 0, "wait_s": 601, "window_s": 600},
        {"default_reward": float("nan"), "wait_s": 1},
        {"default_reward": 0, "wait_s": 0},
        {"wait_s": -1},
        {"wait_s": float("inf")},
        {"wait_s": 31_536_001},
        {"window": 3},
    ],
)
def test_invalid_rules_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        RewardRules.from_json(wrong)


@pytest.mark.parametrize(
    ("default", "least", "greatest", "learned"),
    [
        (None, 0, 1, None),
        (0, 0, 1, 0),
        (0, -1, 1, 0),
        (0.5, 0, 1, 0.5),
        (0, 1, 5, 1),
        (0, -5, -1, -5),
        (None, 1, 5, None),
    ],
)
def test_a_default_of_0_outside_the_range_is_its_lower_end(
    default: float | None, least: float, greatest: float, learned: float | None
) -> None:
    rules = RewardRules(reward_min=least, reward_max=greatest, default_reward=default)
    assert rules.reward_of_silence == learned
    assert rules.default_reward == default


def test_the_wait_is_10_minutes_or_the_reward_window() -> None:
    assert RewardRules().waited_s == 600
    assert RewardRules(window_s=60).waited_s == 60
    assert RewardRules(wait_s=700).waited_s == 700
    assert RewardRules(default_reward=0, window_s=60).overdue_ms(1_000) == 61_000


def test_json_round_trip() -> None:
    rules = RewardRules("first", -1, 5, 0, 60)
    assert RewardRules.from_json(rules.to_json()) == rules
    assert RewardRules.from_json(None) == RewardRules.from_json({}) == RewardRules()
    assert rules.to_json().keys() == {each.name for each in fields(RewardRules) if each.init}
    assert rules.range == RewardRange(-1, 5)
    assert rules.overdue_ms(1_000) == 61_000
    assert RewardRules().overdue_ms(1_000) is None
    assert RewardRules(wait_s=60).overdue_ms(1_000) is None


# ---------------------------------------------------------------------- ranges


NUMBERS = st.floats(-1e6, 1e6)
DEFAULT = RewardRules().range


@st.composite
def ranges(draw: st.DrawFn) -> RewardRange:
    least = draw(NUMBERS)
    return RewardRange(least, least + draw(st.floats(0.01, 1e6)))


def test_default_range_changes_nothing() -> None:
    assert [DEFAULT.scaled(reward) for reward in (0.0, 0.1, 1 / 3, 1.0)] == [0.0, 0.1, 1 / 3, 1.0]
    assert [DEFAULT.as_sent(reward) for reward in (0.0, 0.1, 1 / 3, 1.0)] == [0.0, 0.1, 1 / 3, 1.0]
    assert [DEFAULT.takes(reward) for reward in (-1e-9, 0, 0.5, 1, 1.01)] == [False, True, True, True, False]


@given(ranges(), st.floats(0, 1))
def test_a_range_is_mapped_to_0_to_1(sent_in: RewardRange, share: float) -> None:
    reward = sent_in.least + share * (sent_in.greatest - sent_in.least)
    assert 0 <= sent_in.scaled(reward) <= 1
    assert sent_in.scaled(sent_in.least) == 0
    assert sent_in.scaled(sent_in.greatest) == 1
    if sent_in.takes(reward):
        assert sent_in.as_sent(sent_in.scaled(reward)) == pytest.approx(reward, abs=1e-6)


@pytest.mark.parametrize(
    ("least", "greatest"),
    [
        (1, 1),
        (2, 1),
        (float("nan"), 1),
        (0, float("nan")),
        (0, float("inf")),
        (-float("inf"), 0),
        (0, 2 * REWARD_LIMIT),
    ],
)
def test_invalid_ranges_are_refused(least: float, greatest: float) -> None:
    with pytest.raises(ValueError, match="cannot lie between"):
        RewardRange(least, greatest)
