"""Admin: the group of users who agree with a user on an arm."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import final

import numpy as np

from metaban.models.features import FeatureError, assemble
from metaban.models.learner import arm_key
from metaban.service.engine.commands import GroupQuery, GroupView
from metaban.service.engine.model.lifecycle import ModelHost
from metaban.service.engine.model.types import ScoreRequest, UserStart
from metaban.service.engine.store_guard import StoreAccess, StoreGuard
from metaban.service.errors import InvalidInput, NotFound
from metaban.store.users.users import UserStore


@final
class GroupAdmin:
    """Shows groups of one namespace; from memory alone while the store is unavailable."""

    def __init__(self, guard: StoreGuard, users: UserStore, host: ModelHost) -> None:
        self._guard = guard
        self._users = users
        self._host = host

    @property
    def needs_context(self) -> bool:
        """Whether requests of this namespace have a context."""
        serving = self._host.serving
        return serving is not None and serving.layout.context > 0

    async def inspect(self, query: GroupQuery) -> GroupView:
        """The group of a user on one arm. A user without rewards is scored from the prior or their warm start."""
        serving = self._host.serving
        if serving is None:
            raise NotFound("Nothing is served here yet: the first POST /recommend fixes the features of arms.")
        try:
            inputs = assemble(serving.layout, [query.features], query.context)
        except FeatureError as error:
            # The only arm is not in a list: its path starts at `features`.
            field = ("features", *error.field[3:]) if error.field[0] == "arms" else error.field
            raise InvalidInput(field, error.message) from error
        store = StoreAccess(self._guard, go_on=True)
        keys = None if query.arm_id is None else np.array([arm_key(query.arm_id)])
        asked = ScoreRequest(query.user_id, inputs, arm_keys=keys)
        if query.user_id not in serving.model:
            states, starts = await store.run(lambda: self._users.load_with_warm_starts([query.user_id])) or ({}, {})
            states |= await store.run(lambda: serving.replica.put(states.values()), budget_s=None) or {}
            asked = replace(
                asked,
                loaded=states.get(query.user_id),
                start=UserStart.of(starts[query.user_id]) if query.user_id in starts else None,
            )
        group = await serving.explainer.group(asked, query.limit)
        if not (math.isfinite(group.prediction) and math.isfinite(group.threshold)):
            raise InvalidInput(("features",), "are too large for the learner: the prediction is not finite")
        users = await store.run(self._users.count)
        return GroupView(
            prediction=group.prediction,
            threshold=group.threshold,
            group_size=group.group_size,
            pool_size=group.pool_size,
            sampled=group.pool_chosen or (group.pool_full and (users is None or users > group.pool_size)),
            users=users,
            members=group.members,
            model_version=group.epoch,
            user_version=group.user_events,
            cold_start=group.cold_start,
        )
