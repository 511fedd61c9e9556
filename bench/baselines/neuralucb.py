"""NeuralUCB: Zhou, Li and Gu, Neural contextual bandits with UCB-based exploration, ICML 2020.

An arm's bound under a net f with m hidden units is

    f(x; θ) + α·√(g(x; θ)ᵀ Z⁻¹ g(x; θ)/m),        Z = λI + Σ g gᵀ/m over the arms played,

where g is the gradient in θ; only the diagonal of Z is kept, as usual. f(x; θ) = vᵀ·max(Wx, 0) has one hidden layer. θ
minimises Σ(f(x) − r)²/2 + mλ/2·‖θ − θ₀‖² over all samples so far: a few steps of Adam (Kingma and Ba, ICLR 2015) on
replayed minibatches after every event. ONE is a single net for all users, IND one net a user. Inputs are standardised
by the moments of all arms seen, and get a constant 1 for the hidden biases.
"""

from __future__ import annotations

from typing import Any, Final, final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from metaban.bench.baselines.base import Baseline, Matrix, best_row
from metaban.bench.baselines.standardizer import Standardizer

#: Numbers in the precision of the nets, single by default.
Singles = NDArray[np.floating[Any]]

#: Hidden units, m.
WIDTH: Final = 100

#: Samples in a replayed minibatch.
BATCH: Final = 64

#: Minibatches after each event; fewer for a net of many parameters, whose steps are slow.
STEPS: Final = 8
STEPS_OF_LARGE: Final = 3
LARGE_PARAMETERS: Final = 20_000

#: Initial capacity of a net's log; it doubles when full.
FIRST_ROOM: Final = 64

#: Adam: the step size, the share of a new gradient in both moments, and the constant that bounds the division.
LEARNING_RATE: Final = 1e-3
NEW_IN_MEAN: Final = 0.1
NEW_IN_SQUARE: Final = 0.001
EPSILON: Final = 1e-8


@final
class NeuralUCB(Baseline):
    """Small nets with a gradient-based bonus, one for all users or one a user."""

    def __init__(
        self,
        *,
        users: int,
        dimension: int,
        regularization: float = 0.1,
        exploration: float = 0.01,
        standardize: bool = True,
        seed: int = 0,
        shared: bool = True,
    ) -> None:
        self._shared = shared
        self._regularization = regularization
        self._exploration = exploration
        self._random = np.random.default_rng(seed)
        self._standardizer = Standardizer(dimension, regularization, enabled=standardize)
        self._mean = np.zeros(dimension + 1, dtype=np.float32)  # [D]
        self._deviation = np.ones(dimension + 1, dtype=np.float32)  # [D]
        count = 1 if shared else users
        self.nets = Nets(count, dimension + 1, WIDTH, self._random)
        self._logs = [SampleLog(dimension + 1) for _ in range(count)]
        self._steps = STEPS if self.nets.parameters.shape[1] < LARGE_PARAMETERS else STEPS_OF_LARGE
        # The diagonal of Z for W and for v.
        self._first_z = np.full((count, WIDTH, dimension + 1), regularization, dtype=np.float32)  # [n, m, D]
        self._last_z = np.full((count, WIDTH), regularization, dtype=np.float32)  # [n, m]

    def choose(self, user: int, arms: Matrix) -> int:
        """The row of arms [k, d] with the highest f + α·√(gᵀZ⁻¹g/m)."""
        if self._standardizer.observe(arms):
            self._mean[:-1] = self._standardizer.mean
            self._deviation[:-1] = self._standardizer.deviation
        return best_row(self.bounds(0 if self._shared else user, arms), self._random)

    def bounds(self, net: int, arms: Matrix) -> Matrix:
        """f + α·√(gᵀZ⁻¹g/m) of arms [k, d] under one net, [k]."""
        inputs = np.ones((len(arms), arms.shape[1] + 1), dtype=np.float32)  # [k, D]
        inputs[:, :-1] = arms
        inputs = self._standard(inputs)
        values, by_last, by_first = self.nets.gradients(net, inputs)  # [k], [k, m], [k, m]
        squares = ((np.square(by_first) @ (1.0 / self._first_z[net])) * np.square(inputs)).sum(1)  # [k]
        squares += np.square(by_last) @ (1.0 / self._last_z[net])
        bounds: Matrix = (values + self._exploration * np.sqrt(squares / WIDTH)).astype(np.float64)
        return bounds

    def learn(self, user: int, arm: Matrix, reward: float) -> None:
        """Add the played arm [d] to Z and to the log, and train."""
        net = 0 if self._shared else user
        raw = np.append(arm, 1.0).astype(np.float32)  # [D]
        inputs = self._standard(raw)[None]  # [1, D]
        _, by_last, by_first = self.nets.gradients(net, inputs)
        self._first_z[net] += np.square(by_first[0])[:, None] * (np.square(inputs[0]) / np.float32(WIDTH))
        self._last_z[net] += np.square(by_last[0]) / np.float32(WIDTH)
        log = self._logs[net]
        log.append(raw, reward)
        # The loss is a mean over samples, so the pull towards θ₀ is divided by their number.
        pull = self._regularization * WIDTH / log.count
        for _ in range(self._steps):
            batch, rewards = log.draw(BATCH, self._random)
            self.nets.step(net, self._standard(batch), rewards, pull)

    def _standard(self, inputs: Singles) -> Singles:
        standard: Singles = (inputs - self._mean) / self._deviation
        return standard


@final
class Nets:
    """Nets with one hidden layer, one row of parameters each: W [m, D] first, then v [m]. Gradients are written out.

    Initially the second half of the units repeats the first with the opposite sign, so f(x; θ₀) is 0 for every x.
    """

    def __init__(
        self, count: int, size: int, width: int, random: np.random.Generator, dtype: DTypeLike = np.float32
    ) -> None:
        self._size, self._width = size, width
        first = random.standard_normal((count, width // 2, size)) * np.sqrt(2.0 / size)  # [n, m/2, D]
        last = random.standard_normal((count, width // 2)) * np.sqrt(1.0 / width)  # [n, m/2]
        flat = first.reshape(count, -1)
        self._start: Singles = np.concatenate([flat, flat, last, -last], axis=1).astype(dtype)  # [n, p], θ₀
        self.parameters = self._start.copy()  # [n, p]
        self._mean = np.zeros_like(self._start)  # [n, p]
        self._square = np.zeros_like(self._start)  # [n, p]
        self._steps = np.zeros(count, dtype=np.int64)  # [n]

    def layers(self, net: int) -> tuple[Singles, Singles]:
        """Views of W [m, D] and v [m]."""
        row = self.parameters[net]
        return row[: -self._width].reshape(self._width, self._size), row[-self._width :]

    def gradients(self, net: int, inputs: Singles) -> tuple[Singles, Singles, Singles]:
        """f [b] of inputs [b, D], its gradient by v [b, m], and c [b, m] such that the one by W is c_i·x_iᵀ."""
        first, last = self.layers(net)
        hidden = np.maximum(inputs @ first.T, 0)  # [b, m]
        values: Singles = hidden @ last  # [b]
        return values, hidden, (hidden > 0) * last

    def loss_gradient(self, net: int, inputs: Singles, rewards: Singles) -> Singles:
        """The gradient [p] of the mean of (f(x) − r)²/2 over inputs [b, D] and rewards [b]."""
        values, by_last, by_first = self.gradients(net, inputs)
        errors = (values - rewards) / len(inputs)  # [b]
        gradient: Singles = np.empty_like(self.parameters[net])  # [p]
        by_first *= errors[:, None]
        np.matmul(by_first.T, inputs, out=gradient[: -self._width].reshape(self._width, self._size))
        np.matmul(errors, by_last, out=gradient[-self._width :])
        return gradient

    def step(self, net: int, inputs: Singles, rewards: Singles, pull: float) -> None:
        """One step of Adam on that loss plus pull/2·‖θ − θ₀‖²."""
        parameters, mean, square = self.parameters[net], self._mean[net], self._square[net]  # [p] each
        gradient = self.loss_gradient(net, inputs, rewards)
        gradient += pull * (parameters - self._start[net])
        mean += NEW_IN_MEAN * (gradient - mean)
        gradient *= gradient
        gradient -= square
        gradient *= NEW_IN_SQUARE
        square += gradient
        self._steps[net] += 1
        taken = int(self._steps[net])
        unbiased = np.sqrt(1.0 - (1.0 - NEW_IN_SQUARE) ** taken) / (1.0 - (1.0 - NEW_IN_MEAN) ** taken)
        move = np.sqrt(square)
        move += EPSILON
        np.divide(mean, move, out=move)
        move *= float(LEARNING_RATE * unbiased)
        parameters -= move


@final
class SampleLog:
    """All samples of one net, in raw inputs."""

    def __init__(self, size: int) -> None:
        self.count = 0
        self._inputs = np.empty((FIRST_ROOM, size), dtype=np.float32)  # [room, D]
        self._rewards = np.empty(FIRST_ROOM, dtype=np.float32)  # [room]

    def append(self, inputs: Singles, reward: float) -> None:
        """Append one sample, inputs [D]."""
        if self.count == len(self._rewards):
            self._inputs = np.concatenate([self._inputs, np.empty_like(self._inputs)])
            self._rewards = np.concatenate([self._rewards, np.empty_like(self._rewards)])
        self._inputs[self.count], self._rewards[self.count] = inputs, reward
        self.count += 1

    def draw(self, batch: int, random: np.random.Generator) -> tuple[Singles, Singles]:
        """Inputs [b, D] and rewards [b]: samples drawn with replacement, or all while there are at most that many."""
        if self.count <= batch:
            return self._inputs[: self.count], self._rewards[: self.count]
        places = random.integers(self.count, size=batch)  # [b]
        return self._inputs[places], self._rewards[places]
