"""Changes of tastes: do recent rewards fall short of what was predicted when they were decided?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self, final

import torch
from torch import Tensor

from metaban.models.default.samples import Samples

#: Drift is tested on the latest epochs, with at least so many samples there and before.
DRIFT_EPOCHS: Final = 2
DRIFT_SAMPLES: Final = 128

#: Rewards have to fall short of predictions by so many standard errors more than before.
DRIFT_ERRORS: Final = 6.0


def drift_detected(samples: Samples, epoch: Tensor, since: Tensor) -> Tensor:
    """Whether recent rewards fall short of predictions more than earlier ones did, and so far that the mean of the
    recent rewards would have predicted them better [] bool.

    A drift discards what was learned, so what was learned has to be worse than nothing: with many samples, chosen arms
    fall short significantly after any change of the learner, because the most overestimated ones are chosen.
    """
    short = (samples.notes.mean - samples.rewards).to(torch.float64)  # [n]
    real = samples.weights > 0
    late = real & (samples.epochs > epoch - DRIFT_EPOCHS)
    early = real & ~late & (samples.epochs >= since)
    now, before = _Mean.of(short, late), _Mean.of(short, early)
    error = (now.variance / now.count + before.variance / before.count).sqrt()
    enough = (now.count >= DRIFT_SAMPLES) & (before.count >= DRIFT_SAMPLES)
    # Early rewards exceed the predictions of an untrained learner; that difference is no drift.
    fell = now.mean - before.mean.clamp_min(0) > DRIFT_ERRORS * error
    worse = now.variance + now.mean.square() > _Mean.of(samples.rewards.to(torch.float64), late).variance
    return enough & fell & worse


@final
@dataclass(frozen=True, slots=True)
class _Mean:
    count: Tensor
    mean: Tensor
    variance: Tensor

    @classmethod
    def of(cls, values: Tensor, chosen: Tensor) -> Self:
        count = chosen.sum().clamp_min(1)
        mean = (values * chosen).sum() / count
        return cls(count, mean, ((values - mean).square() * chosen).sum() / count)
