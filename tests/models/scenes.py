"""A fixed scene of users and requests, the parts of the default learner, and conversions to numpy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from metaban.models.default.learner import PosteriorLearner
from metaban.models.learner import Query, UserBatch
from tests.models.default_worlds import (
    WIDE,
    Scene,
    epoch_with_kinds,
    generator_of,
    kinds,
    random_history,
    with_common_part,
    with_known_arms,
)
from tests.models.worlds import rounded_to_float32

#: All parts on, and each part off.
PARTS = pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kinds": False},
        {"memory": False},
        {"heads": False},
        {"trunk": False},
        {"arms": False},
        {"bins": 0},
        {"products_max": 0},
        WIDE,
        {"apart": False, **WIDE},
    ],
    ids=lambda changes: next(iter(changes), "all"),
)


def batch_in_numpy(batch: UserBatch) -> UserBatch:
    return UserBatch(**{each.name: getattr(batch, each.name).numpy() for each in fields(batch)})


def query_in_numpy(query: Query, own: Mapping[str, Any]) -> Query:
    return replace(
        query,
        arms=query.arms.numpy(),
        own=own,
        own_row=query.own_row.numpy(),
        own_events=query.own_events.numpy(),
        arm_keys=None if query.arm_keys is None else query.arm_keys.numpy(),
    )


#: Arms with ids, of which every second is known.
CATALOGUE = 6


def scene_of(learner: PosteriorLearner, *, users: int = 6, known: bool = True) -> Scene:
    """A fixed scene: users of two kinds; requests of 4, 1, 5 and 3 arms by pool users, a user outside and a new user.

    Unless the users are `known`, the epoch is the first, without groups. Some arms have no id, some are new.
    """
    generator = generator_of(5)
    shared = learner.initial_shared()
    if known:
        shared = epoch_with_kinds(learner, kinds(learner, 8, 6, generator), since=2.0)
    shared = with_common_part(learner, shared, generator)
    if known and learner.settings.arms:
        shared = with_known_arms(shared, generator, CATALOGUE)
    pool = kinds(learner, users, 5, generator, catalogue=CATALOGUE)
    guest, stranger = (random_history(learner, samples, generator, catalogue=CATALOGUE) for samples in (3, 0))
    askers = [(pool[1], 1) if pool else (guest, -1), (guest, -1), (pool[-1], users - 1) if pool else (guest, -1)]
    requests, arm_keys = [], []
    for (asker, row), arms in zip([*askers, (stranger, -1)], (4, 1, 5, 3), strict=True):
        shelf = rounded_to_float32(torch.randn(arms, learner.input_size, generator=generator, dtype=torch.float64))
        if asker.features.shape[0]:
            shelf[0] = asker.features[-1]  # an arm in the memory
        requests.append((asker, row, shelf))
        arm_keys.append(torch.randperm(3 + CATALOGUE, generator=generator)[:arms])
    return Scene(learner.settings, learner.input_size, shared, pool, requests, arm_keys)
