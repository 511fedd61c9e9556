"""POST /recommend/batch: many decisions in one call, each by itself."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final, final

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from service.auth import ClientEngine
from service.bodies import RecommendBatch
from service.edge import Edge, edge_of
from service.errors import BodyTooLarge, InvalidInput, MalformedBody, Unauthorized, UnsupportedMedia
from service.intake import body_as, parse_json, read_body
from service.openapi import json_body, problem_responses
from service.problems import problem_within
from service.routes.recommend import decide
from service.schemas import DECISION_EXAMPLE, Problem, RecommendResponse

if TYPE_CHECKING:
    from service.engine import Engine

router = APIRouter(tags=["recommendations"])

#: Requests of a batch that are under way at once: each may hold the inputs of a whole catalogue.
AT_ONCE: Final = 16
#: What a decision is called that was asked for without an id.
MADE_UP_ID: Final = "5b0f3d8a6c2e4e719a4c1f0d2b7e6a93"


@final
class BatchResultOut(BaseModel):
    """What became of one request of a batch: a decision or a problem."""

    status: int = Field(description="What it would have been answered with alone.", examples=[200])
    decision: RecommendResponse | None = Field(default=None, description="With status 200; else left out.")
    problem: Problem | None = Field(default=None, description="With any other status; else left out.")


@final
class RecommendBatchResponse(BaseModel):
    """What became of each request, in their order."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "results": [
                        {"status": 200, "decision": {**DECISION_EXAMPLE, "decision_id": "third-order"}},
                        {"status": 200, "decision": {**DECISION_EXAMPLE, "decision_id": MADE_UP_ID}},
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
    "/recommend/batch",
    summary="Choose arms for many users",
    response_model=RecommendBatchResponse,
    openapi_extra=json_body(RecommendBatch),
    responses=problem_responses(MalformedBody, Unauthorized, BodyTooLarge, UnsupportedMedia, InvalidInput),
)
async def recommend_batch(request: Request, engine: ClientEngine) -> Response:
    """Up to 100 requests, each decided, recorded and answered as POST /recommend would, at the same time.

    The batch is 200 when it can be read at all; each result has a status of its own, and a problem document in place
    of a decision where that is not 200. Two with one `decision_id` are as if sent at the same time: they get one
    decision, or `decision-conflict`.
    """
    body = await read_body(request)
    arrived_s = time.perf_counter()
    edge = edge_of(request)
    payloads: list[Any] = body_as(RecommendBatch, parse_json(body)).requests
    turn = asyncio.Semaphore(AT_ONCE)
    results = await asyncio.gather(*(_answered(engine, edge, payload, arrived_s, turn) for payload in payloads))
    answer = RecommendBatchResponse(results=results)
    return Response(answer.model_dump_json(exclude_unset=True), media_type="application/json")


async def _answered(
    engine: Engine, edge: Edge, payload: Any, arrived_s: float, turn: asyncio.Semaphore
) -> BatchResultOut:
    try:
        async with turn:
            return BatchResultOut(status=200, decision=await decide(engine, edge, payload, arrived_s))
    except Exception as error:
        status, problem = problem_within(error)
        return BatchResultOut(status=status, problem=Problem(**problem))
