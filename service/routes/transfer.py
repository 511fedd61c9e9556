"""/admin/transfer: which users help a target, worked out by workers; and who teaches whom by the served epoch."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, final

from fastapi import APIRouter, Path, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from models.teaching import Teaching
from service.auditing import note_detail
from service.auth import AdminEngine
from service.bodies import TransferRequest
from service.errors import (
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
from service.examples import TRANSFER_EXAMPLES
from service.intake import body_as, parse_json, read_body
from service.openapi import json_body, problem_responses
from store.transfer import TransferJob, TransferQuestion

router = APIRouter(prefix="/admin/transfer", tags=["administration"])

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
    """What was asked."""

    user_id: str | None
    cluster: int | None
    sources: list[str] | None = Field(description="null: every other cluster.")
    metric: str


class JobFields(BaseModel):
    """What is told of a transfer job wherever it is; never by itself."""

    id: str = Field(description="Look after it at /admin/transfer/{id}.")
    state: Literal["queued", "running", "failed", "done"] = Field(description="`queued` until a worker takes it.")
    progress: float = Field(description="From 0 to 1.")
    doing: str = Field(description="What it is at; empty when it is at nothing.")
    requested_ms: int
    started_ms: int | None
    finished_ms: int | None
    reason: str | None = Field(description="Why it failed.")
    request: QuestionOut


@final
class JobSummaryOut(JobFields):
    """A transfer job, without what came of it."""


@final
class PartyOut(BaseModel):
    """Whose rewards they are: one user's, or those of a cluster."""

    user_id: str | None
    cluster: int | None
    users: int = Field(description="How many they are of.")
    events: int = Field(description="Rewards that it was trained and judged with, the newest.")


@final
class SourceOut(BaseModel):
    """What a source does for the target. Gains are losses saved: positive is good."""

    user_id: str | None
    cluster: int | None
    users: int = Field(description="How many they are of.")
    events: int = Field(description="Rewards that it was trained with, the newest.")
    coefficient: float = Field(description="What it adds to the target's loss, in any company: below 0 it helps.")
    low: float = Field(description="The 90 % interval of that begins here.")
    high: float
    selected: bool = Field(description="Whether it is among those that help best together.")
    predicted_gain: float = Field(description="By that source alone, by the coefficient.")
    gain: float = Field(description="By that source alone, as measured.")


@final
class LossesOut(BaseModel):
    """What the target loses, on rewards that nothing else looked at."""

    alone: float
    everything: float = Field(description="With all sources.")
    selected: float = Field(description="With the selected ones.")


@final
class SurrogateOut(BaseModel):
    """How well sums of coefficients foretell losses."""

    error: float = Field(description="Mean squared, on sets of sources that it was not fitted to.")
    variance: float = Field(description="Of the losses of all sets; an error far below it means that they add up.")


@final
class TransferResultOut(BaseModel):
    """Which sources help a target."""

    target: PartyOut
    metric: str
    losses: LossesOut
    predicted_gain: float = Field(description="By the selected sources, by the coefficients.")
    gain: float = Field(description="The same as measured: `losses.alone` − `losses.selected`.")
    gain_error: float = Field(description="The standard error of the gain.")
    applies: bool = Field(description="Whether the selected sources did help.")
    gamma: float = Field(description="Sources below this coefficient are selected.")
    subsets: int = Field(description="Sets of sources that were trained.")
    surrogate: SurrogateOut
    sources: list[SourceOut] = Field(description="The most helpful first.")


@final
class TransferJobOut(JobFields):
    """A transfer job, and what came of it."""

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

    result: TransferResultOut | None = Field(description="What came of it; null until then.")


@final
class TeachingOut(BaseModel):
    """How much the rewards of each cluster of users count in what all others learn."""

    model_version: int = Field(description="The epoch that says so.")
    clusters: int
    weights: list[float] = Field(description="Of each cluster: 1, or 0 for one that makes others learn worse.")
    gain: float = Field(
        description="What silencing some saves the others, on users held out, in nats a user; where all weights are 1, "
        "what it would save, which is too little."
    )
    gain_error: float = Field(description="Its standard error.")
    in_use: bool = Field(description="Whether rewards count so now; false where groups tell users apart anyway.")


@final
class TransferOut(BaseModel):
    """The jobs of the last day, and who teaches."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "jobs": [JOB_EXAMPLE],
                    "teaching": {
                        "model_version": 7,
                        "clusters": 8,
                        "weights": [1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0],
                        "gain": 0.31,
                        "gain_error": 0.02,
                        "in_use": True,
                    },
                }
            ]
        }
    )

    jobs: list[JobSummaryOut] = Field(description="The newest first, at most 32.")
    teaching: TeachingOut | None = Field(
        description="By the epoch that the process that answered serves; null until clusters are told apart, and where "
        "the learner does not do that."
    )


@router.post(
    "",
    summary="Which users help a target?",
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
    """Have a worker find out which sources help a target that learns together with them; GET tells how it is doing.

    Asked again for the same while it waits or is under way, it answers with that job. A target needs 30 rewards that
    are kept, and two sources or more; what only the worker can see to be too little makes the job fail, with the
    reason. 503 while 8 jobs wait.
    """
    asked = body_as(TransferRequest, parse_json(await read_body(request)))
    sources = None if asked.sources is None else tuple(asked.sources)
    # Users are not written down: one may be forgotten.
    note_detail(request, metric=asked.metric, cluster=asked.cluster, sources=None if sources is None else len(sources))
    return _shown(await engine.transfer.request(TransferQuestion(asked.metric, asked.user_id, asked.cluster, sources)))


@router.get(
    "",
    summary="Transfer jobs, and who teaches",
    responses=problem_responses(Unauthorized, Forbidden, NotFound, Unavailable),
)
async def show(engine: AdminEngine) -> TransferOut:
    """The jobs that are remembered, without their results, and the weights of clusters in the served epoch."""
    view = await engine.transfer.describe()
    return TransferOut(
        jobs=[JobSummaryOut(**_summary(job)) for job in view.jobs],
        teaching=None if view.teaching is None else _taught(view.teaching, view.model_version),
    )


@router.get(
    "/{job_id}",
    summary="How is a transfer job doing?",
    responses=problem_responses(Unauthorized, Forbidden, NotFound, Unavailable),
)
async def job(engine: AdminEngine, job_id: Annotated[str, Path(max_length=64)]) -> TransferJobOut:
    """State and progress of a job and, once it is done, which sources help, ranked."""
    return _shown(*await engine.transfer.job(job_id))


def _shown(job: TransferJob, result: dict[str, Any] | None = None) -> TransferJobOut:
    try:
        came = None if result is None else TransferResultOut.model_validate(result)
    except ValidationError:  # of another version of metaban
        came = None
    return TransferJobOut(**_summary(job), result=came)


def _summary(job: TransferJob) -> dict[str, Any]:
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


def _taught(teaching: Teaching, model_version: int) -> TeachingOut:
    return TeachingOut(
        model_version=model_version,
        clusters=teaching.kinds,
        weights=teaching.weights.tolist(),
        gain=teaching.gain,
        gain_error=teaching.gain_error,
        in_use=teaching.in_use,
    )
