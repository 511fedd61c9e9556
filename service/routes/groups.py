"""/admin/groups: who agrees with a user on an arm."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Literal, final

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from service.auth import AdminEngine
from service.bodies import MEMBERS_LISTED, MEMBERS_MAX, GroupRequest
from service.contracts import GroupQuery, GroupView
from service.edge import edge_of
from service.errors import (
    BodyTooLarge,
    Forbidden,
    InvalidInput,
    MalformedBody,
    NotFound,
    Overloaded,
    Unauthorized,
    UnsupportedMedia,
)
from service.intake import body_as, check_length, parse_json, read_body
from service.openapi import json_body, problem_responses
from service.schemas import Identifier

router = APIRouter(prefix="/admin/groups", tags=["administration"])


@final
class GroupMemberOut(BaseModel):
    """Somebody in the group."""

    user_id: str
    prediction: float = Field(description="What they expect of the arm.")
    distance: float = Field(description="How far that is from what the user expects.")
    events: int = Field(description="Rewards learned of them.")


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

    prediction: float = Field(description="What the user's own learner expects of the arm.")
    threshold: float = Field(description="How far from it others may be who agree.")
    group_size: int = Field(description="Users who agree, the asking one among them.")
    pool_size: int = Field(description="Users compared, the asking one among them.")
    users: int | None = Field(description="Users that the store has a record of; null while it is away.")
    sampled: bool = Field(description="Whether the pool is a sample, there being more users than it holds.")
    members: list[GroupMemberOut] = Field(description="The user first, then by distance.")
    members_total: int = Field(description="How many there are, listed or not.")
    model_version: int = Field(description="The epoch of the shared parameters.")
    user_version: int = Field(description="Rewards of the user that the model has learned.")
    cold_start: Literal["meta", "fusion"] | None = Field(
        description="When there are none yet, what the user begins from; null otherwise."
    )


@router.post(
    "",
    summary="Who agrees with a user on an arm?",
    response_model=GroupOut,
    openapi_extra=json_body(GroupRequest),
    responses=problem_responses(
        MalformedBody, Unauthorized, Forbidden, NotFound, BodyTooLarge, UnsupportedMedia, InvalidInput, Overloaded
    ),
)
async def inspect(request: Request, engine: AdminEngine) -> GroupOut:
    """The group of a user on an arm that is the only one on offer, from the memory of the process that answers.

    404 before the first POST /recommend of a namespace, which says what features look like.
    """
    asked = body_as(GroupRequest, parse_json(await read_body(request)))
    for name, features in (("features", asked.features), ("context", asked.context)):
        check_length(features, edge_of(request).settings.max_dimension, (name,))
    return _shown(await engine.inspect_group(GroupQuery(asked.user_id, asked.features, asked.context, asked.limit)))


@router.get(
    "",
    summary="Who agrees with a user on an arm of the catalogue?",
    responses=problem_responses(Unauthorized, Forbidden, NotFound, InvalidInput, Overloaded),
)
async def inspect_arm(
    engine: AdminEngine,
    user_id: Annotated[Identifier, Query(description="Who it is about.")],
    arm_id: Annotated[Identifier, Query(description="An arm of the catalogue.")],
    limit: Annotated[int, Query(ge=1, le=MEMBERS_MAX, description="Members to list, the nearest.")] = MEMBERS_LISTED,
) -> GroupOut:
    """The same by the id of an arm; where requests have a context, POST takes one."""
    arm = await engine.arms.get(arm_id)
    if arm is None:
        raise NotFound("There is no such arm in the catalogue; POST takes features.")
    return _shown(await engine.inspect_group(GroupQuery(user_id, arm.features, None, limit)))


def _shown(view: GroupView) -> GroupOut:
    return GroupOut(**asdict(view), members_total=view.group_size)
