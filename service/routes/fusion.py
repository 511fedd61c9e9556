"""/admin/fusion: the model that new users' learners are made from, and its training."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final, Literal, final

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from service.auth import AdminEngine
from service.errors import Forbidden, FusionUnavailable, NotFound, Unauthorized, Unavailable
from service.fusing import told
from service.openapi import problem_responses
from store.fusion import FusionJob

router = APIRouter(prefix="/admin/fusion", tags=["administration"])

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
    """The latest training, by a worker."""

    model_config = ConfigDict(json_schema_extra={"examples": [JOB_EXAMPLE]})

    state: Literal["idle", "queued", "running", "failed", "done"] = Field(
        description="`queued` until a worker takes it; `idle`: there was none yet."
    )
    progress: float = Field(description="From 0 to 1.")
    doing: str = Field(description="What it is at; empty when it is at nothing.")
    by: Literal["schedule", "growth", "request"] | None = Field(description="Why it was begun.")
    requested_ms: int | None
    started_ms: int | None
    finished_ms: int | None
    reason: str | None = Field(description="Why it failed.")

    @staticmethod
    def of(job: FusionJob) -> FusionJobOut:
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
    """How first rewards of users held out were foretold, in nats a user; less loss is better."""

    verdict: Literal["fusion", "blend", "prior"] = Field(
        description="What new users with a profile begin from: what is fused, something between that and the "
        "meta-learner's prior, or the prior alone."
    )
    blend: float = Field(description="How far a beginning goes from the prior to what is fused.")
    trust: float = Field(description="Share of the prior's variance that profiles explain, at most.")
    held_out: int = Field(description="Users held out.")
    events: int = Field(description="Rewards of theirs that were foretold.")
    prior_loss: float
    fusion_loss: float
    gain: float = Field(description="How much less the loss is by profiles.")
    gain_error: float = Field(description="The standard error of the gain.")
    summary: str = Field(description="The same in words.")


@final
class FusionOut(BaseModel):
    """What new users' learners are made from."""

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
                        "summary": "The first rewards of 124 users held out were foretold by their profiles 1.48 ± "
                        "0.21 nats a user better than by the meta-learner's prior. New users with a profile begin "
                        "from what is fused.",
                    },
                    "job": {**JOB_EXAMPLE, "state": "done", "progress": 1.0, "finished_ms": 1772344811300},
                }
            ]
        }
    )

    available: bool = Field(description="Whether the learner of the namespace takes warm starts.")
    setting: Literal["auto", "off"] = Field(description="`off`: nobody gets a new one. See PATCH /admin/config.")
    version: int | None = Field(description="The newest fusion model; null: there is none.")
    served: int | None = Field(description="The one that the process that answered makes starts with; null: none.")
    trained_ms: int | None
    sources: int | None = Field(description="Users that it was made from, without those forgotten since.")
    profile_size: int | None = Field(
        description="Numbers that a profile is made of, as the first `user_features` had them; null: there were none."
    )
    guard: GuardOut | None = Field(description="Whether profiles help, and so whether it is used.")
    job: FusionJobOut


@router.get(
    "",
    summary="What do new users begin from?",
    responses=problem_responses(Unauthorized, Forbidden, NotFound, Unavailable),
)
async def show(engine: AdminEngine) -> FusionOut:
    """The newest fusion model, what its guard found, and the latest training."""
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
        guard=None if guard is None else GuardOut(**asdict(guard), summary=told(guard)),
        job=FusionJobOut.of(view.job),
    )


@router.post(
    "",
    summary="Train fusion now",
    status_code=202,
    responses=problem_responses(Unauthorized, Forbidden, NotFound, FusionUnavailable, Unavailable),
)
async def train(engine: AdminEngine) -> FusionJobOut:
    """Have a worker train a new fusion model from what users have learned and told; GET tells how it is doing.

    Asked again while one waits or is under way, it answers with that one.
    """
    return FusionJobOut.of(await engine.fusion.request())
