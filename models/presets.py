"""Learners by name."""

from __future__ import annotations

import torch

from models.learner import Learner
from models.metaban import PaperLearner
from models.pooled import PooledLearner
from models.settings import MetaBanSettings


def build_learner(settings: MetaBanSettings, inputs: int, dtype: torch.dtype = torch.float32) -> Learner:
    """The learner that the settings name, for a number of inputs."""
    learners: dict[str, type[PaperLearner] | type[PooledLearner]] = {
        "paper": PaperLearner,
        "pooled": PooledLearner,
    }
    return learners[settings.preset](settings, inputs, dtype)
