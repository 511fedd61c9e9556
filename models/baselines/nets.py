"""ReLU nets with one hidden layer, side by side: f(x; θ) = vᵀ·max(Wx, 0), gradients written out, trained by Adam.

Kingma and Ba, Adam: a method for stochastic optimization, ICLR 2015.
"""

from __future__ import annotations

from typing import Any, Final, final

import numpy as np
from numpy.typing import DTypeLike, NDArray

#: Numbers of the nets' precision, single unless asked otherwise.
Singles = NDArray[np.floating[Any]]

#: Adam: the step size, the share of a new gradient in both moments, and what keeps a division from exploding.
LEARNING_RATE: Final = 1e-3
NEW_IN_MEAN: Final = 0.1
NEW_IN_SQUARE: Final = 0.001
EPSILON: Final = 1e-8


@final
class Nets:
    """One row of parameters a net: W [m, D] first, then v [m].

    At the start, the second half of the units repeats the first with the opposite sign, so that f(x; θ₀) is 0 for
    every x and what a net says is what it was taught.
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
