"""Request and response of POST /feedback."""

from __future__ import annotations

from typing import Annotated, final

from pydantic import BaseModel, ConfigDict, FailFast, Field

from metaban.service.http.schemas.fields import MAX_EVENTS, DecisionId, Identifier, Number, RequestModel


@final
class RewardIn(RequestModel):
    """The reward of one chosen arm."""

    decision_id: DecisionId = Field(description="The id in the answer of POST /recommend.")
    arm_id: Identifier | None = Field(
        default=None, description="The chosen arm; may be left out when only one was chosen."
    )
    reward: Number = Field(description="Within the namespace's range; from 0 to 1 unless that is set.")
    event_id: Identifier | None = Field(
        default=None,
        description="Id of the reward: rewards with the same id count once. Left out, it is made from the decision and "
        "the arm, so that each arm of a decision has one reward.",
    )


@final
class RewardBatch(RequestModel):
    """Many rewards; each is accepted or rejected on its own."""

    events: Annotated[list[RewardIn], FailFast()] = Field(min_length=1, max_length=MAX_EVENTS)


@final
class RejectionOut(BaseModel):
    """A reward that will not be learned."""

    index: int = Field(description="Index in `events`, from 0.")
    code: str = Field(
        examples=[
            "unknown-decision", "unknown-arm", "arm-required", "user-reset", "not-activated", "too-many-rewards",
            "late", "not-learned",
        ]
    )  # fmt: skip
    detail: str


@final
class FeedbackResponse(BaseModel):
    """How many rewards were accepted, known already, or rejected."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"accepted": 1, "duplicates": 0, "rejected": [], "applied": True}]}
    )

    accepted: int = Field(description="Stored, and learned exactly once.")
    duplicates: int = Field(description="Stored before with the same event_id; ignored.")
    rejected: list[RejectionOut]
    applied: bool | None = Field(
        default=None,
        description="With `?wait=applied`: whether the served model has learned them; false after the time limit.",
    )
