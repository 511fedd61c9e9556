"""/admin/users: show what is stored about a user, and forget a user."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, final

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, ConfigDict, Field

from metaban.service.engine.commands import UserDescription
from metaban.service.errors import Forbidden, InvalidInput, NotFound, Unauthorized, Unavailable
from metaban.service.http.audit import AuditedRoute
from metaban.service.http.auth import AdminEngine
from metaban.service.http.openapi import problem_responses
from metaban.service.http.schemas.fields import Identifier

#: Rewards of a user that one call returns at most.
EVENTS_MAX: Final = 100

router = APIRouter(route_class=AuditedRoute, prefix="/admin/users", tags=["users"])

UserId = Annotated[
    Identifier,
    Path(description="Id of the user as in POST /recommend, percent-encoded.", examples=["ada"]),
]


@final
class UserEventOut(BaseModel):
    """A sample: an arm of a decision with rewards that were learned."""

    model_config = ConfigDict(from_attributes=True)

    arm_id: str
    reward: float = Field(description="The latest, scaled from the reward range to 0..1.")
    propensity: float
    epoch: int = Field(description="Epoch of the model that made the decision.")
    received_ms: int = Field(description="When the latest reward came.")


@final
class OpenDecisionOut(BaseModel):
    """A decision that still accepts rewards."""

    model_config = ConfigDict(from_attributes=True)

    decision_id: str
    expires_ms: int = Field(
        description="End of the reward window; for a deferred decision, end of the time for its activation."
    )


@final
class RemnantsOut(BaseModel):
    """What is left in the store of a forgotten user, besides the tombstone. All zero and false if nothing is left."""

    model_config = ConfigDict(from_attributes=True)

    decisions: int
    waiting: int = Field(description="Rewards in the event stream that the worker will drop.")
    dead_letters: int
    samples: int
    log_lines: int = Field(description="Entries of the update log, without the one about the forgetting.")
    pool: bool = Field(description="Whether the user is in the pool of the current epoch.")
    fusion: bool = Field(description="Whether the user is a source of the fusion model.")
    transfer: bool = Field(description="Whether a transfer job names the user as target or source.")


@final
class NearUserOut(BaseModel):
    """A source of the fusion model with a similar profile."""

    model_config = ConfigDict(from_attributes=True)

    user_id: str | None = Field(description="null if the user was forgotten since.")
    distance: float = Field(description="Distance of the profiles, in standard deviations.")


@final
class WarmStartOut(BaseModel):
    """The warm start of a user: first parameters made from their profile."""

    model_config = ConfigDict(from_attributes=True)

    fusion_version: int = Field(description="Version of the fusion model that made it.")
    trust: float = Field(description="Share of the prior's variance that the warm start explains.")
    created_ms: int
    nearest: list[NearUserOut] = Field(description="Sources with the most similar profiles, at most 5.")


@final
class UserOut(BaseModel):
    """Everything stored about a user."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "user_id": "ada",
                    "incarnation": 0,
                    "version": 31,
                    "epoch": 7,
                    "samples": 31,
                    "resident": True,
                    "forgotten": False,
                    "cold_start": "fusion",
                    "warm_start": {
                        "fusion_version": 3,
                        "trust": 0.58,
                        "created_ms": 1767200000000,
                        "nearest": [{"user_id": "ben", "distance": 0.12}, {"user_id": None, "distance": 0.4}],
                    },
                    "profile": {"country": "NL", "member": True},
                    "events": [
                        {
                            "arm_id": "sencha",
                            "reward": 1.0,
                            "propensity": 0.9867,
                            "epoch": 7,
                            "received_ms": 1767225600000,
                        }
                    ],
                    "decisions": [{"decision_id": "first-order", "expires_ms": 1767312000000}],
                    "traces": None,
                }
            ]
        }
    )

    user_id: str
    incarnation: int = Field(description="Grows by 1 when the user is forgotten or restored.")
    version: int = Field(description="Rewards learned in this incarnation.")
    epoch: int | None = Field(description="Epoch under which the user was last fitted; null if no reward is learned.")
    samples: int = Field(description="Number of samples kept.")
    resident: bool = Field(description="Whether the process that answers holds the user's parameters.")
    forgotten: bool = Field(description="Forgotten, or removed by a restore, and no reward learned since.")
    cold_start: Literal["meta", "fusion"] = Field(
        description="Where the user's parameters started: at the prior (`meta`) or at a warm start (`fusion`)."
    )
    warm_start: WarmStartOut | None = Field(description="The warm start; null if there is none.")
    profile: list[Any] | dict[str, Any] | None = Field(description="The latest `user_features`.")
    events: list[UserEventOut] = Field(description="The latest samples, newest first; `?events=` sets how many.")
    decisions: list[OpenDecisionOut] = Field(
        description="Decisions that accept rewards now or after activation, newest first, out of the latest 100 "
        "decisions of the user."
    )
    traces: RemnantsOut | None = Field(
        description="What the store still has of a forgotten user; null for other users."
    )

    @staticmethod
    def of(user_id: str, found: UserDescription) -> UserOut:
        stored = found.stored
        return UserOut(
            user_id=user_id,
            incarnation=stored.incarnation,
            version=stored.version,
            epoch=stored.epoch,
            samples=stored.samples,
            resident=found.resident,
            forgotten=stored.forgotten,
            cold_start="meta" if found.warm_start is None else "fusion",
            warm_start=None if found.warm_start is None else WarmStartOut.model_validate(found.warm_start),
            profile=found.profile,
            events=[UserEventOut.model_validate(sample) for sample in found.events],
            decisions=[OpenDecisionOut.model_validate(decision) for decision in found.decisions],
            traces=None if found.remnants is None else RemnantsOut.model_validate(found.remnants),
        )


@final
class RemovedOut(BaseModel):
    """How many records were deleted."""

    model_config = ConfigDict(from_attributes=True)

    samples: int
    decisions: int
    dead_letters: int
    log_lines: int


@final
class ForgottenOut(BaseModel):
    """A user was forgotten."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "user_id": "ada",
                    "incarnation": 1,
                    "removed": {"samples": 31, "decisions": 4, "dead_letters": 0, "log_lines": 31},
                    "waiting": 0,
                    "history": "rewritten",
                }
            ]
        }
    )

    user_id: str
    incarnation: int = Field(description="Rewards count only for decisions of this incarnation.")
    removed: RemovedOut
    waiting: int = Field(description="Rewards in the event stream that the worker will drop.")
    history: Literal["rewritten", "pending", "not ours"] = Field(
        description="`rewritten`: the append-only file of the private Valkey no longer contains the user; `pending`: "
        "it will be rewritten soon; `not ours`: the store is external, and its files are not known here."
    )


@router.get(
    "/{user_id:path}",
    summary="Show what is stored about a user",
    responses=problem_responses(Unauthorized, Forbidden, NotFound, InvalidInput, Unavailable),
)
async def describe(
    engine: AdminEngine,
    user_id: UserId,
    events: Annotated[int, Query(ge=0, le=EVENTS_MAX, description="Number of latest samples to return.")] = 0,
) -> UserOut:
    """404 if nothing is stored about the user: no reward, decision, profile or tombstone."""
    found = await engine.users.describe(user_id, events=events)
    if found is None:
        raise NotFound("Nothing is stored about this user.")
    return UserOut.of(user_id, found)


@router.delete(
    "/{user_id:path}",
    summary="Forget a user",
    responses=problem_responses(Unauthorized, Forbidden, InvalidInput, Unavailable),
)
async def forget(engine: AdminEngine, user_id: UserId) -> ForgottenOut:
    """Delete everything stored about the user except a tombstone. Rewards that are not yet applied are dropped.

    It also works for an unknown user, because a request may be in progress, and it can be repeated. Earlier decisions
    become unknown. The call waits up to 5 s for waiting rewards to be dropped and for a private Valkey to rewrite its
    append-only file. `traces` of GET shows whether anything is left.
    """
    done = await engine.users.forget(user_id)
    return ForgottenOut(
        user_id=user_id,
        incarnation=done.incarnation,
        removed=RemovedOut.model_validate(done.removed),
        waiting=done.waiting,
        history=done.history,
    )
