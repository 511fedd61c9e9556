"""Learners by name."""

from __future__ import annotations

import math

import torch

from models.learner import Learner
from models.metaban import PaperLearner
from models.pooled import PooledLearner
from models.posterior import PosteriorLearner
from models.settings import LearnerSettings, MetaBanSettings, PosteriorSettings


def build_learner(settings: LearnerSettings, inputs: int, dtype: torch.dtype = torch.float32) -> Learner:
    """The learner that the settings name, for a number of inputs; ValueError when it would be too large.

    It has no tensors yet, so that to ask whether there can be one takes no time and no memory.
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
