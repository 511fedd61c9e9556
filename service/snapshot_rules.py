"""What learners say of the records of a snapshot: which shapes they have, and whose records another one can use."""

from __future__ import annotations

from typing import Any, final

import numpy as np
import torch

from models.features import FeatureLayout
from models.learner import Learner
from models.presets import build_learner
from models.settings import stored_settings


@final
class LearnerRecords:
    """The rules for records of one learner."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._shared = {name: tuple(tensor.shape) for name, tensor in learner.initial_shared().items()}
        self._fields = {name: tuple(shape) for name, shape in learner.fields.items()}

    def check_epoch(self, tensors: dict[str, np.ndarray]) -> None:
        """Shared state has the names and shapes of the learner's, and is finite."""
        _check(tensors, self._shared)

    def check_state(self, tensors: dict[str, np.ndarray]) -> None:
        """A user's state has the learner's fields, and is finite."""
        _check(tensors, self._fields)

    def check_sample_size(self, inputs: int, notes: int) -> None:
        """A sample has the learner's inputs and notes."""
        expected = (self._learner.inputs_expected, self._learner.noted)
        if (inputs, notes) != expected:
            raise ValueError(f"a sample has {inputs} inputs and {notes} notes, not {expected[0]} and {expected[1]}")

    def epoch_due(self, epoch_events: int, total_events: int) -> bool:
        """Whether shared state derived at so many events is due again."""
        return self._learner.epoch_due(epoch_events, total_events)

    def renumber(self, tensors: dict[str, np.ndarray], number: int) -> dict[str, np.ndarray]:
        """Shared state as it is when it is published as epoch `number`."""
        shared = {name: torch.from_numpy(array.copy()) for name, array in tensors.items()}
        return {name: tensor.numpy() for name, tensor in self._learner.renumbered(shared, number).items()}


@final
class KnownLearners:
    """The learners of this version of metaban."""

    def records(self, learner: dict[str, Any], layout: dict[str, Any]) -> LearnerRecords:
        """The rules for records of a learner with these settings."""
        return LearnerRecords(build_learner(stored_settings(learner), FeatureLayout.from_json(layout).dimension))

    def difference(self, learner: dict[str, Any], other: dict[str, Any]) -> str:
        """Which settings give the one's records another meaning to the other."""
        ours, theirs = stored_settings(learner).structure(), stored_settings(other).structure()
        names = [name for name in ours if theirs.get(name) != ours[name]]
        return ", ".join(f"its {name} is {ours[name]!r}, the snapshot's {theirs.get(name)!r}" for name in names)


def _check(tensors: dict[str, np.ndarray], expected: dict[str, tuple[int, ...]]) -> None:
    found = {name: array.shape for name, array in tensors.items()}
    if found != expected:
        wrong = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
        raise ValueError(f"{', '.join(wrong)} have the wrong shape, or are missing or unknown")
    for name, array in tensors.items():
        if not np.isfinite(array).all():
            raise ValueError(f"{name} is not finite")
