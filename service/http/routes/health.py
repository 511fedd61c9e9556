"""GET /health/live, /health/ready and /metrics: for orchestrators and Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final, Literal

import structlog
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from metaban.service.engine.commands import CheckResult
from metaban.service.errors import Forbidden, Unauthorized
from metaban.service.http.app_state import AppState, state_of
from metaban.service.http.auth import require_observer
from metaban.service.http.openapi import problem_responses
from metaban.service.http.schemas.health import CheckOut, LiveResponse, ReadyResponse, WarningOut
from metaban.store.errors import StoreError

#: Shorter than the usual time-out of probes.
READINESS_TIMEOUT_S: Final = 3.0

_log = structlog.stdlib.get_logger(__name__)

router = APIRouter(tags=["operations"])


@router.get("/health/live", summary="Liveness: does the process answer?")
async def live(request: Request) -> LiveResponse:
    """Always 200. Restart the process if it does not answer."""
    return LiveResponse(version=request.app.version)


@router.get(
    "/health/ready",
    summary="Readiness: can requests be sent here?",
    response_model=ReadyResponse,
    responses={503: {"model": ReadyResponse, "description": "Not ready; `checks` says why."}},
)
async def ready(request: Request) -> Response:
    """200 while requests are answered, also without the store (`degraded`). 503 otherwise, and while stopping."""
    app_state = state_of(request.app)
    checks = await _checks(app_state)
    status = _status(checks.values())
    warnings = app_state.recommenders.warnings()
    answer = ReadyResponse(
        status=status,
        checks={name: CheckOut(ok=check.ok, detail=check.detail) for name, check in checks.items()},
        warnings=[WarningOut(namespace=name, code=each.code, detail=each.detail) for name, each in warnings],
    )
    return Response(answer.model_dump_json(), 503 if status == "not ready" else 200, media_type="application/json")


async def _checks(app_state: AppState) -> dict[str, CheckResult]:
    try:
        async with asyncio.timeout(READINESS_TIMEOUT_S):
            checks = await app_state.recommenders.readiness()
    except TimeoutError:
        checks = {"engine": CheckResult(False, f"no answer within {READINESS_TIMEOUT_S:g} s")}
    if app_state.stopping.is_set():
        checks = {**checks, "service": CheckResult(False, "is about to stop: send requests elsewhere")}
    return checks


def _status(checks: Iterable[CheckResult]) -> Literal["ready", "degraded", "not ready"]:
    failing = [check for check in checks if not check.ok]
    if any(check.vital for check in failing):
        return "not ready"
    return "degraded" if failing else "ready"


@router.get(
    "/metrics",
    summary="Metrics for Prometheus",
    dependencies=[Depends(require_observer)],
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}}, **problem_responses(Unauthorized, Forbidden)},
)
async def metrics(request: Request) -> Response:
    """Latencies, decisions, rewards, backlog and freshness of all namespaces, in the Prometheus text format."""
    app_state = state_of(request.app)
    try:
        async with asyncio.timeout(READINESS_TIMEOUT_S):
            await app_state.recommenders.refresh_gauges()
    except (StoreError, TimeoutError) as error:
        # The counters of this process are still exposed: they are needed most during an outage.
        _log.warning("gauges_not_refreshed", reason=str(error) or "timed out")
    app_state.metrics.ready.set(_status((await _checks(app_state)).values()) != "not ready")
    content, media_type = app_state.metrics.render(request.headers.get("accept", ""))
    return Response(content, headers={"Content-Type": media_type})
