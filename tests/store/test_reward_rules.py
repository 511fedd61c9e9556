"""What rewards mean: ranges, sums and defaults."""

from __future__ import annotations

from dataclasses import fields
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.reward_rules import REWARD_LIMIT, RewardRules

NUMBERS = st.floats(-1e6, 1e6)


@st.composite
def ranges(draw: st.DrawFn) -> RewardRules:
    low = draw(NUMBERS)
    return RewardRules(reward_min=low, reward_max=low + draw(st.floats(0.01, 1e6)))


def test_by_default_rewards_are_as_they_are() -> None:
    rules = RewardRules()
    assert [rules.scaled(reward) for reward in (0.0, 0.1, 1 / 3, 1.0)] == [0.0, 0.1, 1 / 3, 1.0]
    assert [rules.takes(reward) for reward in (-1e-9, 0, 0.5, 1, 1.01)] == [False, True, True, True, False]
    assert rules.total([0.25, 0.5]) == 0.75
    assert rules.total([0.75, 0.5]) == 1.0
    assert rules.overdue_ms(1_000) is None


@given(ranges(), st.floats(0, 1))
def test_a_range_is_seen_as_0_to_1(rules: RewardRules, share: float) -> None:
    reward = rules.reward_min + share * (rules.reward_max - rules.reward_min)
    assert 0 <= rules.scaled(reward) <= 1
    assert rules.scaled(rules.reward_min) == 0
    assert rules.scaled(rules.reward_max) == 1
    if rules.takes(reward):
        back = rules.reward_min + rules.scaled(reward) * (rules.reward_max - rules.reward_min)
        assert back == pytest.approx(reward, abs=1e-6)


@given(ranges(), st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_a_sum_is_that_of_the_rewards_as_they_were_sent(rules: RewardRules, shares: list[float]) -> None:
    low, high = Fraction(rules.reward_min), Fraction(rules.reward_max)
    sent = [low + Fraction(share) * (high - low) for share in shares]
    summed = min(high, max(low, sum(sent, Fraction(0))))
    assert rules.total(shares) == pytest.approx(float((summed - low) / (high - low)), abs=1e-6)


def test_sums_in_other_ranges() -> None:
    votes = RewardRules(reward_min=-1, reward_max=1)
    assert votes.total([votes.scaled(vote) for vote in (0, 0)]) == votes.scaled(0)
    assert votes.total([votes.scaled(vote) for vote in (1, -1)]) == votes.scaled(0)
    assert votes.total([votes.scaled(vote) for vote in (-1, -1)]) == 0
    stars = RewardRules(reward_min=1, reward_max=5)
    assert stars.total([stars.scaled(1), stars.scaled(2)]) == stars.scaled(3)


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
        {"default_reward": 0.0},
        {"default_reward": 1.5, "wait_s": 1},
        {"default_reward": float("nan"), "wait_s": 1},
        {"default_reward": 0, "wait_s": 0},
        {"wait_s": -1},
        {"wait_s": float("inf")},
        {"wait_s": 31_536_001},
        {"window": 3},
    ],
)
def test_rules_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        RewardRules.from_json(wrong)


def test_as_json_and_back() -> None:
    rules = RewardRules("first", -1, 5, 0, 60)
    assert RewardRules.from_json(rules.to_json()) == rules
    assert RewardRules.from_json(None) == RewardRules.from_json({}) == RewardRules()
    assert rules.to_json().keys() == {each.name for each in fields(RewardRules)}
    assert rules.overdue_ms(1_000) == 61_000
    assert RewardRules(wait_s=60).overdue_ms(1_000) is None
