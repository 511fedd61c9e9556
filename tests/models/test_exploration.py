"""Policies: distributions that are exact, and choices that follow them."""

from __future__ import annotations

from collections import Counter
from itertools import islice, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.exploration import (
    FlooredUpperConfidence,
    InverseGap,
    Policy,
    UpperConfidence,
    build_policy,
    decision_draws,
    draw_slate,
)

EPSILON = 0.3
POLICIES: list[Policy] = [
    UpperConfidence(),
    FlooredUpperConfidence(EPSILON),
    FlooredUpperConfidence(0.0),
    FlooredUpperConfidence(1.0),
    InverseGap(20.0),
    InverseGap(1e9),
]
#: Few values, so that ties are common.
numbers = st.one_of(st.sampled_from([0.0, 0.5, 1.0, -2.0]), st.floats(-1e3, 1e3))


@st.composite
def arms(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    count = draw(st.integers(1, 12))
    lists = st.lists(numbers, min_size=count, max_size=count)
    return np.array(draw(lists)), np.abs(np.array(draw(lists)))


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
class TestEveryPolicy:
    @settings(max_examples=60, deadline=None)
    @given(arms())
    def test_chances_are_a_distribution_that_prefers_better_arms(
        self, policy: Policy, scored: tuple[np.ndarray, np.ndarray]
    ) -> None:
        mean, bonus = scored
        chances = policy.probabilities(mean, bonus)
        assert chances.shape == mean.shape
        assert (chances >= 0).all()
        assert chances.sum() == pytest.approx(1.0, abs=1e-12)
        order = np.argsort(mean + bonus, kind="stable")
        assert (np.diff(chances[order]) >= -1e-12).all()
        # Arms of equal score are equally likely, wherever they stand.
        score = mean + bonus
        for value in set(score.tolist()):
            assert len(set(chances[score == value].tolist())) == 1

    @settings(max_examples=40, deadline=None)
    @given(arms(), st.data())
    def test_a_slate_names_each_arm_once_with_its_chance(
        self, policy: Policy, scored: tuple[np.ndarray, np.ndarray], data: st.DataObject
    ) -> None:
        mean, bonus = scored
        size = data.draw(st.integers(1, len(mean)))
        slate = draw_slate(policy, mean, bonus, size, decision_draws(data.draw(st.integers(0, 99)), "d"))
        assert len(set(slate.chosen)) == len(slate.chosen) == len(slate.propensities) == size
        left = list(range(len(mean)))
        for arm, propensity in zip(slate.chosen, slate.propensities, strict=True):
            assert 0 < propensity <= 1 + 1e-12
            assert propensity == policy.probabilities(mean[left], bonus[left])[left.index(arm)]
            left.remove(arm)

    def test_the_inputs_are_left_as_they_are(self, policy: Policy) -> None:
        mean, bonus = np.array([1.0, 2.0, 2.0]), np.array([0.5, 0.0, 0.0])
        draw_slate(policy, mean, bonus, 3, decision_draws(0, "d"))
        policy.probabilities(mean, bonus)
        assert mean.tolist() == [1, 2, 2]
        assert bonus.tolist() == [0.5, 0, 0]


class TestShares:
    def test_ucb_shares_ties(self) -> None:
        chances = UpperConfidence().probabilities(np.array([1.0, 0.0, 0.5, 0.0]), np.array([0.0, 1.0, 0.0, 0.9]))
        assert chances.tolist() == [0.5, 0.5, 0, 0]

    @pytest.mark.parametrize("count", [1, 2, 3, 10])
    def test_the_floor_is_exact(self, count: int) -> None:
        chances = FlooredUpperConfidence(EPSILON).probabilities(np.arange(float(count)), np.zeros(count))
        assert chances[:-1] == pytest.approx(np.full(count - 1, EPSILON / count), rel=1e-15)
        assert chances[-1] == pytest.approx(1 - EPSILON + EPSILON / count, rel=1e-15)

    def test_inverse_gaps(self) -> None:
        chances = InverseGap(10.0).probabilities(np.array([1.0, 0.5, 0.0]), np.zeros(3))
        assert chances[1:] == pytest.approx([1 / (3 + 5), 1 / (3 + 10)])
        assert chances[0] == pytest.approx(1 - 1 / 8 - 1 / 13)


@pytest.mark.parametrize("policy", [FlooredUpperConfidence(0.5), InverseGap(3.0)], ids=["ucb-floor", "squarecb"])
def test_slates_come_as_often_as_their_propensities_say(policy: Policy) -> None:
    mean, bonus = np.array([0.9, 0.9, 0.2, 0.5]), np.array([0.0, 0.0, 0.3, 0.1])
    chance: dict[tuple[int, ...], float] = {}
    for slate in permutations(range(4), 2):
        left, product = list(range(4)), 1.0
        for arm in slate:
            product *= policy.probabilities(mean[left], bonus[left])[left.index(arm)]
            left.remove(arm)
        chance[slate] = product
    assert sum(chance.values()) == pytest.approx(1.0)
    draws = 3_000
    seen = Counter(draw_slate(policy, mean, bonus, 2, decision_draws(5, f"d{n}")).chosen for n in range(draws))
    for slate, wanted in chance.items():
        # Five standard errors, for twelve slates: chance alone fails one run in a hundred thousand; the seed is fixed.
        assert seen[slate] / draws == pytest.approx(wanted, abs=5 * np.sqrt(wanted * (1 - wanted) / draws))


class TestRandomness:
    def test_belongs_to_the_decision(self) -> None:
        policy = FlooredUpperConfidence(1.0)

        def slate(seed: int, decision_id: str) -> tuple[int, ...]:
            return draw_slate(policy, np.zeros(20), np.zeros(20), 20, decision_draws(seed, decision_id)).chosen

        assert slate(1, "a") == slate(1, "a")
        assert len({slate(seed, name) for seed in (1, 2) for name in ("a", "b", "é", "")}) == 8

    def test_does_not_depend_on_the_order_of_decisions(self) -> None:
        first = list(islice(decision_draws(0, "x"), 20))
        list(islice(decision_draws(0, "y"), 100))
        assert list(islice(decision_draws(0, "x"), 20)) == first


class TestMaking:
    @pytest.mark.parametrize("name", ["ucb", "ucb-floor", "squarecb"])
    def test_by_name(self, name: str) -> None:
        assert build_policy(name, epsilon=0.1, squarecb_gamma=3.0).name == name

    def test_impossible_settings(self) -> None:
        for epsilon in (-0.1, 1.1, float("nan")):
            with pytest.raises(ValueError, match="epsilon"):
                FlooredUpperConfidence(epsilon)
        for gamma in (0.0, -1.0, float("nan")):
            with pytest.raises(ValueError, match="gamma"):
                InverseGap(gamma)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_scores_that_are_not_numbers_are_refused(policy: Policy) -> None:
    """A distribution over them would be made up, and its propensities with it."""
    for broken in (float("nan"), float("inf"), float("-inf")):
        with pytest.raises(ValueError, match="finite"):
            draw_slate(policy, np.array([0.0, broken]), np.zeros(2), 1, decision_draws(0, "d"))
