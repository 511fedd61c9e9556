"""Hybrid LinUCB against one explicit ridge regression over the shared columns and those of all arms."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest

from metaban.bench.shop.hybrid_linucb import HybridLinUCB, HybridRidge
from metaban.bench.shop.inputs import context_inputs, item_inputs
from metaban.bench.worlds.shop import Matrix, ShopRequest
from tests.bench.shop.shops import catalogue, feedback

ARMS, OWN, SHARED, RIDGE = 4, 3, 5, 0.7


def joined(arms: int, arm: int, own: Matrix, shared: Matrix) -> Matrix:
    """One long input: shared columns, then a block for each arm, zero but for one."""
    blocks = np.zeros((arms, len(own)))
    blocks[arm] = own
    return np.concatenate([shared, blocks.ravel()])


def test_means_and_variances_are_those_of_the_explicit_regression() -> None:
    random = np.random.default_rng(0)
    model = HybridRidge(ARMS, OWN, SHARED, RIDGE)
    size = SHARED + ARMS * OWN
    gram, target = RIDGE * np.eye(size), np.zeros(size)
    for number in range(60):
        arm, count = int(random.integers(ARMS)), int(random.integers(1, 6))
        own, shared = random.standard_normal((count, OWN)), random.standard_normal((count, SHARED))
        rewards = (random.random(count) < 0.3).astype(np.float64)
        model.observe(arm, own, shared, rewards)
        for place in range(count):
            row = joined(ARMS, arm, own[place], shared[place])
            gram += np.outer(row, row)
            target += rewards[place] * row
        if number % 20 == 0 or number == 59:
            weights, inverse = np.linalg.solve(gram, target), np.linalg.inv(gram)
            for arms in (np.array([0, 3, 1, 1, 2]), np.full(5, 2)):
                owns, shareds = random.standard_normal((5, OWN)), random.standard_normal((5, SHARED))
                means, variances = model.predict(arms, owns, shareds)
                for place, arm in enumerate(arms.tolist()):
                    asked = joined(ARMS, arm, owns[place], shareds[place])
                    assert means[place] == pytest.approx(asked @ weights)
                    assert variances[place] == pytest.approx(asked @ inverse @ asked)


def test_rows_of_one_arm_with_crossed_inputs_have_the_same_means_and_variances() -> None:
    random = np.random.default_rng(1)
    columns, context = 6, 4
    model = HybridRidge(ARMS, OWN, columns + OWN * context, RIDGE)
    for _ in range(40):
        own, shared = random.standard_normal((2, OWN)), random.standard_normal((2, columns + OWN * context))
        model.observe(int(random.integers(ARMS)), own, shared, random.random(2))
    owns, at, asked = random.standard_normal((5, OWN)), np.array([3, 0, 5, 3, 1]), random.standard_normal(context)
    rows = np.array([[*np.eye(columns)[at[n]], *np.outer(owns[n], asked).ravel()] for n in range(5)])
    means, variances = model.predict_crossed(2, owns, at, asked)
    expected = model.predict(np.full(5, 2), owns, rows)
    assert means == pytest.approx(expected[0])
    assert variances == pytest.approx(expected[1])


@pytest.mark.parametrize("split", ["user", "item"])
def test_the_player_ranks_by_the_upper_bound(split: Literal["user", "item"]) -> None:
    items, users, decay = catalogue(), 4, 0.8
    player = HybridLinUCB(items, users=users, seed=0, split=split, regularization=2.0, exploration=0.5, decay=decay)
    described = item_inputs(items)

    def row(request: ShopRequest, item: int) -> Matrix:
        context = context_inputs(request)
        shared = np.concatenate([np.eye(12)[item], np.outer(described[item], context).ravel()])
        if split == "user":
            return joined(users, request.user, described[item], shared)
        return joined(12, item, context, shared)

    made = feedback(80)
    shown = [replace(each, request=made[number // 5 * 5].request) for number, each in enumerate(made)]  # slates of five
    size = len(row(shown[0].request, 0))
    gram, target = 2.0 * np.eye(size), np.zeros(size)
    for each in shown:
        inputs = decay**each.position * row(each.request, each.item)
        gram += np.outer(inputs, inputs)
        target += each.reward * inputs
    for start in range(0, 80, 10):  # two slates at once, as they may arrive
        player.learn(shown[start : start + 10])
    weights, inverse = np.linalg.solve(gram, target), np.linalg.inv(gram)
    asked, eligible = ShopRequest(99, 2, "tv", 21), np.array([0, 2, 3, 5, 6, 7, 9, 11])
    rows = [row(asked, item) for item in eligible.tolist()]
    bounds = [float(each @ weights + 0.5 * np.sqrt(each @ inverse @ each)) for each in rows]
    assert player.recommend(asked, eligible, 5).tolist() == eligible[np.argsort(bounds)[::-1][:5]].tolist()


def test_hidden_metadata_leaves_a_constant() -> None:
    assert item_inputs(catalogue(features=False)).tolist() == [[1.0]] * 12
    assert context_inputs(ShopRequest(0, 0, "tv", 23)).tolist() == [1, 0, 0, 1, 0, 0, 0, 0, 0, 1]
