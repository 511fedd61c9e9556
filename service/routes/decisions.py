"""/decisions: what happens to a decision between its making and its rewards."""

from __future__ import annotations

from typing import Annotated, final

from fastapi import APIRouter, Path
from pydantic import BaseModel, ConfigDict, Field

from service.auth import ClientEngine
from service.errors import InvalidInput, Unauthorized, Unavailable, UnknownDecision
from service.openapi import problem_responses
from service.schemas import DecisionId

router = APIRouter(prefix="/decisions", tags=["recommendations"])


@final
class ActivationOut(BaseModel):
    """A decision that counts."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"decision_id": "first-order", "activated_ms": 1_772_344_800_000}]}
    )

    decision_id: str
    activated_ms: int = Field(description="Since when it counts: rewards are awaited from then on.")


@router.post(
    "/{decision_id}/activate",
    summary="Have a deferred decision count",
    responses=problem_responses(Unauthorized, UnknownDecision, InvalidInput, Unavailable),
)
async def activate(
    engine: ClientEngine,
    decision_id: Annotated[DecisionId, Path(description="As the recommendation said.", examples=["first-order"])],
) -> ActivationOut:
    """Say that the choice of a decision made with `deferred` was shown: it takes rewards from now on.

    Repeating it is harmless, and so is activating a decision that was not deferred.
    """
    done = await engine.activate(decision_id)
    return ActivationOut(decision_id=done.decision_id, activated_ms=done.activated_ms)
