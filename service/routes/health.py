"""GET /health/live, /health/ready and /metrics: for orchestrators and for Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final, Literal

import structlog
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from service.auth import require_observer
from service.contracts import CheckResult
from service.edge import Edge, edge_of
from service.errors import Forbidden, Unauthorized
from service.openapi import problem_responses
from service.schemas import CheckOut, LiveResponse, ReadyResponse
from store.errors import StoreError

#: Probes give up after a few seconds; an answer after that helps nobody.
READINESS_TIMEOUT_S: Final = 3.0

_log = structlog.stdlib.get_logger(__name__)

router = APIRouter(tags=["operations"])


@router.get("/health/live", summary="Does the process answer?")
async def live(request: Request) -> LiveResponse:
    """Always 200: a failure to answer is the signal to restart."""
    return LiveResponse(version=request.app.version)


@router.get(
    "/health/ready",
    summary="May traffic be sent here?",
    response_model=ReadyResponse,
    responses={503: {"model": ReadyResponse, "description": "Not now; `checks` says why."}},
)
async def ready(request: Request) -> Response:
    """200 when requests are answered, be it from memory alone (`degraded`); 503 otherwise, and when stopping."""
    checks = await _checks(edge_of(request))
    status = _status(checks.values())
    answer = ReadyResponse(
        status=status,
        checks={name: CheckOut(ok=check.ok, detail=check.detail) for name, check in checks.items()},
    )
    return Response(answer.model_dump_json(), 503 if status == "not ready" else 200, media_type="application/json")


async def _checks(edge: Edge) -> dict[str, CheckResult]:
    try:
        async with asyncio.timeout(READINESS_TIMEOUT_S):
            checks = await edge.recommenders.readiness()
    except TimeoutError:
        checks = {"engine": CheckResult(False, f"no answer within {READINESS_TIMEOUT_S:g} s")}
    if edge.stopping.is_set():
        checks = {**checks, "service": CheckResult(False, "is about to stop: send requests elsewhere")}
    return checks


def _status(checks: Iterable[CheckResult]) -> Literal["ready", "degraded", "not ready"]:
    failing = [check for check in checks if not check.ok]
    if any(check.vital for check in failing):
        return "not ready"
    return "degraded" if failing else "ready"


@router.get(
    "/metrics",
    summary="Counters for Prometheus",
    dependencies=[Depends(require_observer)],
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}}, **problem_responses(Unauthorized, Forbidden)},
)
async def metrics(request: Request) -> Response:
    """Latencies, decisions, rewards, backlog and freshness of all namespaces, in the Prometheus text format."""
    edge = edge_of(request)
    try:
        async with asyncio.timeout(READINESS_TIMEOUT_S):
            await edge.recommenders.refresh_gauges()
    except (StoreError, TimeoutError) as error:
        # What this process counted is worth most while the store is away.
        _log.warning("gauges_not_refreshed", reason=str(error) or "timed out")
    try:
        edge.metrics.ready.set(_status((await _checks(edge)).values()) != "not ready")
    except StoreError:
        edge.metrics.ready.set(0)
    content, media_type = edge.metrics.render(request.headers.get("accept", ""))
    return Response(content, headers={"Content-Type": media_type})
