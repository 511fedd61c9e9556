"""POST /feedback: the rewards of decisions."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Literal

from fastapi import APIRouter, Header, Query, Request
from starlette.responses import Response

from metaban.service.engine.commands import RejectedReward
from metaban.service.errors import (
    BodyTooLarge,
    InvalidInput,
    MalformedBody,
    NotActivated,
    Overloaded,
    ServiceError,
    TooManyRewards,
    Unauthorized,
    UnknownDecision,
    UnsupportedMedia,
    UserReset,
)
from metaban.service.http.auth import ClientEngine
from metaban.service.http.openapi import json_body, problem_responses
from metaban.service.http.parsing import parse_json, read_body, reward_commands
from metaban.service.http.schemas.examples import FEEDBACK_EXAMPLES
from metaban.service.http.schemas.feedback import FeedbackResponse, RejectionOut, RewardBatch, RewardIn
from metaban.service.http.schemas.fields import IDEMPOTENCY_KEY_PATTERN

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
        TooManyRewards,
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
        Query(description="`applied`: answer when the served model has learned the rewards, or after a time limit."),
    ] = None,
    idempotency_key: Annotated[
        str | None,
        Header(
            alias="Idempotency-Key",
            pattern=IDEMPOTENCY_KEY_PATTERN,
            description="The `event_id` of a reward without one; in a batch, followed by a colon and the index.",
        ),
    ] = None,
) -> Response:
    """Store rewards. Each is learned exactly once, however often it is sent.

    One reward is an object, many are `{"events": [...]}`. In a batch, a reward that cannot be learned is listed in
    `rejected` and the others are stored; a malformed reward, or one outside the namespace's range, makes the whole
    batch fail. A late reward, or the reward of a baseline decision, is listed in `rejected` even when sent alone.
    """
    commands, batch = reward_commands(parse_json(await read_body(request)), idempotency_key)
    outcome = await engine.feedback.accept(commands, wait_applied=wait == "applied")
    engine.metrics.count_rewards(
        accepted=outcome.accepted, duplicates=outcome.duplicates, rejected=len(outcome.rejected)
    )
    if not batch and outcome.rejected and (error := _single_error(outcome.rejected[0])):
        raise error
    answer = FeedbackResponse(
        accepted=outcome.accepted,
        duplicates=outcome.duplicates,
        rejected=[RejectionOut(**asdict(rejection)) for rejection in outcome.rejected] if outcome.rejected else [],
        applied=outcome.applied,
    )
    content = answer.model_dump_json(exclude={"applied"} if wait is None else None)
    return Response(content, status_code=202, media_type="application/json")


def _single_error(rejection: RejectedReward) -> ServiceError | None:
    """The error of a request with a single reward; None if the rejection is listed in a 202 response."""
    if rejection.code == "unknown-decision":
        return UnknownDecision(rejection.detail)
    if rejection.code in {"unknown-arm", "arm-required"}:
        return InvalidInput(("arm_id",), rejection.detail)
    if rejection.code == "user-reset":
        return UserReset(rejection.detail)
    if rejection.code == "not-activated":
        return NotActivated(rejection.detail)
    if rejection.code == "too-many-rewards":
        return TooManyRewards(rejection.detail)
    return None
