"""NeuralUCB: gradients against finite differences, the bonus against whole gradients, steps against Adam's paper."""

from __future__ import annotations

import numpy as np
import pytest

from metaban.bench.baselines import neuralucb
from metaban.bench.baselines.neuralucb import (
    EPSILON,
    FIRST_ROOM,
    LEARNING_RATE,
    NEW_IN_MEAN,
    NEW_IN_SQUARE,
    WIDTH,
    Nets,
    NeuralUCB,
    SampleLog,
)
from tests.bench.baselines.linear_worlds import DIMENSION, USERS, LinearWorld, Matrix

SIZE, HIDDEN = 4, 6


def nets_off_start(count: int = 2) -> Nets:
    """Nets whose parameters are no longer symmetric."""
    nets = Nets(count, SIZE, HIDDEN, np.random.default_rng(1), np.float64)
    nets.parameters += 0.1 * np.random.default_rng(2).standard_normal(nets.parameters.shape)
    return nets


def literal_value(parameters: Matrix, x: Matrix, width: int) -> float:
    """f(x; θ), unit by unit."""
    size = len(x)
    return sum(
        parameters[width * size + unit] * max(0.0, float(parameters[unit * size : (unit + 1) * size] @ x))
        for unit in range(width)
    )


def numeric_gradient(function: object, parameters: Matrix, step: float = 1e-6) -> Matrix:
    """Central differences."""
    assert callable(function)
    gradient = np.zeros_like(parameters)
    for place in range(len(parameters)):
        moved = parameters.copy()
        moved[place] += step
        above = function(moved)
        moved[place] -= 2 * step
        gradient[place] = (above - function(moved)) / (2 * step)
    return gradient


def test_gradients_equal_finite_differences() -> None:
    nets, x = nets_off_start(), np.random.default_rng(3).standard_normal((5, SIZE))
    values, by_last, by_first = nets.gradients(1, x)
    for row in range(5):
        theta = nets.parameters[1]
        assert values[row] == pytest.approx(literal_value(theta, x[row], HIDDEN))
        whole = np.concatenate([np.outer(by_first[row], x[row]).ravel(), by_last[row]])
        expected = numeric_gradient(lambda moved, row=row: literal_value(moved, x[row], HIDDEN), theta)
        assert whole == pytest.approx(expected, abs=1e-7)


def test_loss_gradient_equals_finite_differences() -> None:
    nets, random = nets_off_start(), np.random.default_rng(4)
    x, rewards = random.standard_normal((7, SIZE)), random.random(7)

    def loss(theta: Matrix) -> float:
        return sum((literal_value(theta, x[row], HIDDEN) - rewards[row]) ** 2 / 2 for row in range(7)) / 7

    assert nets.loss_gradient(0, x, rewards) == pytest.approx(numeric_gradient(loss, nets.parameters[0]), abs=1e-7)


def test_steps_follow_adam_and_change_one_net() -> None:
    nets, random, pull = nets_off_start(), np.random.default_rng(5), 0.2
    start = Nets(2, SIZE, HIDDEN, np.random.default_rng(1), np.float64).parameters[0]
    theta, other = nets.parameters[0].copy(), nets.parameters[1].copy()
    mean, square = np.zeros_like(theta), np.zeros_like(theta)
    for taken in range(1, 6):
        x, rewards = random.standard_normal((3, SIZE)), random.random(3)
        gradient = nets.loss_gradient(0, x, rewards) + pull * (theta - start)
        mean = (1 - NEW_IN_MEAN) * mean + NEW_IN_MEAN * gradient
        square = (1 - NEW_IN_SQUARE) * square + NEW_IN_SQUARE * gradient**2
        unbiased = mean / (1 - (1 - NEW_IN_MEAN) ** taken), square / (1 - (1 - NEW_IN_SQUARE) ** taken)
        theta = theta - LEARNING_RATE * unbiased[0] / (np.sqrt(unbiased[1]) + EPSILON)
        nets.step(0, x, rewards, pull)
        assert nets.parameters[0] == pytest.approx(theta, abs=1e-6)
    assert np.array_equal(nets.parameters[1], other)


def test_a_new_net_predicts_zero() -> None:
    nets = Nets(1, SIZE, HIDDEN, np.random.default_rng(6))
    assert nets.gradients(0, np.ones((1, SIZE), dtype=np.float32))[0] == pytest.approx([0.0], abs=1e-6)
    assert nets.parameters.dtype == np.float32


@pytest.mark.parametrize("shared", [True, False])
def test_bonus_uses_the_whole_gradient(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Z is summed as a vector over all parameters, from the concatenated gradients in W and v."""
    monkeypatch.setattr(neuralucb, "STEPS", 1)
    model = NeuralUCB(users=USERS, dimension=DIMENSION, regularization=0.3, exploration=0.5, seed=1, shared=shared)
    world = LinearWorld(seed=7)
    diagonals = np.full((1 if shared else USERS, WIDTH * (DIMENSION + 2)), 0.3)

    def gradients(net: int, arms: Matrix) -> tuple[Matrix, Matrix]:
        moments = model._standardizer
        inputs = np.column_stack([(arms - moments.mean) / moments.deviation, np.ones(len(arms))]).astype(np.float32)
        values, by_last, by_first = model.nets.gradients(net, inputs)
        by_weights = (by_first[:, :, None] * inputs[:, None, :]).reshape(len(arms), -1)
        return values.astype(np.float64), np.concatenate([by_weights, by_last], axis=1).astype(np.float64)

    for _ in range(30):
        user, arms, worth = world.next_round()
        net = 0 if shared else user
        choice = model.choose(user, arms)
        values, whole = gradients(net, arms)
        expected = values + 0.5 * np.sqrt((whole**2 / diagonals[net]).sum(1) / WIDTH)
        assert model.bounds(net, arms) == pytest.approx(expected, rel=1e-4)
        diagonals[net] += whole[choice] ** 2 / WIDTH
        model.learn(user, arms[choice], world.reward(worth[choice]))


def test_the_log_keeps_all_samples_and_draws_from_all() -> None:
    log, random = SampleLog(2), np.random.default_rng(8)
    total = 3 * FIRST_ROOM + 1
    for number in range(total):
        log.append(np.full(2, number, dtype=np.float32), float(number))
    inputs, rewards = log.draw(total, random)
    assert rewards.tolist() == list(range(total))
    assert np.array_equal(inputs[:, 1], rewards)
    drawn = {float(reward) for _ in range(40) for reward in log.draw(64, random)[1]}
    assert len(drawn) > 0.95 * total


def test_wide_inputs_train_with_fewer_steps() -> None:
    narrow = NeuralUCB(users=2, dimension=4)
    wide = NeuralUCB(users=2, dimension=300)
    assert narrow._steps == neuralucb.STEPS > wide._steps == neuralucb.STEPS_OF_LARGE
