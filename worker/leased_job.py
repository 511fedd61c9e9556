"""A job that one worker does under a lease: the lease is kept and the progress written down while it is at work."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, Final, Generic, Protocol, TypeVar, final

import structlog

from store.errors import StoreReset, StoreUnavailable

#: Short, since a killed worker's lease has to run out before another can take over.
JOB_LEASE_MS: Final = 3_000

log = structlog.get_logger()
Job = TypeVar("Job")
Told = TypeVar("Told", contravariant=True)
Value = TypeVar("Value")


class JobStore(Protocol[Told]):
    """Where a lease is kept and a job is told of."""

    async def renew_lease(self, token: str, ttl_ms: int) -> bool:
        """Keep the lease; False when it was lost."""

    async def put_job(self, job: Told, *, lease_token: str) -> bool:
        """Say how a job is coming along; False when it is not ours to tell any more."""


class Interrupted(Exception):
    """The job is not ours any more, or the worker stops."""


@final
class LeasedJob(Generic[Job]):
    """One job under way; `job` is what is to be told of it, and may be changed at any time."""

    def __init__(self, store: JobStore[Job], stopping: asyncio.Event, job: Job, *, token: str) -> None:
        self.job = job
        self._store = store
        self._stopping = stopping
        self._token = token
        self._written: Job | None = None
        self._over = asyncio.Event()
        self._lost = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None

    async def begin(self) -> bool:
        """Tell that it is under way, and keep the lease from now on; False when it is not ours."""
        self._written = self.job
        if not await self._store.put_job(self.job, lease_token=self._token):
            self._lost.set()
            return False
        self._keeping = asyncio.create_task(self._keep())
        return True

    async def end(self) -> None:
        """Tell nothing more, so that the last word can be written; the lease is still ours for a while."""
        # Not cancelled: what it was about to write would overtake the last word.
        self._over.set()
        if self._keeping is not None:
            await self._keeping

    async def unless_interrupted(self, work: Coroutine[Any, Any, Value]) -> Value:
        """What comes of some work, which is cancelled when it is not wanted any more: Interrupted then."""
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

    async def _keep(self) -> None:
        """Keep the lease and write down what has changed, once a second, until all is over or the lease is lost."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(JOB_LEASE_MS / 3_000):
                    await self._over.wait()
            if self._over.is_set():
                return
            try:
                kept = await self._store.renew_lease(self._token, JOB_LEASE_MS)
                if kept and self.job != self._written:
                    self._written = self.job
                    kept = await self._store.put_job(self.job, lease_token=self._token)
            except StoreUnavailable as error:
                log.warning("store unavailable", error=str(error))
                continue
            except StoreReset:
                kept = False  # who works finds out by itself
            if not kept:
                self._lost.set()
                return


async def keep_ticking(
    tick: Callable[[], Awaitable[None]], stopping: asyncio.Event, every_s: float, unforeseen: str
) -> None:
    """Look after something again and again until asked to stop; only the loss of the store ends it before."""
    while not stopping.is_set():
        try:
            await tick()
        except StoreUnavailable as error:
            log.warning("store unavailable", error=str(error))
        except StoreReset:
            raise
        except Exception:
            # Learning goes on without it; the consumers would end with this task.
            log.exception(unforeseen)
        with suppress(TimeoutError):
            async with asyncio.timeout(every_s):
                await stopping.wait()
