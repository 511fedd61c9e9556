"""POST /decisions/{decision_id}/activate: deferred decisions count once they are activated."""

from __future__ import annotations

from typing import Annotated, final

from fastapi import APIRouter, Path
from pydantic import BaseModel, ConfigDict, Field

from metaban.service.errors import InvalidInput, Unauthorized, Unavailable, UnknownDecision
from metaban.service.http.auth import ClientEngine
from metaban.service.http.openapi import problem_responses
from metaban.service.http.schemas.fields import DecisionId

router = APIRouter(prefix="/decisions", tags=["recommendations"])


@final
class ActivationOut(BaseModel):
    """An activated decision."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"decision_id": "first-order", "activated_ms": 1_772_344_800_000}]}
    )

    decision_id: str
    activated_ms: int = Field(description="Time of the activation; the reward window starts then.")


@router.post(
    "/{decision_id}/activate",
    summary="Activate a deferred decision",
    responses=problem_responses(Unauthorized, UnknownDecision, InvalidInput, Unavailable),
)
async def activate(
    engine: ClientEngine,
    decision_id: Annotated[DecisionId, Path(description="Id of the recommendation.", examples=["first-order"])],
) -> ActivationOut:
    """Report that the arms of a decision made with `deferred` were shown. It accepts rewards from now on.

    The call can be repeated. It does nothing for a decision that was not deferred.
    """
    decision = await engine.decider.activate(decision_id)
    return ActivationOut(decision_id=decision.decision_id, activated_ms=decision.since_ms)
