"""Work that takes longer than a request: started by one, looked after by others. Known to this process only."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextvars import Context
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, final
from uuid import uuid4

import structlog

from service.errors import JobRunning, NotFound, ServiceError
from service.records import now_ms
from store.errors import StoreError
from store.snapshots import Progress

#: Jobs remembered after their end.
REMEMBERED: Final = 100
STOP_AGAIN_S: Final = 0.5

Work: TypeAlias = Callable[[Progress], Awaitable[dict[str, Any]]]

_log = structlog.stdlib.get_logger(__name__)


@final
@dataclass(slots=True)
class Job:
    """One piece of work and how it stands."""

    id: str
    kind: str
    started_ms: int
    state: Literal["running", "done", "failed"] = "running"
    finished_ms: int | None = None
    doing: str = ""
    done: int = 0
    total: int = 0
    result: dict[str, Any] | None = None
    error: str | None = None

    def tell(self, what: str, done: int, total: int) -> None:
        """Take note of the progress."""
        self.doing, self.done, self.total = what, done, total


@final
class JobTable:
    """The jobs of this process, one at a time."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._task: asyncio.Task[None] | None = None

    def require_idle(self) -> None:
        """JobRunning while a job is under way."""
        if self._task is not None and not self._task.done():
            running = next(reversed(self._jobs.values()))
            raise JobRunning(f"Job {running.id} ({running.kind}) is under way; wait for it to end.")

    def start(self, kind: str, work: Work) -> Job:
        """Begin; JobRunning while another one is under way."""
        self.require_idle()
        job = Job(uuid4().hex[:12], kind, now_ms())
        self._jobs[job.id] = job
        while len(self._jobs) > REMEMBERED:
            self._jobs.popitem(last=False)
        # A context of its own: it outlives the request, whose id would be in all its log lines.
        self._task = asyncio.create_task(self._run(job, work), context=Context())
        return job

    def get(self, job_id: str) -> Job:
        """A job by its id; NotFound when it is not remembered here."""
        if job_id not in self._jobs:
            raise NotFound("There is no such job in this process; jobs are forgotten when it restarts.")
        return self._jobs[job_id]

    def list(self) -> list[Job]:
        """The jobs that are remembered, the newest first."""
        return [*reversed(self._jobs.values())]

    async def stop(self) -> None:
        """Break off what is under way."""
        while self._task is not None and not self._task.done():
            self._task.cancel()  # more than once: the driver may swallow a cancellation
            await asyncio.wait([self._task], timeout=STOP_AGAIN_S)

    async def _run(self, job: Job, work: Work) -> None:
        _log.info("job started", job=job.id, kind=job.kind)
        try:
            job.result = await work(job.tell)
            _log.info("job done", job=job.id, kind=job.kind, **job.result)
        except (StoreError, OSError) as error:
            job.error = str(error)
            _log.error("job failed", job=job.id, kind=job.kind, reason=job.error)
        except ServiceError as error:
            # Something about what a client sent, of which nothing stands in the log.
            job.error = error.detail
            _log.warning("job refused", job=job.id, kind=job.kind, reason=error.slug)
        except asyncio.CancelledError:
            job.error = "the service was stopped"
            _log.warning("job broken off", job=job.id, kind=job.kind)
            raise
        except Exception:
            job.error = "something went wrong on our side; the log has it under the id of the job"
            _log.exception("job failed", job=job.id, kind=job.kind)
        finally:
            job.state = "done" if job.result is not None else "failed"
            job.finished_ms = now_ms()
