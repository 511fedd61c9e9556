"""POST /feedback: how it went."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Literal

from fastapi import APIRouter, Header, Query, Request
from starlette.responses import Response

from service.auth import ClientEngine
from service.contracts import Rejection
from service.errors import (
    BodyTooLarge,
    InvalidInput,
    MalformedBody,
    NotActivated,
    Overloaded,
    ServiceError,
    Unauthorized,
    UnknownDecision,
    UnsupportedMedia,
    UserReset,
)
from service.examples import FEEDBACK_EXAMPLES
from service.intake import parse_json, read_body, reward_commands
from service.openapi import json_body, problem_responses
from service.schemas import (
    IDEMPOTENCY_KEY_PATTERN,
    FeedbackResponse,
    RejectionOut,
    RewardBatch,
    RewardIn,
)

router = APIRouter(tags=["recommendations"])


@router.post(
    "/feedback",
    summary="Report rewards",
    status_code=202,
    response_model=FeedbackResponse,
    openapi_extra=json_body(RewardIn, RewardBatch, examples=FEEDBACK_EXAMPLES),
    responses=problem_responses(
        MalformedBody,
        Unauthorized,
        UnknownDecision,
        UserReset,
        NotActivated,
        BodyTooLarge,
        UnsupportedMedia,
        InvalidInput,
        Overloaded,
    ),
)
async def feedback(
    request: Request,
    engine: ClientEngine,
    wait: Annotated[
        Literal["applied"] | None,
        Query(description="`applied`: answer when the served model has learned the rewards, or the wait ran out."),
    ] = None,
    idempotency_key: Annotated[
        str | None,
        Header(
            alias="Idempotency-Key",
            pattern=IDEMPOTENCY_KEY_PATTERN,
            description="Stands for an `event_id` that is left out; in a batch, followed by a colon and the place.",
        ),
    ] = None,
) -> Response:
    """Store rewards to be learned, each exactly once, however often it is sent.

    One reward is an object, many are `{"events": [...]}`. In a batch, a reward that cannot be learned is listed in
    `rejected` and the others are stored; a malformed one, or one outside of the namespace's range, refuses the whole
    batch. A late reward, or one of a decision of the baseline, is listed in `rejected` even when it comes alone.
    """
    commands, batch = reward_commands(parse_json(await read_body(request)), idempotency_key)
    outcome = await engine.feedback(commands, wait_applied=wait == "applied")
    engine.metrics.count_rewards(
        accepted=outcome.accepted, duplicates=outcome.duplicates, rejected=len(outcome.rejected)
    )
    if not batch and outcome.rejected and (error := _single_error(outcome.rejected[0])):
        raise error
    answer = FeedbackResponse(
        accepted=outcome.accepted,
        duplicates=outcome.duplicates,
        rejected=[RejectionOut(**asdict(rejection)) for rejection in outcome.rejected],
        applied=outcome.applied,
    )
    shown = answer.model_dump_json(exclude={"applied"} if wait is None else None)
    return Response(shown, status_code=202, media_type="application/json")


def _single_error(rejection: Rejection) -> ServiceError | None:
    """A request for one reward fails with it; only rewards that are welcome yet not learned are listed."""
    if rejection.code == "unknown-decision":
        return UnknownDecision(rejection.detail)
    if rejection.code in {"unknown-arm", "arm-required"}:
        return InvalidInput(("arm_id",), rejection.detail)
    if rejection.code == "user-reset":
        return UserReset(rejection.detail)
    if rejection.code == "not-activated":
        return NotActivated(rejection.detail)
    return None
