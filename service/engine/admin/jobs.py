"""Admin jobs of this process: a request starts one, later requests ask for its state."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextvars import Context
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, final
from uuid import uuid4

import structlog

from metaban.service.errors import JobRunning, NotFound, ServiceError
from metaban.store.codec import now_ms
from metaban.store.errors import StoreError
from metaban.store.snapshots.create import Progress

#: Jobs remembered.
REMEMBERED: Final = 100

#: Pause before a job that did not stop is cancelled again.
STOP_AGAIN_S: Final = 0.5

Work: TypeAlias = Callable[[Progress], Awaitable[dict[str, Any]]]

_log = structlog.stdlib.get_logger(__name__)


@final
@dataclass(slots=True)
class ProcessJob:
    """One job and its progress."""

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

    def report(self, what: str, done: int, total: int) -> None:
        """Record the progress."""
        self.doing, self.done, self.total = what, done, total


@final
class JobTable:
    """The jobs of this process, one at a time."""

    def __init__(self, namespace: str | None = None) -> None:
        self._log = _log.bind(namespace=namespace)
        self._jobs: OrderedDict[str, ProcessJob] = OrderedDict()
        self._task: asyncio.Task[None] | None = None

    def require_idle(self) -> None:
        """JobRunning while a job runs."""
        if self._task is not None and not self._task.done():
            running = next(reversed(self._jobs.values()))
            raise JobRunning(f"Job {running.id} ({running.kind}) is running; wait until it has ended.")

    def start(self, kind: str, work: Work) -> ProcessJob:
        """Start a job; JobRunning while another one runs."""
        self.require_idle()
        job = ProcessJob(uuid4().hex[:12], kind, now_ms())
        self._jobs[job.id] = job
        while len(self._jobs) > REMEMBERED:
            self._jobs.popitem(last=False)
        # An empty context: it outlives the request, whose id must not be in its log lines.
        self._task = asyncio.create_task(self._run(job, work), context=Context())
        return job

    def get(self, job_id: str) -> ProcessJob:
        """A job by its id; NotFound when this process does not know it."""
        if job_id not in self._jobs:
            raise NotFound("There is no such job in this process; jobs are forgotten when it restarts.")
        return self._jobs[job_id]

    def list(self) -> list[ProcessJob]:
        """The remembered jobs, the newest first."""
        return [*reversed(self._jobs.values())]

    async def stop(self) -> None:
        """Cancel the running job."""
        while self._task is not None and not self._task.done():
            self._task.cancel()  # more than once: the driver may swallow a cancellation
            await asyncio.wait([self._task], timeout=STOP_AGAIN_S)

    async def _run(self, job: ProcessJob, work: Work) -> None:
        self._log.info("job_started", job=job.id, kind=job.kind)
        try:
            job.result = await work(job.report)
            self._log.info("job_done", job=job.id, kind=job.kind, **job.result)
        except (StoreError, OSError) as error:
            job.error = str(error)
            self._log.error("job_failed", job=job.id, kind=job.kind, reason=job.error)
        except ServiceError as error:
            # The detail may quote the client's data, which is not logged.
            job.error = error.detail
            self._log.warning("job_refused", job=job.id, kind=job.kind, reason=error.slug)
        except asyncio.CancelledError:
            job.error = "the service was stopped"
            self._log.warning("job_cancelled", job=job.id, kind=job.kind)
            raise
        except Exception:
            job.error = "internal error: search the log for the id of the job"
            self._log.exception("job_failed", job=job.id, kind=job.kind)
        finally:
            job.state = "done" if job.result is not None else "failed"
            job.finished_ms = now_ms()
