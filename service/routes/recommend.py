"""POST /recommend: which of these arms for this user?"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from service.auth import ClientEngine
from service.edge import Edge, edge_of
from service.errors import (
    BodyTooLarge,
    DecisionConflict,
    InvalidInput,
    MalformedBody,
    Unauthorized,
    Unavailable,
    UnsupportedMedia,
    VersionNotReached,
)
from service.examples import RECOMMEND_EXAMPLES
from service.intake import parse_json, read_body, recommend_command
from service.openapi import json_body, problem_responses
from service.schemas import ItemOut, RecommendRequest, RecommendResponse

if TYPE_CHECKING:
    from service.engine import Engine

router = APIRouter(tags=["recommendations"])


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
    """Rank the arms by what the user, the users who agree with them, and all users together have taught the
    service, and choose `k` of them.

    The decision is recorded before it is answered: send its id back with the reward. While the store is away it is
    not, and the answer says so in `logged`. Arms may be explored rather than exploited; `propensity` tells how likely
    each choice was.
    """
    body = await read_body(request)
    arrived_s = time.perf_counter()
    answer = await decide(engine, edge_of(request), parse_json(body), arrived_s)
    return Response(answer.model_dump_json(exclude_unset=True), media_type="application/json")


async def decide(engine: Engine, edge: Edge, payload: Any, arrived_s: float) -> RecommendResponse:
    """Answer one request of which the JSON is here; members that were not asked for are not set."""
    with engine.metrics.stage("intake"):
        command = recommend_command(payload, edge.settings)
    decision = await engine.recommend(command)
    engine.metrics.count_decision(
        decision.policy, decision.cold_start, replayed=decision.replayed, logged=decision.logged
    )
    items = [asdict(item) for item in decision.items]
    if command.explain:
        for item, explanation in zip(items, decision.explanations, strict=True):
            item["explanation"] = None if explanation is None else asdict(explanation)
    return RecommendResponse(
        decision_id=decision.decision_id,
        items=[ItemOut(**item) for item in items],
        policy=decision.policy,
        model_version=decision.model_version,
        user_version=decision.user_version,
        cold_start=decision.cold_start,
        logged=decision.logged,
        took_ms=round((time.perf_counter() - arrived_s) * 1e3, 3),
    )
