"""/admin/fusion: the fusion model, which makes warm starts for new users, and its training."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final, Literal, final

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from metaban.service.engine.admin.warm_starts import guard_summary
from metaban.service.errors import Forbidden, FusionUnavailable, NotFound, Unauthorized, Unavailable
from metaban.service.http.audit import AuditedRoute
from metaban.service.http.auth import AdminEngine
from metaban.service.http.openapi import problem_responses
from metaban.store.shared.fusion import FusionJobRecord

router = APIRouter(route_class=AuditedRoute, prefix="/admin/fusion", tags=["administration"])

JOB_EXAMPLE: Final[dict[str, Any]] = {
    "state": "running",
    "progress": 0.4,
    "doing": "training",
    "by": "request",
    "requested_ms": 1772344800000,
    "started_ms": 1772344800900,
    "finished_ms": None,
    "reason": None,
}


@final
class FusionJobOut(BaseModel):
    """The latest training job of the fusion model."""

    model_config = ConfigDict(json_schema_extra={"examples": [JOB_EXAMPLE]})

    state: Literal["idle", "queued", "running", "failed", "done"] = Field(
        description="`queued` until a worker starts it; `idle` if there was no training yet."
    )
    progress: float = Field(description="From 0 to 1.")
    doing: str = Field(description="Current step; empty if none is running.")
    by: Literal["schedule", "growth", "request"] | None = Field(description="Why the training was started.")
    requested_ms: int | None
    started_ms: int | None
    finished_ms: int | None
    reason: str | None = Field(description="Why the training failed.")

    @staticmethod
    def of(job: FusionJobRecord) -> FusionJobOut:
        return FusionJobOut(
            state=job.state,
            progress=job.progress,
            doing=job.doing,
            by=job.by or None,
            requested_ms=job.requested_ms or None,
            started_ms=job.started_ms or None,
            finished_ms=job.finished_ms or None,
            reason=job.reason or None,
        )


@final
class GuardOut(BaseModel):
    """How well the first rewards of held-out users were predicted. Losses are in nats per user."""

    verdict: Literal["fusion", "blend", "prior"] = Field(
        description="Where new users with a profile start: at the warm start, between it and the prior, or at the "
        "prior."
    )
    blend: float = Field(description="Position between the prior (0) and the warm start (1).")
    trust: float = Field(description="Upper bound of the share of the prior's variance that profiles explain.")
    held_out: int = Field(description="Number of held-out users.")
    events: int = Field(description="Number of their rewards that were predicted.")
    prior_loss: float
    fusion_loss: float
    gain: float = Field(description="`prior_loss` − `fusion_loss`.")
    gain_error: float = Field(description="Standard error of the gain.")
    summary: str = Field(description="The verdict in words.")


@final
class FusionOut(BaseModel):
    """The fusion model of a namespace."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "available": True,
                    "setting": "auto",
                    "version": 3,
                    "served": 3,
                    "trained_ms": 1772344811300,
                    "sources": 412,
                    "profile_size": 4,
                    "guard": {
                        "verdict": "fusion",
                        "blend": 1.0,
                        "trust": 0.6,
                        "held_out": 124,
                        "events": 2480,
                        "prior_loss": 9.41,
                        "fusion_loss": 7.93,
                        "gain": 1.48,
                        "gain_error": 0.21,
                        "summary": "Warm starts predicted the first rewards of 124 held-out users 1.48 ± 0.21 nats per "
                        "user better than the prior. New users with a profile begin from their warm start.",
                    },
                    "job": {**JOB_EXAMPLE, "state": "done", "progress": 1.0, "finished_ms": 1772344811300},
                }
            ]
        }
    )

    available: bool = Field(description="Whether the learner of the namespace supports warm starts.")
    setting: Literal["auto", "off"] = Field(description="`off`: no new warm starts are made. See PATCH /admin/config.")
    version: int | None = Field(description="Version of the latest fusion model; null if there is none.")
    served: int | None = Field(description="Version that this process uses; null if there is none.")
    trained_ms: int | None
    sources: int | None = Field(description="Users it was trained on, without those forgotten since.")
    profile_size: int | None = Field(
        description="Length of a profile vector, fixed by the first `user_features`; null if there were none."
    )
    guard: GuardOut | None = Field(description="The check that decides whether warm starts are used.")
    job: FusionJobOut


@router.get(
    "",
    summary="Show the fusion model",
    responses=problem_responses(Unauthorized, Forbidden, NotFound, Unavailable),
)
async def show(engine: AdminEngine) -> FusionOut:
    """The latest fusion model, the result of its check on held-out users, and the latest training."""
    view = await engine.fusion.describe()
    record, guard = view.record, view.guard
    return FusionOut(
        available=view.available,
        setting=view.setting,
        version=None if record is None else record.version,
        served=view.served,
        trained_ms=None if record is None else record.created_ms,
        sources=None if record is None else len(record.sources),
        profile_size=view.profile_size,
        guard=None if guard is None else GuardOut(**asdict(guard), summary=guard_summary(guard)),
        job=FusionJobOut.of(view.job),
    )


@router.post(
    "",
    summary="Train the fusion model now",
    status_code=202,
    responses=problem_responses(Unauthorized, Forbidden, NotFound, FusionUnavailable, Unavailable),
)
async def train(engine: AdminEngine) -> FusionJobOut:
    """Request the training of a new fusion model from learned users and their profiles. Poll it with GET.

    While a training is queued or running, the call returns that one.
    """
    return FusionJobOut.of(await engine.fusion.request())
