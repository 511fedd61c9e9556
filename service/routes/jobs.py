"""/admin/jobs: how work is doing that goes on after the request for it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, final

from fastapi import APIRouter, Path
from pydantic import BaseModel

from service.auth import AdminEngine
from service.errors import Forbidden, NotFound, Unauthorized
from service.jobs import Job
from service.openapi import problem_responses
from service.schemas import JobOut, ProgressOut

router = APIRouter(prefix="/admin/jobs", tags=["administration"])


@final
class JobListOut(BaseModel):
    """The jobs that this process remembers, the newest first."""

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
