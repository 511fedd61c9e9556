"""POST /recommend: choose arms for a user. POST /recommend/batch: several such requests in one call."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, final

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from metaban.service.errors import (
    BodyTooLarge,
    DecisionConflict,
    InvalidInput,
    MalformedBody,
    Unauthorized,
    Unavailable,
    UnsupportedMedia,
    VersionNotReached,
)
from metaban.service.http.app_state import AppState, state_of
from metaban.service.http.auth import ClientEngine
from metaban.service.http.openapi import json_body, problem_responses
from metaban.service.http.parsing import body_as, parse_json, read_body, recommend_command
from metaban.service.http.problems import Problem, problem_within
from metaban.service.http.schemas.examples import RECOMMEND_EXAMPLES
from metaban.service.http.schemas.recommend import (
    DECISION_EXAMPLE,
    ItemOut,
    RecommendBatch,
    RecommendRequest,
    RecommendResponse,
)

if TYPE_CHECKING:
    from metaban.service.engine.engine import Engine

#: Requests of a batch decided concurrently; each may hold the inputs of a whole catalogue.
CONCURRENT_REQUESTS: Final = 16

#: A generated decision_id, for examples.
GENERATED_ID: Final = "5b0f3d8a6c2e4e719a4c1f0d2b7e6a93"

router = APIRouter(tags=["recommendations"])


@final
class BatchResultOut(BaseModel):
    """The result of one request of a batch: a decision or a problem."""

    status: int = Field(description="Status that the request alone would be answered with.", examples=[200])
    decision: RecommendResponse | None = Field(default=None, description="Only with status 200.")
    problem: Problem | None = Field(default=None, description="Only with other statuses.")


@final
class RecommendBatchResponse(BaseModel):
    """The result of each request, in the same order."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "results": [
                        {"status": 200, "decision": {**DECISION_EXAMPLE, "decision_id": "third-order"}},
                        {"status": 200, "decision": {**DECISION_EXAMPLE, "decision_id": GENERATED_ID}},
                    ]
                },
                {
                    "results": [
                        {"status": 200, "decision": {**DECISION_EXAMPLE, "decision_id": "third-order"}},
                        {
                            "status": 422,
                            "problem": {
                                "type": "/problems/invalid-input",
                                "title": "Invalid input",
                                "status": 422,
                                "detail": "arm_ids[1]: is no arm of the catalogue: GET /admin/arms lists them",
                                "instance": "0b1f6c1e9d7b4c41a5b4b6a2a1c0f5aa",
                                "errors": [
                                    {
                                        "field": "arm_ids[1]",
                                        "detail": "is no arm of the catalogue: GET /admin/arms lists them",
                                    }
                                ],
                            },
                        },
                    ]
                },
            ]
        }
    )

    results: list[BatchResultOut]


@router.post(
    "/recommend",
    summary="Choose arms for a user",
    response_model=RecommendResponse,
    openapi_extra=json_body(RecommendRequest, examples=RECOMMEND_EXAMPLES),
    responses=problem_responses(
        MalformedBody,
        Unauthorized,
        DecisionConflict,
        BodyTooLarge,
        UnsupportedMedia,
        InvalidInput,
        VersionNotReached,
        Unavailable,
    ),
)
async def recommend(request: Request, engine: ClientEngine) -> Response:
    """Choose `k` of the arms, based on the rewards of this user, of users who agree with them, and of all users.

    The decision is recorded before the response: send its id back with the reward. While the store does not answer,
    the decision is not recorded and `logged` is false. Some arms are chosen to explore; `propensity` is the probability
    of each choice.
    """
    body = await read_body(request)
    arrived_s = time.perf_counter()
    answer = await _decide(engine, state_of(request.app), parse_json(body), arrived_s)
    return Response(answer.model_dump_json(exclude_unset=True), media_type="application/json")


@router.post(
    "/recommend/batch",
    summary="Choose arms for many users",
    response_model=RecommendBatchResponse,
    openapi_extra=json_body(RecommendBatch),
    responses=problem_responses(MalformedBody, Unauthorized, BodyTooLarge, UnsupportedMedia, InvalidInput),
)
async def recommend_batch(request: Request, engine: ClientEngine) -> Response:
    """Up to 100 requests, decided concurrently. Each is handled as by POST /recommend.

    The status is 200 if the batch can be parsed. Each result has its own status, and a problem document instead of a
    decision if that is not 200. Two requests with one `decision_id` get the same decision, or `decision-conflict`.
    """
    body = await read_body(request)
    arrived_s = time.perf_counter()
    app_state = state_of(request.app)
    payloads: list[Any] = body_as(RecommendBatch, parse_json(body)).requests
    turn = asyncio.Semaphore(CONCURRENT_REQUESTS)
    results = await asyncio.gather(
        *(_batch_result(engine, app_state, payload, arrived_s, turn) for payload in payloads)
    )
    answer = RecommendBatchResponse(results=results)
    return Response(answer.model_dump_json(exclude_unset=True), media_type="application/json")


async def _decide(engine: Engine, app_state: AppState, payload: Any, arrived_s: float) -> RecommendResponse:
    """Answer one parsed request; response members that were not asked for stay unset."""
    with engine.metrics.stage("intake"):
        command = recommend_command(payload, app_state.settings)
    made = await engine.decider.recommend(command)
    decision = made.decision
    engine.metrics.count_decision(decision.policy, decision.cold_start, replayed=made.replayed, logged=made.logged)
    items = []
    for place, item in enumerate(decision.items):
        fields = asdict(item)
        if command.explain:
            explanation = made.explanations[place]
            fields["explanation"] = None if explanation is None else asdict(explanation)
        items.append(ItemOut(**fields))
    return RecommendResponse(
        decision_id=decision.decision_id,
        items=items,
        policy=decision.policy,
        model_version=decision.epoch,
        user_version=decision.user_version,
        cold_start=None if decision.cold_start is None else "fusion" if decision.cold_start == "fusion" else "meta",
        logged=made.logged,
        took_ms=round((time.perf_counter() - arrived_s) * 1e3, 3),
    )


async def _batch_result(
    engine: Engine, app_state: AppState, payload: Any, arrived_s: float, turn: asyncio.Semaphore
) -> BatchResultOut:
    try:
        async with turn:
            return BatchResultOut(status=200, decision=await _decide(engine, app_state, payload, arrived_s))
    except Exception as error:
        status, problem = problem_within(error, engine.namespace)
        return BatchResultOut(status=status, problem=Problem(**problem))
