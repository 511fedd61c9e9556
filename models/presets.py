"""Builds the learner that settings name."""

from __future__ import annotations

import math

import torch

from metaban.models.default.learner import PosteriorLearner
from metaban.models.learner import Learner
from metaban.models.metaban.paper import PaperLearner
from metaban.models.metaban.pooled import PooledLearner
from metaban.models.settings import LearnerSettings, MetaBanSettings, PosteriorSettings


def build_learner(settings: LearnerSettings, inputs: int, dtype: torch.dtype = torch.float32) -> Learner:
    """The learner for these settings and this number of inputs; ValueError when it would be too large.

    No tensors are allocated.
    """
    learner = _made(settings, inputs, dtype)
    user = sum(math.prod(shape) for shape in learner.fields.values())
    settings.check_size(inputs, network=learner.network_size, user=user)
    return learner


def _made(settings: LearnerSettings, inputs: int, dtype: torch.dtype) -> Learner:
    if isinstance(settings, PosteriorSettings):
        return PosteriorLearner(settings, inputs, dtype)
    if not isinstance(settings, MetaBanSettings):
        raise TypeError(f"there is no learner for {type(settings).__name__}")
    return (PooledLearner if settings.preset == "pooled" else PaperLearner)(settings, inputs, dtype)
