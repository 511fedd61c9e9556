"""What rewards mean: rules that make sense together, and defaults."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from store.reward_range import REWARD_LIMIT, RewardRange
from store.reward_rules import RewardRules


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
    assert rules.range == RewardRange(-1, 5)
    assert rules.overdue_ms(1_000) == 61_000
    assert RewardRules().overdue_ms(1_000) is None
    assert RewardRules(wait_s=60).overdue_ms(1_000) is None
