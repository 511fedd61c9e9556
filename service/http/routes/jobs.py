"""/admin/jobs: state and progress of snapshot and import jobs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Final, Literal, final

from fastapi import APIRouter, Path
from pydantic import BaseModel, ConfigDict, Field, JsonValue

from metaban.service.engine.admin.jobs import ProcessJob
from metaban.service.errors import Forbidden, NotFound, Unauthorized
from metaban.service.http.audit import AuditedRoute
from metaban.service.http.auth import AdminEngine
from metaban.service.http.openapi import problem_responses

router = APIRouter(route_class=AuditedRoute, prefix="/admin/jobs", tags=["administration"])


@final
class ProgressOut(BaseModel):
    """Progress of a job."""

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
    """A long task that goes on after the request that started it."""

    model_config = ConfigDict(json_schema_extra={"examples": [JOB_EXAMPLE]})

    id: str = Field(description="Poll it at /admin/jobs/{id}.")
    kind: Literal["snapshot-create", "snapshot-restore", "arms-import"]
    state: Literal["running", "done", "failed"]
    started_ms: int
    finished_ms: int | None
    progress: ProgressOut
    result: dict[str, JsonValue] | None = Field(description="Result of a job that is done; null otherwise.")
    error: str | None = Field(description="Why the job failed, and what to do; null otherwise.")


@final
class JobListOut(BaseModel):
    """The latest jobs of this process, the newest first."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"jobs": [JOB_EXAMPLE]}]})

    jobs: list[JobOut]


@router.get("", summary="List jobs", responses=problem_responses(Unauthorized, Forbidden))
async def show(engine: AdminEngine) -> JobListOut:
    """The latest 100 jobs of this process, the newest first."""
    return JobListOut(jobs=[job_response(job) for job in engine.snapshots.jobs.list()])


@router.get(
    "/{job_id}",
    summary="Show a job",
    responses=problem_responses(Unauthorized, Forbidden, NotFound),
)
async def job(engine: AdminEngine, job_id: Annotated[str, Path(max_length=64)]) -> JobOut:
    """State, progress and result of a job of this process."""
    return job_response(engine.snapshots.jobs.get(job_id))


def job_response(job: ProcessJob) -> JobOut:
    """A job as a response body."""
    fields = asdict(job)
    progress = ProgressOut(doing=fields.pop("doing"), done=fields.pop("done"), total=fields.pop("total"))
    return JobOut(**fields, progress=progress)
