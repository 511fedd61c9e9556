"""Small served models, and states and requests for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from metaban.models.policies import Slate
from metaban.models.presets import build_learner
from metaban.models.settings import LearnerSettings
from metaban.service.engine.model.served_model import ServedModel
from metaban.service.engine.model.types import ArmScores, ScoreRequest
from metaban.store.users.records import UserState
from metaban.worker.learning.trainer import FitInput, Trainer
from tests.worker.workshop import CPU, INPUTS, features, make_sample, small_default

#: Nearly all users are in each other's groups.
WIDE = {"nu": 50.0}


def make_model(*, pool: int = 10, guests: int = 10, settings: LearnerSettings | None = None) -> ServedModel:
    return ServedModel(build_learner(settings or small_default(**WIDE), INPUTS), CPU, pool_max=pool, guests_max=guests)


def state(model: ServedModel, user: str, version: int = 1, *, epoch: int = 0, incarnation: int = 0) -> UserState:
    """The state of a user after `version` events."""
    trainer = Trainer(model.learner, CPU)
    seed = 7 * sum(user.encode()) + 1_000 * incarnation
    noted = np.zeros(model.learner.noted, dtype=np.float32)
    samples = [replace(make_sample(seed + number), phi=noted) for number in range(version)]
    [tensors] = trainer.fit(model.learner.initial_shared(), [FitInput(user, version, samples, None)]).states
    return UserState(user, incarnation, version, epoch, tensors)


def ask(user: str, arms: int = 3, seed: int = 0) -> ScoreRequest:
    return ScoreRequest(user, np.stack([features(1_000 + 10 * seed + arm) for arm in range(arms)]))


def everything(scores: ArmScores) -> Slate:
    """A draw of all arms, in order."""
    return Slate(tuple(range(len(scores.mean))), (1.0,) * len(scores.mean))


def group_sizes(model: ServedModel, request: ScoreRequest) -> list[int]:
    """The group size of each arm of a request."""
    return model.choose_one(request, everything).group_sizes


def adopt(model: ServedModel, number: int, members: Sequence[str] = (), **changes: np.ndarray) -> None:
    tensors = {name: tensor.numpy() for name, tensor in model.learner.initial_shared().items()}
    model.adopt_epoch(number, 0, {**tensors, **changes}, members)


def put_each(model: ServedModel, states: Iterable[UserState]) -> None:
    """Put the states one by one."""
    for each in states:
        model.put([each])


def versions(model: ServedModel) -> dict[str, int]:
    held = {user: model.holds(user) for user in model.users()}
    return {user: standing.version for user, standing in held.items() if standing is not None}
