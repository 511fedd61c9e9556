"""Builds the learner that settings name."""

from __future__ import annotations

import math

import torch

from metaban.models.default.learner import PosteriorLearner
from metaban.models.learner import Learner
from metaban.models.metaban.paper import PaperLearner
from metaban.models.metaban.pooled import PooledLearner
from metaban.models.settings import LearnerSettings, MetaBanSettings, PosteriorSettings


def build_learner(
    settings: LearnerSettings, inputs: int, dtype: torch.dtype = torch.float32, *, arm_inputs: int | None = None
) -> Learner:
    """The learner for these settings and this number of inputs; ValueError when it would be too large.

    The first `arm_inputs` of them describe the arm alone; None means all. No tensors are allocated.
    """
    learner = _made(settings, inputs, inputs if arm_inputs is None else arm_inputs, dtype)
    user = sum(math.prod(shape) for shape in learner.fields.values())
    settings.check_size(inputs, network=learner.network_size, user=user)
    return learner


def _made(settings: LearnerSettings, inputs: int, arm_inputs: int, dtype: torch.dtype) -> Learner:
    if isinstance(settings, PosteriorSettings):
        return PosteriorLearner(settings, inputs, dtype, arm_inputs=arm_inputs)
    if not isinstance(settings, MetaBanSettings):
        raise TypeError(f"there is no learner for {type(settings).__name__}")
    return (PooledLearner if settings.preset == "pooled" else PaperLearner)(settings, inputs, dtype)
