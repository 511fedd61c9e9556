"""/admin/jobs: how work is doing that goes on after the request for it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Final, Literal, final

from fastapi import APIRouter, Path
from pydantic import BaseModel, ConfigDict, Field, JsonValue

from service.auth import AdminEngine
from service.errors import Forbidden, NotFound, Unauthorized
from service.jobs import Job
from service.openapi import problem_responses

router = APIRouter(prefix="/admin/jobs", tags=["administration"])


@final
class ProgressOut(BaseModel):
    """How far a job is."""

    doing: str = Field(description="What is being counted.", examples=["users"])
    done: int
    total: int


JOB_EXAMPLE: Final[dict[str, Any]] = {
    "id": "5f1c22ab90de",
    "kind": "snapshot-create",
    "state": "done",
    "started_ms": 1772344800000,
    "finished_ms": 1772344803200,
    "progress": {"doing": "users", "done": 5012, "total": 5012},
    "result": {"snapshot": "20260301T060000Z-ab12cd", "users": 5012, "events": 90210, "damaged": 0},
    "error": None,
}


@final
class JobOut(BaseModel):
    """Work that goes on after the request."""

    model_config = ConfigDict(json_schema_extra={"examples": [JOB_EXAMPLE]})

    id: str = Field(description="Look after it at /admin/jobs/{id}.")
    kind: Literal["snapshot-create", "snapshot-restore", "arms-import"]
    state: Literal["running", "done", "failed"]
    started_ms: int
    finished_ms: int | None
    progress: ProgressOut
    result: dict[str, JsonValue] | None = Field(description="What was done; null until then.")
    error: str | None = Field(description="Why it failed, and what to do.")


@final
class JobListOut(BaseModel):
    """The jobs that this process remembers, the newest first."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"jobs": [JOB_EXAMPLE]}]})

    jobs: list[JobOut]


@router.get("", summary="List jobs", responses=problem_responses(Unauthorized, Forbidden))
async def show(engine: AdminEngine) -> JobListOut:
    """The latest 100 jobs that this process was asked for, the newest first."""
    return JobListOut(jobs=[shown(job) for job in engine.snapshots.jobs.list()])


@router.get(
    "/{job_id}",
    summary="How is a job doing?",
    responses=problem_responses(Unauthorized, Forbidden, NotFound),
)
async def job(engine: AdminEngine, job_id: Annotated[str, Path(max_length=64)]) -> JobOut:
    """State and progress of a job that this process was asked for."""
    return shown(engine.snapshots.jobs.get(job_id))


def shown(job: Job) -> JobOut:
    """A job as it is answered."""
    fields = asdict(job)
    progress = ProgressOut(doing=fields.pop("doing"), done=fields.pop("done"), total=fields.pop("total"))
    return JobOut(**fields, progress=progress)
