"""The synthetic world is what its description says."""

from __future__ import annotations

import numpy as np

from bench.environments import SyntheticGroups


def test_rounds_are_made_of_unit_arms_and_their_true_chances() -> None:
    world = SyntheticGroups(seed=1, users=6, groups=2, arms=5, dimension=3, low=0.1, high=0.9, spread=0.5)
    for _ in range(50):
        asked = world.next_round()
        assert asked.arms.shape == (5, 3)
        assert np.allclose(np.linalg.norm(asked.arms, axis=1), 1)
        assert ((asked.chances >= 0.1) & (asked.chances <= 0.9)).all()
        assert world.group_of(asked.user_id) == int(asked.user_id.removeprefix("user-")) % 2


def test_groups_want_different_arms() -> None:
    world = SyntheticGroups(seed=2)
    rounds = [world.next_round() for _ in range(4_000)]
    liked = [
        np.mean([asked.arms[asked.chances.argmax()] for asked in rounds if world.group_of(asked.user_id) == group], 0)
        for group in (0, 1)
    ]
    assert liked[0] @ liked[1] < -0.3


def test_rewards_come_with_the_chance_of_the_arm() -> None:
    world = SyntheticGroups(seed=3)
    asked = world.next_round()
    arm = int(asked.chances.argmax())
    drawn = np.mean([world.reward(asked, arm) for _ in range(4_000)])
    assert abs(drawn - asked.chances[arm]) < 4 * np.sqrt(0.25 / 4_000)


def test_the_same_seed_is_the_same_world() -> None:
    one, two = SyntheticGroups(seed=9), SyntheticGroups(seed=9)
    for _ in range(5):
        first, second = one.next_round(), two.next_round()
        assert first.user_id == second.user_id
        assert np.array_equal(first.arms, second.arms)
