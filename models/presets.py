"""Builds the learner that settings name."""

from __future__ import annotations

import math

import torch

from metaban.models.default.learner import PosteriorLearner
from metaban.models.features import InputParts
from metaban.models.learner import Learner
from metaban.models.metaban.paper import PaperLearner
from metaban.models.metaban.pooled import PooledLearner
from metaban.models.settings import LearnerSettings, MetaBanSettings, PosteriorSettings


def build_learner(settings: LearnerSettings, inputs: int | InputParts, dtype: torch.dtype = torch.float32) -> Learner:
    """The learner for these settings and inputs; ValueError when it would be too large. No tensors are allocated."""
    parts = InputParts.of(inputs)
    learner = _made(settings, parts, dtype)
    user = sum(math.prod(shape) for shape in learner.fields.values())
    settings.check_size(parts.count, network=learner.network_size, user=user)
    return learner


def _made(settings: LearnerSettings, parts: InputParts, dtype: torch.dtype) -> Learner:
    if isinstance(settings, PosteriorSettings):
        return PosteriorLearner(settings, parts, dtype)
    if not isinstance(settings, MetaBanSettings):
        raise TypeError(f"there is no learner for {type(settings).__name__}")
    return (PooledLearner if settings.preset == "pooled" else PaperLearner)(settings, parts.count, dtype)
