"""Ranges of rewards: where one lies on the learners' scale, and what several are together."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.reward_range import REWARD_LIMIT, RewardRange, scaled_sum
from store.reward_rules import RewardRules

NUMBERS = st.floats(-1e6, 1e6)
DEFAULT = RewardRules().range


@st.composite
def ranges(draw: st.DrawFn) -> RewardRange:
    least = draw(NUMBERS)
    return RewardRange(least, least + draw(st.floats(0.01, 1e6)))


def together(*sent: tuple[float, RewardRange]) -> float:
    return scaled_sum([(sent_in.scaled(reward), sent_in) for reward, sent_in in sent])


def test_by_default_rewards_are_as_they_are() -> None:
    assert [DEFAULT.scaled(reward) for reward in (0.0, 0.1, 1 / 3, 1.0)] == [0.0, 0.1, 1 / 3, 1.0]
    assert [DEFAULT.as_sent(reward) for reward in (0.0, 0.1, 1 / 3, 1.0)] == [0.0, 0.1, 1 / 3, 1.0]
    assert [DEFAULT.takes(reward) for reward in (-1e-9, 0, 0.5, 1, 1.01)] == [False, True, True, True, False]
    assert scaled_sum([(0.25, DEFAULT), (0.5, DEFAULT)]) == 0.75
    assert scaled_sum([(0.75, DEFAULT), (0.5, DEFAULT)]) == 1.0


@given(ranges(), st.floats(0, 1))
def test_a_range_is_seen_as_0_to_1(sent_in: RewardRange, share: float) -> None:
    reward = sent_in.least + share * (sent_in.greatest - sent_in.least)
    assert 0 <= sent_in.scaled(reward) <= 1
    assert sent_in.scaled(sent_in.least) == 0
    assert sent_in.scaled(sent_in.greatest) == 1
    if sent_in.takes(reward):
        assert sent_in.as_sent(sent_in.scaled(reward)) == pytest.approx(reward, abs=1e-6)


@given(st.lists(st.tuples(st.floats(0, 1), ranges()), min_size=1, max_size=6), st.booleans())
def test_a_sum_is_that_of_the_rewards_as_they_were_sent(
    rewards: list[tuple[float, RewardRange]], one_range: bool
) -> None:
    if one_range:
        rewards = [(share, rewards[-1][1]) for share, _ in rewards]
    sent = [
        Fraction(each.least) + Fraction(share) * (Fraction(each.greatest) - Fraction(each.least))
        for share, each in rewards
    ]
    least, greatest = Fraction(rewards[-1][1].least), Fraction(rewards[-1][1].greatest)
    summed = min(greatest, max(least, sum(sent, Fraction(0))))
    assert scaled_sum(rewards) == pytest.approx(float((summed - least) / (greatest - least)), abs=1e-6)


def test_sums_in_other_ranges() -> None:
    votes, stars = RewardRange(-1, 1), RewardRange(1, 5)
    assert together((0, votes), (0, votes)) == votes.scaled(0)
    assert together((1, votes), (-1, votes)) == votes.scaled(0)
    assert together((-1, votes), (-1, votes)) == 0
    assert together((1, stars), (2, stars)) == stars.scaled(3)
    assert together((1, votes), (3, stars)) == stars.scaled(4)
    assert together((3, stars), (-1, votes)) == 1, "cut to the range of the last"


def test_sums_of_the_widest_and_the_narrowest_range_are_numbers() -> None:
    wide, narrow = RewardRange(-REWARD_LIMIT, REWARD_LIMIT), RewardRange(0, 5e-324)
    assert together((REWARD_LIMIT, wide), (0, narrow)) == 1
    assert together((5e-324, narrow), (-REWARD_LIMIT, wide)) == 0


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
def test_ranges_that_make_no_sense(least: float, greatest: float) -> None:
    with pytest.raises(ValueError, match="cannot lie between"):
        RewardRange(least, greatest)
