"""Learners by name."""

from __future__ import annotations

import torch

from models.learner import Learner
from models.metaban import PaperLearner
from models.pooled import PooledLearner
from models.posterior import PosteriorLearner
from models.settings import LearnerSettings, MetaBanSettings, PosteriorSettings


def build_learner(settings: LearnerSettings, inputs: int, dtype: torch.dtype = torch.float32) -> Learner:
    """The learner that the settings name, for a number of inputs."""
    if isinstance(settings, PosteriorSettings):
        return PosteriorLearner(settings, inputs, dtype)
    if not isinstance(settings, MetaBanSettings):
        raise TypeError(f"there is no learner for {type(settings).__name__}")
    return (PooledLearner if settings.preset == "pooled" else PaperLearner)(settings, inputs, dtype)
