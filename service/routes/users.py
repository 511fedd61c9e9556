"""/admin/users: what is stored of a user, and forgetting them."""

from __future__ import annotations

from typing import Annotated, final

from fastapi import APIRouter, Path
from pydantic import BaseModel, ConfigDict, Field

from service.auth import AdminEngine
from service.errors import Forbidden, InvalidInput, NotFound, Unauthorized, Unavailable
from service.openapi import problem_responses
from service.schemas import Identifier

router = APIRouter(prefix="/admin/users", tags=["users"])

UserId = Annotated[Identifier, Path(description="As in POST /recommend; percent-encoded where a URL needs it.")]


@final
class UserOut(BaseModel):
    """What is stored of a user."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "user_id": "u-42",
                    "incarnation": 0,
                    "version": 31,
                    "epoch": 7,
                    "samples": 31,
                    "resident": True,
                    "forgotten": False,
                }
            ]
        }
    )

    user_id: str
    incarnation: int = Field(description="Grows by one when the user is forgotten or restored.")
    version: int = Field(description="Rewards learned in this incarnation.")
    epoch: int | None = Field(description="The epoch that the user was last fitted under; null when `forgotten`.")
    samples: int = Field(description="Samples kept of the latest rewards.")
    resident: bool = Field(description="Whether the process that answered has the user in memory.")
    forgotten: bool = Field(description="Forgotten, or dropped by a restore, and no reward learned since.")


@final
class ForgottenOut(BaseModel):
    """A user began anew."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"user_id": "u-42", "incarnation": 1}]})

    user_id: str
    incarnation: int = Field(description="Only decisions made from now on are learned, into this incarnation.")


@router.get(
    "/{user_id:path}",
    summary="What is stored of a user",
    responses=problem_responses(Unauthorized, Forbidden, NotFound, InvalidInput, Unavailable),
)
async def describe(engine: AdminEngine, user_id: UserId) -> UserOut:
    """404 for a user of whom no reward was ever learned, and who was neither forgotten nor dropped by a restore."""
    found = await engine.describe_user(user_id)
    if found is None:
        raise NotFound("No reward of this user was ever learned.")
    stored = found.stored
    return UserOut(
        user_id=user_id,
        incarnation=stored.incarnation,
        version=stored.version,
        epoch=stored.epoch,
        samples=stored.samples,
        resident=found.resident,
        forgotten=stored.forgotten,
    )


@router.delete(
    "/{user_id:path}",
    summary="Forget a user",
    responses=problem_responses(Unauthorized, Forbidden, InvalidInput, Unavailable),
)
async def forget(engine: AdminEngine, user_id: UserId) -> ForgottenOut:
    """Delete the user's learner, samples and dead letters, and void the rewards under way.

    Works for a user never seen, too, of whom a decision may be under way. Decisions that were made before can still be
    repeated until their reward window ends, but their rewards are refused with `user-reset`.
    """
    return ForgottenOut(user_id=user_id, incarnation=await engine.forget_user(user_id))
