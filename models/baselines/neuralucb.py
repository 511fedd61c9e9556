"""NeuralUCB: Zhou, Li and Gu, Neural contextual bandits with UCB-based exploration, ICML 2020.

An arm's bound under a net f with m hidden units is

    f(x; θ) + α·√(g(x; θ)ᵀ Z⁻¹ g(x; θ)/m),        Z = λI + Σ g gᵀ/m over the arms played,

where g is the gradient by θ; of Z only the diagonal is kept, as is usual. θ minimises Σ(f(x) − r)²/2 + mλ/2·‖θ − θ₀‖²
over all samples so far: after every event a few steps of Adam on replayed minibatches. ONE is a single net for
everybody, IND one net a user. Inputs are standardised by the moments of all arms seen, and get a constant 1 for the
hidden biases.
"""

from __future__ import annotations

from typing import Final, final

import numpy as np

from models.baselines.base import Baseline, Matrix, best_row
from models.baselines.nets import Nets, Singles
from models.baselines.standardizer import Standardizer

#: Hidden units, m.
WIDTH: Final = 100
#: Samples in a replayed minibatch.
BATCH: Final = 64
#: Minibatches after each event; fewer for a net of many parameters, whose steps are dear.
STEPS: Final = 8
STEPS_OF_LARGE: Final = 3
LARGE_PARAMETERS: Final = 20_000
#: Samples a net's log has room for at first; it doubles when full.
FIRST_ROOM: Final = 64


@final
class SampleLog:
    """All samples of one net, in raw inputs."""

    def __init__(self, size: int) -> None:
        self.count = 0
        self._inputs = np.empty((FIRST_ROOM, size), dtype=np.float32)  # [room, D]
        self._rewards = np.empty(FIRST_ROOM, dtype=np.float32)  # [room]

    def append(self, inputs: Singles, reward: float) -> None:
        """One sample more, inputs [D]."""
        if self.count == len(self._rewards):
            self._inputs = np.concatenate([self._inputs, np.empty_like(self._inputs)])
            self._rewards = np.concatenate([self._rewards, np.empty_like(self._rewards)])
        self._inputs[self.count], self._rewards[self.count] = inputs, reward
        self.count += 1

    def draw(self, batch: int, random: np.random.Generator) -> tuple[Singles, Singles]:
        """Inputs [b, D] and rewards [b]: samples drawn with replacement, or all while there are no more than asked."""
        if self.count <= batch:
            return self._inputs[: self.count], self._rewards[: self.count]
        places = random.integers(self.count, size=batch)  # [b]
        return self._inputs[places], self._rewards[places]


@final
class NeuralUCB(Baseline):
    """Small nets with a gradient-based bonus, one for everybody or one a user."""

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
        # The diagonal of Z, by W and by v.
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
