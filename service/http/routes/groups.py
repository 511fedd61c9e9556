"""/admin/groups: the users who agree with a user on an arm."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Literal, final

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from metaban.service.engine.commands import GroupQuery, GroupView
from metaban.service.errors import (
    BodyTooLarge,
    Forbidden,
    InvalidInput,
    MalformedBody,
    NotFound,
    Overloaded,
    Unauthorized,
    UnsupportedMedia,
)
from metaban.service.http.app_state import state_of
from metaban.service.http.audit import AuditedRoute
from metaban.service.http.auth import AdminEngine
from metaban.service.http.openapi import json_body, problem_responses
from metaban.service.http.parsing import body_as, check_length, parse_json, read_body
from metaban.service.http.schemas.admin import MEMBERS_LISTED, MEMBERS_MAX, GroupRequest
from metaban.service.http.schemas.fields import Identifier

router = APIRouter(route_class=AuditedRoute, prefix="/admin/groups", tags=["administration"])


@final
class GroupMemberOut(BaseModel):
    """A user in the group."""

    user_id: str
    prediction: float = Field(description="Reward that this user's learner predicts for the arm.")
    distance: float = Field(description="Difference to the prediction of the user asked about.")
    events: int = Field(description="Rewards learned from this user.")


@final
class GroupOut(BaseModel):
    """A user's group on an arm (Eq. 4 of the Meta-Ban paper)."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "prediction": 0.41,
                    "threshold": 0.08,
                    "group_size": 2,
                    "pool_size": 512,
                    "users": 512,
                    "sampled": False,
                    "members": [
                        {"user_id": "ada", "prediction": 0.41, "distance": 0.0, "events": 31},
                        {"user_id": "ben", "prediction": 0.44, "distance": 0.03, "events": 12},
                    ],
                    "members_total": 2,
                    "model_version": 7,
                    "user_version": 31,
                    "cold_start": None,
                }
            ]
        }
    )

    prediction: float = Field(description="Reward that the user's own learner predicts for the arm.")
    threshold: float = Field(description="Other users are in the group if their prediction differs by at most this.")
    group_size: int = Field(description="Users in the group, including this user.")
    pool_size: int = Field(description="Users compared, including this user.")
    users: int | None = Field(description="Users in the store; null while the store is unavailable.")
    sampled: bool = Field(description="Whether the pool is a sample, because there are more users than it holds.")
    members: list[GroupMemberOut] = Field(description="The user first, then by distance.")
    members_total: int = Field(description="Number of members, including those not listed.")
    model_version: int = Field(description="The epoch of the shared parameters.")
    user_version: int = Field(description="Rewards of this user that the model has learned.")
    cold_start: Literal["meta", "fusion"] | None = Field(
        description="How a user without rewards is scored, as in POST /recommend; null for other users."
    )


@router.post(
    "",
    summary="Show the group of a user on an arm",
    response_model=GroupOut,
    openapi_extra=json_body(GroupRequest),
    responses=problem_responses(
        MalformedBody, Unauthorized, Forbidden, NotFound, BodyTooLarge, UnsupportedMedia, InvalidInput, Overloaded
    ),
)
async def inspect(request: Request, engine: AdminEngine) -> GroupOut:
    """The group of a user if the arm were the only one in a request, from the replica of this process.

    404 before the first POST /recommend of a namespace, which fixes the form of the features.
    """
    asked = body_as(GroupRequest, parse_json(await read_body(request)))
    for name, features in (("features", asked.features), ("context", asked.context)):
        check_length(features, state_of(request.app).settings.max_dimension, (name,))
    return _group_response(
        await engine.groups.inspect(GroupQuery(asked.user_id, asked.features, asked.context, asked.limit))
    )


@router.get(
    "",
    summary="Show the group of a user on an arm of the catalogue",
    responses=problem_responses(Unauthorized, Forbidden, NotFound, InvalidInput, Overloaded),
)
async def inspect_arm(
    engine: AdminEngine,
    user_id: Annotated[Identifier, Query(description="The user.")],
    arm_id: Annotated[Identifier, Query(description="An arm of the catalogue.")],
    limit: Annotated[int, Query(ge=1, le=MEMBERS_MAX, description="Members to list, nearest first.")] = MEMBERS_LISTED,
) -> GroupOut:
    """Like POST, for an arm of the catalogue and without a context."""
    arm = await engine.arms.get(arm_id)
    if arm is None:
        raise NotFound("The catalogue has no arm with this id. Send its features with POST instead.")
    if engine.groups.needs_context:
        raise InvalidInput(("context",), "is needed in this namespace: send it with POST /admin/groups")
    return _group_response(await engine.groups.inspect(GroupQuery(user_id, arm.features, None, limit, arm_id)))


def _group_response(view: GroupView) -> GroupOut:
    return GroupOut(**asdict(view), members_total=view.group_size)
