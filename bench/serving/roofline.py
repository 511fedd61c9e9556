"""Time of a decision of the default learner against the lower bound of this machine.

The minimal work of a decision is counted from shapes: every operation of the formulas once, every number read or
written once, intermediate results in the cache. Divided by the machine's measured speeds it is a lower bound on the
time of any program with these formulas:

    bound = max(bytes / bandwidth, single-precision flops / their peak + double-precision flops / theirs)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final, final

import torch

from metaban.models.default.learner import PosteriorLearner
from metaban.models.learner import Learner

#: Bytes of the copied tensor, far more than caches hold.
COPIED_BYTES: Final = 1 << 29

#: Rows and columns of the multiplied matrices.
MULTIPLIED_SIZE: Final = 1_024

#: Repeats; the fastest counts.
REPEATS: Final = 7

#: Aim for a batch of 64, as a share of the bound.
AIM: Final = 0.40

SINGLE, DOUBLE = 4, 8  #: bytes per number


@final
@dataclass(frozen=True, slots=True)
class Machine:
    """Measured speeds of one thread."""

    bytes_per_s: float
    single_flops_per_s: float
    double_flops_per_s: float


@final
@dataclass(frozen=True, slots=True)
class Part:
    """A part of a decision: flops in single and double precision, and bytes to move."""

    name: str
    single: float
    double: float
    bytes: float

    def bound_s(self, machine: Machine) -> float:
        """Lower bound of its time."""
        computing = self.single / machine.single_flops_per_s + self.double / machine.double_flops_per_s
        return max(self.bytes / machine.bytes_per_s, computing)


def measure_machine(copied_bytes: int = COPIED_BYTES) -> Machine:
    """Copy a large tensor (read and write) and multiply square matrices."""
    source = torch.ones(copied_bytes // SINGLE)
    target = torch.empty_like(source)
    copying = _best(lambda: target.copy_(source))
    flops, size = {}, MULTIPLIED_SIZE
    for dtype in (torch.float32, torch.float64):
        a, b = torch.rand(size, size, dtype=dtype), torch.rand(size, size, dtype=dtype)
        flops[dtype] = 2 * size**3 / _best(partial(torch.mm, a, b, out=torch.empty_like(a)))
    return Machine(2 * source.nbytes / copying, flops[torch.float32], flops[torch.float64])


def _best(work: Callable[[], object]) -> float:
    work()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def decision_parts(learner: PosteriorLearner, *, requests: int, arms: int, pool: int) -> list[Part]:
    """Minimal work of scoring `requests` requests of `arms` arms each, one of them chosen, against a pool."""
    total, size, seen = requests * arms, learner.head_size, learner.inputs.seen
    inputs, codes = learner.input_size, learner.input_size * learner.inputs.bins
    kept = learner.settings.memory_samples
    weights = learner.trunk.members * sum(rows * columns for rows, columns in learner.trunk.sizes)
    narrowing = inputs * seen if learner.inputs.narrowed else 0
    arms_in_out = SINGLE * total * (inputs + 2 + learner.noted) + DOUBLE * total
    return [
        # Standardise: 2 per input. Codes: difference, quotient and two bounds each. Layers: multiply and add.
        Part(
            "trunk",
            total * (2 * inputs + 4 * codes + 2 * weights),
            0,
            SINGLE * (learner.trunk.parameters + 2 * inputs + (codes + inputs if codes else 0)) + arms_in_out,
        ),
        # The mean by the head, 2D, and the variance, 2D² + 2D; heads and covariance are computed in advance.
        Part(
            "heads",
            total * (2 * narrowing + learner.inputs.products + 2 * size * size + 4 * size),
            0,
            SINGLE * (narrowing + requests * (size * size + size)),
        ),
        # Every pool user's prediction of each chosen arm, its distance, and the comparison with the tolerance.
        Part("agreement", requests * pool * (2 * size + 3), 0, SINGLE * pool * size),
        # Squared distances to the kept samples, a kernel of each, summed twice.
        Part("memory", total * kept * (3 * seen + 6), 0, SINGLE * requests * kept * (seen + 2)),
    ]


def bound_of(parts: Sequence[Part], machine: Machine) -> float:
    """Lower bound in seconds of all parts together; reading overlaps with computing."""
    return Part(
        "all", sum(part.single for part in parts), sum(part.double for part in parts), sum(part.bytes for part in parts)
    ).bound_s(machine)


def roofline_row(
    learner: PosteriorLearner, machine: Machine, took_s: float, *, requests: int, arms: int, pool: int
) -> dict[str, Any]:
    """A measured scoring call and its bound."""
    parts = decision_parts(learner, requests=requests, arms=arms, pool=pool)
    bound = bound_of(parts, machine)
    return {
        "requests": requests,
        "bytes": sum(part.bytes for part in parts),
        "flops": sum(part.single + part.double for part in parts),
        "bound_ms": bound * 1_000,
        "took_ms": took_s * 1_000,
        "share": bound / took_s,
        "parts": [{**asdict(part), "bound_ms": part.bound_s(machine) * 1_000} for part in parts],
    }


def bytes_a_user(learner: Learner) -> int:
    """Bytes of one user's tensors."""
    return sum(math.prod(shape) for shape in learner.fields.values()) * learner.dtype.itemsize
