"""The contract of every baseline."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest

from metaban.bench.baselines import BASELINES, build_baseline
from metaban.bench.baselines.linear import WIDEST_POOLED
from tests.bench.baselines.linear_worlds import ARMS, DIMENSION, USERS, LinearWorld, play, small

NAMES = sorted(BASELINES)
#: Methods that learn one taste for all users, and so nothing where two halves disagree.
SHARED = {"linucb", "neuralucb-one"}
#: A learner's regret in its last rounds, as a share of what a random arm costs: with one taste, with two, and without.
LEARNED, TOLD_APART, NOT_LEARNED = 0.15, 0.3, 0.6


@pytest.mark.parametrize("name", NAMES)
def test_chooses_an_arm_of_the_slate(name: str) -> None:
    choices, _ = play(small(name), LinearWorld(seed=1), 60)
    assert set(choices) <= set(range(ARMS))
    assert len(set(choices)) > 1


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_same_choices(name: str) -> None:
    first, _ = play(small(name, seed=3), LinearWorld(seed=1), 60)
    second, _ = play(small(name, seed=3), LinearWorld(seed=1), 60)
    assert first == second


@pytest.mark.parametrize("name", NAMES)
def test_learns_a_common_taste(name: str) -> None:
    _, shares = play(small(name), LinearWorld(seed=2), 400)
    assert shares[-100:].mean() < LEARNED


@pytest.mark.parametrize("name", NAMES)
def test_learns_that_users_disagree(name: str) -> None:
    _, shares = play(small(name), LinearWorld(seed=2, tastes=2), 500)
    if name in SHARED:
        assert shares[-100:].mean() > NOT_LEARNED
    else:
        assert shares[-100:].mean() < TOLD_APART


@pytest.mark.parametrize("name", NAMES)
def test_learns_nothing_from_random_rewards(name: str) -> None:
    """With rewards that are noise, the margin above is missed by far: it is not met by chance."""
    shares = []
    for seed in range(6):
        baseline, world, random = small(name), LinearWorld(seed=seed), np.random.default_rng(seed + 10)
        for _ in range(40):
            user, arms, worth = world.next_round()
            choice = baseline.choose(user, arms)
            baseline.learn(user, arms[choice], float(random.random()))
            shares.append((worth.max() - worth[choice]) / (worth.max() - worth.mean()))
    assert np.mean(shares) > NOT_LEARNED


@pytest.mark.parametrize("name", NAMES)
def test_position_does_not_matter(name: str) -> None:
    baseline, world, random = small(name), LinearWorld(seed=5, tastes=2), np.random.default_rng(6)
    play(baseline, world, 60)
    for _ in range(20):
        user, arms, _ = world.next_round()
        order = random.permutation(ARMS)
        assert order[deepcopy(baseline).choose(user, arms[order])] == deepcopy(baseline).choose(user, arms)


@pytest.mark.parametrize("name", NAMES)
def test_equal_arms_are_chosen_equally_often(name: str) -> None:
    baseline = small(name)
    choices = [baseline.choose(0, np.ones((3, DIMENSION))) for _ in range(60)]
    assert set(choices) == {0, 1, 2}


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_user(name: str) -> None:
    baseline, world = small(name), LinearWorld(seed=7)
    play(baseline, world, 100, users=USERS - 1)
    arms = world.next_round()[1]
    assert 0 <= baseline.choose(USERS - 1, arms) < ARMS
    baseline.learn(USERS - 1, arms[0], 1.0)
    assert 0 <= baseline.choose(USERS - 1, arms) < ARMS


@pytest.mark.parametrize("name", NAMES)
def test_one_arm_one_user_and_slates_of_any_length(name: str) -> None:
    baseline, random = small(name, users=1), np.random.default_rng(8)
    for length in (1, 3, 1, 12, 2):
        arms = random.standard_normal((length, DIMENSION))
        choice = baseline.choose(0, arms)
        assert 0 <= choice < length
        baseline.learn(0, arms[choice], 0.5)


@pytest.mark.parametrize("name", NAMES)
def test_arms_are_not_modified(name: str) -> None:
    baseline, arms = small(name), np.random.default_rng(9).standard_normal((ARMS, DIMENSION))
    before = arms.copy()
    baseline.choose(0, arms)
    baseline.learn(0, arms[0], 1.0)
    assert np.array_equal(arms, before)


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"neuralucb-one", "neuralucb-ind"}))
def test_scale_and_offset_do_not_matter_when_standardised(name: str) -> None:
    """The bounds of a standardised method are those of the arms before scaling and shifting."""
    plain, moved = small(name, standardize=True), small(name, standardize=True)
    stretch, offset = np.array([50.0, 1.0, 0.1, 5.0]), np.array([200.0, 0.0, 1.0, -20.0])
    world = LinearWorld(seed=10)
    for number in range(150):
        user, arms, worth = world.next_round()
        choice = plain.choose(user, arms)
        other = moved.choose(user, arms * stretch + offset)
        assert choice == other or number < 10  # until there are moments, inputs are raw
        reward = world.reward(worth[choice])
        plain.learn(user, arms[choice], reward)
        moved.learn(user, arms[choice] * stretch + offset, reward)


@pytest.mark.parametrize("name", NAMES)
def test_wide_arms(name: str) -> None:
    """Arms wider than clustering methods take without projection; the taste is in the first numbers."""
    baseline, random, shares = small(name, users=2, dimension=WIDEST_POOLED + 20), np.random.default_rng(11), []
    for _ in range(60):
        arms = random.standard_normal((ARMS, WIDEST_POOLED + 20)) * np.geomspace(1, 1e-3, WIDEST_POOLED + 20)
        worth = arms[:, 0]
        choice = baseline.choose(0, arms)
        baseline.learn(0, arms[choice], float(worth[choice]))
        shares.append((worth.max() - worth[choice]) / (worth.max() - worth.mean()))
    assert np.mean(shares[-20:]) < NOT_LEARNED


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="linucb-user"):
        build_baseline("linucb-nobody", users=2, dimension=2, seed=0, settings={})
