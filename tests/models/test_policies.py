"""Policies: exact distributions, and choices that follow them."""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b
from itertools import islice, permutations, repeat

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare, kstest

from metaban.models import policies as exploration_module
from metaban.models.policies import (
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
    def test_propensities_are_a_distribution_that_prefers_better_arms(
        self, policy: Policy, scored: tuple[np.ndarray, np.ndarray]
    ) -> None:
        mean, bonus = scored
        chances = policy.probabilities(mean, bonus)
        assert chances.shape == mean.shape
        assert (chances >= 0).all()
        assert chances.sum() == pytest.approx(1.0, abs=1e-12)
        order = np.argsort(mean + bonus, kind="stable")
        assert (np.diff(chances[order]) >= -1e-12).all()
        # Arms of equal score are equally likely in any order.
        score = mean + bonus
        for value in set(score.tolist()):
            assert len(set(chances[score == value].tolist())) == 1

    @settings(max_examples=40, deadline=None)
    @given(arms(), st.data())
    def test_a_slate_holds_each_arm_once_with_its_propensity(
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

    def test_arguments_are_not_modified(self, policy: Policy) -> None:
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
def test_slates_follow_their_propensities(policy: Policy) -> None:
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
        # Five standard errors for twelve slates: by chance alone one run in 100,000 would fail; the seed is fixed.
        assert seen[slate] / draws == pytest.approx(wanted, abs=5 * np.sqrt(wanted * (1 - wanted) / draws))


class TestRandomness:
    def test_depends_on_the_decision_id(self) -> None:
        policy = FlooredUpperConfidence(1.0)

        def slate(seed: int, decision_id: str) -> tuple[int, ...]:
            return draw_slate(policy, np.zeros(20), np.zeros(20), 20, decision_draws(seed, decision_id)).chosen

        assert slate(1, "a") == slate(1, "a")
        assert len({slate(seed, name) for seed in (1, 2) for name in ("a", "b", "é", "")}) == 8

    def test_does_not_depend_on_the_order_of_decisions(self) -> None:
        first = list(islice(decision_draws(0, "x"), 20))
        list(islice(decision_draws(0, "y"), 100))
        assert list(islice(decision_draws(0, "x"), 20)) == first


class TestDraws:
    #: Numbers that one digest provides.
    BLOCK = 8

    def test_are_numbers_from_0_to_below_1(self) -> None:
        drawn = list(islice(decision_draws(3, "d"), 50 * self.BLOCK))
        assert all(0 <= number < 1 for number in drawn)
        assert len(set(drawn)) == len(drawn), "no repetition after the first digest"

    @pytest.mark.parametrize(("byte", "expected"), [(0, 0.0), (255, 1 - 2.0**-53)])
    def test_the_extremes_of_a_digest(self, byte: int, expected: float, monkeypatch: pytest.MonkeyPatch) -> None:
        """No id is known that hashes to them; rounded to 1, the largest would select no arm."""

        class Extreme:
            def __init__(self, data: bytes) -> None:
                self.size = blake2b(data).digest_size

            def digest(self) -> bytes:
                return bytes([byte]) * self.size

        monkeypatch.setattr(exploration_module, "blake2b", Extreme)
        assert list(islice(decision_draws(0, "d"), 2 * self.BLOCK)) == [expected] * (2 * self.BLOCK)

    def test_differ_between_decisions(self) -> None:
        def drawn(seed: int, decision_id: str) -> list[float]:
            return list(islice(decision_draws(seed, decision_id), 3 * self.BLOCK))

        assert drawn(1, "d") == drawn(1, "d")
        # Including ids that look like the seed, the number of a digest, or both.
        names = ["", "a", "b", "é", "0", "1", "1:", "0:a", "1:a", "1:0:a", "a" * 500]
        everyone = [drawn(seed, name) for seed in (0, 1, 10, -1, 2**63) for name in names]
        assert len({number for each in everyone for number in each}) == sum(map(len, everyone))

    @pytest.mark.parametrize("position", [0, 1, BLOCK - 1, BLOCK, 2 * BLOCK + 3])
    def test_are_uniform_over_decisions(self, position: int) -> None:
        drawn = np.array([next(islice(decision_draws(7, f"d{n}"), position, None)) for n in range(4_000)])
        # The numbers are fixed; another set would fail by chance once in 10,000.
        assert kstest(drawn, "uniform").pvalue > 1e-4
        last_bits = (drawn * 2.0**53).astype(np.int64) % 16
        assert chisquare(np.bincount(last_bits, minlength=16)).pvalue > 1e-4

    def test_the_positions_of_a_decision_are_independent(self) -> None:
        rows = np.array([list(islice(decision_draws(7, f"d{n}"), 2 * self.BLOCK)) for n in range(2_000)])
        apart = np.corrcoef(rows.T) - np.eye(2 * self.BLOCK)
        assert np.abs(apart).max() < 5 / np.sqrt(len(rows))


class Fixed(Policy):
    """A policy with given shares for the remaining arms."""

    name = "fixed"

    def __init__(self, shares: list[float]) -> None:
        self.shares = shares

    def probabilities(self, mean: np.ndarray, bonus: np.ndarray, drawn: np.ndarray | None = None) -> np.ndarray:
        left = np.array([self.shares[int(arm)] for arm in mean])
        return left / left.sum()


JUST_BELOW_1 = 1 - 2.0**-53


class TestDrawing:
    @pytest.mark.parametrize("draw", [0.0, 5e-324, 0.5, JUST_BELOW_1])
    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(weights=st.lists(st.sampled_from([0.0, 1e-300, 1e-17, 0.1, 1 / 3, 1.0, 7.0]), min_size=1, max_size=9))
    def test_arms_of_probability_zero_are_never_drawn(self, draw: float, weights: list[float]) -> None:
        possible = sum(weight > 0 for weight in weights)
        assume(possible)
        arms, none = np.arange(float(len(weights))), np.zeros(len(weights))
        slate = draw_slate(Fixed(weights), arms, none, possible, repeat(draw))
        assert len(set(slate.chosen)) == possible
        assert all(weights[arm] > 0 for arm in slate.chosen)
        assert all(propensity > 0 for propensity in slate.propensities)

    @pytest.mark.parametrize("count", [1, 3, 10, 49])
    def test_the_ends_select_arms_of_positive_probability(self, count: int) -> None:
        """Also where shares sum to a little less or more than 1."""
        weights = [0.0, *[1 / count] * count, 0.0]
        arms, none = np.arange(float(len(weights))), np.zeros(len(weights))
        for draw, first in ((0.0, 1), (JUST_BELOW_1, count)):
            assert draw_slate(Fixed(weights), arms, none, 1, iter([draw])).chosen == (first,)

    def test_each_arm_has_an_interval_of_its_share(self) -> None:
        weights = [0.125, 0.0, 0.25, 0.5, 0.125]  # exact in binary, so it is known which arm each end belongs to
        arms, none = np.arange(5.0), np.zeros(5)
        expected = {0.0: 0, 0.124: 0, 0.125: 2, 0.374: 2, 0.375: 3, 0.874: 3, 0.875: 4, JUST_BELOW_1: 4}
        found = {draw: draw_slate(Fixed(weights), arms, none, 1, iter([draw])).chosen[0] for draw in expected}
        assert found == expected

    def test_a_slate_uses_one_number_per_position(self) -> None:
        draws = iter([0.99, 0.0, 0.0, 0.5])
        assert draw_slate(FlooredUpperConfidence(1.0), np.zeros(4), np.zeros(4), 3, draws).chosen == (3, 0, 1)
        assert list(draws) == [0.5]

    def test_arms_follow_their_shares(self) -> None:
        weights = [0.05, 0.0, 0.3, 0.02, 0.63]
        arms, none, draws = np.arange(5.0), np.zeros(5), 4_000
        seen = Counter(
            draw_slate(Fixed(weights), arms, none, 1, decision_draws(11, f"d{n}")).chosen[0] for n in range(draws)
        )
        assert seen[1] == 0
        drawn, wanted = [arm for arm, weight in enumerate(weights) if weight], [each for each in weights if each]
        assert chisquare([seen[arm] for arm in drawn], np.array(wanted) * draws).pvalue > 1e-4


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
    """Their propensities would be meaningless."""
    for broken in (float("nan"), float("inf"), float("-inf")):
        with pytest.raises(ValueError, match="finite"):
            draw_slate(policy, np.array([0.0, broken]), np.zeros(2), 1, decision_draws(0, "d"))


def test_finite_scores_with_an_infinite_sum_are_accepted() -> None:
    """Finite scores may have an infinite sum; finite means and bonuses may have infinite scores."""
    policy, large = FlooredUpperConfidence(0.1), np.full(3, 1.7e308)
    assert len(draw_slate(policy, large, np.zeros(3), 1, decision_draws(0, "d")).chosen) == 1
    for bonus in (large, np.array([1.7e308, -1.7e308, -1.7e308])):
        with pytest.raises(ValueError, match="finite"), np.errstate(over="ignore"):
            draw_slate(policy, large, bonus, 1, decision_draws(0, "d"))
    with pytest.raises(ValueError, match="finite"), np.errstate(invalid="ignore"):
        draw_slate(policy, np.array([0.0, np.inf]), np.array([0.0, -np.inf]), 1, decision_draws(0, "d"))


@pytest.mark.parametrize("name", ["ucb", "ucb-floor", "squarecb"])
@pytest.mark.parametrize("arms", [1, 2, 31, 32, 33, 60])
def test_few_arms_are_drawn_like_many(name: str, arms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Element by element or by arrays: the same arms with the same probabilities, to the bit."""
    policy = build_policy(name, epsilon=0.3, squarecb_gamma=5.0)
    random = np.random.default_rng(arms)
    for number in range(50):
        mean, bonus = random.random(arms).round(1), random.random(arms).round(1)  # with ties
        slates = []
        for few in (0, 1_000):
            monkeypatch.setattr("metaban.models.policies.FEW_ARMS", few)
            slates.append(draw_slate(policy, mean, bonus, min(arms, 3), decision_draws(1, str(number))))
            for wrong in (np.nan, np.inf, -np.inf):
                with pytest.raises(ValueError, match="finite"):
                    draw_slate(policy, np.where(np.arange(arms) == arms - 1, wrong, mean), bonus, 1, iter([0.5]))
        assert slates[0] == slates[1]
