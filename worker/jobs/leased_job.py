"""A job that one worker runs under a lease; the lease is renewed and progress is stored while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, Final, Generic, Protocol, TypeVar, final

import structlog

from metaban.store.errors import StoreReset, StoreUnavailable
from metaban.worker.learning.outages import store_failed
from metaban.worker.learning.pauses import until_next

#: Short: after a worker was killed, its lease has to expire before another worker can take over.
JOB_LEASE_MS: Final = 3_000

#: Reason of a job that failed by an unexpected error.
INTERNAL_ERROR: Final = "internal error of the worker: see its log"

log = structlog.get_logger()

Job = TypeVar("Job")

StoredJob = TypeVar("StoredJob", contravariant=True)

Value = TypeVar("Value")


class JobStore(Protocol[StoredJob]):
    """Stores the lease and the status of jobs."""

    async def renew_lease(self, token: str, ttl_ms: int) -> bool:
        """Renew the lease; False when it was lost."""

    async def put_job(self, job: StoredJob, *, lease_token: str) -> bool:
        """Store the status of a job; False when the lease was lost."""


class Interrupted(Exception):
    """The lease was lost, or the worker stops."""


@final
class LeasedJob(Generic[Job]):
    """A running job. `job` is its status; assign to it at any time, the change is stored within a second."""

    def __init__(self, store: JobStore[Job], stopping: asyncio.Event, job: Job, *, token: str) -> None:
        self.job = job
        self._store = store
        self._stopping = stopping
        self._token = token
        self._written: Job | None = None
        self._ended = asyncio.Event()
        self._lost = asyncio.Event()
        self._renewing: asyncio.Task[None] | None = None

    async def begin(self) -> bool:
        """Store the status and start to renew the lease; False when the lease was lost."""
        self._written = self.job
        if not await self._store.put_job(self.job, lease_token=self._token):
            self._lost.set()
            return False
        self._renewing = asyncio.create_task(self._renew())
        return True

    async def end(self) -> None:
        """Stop storing progress, so that the final status can be written; the lease stays valid for a while."""
        # Awaited, not cancelled: a write in flight could overwrite the final status.
        self._ended.set()
        if self._renewing is not None:
            await self._renewing

    async def unless_interrupted(self, work: Coroutine[Any, Any, Value]) -> Value:
        """Result of `work`. When the lease is lost or the worker stops, cancels it and raises Interrupted."""
        working = asyncio.create_task(work)
        signals = [asyncio.create_task(event.wait()) for event in (self._stopping, self._lost)]
        try:
            await asyncio.wait([working, *signals], return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise Interrupted
            return working.result()
        finally:
            for task in (working, *signals):
                task.cancel()
            await asyncio.gather(working, *signals, return_exceptions=True)

    async def _renew(self) -> None:
        """Renew the lease and store a changed status once a second, until the job ends or the lease is lost."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(JOB_LEASE_MS / 3_000):
                    await self._ended.wait()
            if self._ended.is_set():
                return
            try:
                kept = await self._store.renew_lease(self._token, JOB_LEASE_MS)
                if kept and self.job != self._written:
                    self._written = self.job
                    kept = await self._store.put_job(self.job, lease_token=self._token)
            except StoreUnavailable as error:
                store_failed(error)
                continue
            except StoreReset:
                kept = False  # the job itself raises StoreReset at its next command
            if not kept:
                self._lost.set()
                return


async def run_periodically(
    tick: Callable[[], Awaitable[None]], stopping: asyncio.Event, every_s: float, *, failure_event: str
) -> None:
    """Call `tick` every `every_s` seconds until asked to stop. Errors are logged; only StoreReset is raised."""
    while not stopping.is_set():
        try:
            await tick()
        except StoreUnavailable as error:
            store_failed(error)
        except StoreReset:
            raise
        except Exception:
            # Raising would also end the consumers, and learning does not need these jobs.
            log.exception(failure_event)
        with suppress(TimeoutError):
            async with asyncio.timeout(until_next(every_s)):
                await stopping.wait()
