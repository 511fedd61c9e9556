"""/admin/transfer: jobs that measure which users help a target."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, final

from fastapi import APIRouter, Path, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from metaban.service.errors import (
    BodyTooLarge,
    Forbidden,
    InvalidInput,
    MalformedBody,
    NotFound,
    Overloaded,
    Unauthorized,
    Unavailable,
    UnsupportedMedia,
)
from metaban.service.http.audit import AuditedRoute, note_detail
from metaban.service.http.auth import AdminEngine
from metaban.service.http.openapi import json_body, problem_responses
from metaban.service.http.parsing import body_as, parse_json, read_body
from metaban.service.http.schemas.admin import TransferRequest
from metaban.service.http.schemas.examples import TRANSFER_EXAMPLES
from metaban.store.shared.transfer import TransferJobRecord, TransferQuestion

router = APIRouter(route_class=AuditedRoute, prefix="/admin/transfer", tags=["administration"])

JOB_EXAMPLE: Final[dict[str, Any]] = {
    "id": "5f1c22ab90de",
    "state": "running",
    "progress": 0.4,
    "doing": "modeling",
    "requested_ms": 1772344800000,
    "started_ms": 1772344800900,
    "finished_ms": None,
    "reason": None,
    "request": {"user_id": "ada", "cluster": None, "sources": ["ben", "cleo"], "metric": "cross-entropy"},
}

RESULT_EXAMPLE: Final[dict[str, Any]] = {
    "target": {"user_id": "ada", "cluster": None, "users": 1, "events": 180},
    "metric": "cross-entropy",
    "losses": {"alone": 0.412, "everything": 0.398, "selected": 0.351},
    "predicted_gain": 0.066,
    "gain": 0.061,
    "gain_error": 0.018,
    "applies": True,
    "gamma": -0.011,
    "subsets": 16,
    "surrogate": {"error": 0.0001, "variance": 0.0021},
    "sources": [
        {
            "user_id": "cleo",
            "cluster": None,
            "users": 1,
            "events": 200,
            "coefficient": -0.066,
            "low": -0.074,
            "high": -0.058,
            "selected": True,
            "predicted_gain": 0.066,
            "gain": 0.07,
        },
        {
            "user_id": "ben",
            "cluster": None,
            "users": 1,
            "events": 95,
            "coefficient": 0.044,
            "low": 0.036,
            "high": 0.052,
            "selected": False,
            "predicted_gain": -0.044,
            "gain": -0.051,
        },
    ],
}


@final
class QuestionOut(BaseModel):
    """The request of a job."""

    user_id: str | None
    cluster: int | None
    sources: list[str] | None = Field(description="null if all other clusters are sources.")
    metric: str


class JobFields(BaseModel):
    """Fields of a transfer job with and without its result."""

    id: str = Field(description="Poll it at /admin/transfer/{id}.")
    state: Literal["queued", "running", "failed", "done"] = Field(description="`queued` until a worker starts it.")
    progress: float = Field(description="From 0 to 1.")
    doing: str = Field(description="Current step; empty if none is running.")
    requested_ms: int
    started_ms: int | None
    finished_ms: int | None
    reason: str | None = Field(description="Why the job failed.")
    request: QuestionOut


@final
class JobSummaryOut(JobFields):
    """A transfer job without its result."""


@final
class PartyOut(BaseModel):
    """The target: a user, or all users of a cluster."""

    user_id: str | None
    cluster: int | None
    users: int = Field(description="Number of users.")
    events: int = Field(description="Latest rewards used for training and evaluation.")


@final
class SourceOut(BaseModel):
    """The effect of a source on the target. A gain is a reduction of the loss: positive is better."""

    user_id: str | None
    cluster: int | None
    users: int = Field(description="Number of users.")
    events: int = Field(description="Latest rewards used for training.")
    coefficient: float = Field(description="Effect of the source on the target's loss; below 0 it helps.")
    low: float = Field(description="Lower bound of the 90 % interval of the coefficient.")
    high: float = Field(description="Upper bound of the interval.")
    selected: bool = Field(description="Whether the source is in the selected set.")
    predicted_gain: float = Field(description="Gain by this source alone, predicted from the coefficient.")
    gain: float = Field(description="Gain by this source alone, as measured.")


@final
class LossesOut(BaseModel):
    """Losses of the target on held-out rewards."""

    alone: float = Field(description="Without sources.")
    everything: float = Field(description="With all sources.")
    selected: float = Field(description="With the selected sources.")


@final
class SurrogateOut(BaseModel):
    """How well sums of coefficients predict losses."""

    error: float = Field(description="Mean squared error on sets of sources that were not used for the fit.")
    variance: float = Field(description="Variance of the losses; if the error is far below it, effects add up.")


@final
class TransferResultOut(BaseModel):
    """Which sources help a target."""

    target: PartyOut
    metric: str
    losses: LossesOut
    predicted_gain: float = Field(description="Gain by the selected sources, predicted from the coefficients.")
    gain: float = Field(description="Measured gain: `losses.alone` − `losses.selected`.")
    gain_error: float = Field(description="Standard error of the gain.")
    applies: bool = Field(description="Whether the gain is more than two standard errors.")
    gamma: float = Field(description="Sources below this coefficient are selected.")
    subsets: int = Field(description="Number of sets of sources that were trained.")
    surrogate: SurrogateOut
    sources: list[SourceOut] = Field(description="The most helpful first.")


@final
class TransferJobOut(JobFields):
    """A transfer job with its result."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    **JOB_EXAMPLE,
                    "state": "done",
                    "progress": 1.0,
                    "doing": "",
                    "finished_ms": 1772344808300,
                    "result": RESULT_EXAMPLE,
                }
            ]
        }
    )

    result: TransferResultOut | None = Field(description="Result of a job that is done; null otherwise.")


@final
class TransferOut(BaseModel):
    """The jobs of the last day, and the number of clusters."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "jobs": [JOB_EXAMPLE],
                    "clusters": 4,
                    "model_version": 7,
                }
            ]
        }
    )

    jobs: list[JobSummaryOut] = Field(description="At most 32, newest first.")
    clusters: int = Field(
        description="Clusters that the users form in the epoch that this process serves, counted from 0 in requests; 1 "
        "while users do not form any, 0 before anything is learned."
    )
    model_version: int = Field(description="The served epoch, which the clusters belong to.")


@router.post(
    "",
    summary="Measure which users help a target",
    status_code=202,
    response_model=TransferJobOut,
    openapi_extra=json_body(TransferRequest, examples=TRANSFER_EXAMPLES),
    responses=problem_responses(
        MalformedBody,
        Unauthorized,
        Forbidden,
        NotFound,
        BodyTooLarge,
        UnsupportedMedia,
        InvalidInput,
        Overloaded,
        Unavailable,
    ),
)
async def ask(request: Request, engine: AdminEngine) -> TransferJobOut:
    """Request a job that measures which sources help a target if it learns together with them. Poll it with GET.

    While a job for the same request is queued or running, the call returns that one. A target needs 30 kept rewards and
    at least two sources. If the worker finds too few rewards, the job fails with the reason. 503 while 8 jobs wait.
    """
    asked = body_as(TransferRequest, parse_json(await read_body(request)))
    sources = None if asked.sources is None else tuple(asked.sources)
    # No user ids in the audit log: a user may be forgotten.
    note_detail(request, metric=asked.metric, cluster=asked.cluster, sources=None if sources is None else len(sources))
    return _job_response(
        await engine.transfer.request(TransferQuestion(asked.metric, asked.user_id, asked.cluster, sources))
    )


@router.get(
    "",
    summary="List transfer jobs and the number of clusters",
    responses=problem_responses(Unauthorized, Forbidden, NotFound, Unavailable),
)
async def show(engine: AdminEngine) -> TransferOut:
    """The jobs of the last day without their results, and the number of clusters in the served epoch."""
    view = await engine.transfer.describe()
    return TransferOut(
        jobs=[JobSummaryOut(**_summary(job)) for job in view.jobs],
        clusters=view.clusters,
        model_version=view.model_version,
    )


@router.get(
    "/{job_id}",
    summary="Show a transfer job",
    responses=problem_responses(Unauthorized, Forbidden, NotFound, Unavailable),
)
async def job(engine: AdminEngine, job_id: Annotated[str, Path(max_length=64)]) -> TransferJobOut:
    """State and progress of a job. When it is done, the sources ranked by how much they help."""
    return _job_response(*await engine.transfer.job(job_id))


def _job_response(job: TransferJobRecord, result: dict[str, Any] | None = None) -> TransferJobOut:
    try:
        parsed = None if result is None else TransferResultOut.model_validate(result)
    except ValidationError:  # written by another version of metaban
        parsed = None
    return TransferJobOut(**_summary(job), result=parsed)


def _summary(job: TransferJobRecord) -> dict[str, Any]:
    question = job.question
    return {
        "id": job.id,
        "state": job.state,
        "progress": job.progress,
        "doing": job.doing,
        "requested_ms": job.requested_ms,
        "started_ms": job.started_ms or None,
        "finished_ms": job.finished_ms or None,
        "reason": job.reason or None,
        "request": QuestionOut(
            user_id=question.user_id,
            cluster=question.cluster,
            sources=None if question.sources is None else list(question.sources),
            metric=question.metric,
        ),
    }
