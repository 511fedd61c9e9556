"""Which users help a target: the calls of administrators, as plans, and what is answered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from service.client_calls import as_answer, encoded, segment
from service.client_core import Call
from service.client_errors import Unsendable
from service.client_jobs import JobWatch


@final
@dataclass(frozen=True, slots=True)
class TransferAsked:
    """What was asked; without sources, every other cluster was one."""

    user_id: str | None
    cluster: int | None
    sources: tuple[str, ...] | None
    metric: str


@final
@dataclass(frozen=True, slots=True)
class TransferTarget:
    """Who is helped, or not: one user, or those of a cluster."""

    user_id: str | None
    cluster: int | None
    users: int
    events: int


@final
@dataclass(frozen=True, slots=True)
class TransferSource:
    """What a source does for the target: below 0 the coefficient is of one that helps. Gains are losses saved."""

    user_id: str | None
    cluster: int | None
    users: int
    events: int
    coefficient: float
    low: float
    high: float
    selected: bool
    predicted_gain: float
    gain: float


@final
@dataclass(frozen=True, slots=True)
class TransferLosses:
    """Of the target by itself, with all sources and with the selected ones."""

    alone: float
    everything: float
    selected: float


@final
@dataclass(frozen=True, slots=True)
class TransferSurrogate:
    """How well sums of coefficients foretell losses: mean squared error, and what it is to be compared with."""

    error: float
    variance: float


@final
@dataclass(frozen=True, slots=True)
class TransferResult:
    """Which sources help a target, the most helpful first."""

    target: TransferTarget
    metric: str
    losses: TransferLosses
    predicted_gain: float
    gain: float
    gain_error: float
    applies: bool
    gamma: float
    subsets: int
    surrogate: TransferSurrogate
    sources: tuple[TransferSource, ...]


@final
@dataclass(frozen=True, slots=True)
class TransferJob:
    """A question: `queued`, `running`, `failed` or `done`; `result` is None until then, and in lists."""

    id: str
    state: str
    progress: float
    doing: str
    requested_ms: int
    started_ms: int | None
    finished_ms: int | None
    reason: str | None
    request: TransferAsked
    result: TransferResult | None = None


@final
@dataclass(frozen=True, slots=True)
class Teaching:
    """How much the rewards of each cluster count in what all others learn, and what that saves them, in nats a user."""

    model_version: int
    clusters: int
    weights: tuple[float, ...]
    gain: float
    gain_error: float
    in_use: bool


@final
@dataclass(frozen=True, slots=True)
class Transfer:
    """The jobs of the last day, the newest first, and who teaches; None until clusters are told apart."""

    jobs: tuple[TransferJob, ...]
    teaching: Teaching | None


def overview() -> Call[Transfer]:
    """The jobs there are, without their results, and who teaches."""
    return Call("GET", "/admin/transfer", as_answer(Transfer))


def ask(
    *,
    user_id: str | None = None,
    cluster: int | None = None,
    sources: Sequence[str] | None = None,
    metric: str = "mse",
) -> Call[TransferJob]:
    """Have a worker find out who helps a target, a user or a cluster; without `sources` every other cluster is one.

    Asked again for the same, it is the job that waits or is under way, if one does.
    """
    if (user_id is None) == (cluster is None):
        raise Unsendable("name the target: either user_id or cluster, and not both")
    wanted = {"user_id": user_id, "cluster": cluster, "sources": sources and list(sources), "metric": metric}
    content = encoded({name: value for name, value in wanted.items() if value is not None})
    return Call("POST", "/admin/transfer", as_answer(TransferJob), content=content)


def get(job_id: str) -> Call[TransferJob]:
    """How a job is doing, and what came of it."""
    return Call("GET", f"/admin/transfer/{segment(job_id)}", as_answer(TransferJob))


def wait(
    job_id: str, *, on_progress: Callable[[TransferJob], None] | None = None, timeout_s: float = 3600.0
) -> JobWatch[TransferJob]:
    """The job, when it is done; raises JobFailed when it has failed or takes longer than `timeout_s`."""
    return JobWatch(get(job_id), lambda job: job.reason, on_progress, timeout_s)
