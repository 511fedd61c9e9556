"""Who agrees with a user on an arm, for an admin to look at."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import final

from models.features import FeatureError, assemble
from service.breaker import StoreBreaker
from service.contracts import GroupQuery, GroupView
from service.errands import Errands
from service.errors import InvalidInput, NotFound
from service.scoring import ScoreRequest, WarmStart
from service.serving import ServingRoom
from store.users import UserStore


@final
class GroupDesk:
    """Looks into the groups of one namespace; from memory alone while the store is away."""

    def __init__(self, breaker: StoreBreaker, users: UserStore, room: ServingRoom) -> None:
        self._breaker = breaker
        self._users = users
        self._room = room

    async def inspect(self, query: GroupQuery) -> GroupView:
        """The group of a user on an arm that is the only one on offer; a user never seen is answered as a newborn."""
        serving = self._room.serving
        if serving is None:
            raise NotFound("Nothing is served here yet: the first POST /recommend says what arms are like.")
        try:
            inputs = assemble(serving.layout, [query.features], query.context)
        except FeatureError as error:
            # Of the one arm there is, a path tells its place.
            field = ("features", *error.field[3:]) if error.field[0] == "arms" else error.field
            raise InvalidInput(field, error.message) from error
        store = Errands(self._breaker, go_on=True)
        asked = ScoreRequest(query.user_id, inputs)
        if query.user_id not in serving.replica:
            states, starts = await store.run(lambda: self._users.load_with_starts([query.user_id])) or ({}, {})
            await serving.replica.take(states.values())
            asked = replace(asked, loaded=states.get(query.user_id), start=WarmStart.of(starts.get(query.user_id)))
        group = await serving.explainer.group(asked, query.limit)
        if not (math.isfinite(group.prediction) and math.isfinite(group.threshold)):
            raise InvalidInput(("features",), "are too large for the learner to tell a prediction")
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
