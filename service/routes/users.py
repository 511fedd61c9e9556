"""/admin/users: what is stored of a user, and forgetting them."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, final

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, ConfigDict, Field

from service.auth import AdminEngine
from service.contracts import UserDescription
from service.errors import Forbidden, InvalidInput, NotFound, Unauthorized, Unavailable
from service.openapi import problem_responses
from service.schemas import Identifier

#: Rewards shown of one user.
EVENTS_MAX: Final = 100

router = APIRouter(prefix="/admin/users", tags=["users"])

UserId = Annotated[
    Identifier,
    Path(description="As in POST /recommend; percent-encoded where a URL needs it.", examples=["ada"]),
]


@final
class UserEventOut(BaseModel):
    """A reward that was learned."""

    model_config = ConfigDict(from_attributes=True)

    arm_id: str
    reward: float = Field(description="As it is learned, from 0 to 1: its place in the range that it was sent in.")
    propensity: float
    epoch: int = Field(description="Of the model that decided.")
    received_ms: int


@final
class OpenDecisionOut(BaseModel):
    """A decision that still takes rewards."""

    model_config = ConfigDict(from_attributes=True)

    decision_id: str
    expires_ms: int = Field(
        description="Until when it does, by the reward window; of a deferred one, until when it can be activated."
    )


@final
class TracesOut(BaseModel):
    """What is left of a user who was forgotten, besides the tombstone; all zero and false: nothing."""

    model_config = ConfigDict(from_attributes=True)

    decisions: int
    waiting: int = Field(description="Rewards that a worker is about to drop without an effect.")
    dead_letters: int
    samples: int
    log_lines: int = Field(description="Lines of the update log but the one that says that the user was forgotten.")
    pool: bool = Field(description="Whether the candidate pool of the current epoch names the user.")
    fusion: bool = Field(description="Whether fusion names the user as a source.")
    transfer: bool = Field(description="Whether a transfer job names the user.")


@final
class NearUserOut(BaseModel):
    """A source of fusion whose profile is near."""

    model_config = ConfigDict(from_attributes=True)

    user_id: str | None = Field(description="null: forgotten since.")
    distance: float = Field(description="Between the profiles, in standard deviations.")


@final
class WarmStartOut(BaseModel):
    """What a learner began from that was made from the user's profile."""

    model_config = ConfigDict(from_attributes=True)

    fusion_version: int = Field(description="Of the fusion model that made it.")
    trust: float = Field(description="Share of the prior's variance that it explains.")
    created_ms: int
    nearest: list[NearUserOut] = Field(description="Sources with the most similar profiles, at most 5.")


@final
class UserOut(BaseModel):
    """What is stored of a user."""

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
    incarnation: int = Field(description="Grows by one when the user is forgotten or restored.")
    version: int = Field(description="Rewards learned in this incarnation.")
    epoch: int | None = Field(
        description="The epoch that the user was last fitted under; null when nothing is learned of them."
    )
    samples: int = Field(description="Samples kept of the latest rewards.")
    resident: bool = Field(description="Whether the process that answered has the user in memory.")
    forgotten: bool = Field(description="Forgotten, or dropped by a restore, and no reward learned since.")
    cold_start: Literal["meta", "fusion"] = Field(
        description="What the user's learner began from: the meta-learner's prior, or a warm start from their profile."
    )
    warm_start: WarmStartOut | None = Field(description="Where that warm start comes from; null without one.")
    profile: list[Any] | dict[str, Any] | None = Field(description="The `user_features` told last.")
    events: list[UserEventOut] = Field(
        description="The latest rewards learned, as many as asked for, the newest first."
    )
    decisions: list[OpenDecisionOut] = Field(
        description="Decisions that still take rewards, or will once they are activated: of the newest 100 that are "
        "kept, the newest first. Others are kept for a while, so that a late reward is told from an unknown one."
    )
    traces: TracesOut | None = Field(description="What is left of the user when `forgotten`; null otherwise.")

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
            traces=None if found.traces is None else TracesOut.model_validate(found.traces),
        )


@final
class RemovedOut(BaseModel):
    """How much was deleted."""

    model_config = ConfigDict(from_attributes=True)

    samples: int
    decisions: int
    dead_letters: int
    log_lines: int


@final
class ForgottenOut(BaseModel):
    """A user began anew."""

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
    incarnation: int = Field(description="Only decisions made from now on are learned, into this incarnation.")
    removed: RemovedOut
    waiting: int = Field(description="Rewards that still wait for a worker to drop them without an effect.")
    history: Literal["rewritten", "pending", "not ours"] = Field(
        description="Whether the append-only file of the private Valkey was rewritten, so that it does not hold the "
        "user any more, or is about to be; `not ours`: the store is another one, whose files and copies are not "
        "known here."
    )


@router.get(
    "/{user_id:path}",
    summary="What is stored of a user",
    responses=problem_responses(Unauthorized, Forbidden, NotFound, InvalidInput, Unavailable),
)
async def describe(
    engine: AdminEngine,
    user_id: UserId,
    events: Annotated[int, Query(ge=0, le=EVENTS_MAX, description="How many of the latest rewards to show.")] = 0,
) -> UserOut:
    """404 for a user of whom nothing is stored: no reward, no decision, no profile, no tombstone."""
    found = await engine.describe_user(user_id, events=events)
    if found is None:
        raise NotFound("Nothing is stored of this user.")
    return UserOut.of(user_id, found)


@router.delete(
    "/{user_id:path}",
    summary="Forget a user",
    responses=problem_responses(Unauthorized, Forbidden, InvalidInput, Unavailable),
)
async def forget(engine: AdminEngine, user_id: UserId) -> ForgottenOut:
    """Delete all that is stored of the user but a tombstone, and void the rewards under way.

    Works for a user never seen, too, of whom a decision may be under way, and may be repeated. Decisions that were made
    before are unknown from now on. The call waits a few seconds for the rewards under way and for the history of a
    private Valkey; GET tells in `traces` whether anything is left.
    """
    done = await engine.forget_user(user_id)
    return ForgottenOut(
        user_id=user_id,
        incarnation=done.incarnation,
        removed=RemovedOut.model_validate(done.removed),
        waiting=done.waiting,
        history=done.history,
    )
