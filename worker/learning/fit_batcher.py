"""Fits users of several partitions together, in one call of the trainer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import final

from metaban.worker.learning.model import SharedEpoch
from metaban.worker.learning.trainer import FitInput, FitResult, Trainer

#: Most users of one batch; the others wait for the next.
BATCH_USERS = 256

#: After a stop, batches begin for this long. A process that stops later than its supervisor allows is killed, so events
#: of later batches are left to the next worker.
FINISH_S = 6.0


@final
class FitAbandoned(Exception):
    """The worker stops before the fit began."""


@final
@dataclass(frozen=True, slots=True)
class FitRequest:
    """The users of one partition to fit, and the future for their result."""

    trainer: Trainer
    epoch: SharedEpoch
    fit_inputs: Sequence[FitInput]
    result: asyncio.Future[FitResult]


@final
class FitBatcher:
    """Collects the fits of all consumers and runs them in batches on an executor.

    Requests that arrive during a fit go into the next batch. Those that wait longer than FINISH_S after a stop raise
    FitAbandoned.
    """

    def __init__(self, compute: Executor, stopping: asyncio.Event) -> None:
        self._compute = compute
        self._stopping = stopping
        self._last_begin_s: float | None = None
        self._waiting: list[FitRequest] = []
        self._task: asyncio.Task[None] | None = None

    async def fit(self, trainer: Trainer, epoch: SharedEpoch, fit_inputs: Sequence[FitInput]) -> FitResult:
        """Fit users. No user may be in two requests at once; partitions guarantee this."""
        result: asyncio.Future[FitResult] = asyncio.get_running_loop().create_future()
        self._waiting.append(FitRequest(trainer, epoch, fit_inputs, result))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        return await result

    async def _run(self) -> None:
        while self._waiting:
            batch = self._next_batch()
            if self._too_late():
                for request in batch:
                    _fail(request, FitAbandoned())
                continue
            try:
                await self._fit(batch)
            except Exception as error:
                if len(batch) == 1:
                    _fail(batch[0], error)
                    continue
                # One request of the batch cannot be fitted; the others must not fail with it.
                for request in batch:
                    try:
                        await self._fit([request])
                    except Exception as own_error:
                        _fail(request, own_error)

    async def _fit(self, batch: Sequence[FitRequest]) -> None:
        first = batch[0]
        fit_inputs = [fit_input for request in batch for fit_input in request.fit_inputs]
        loop = asyncio.get_running_loop()
        fitted = await loop.run_in_executor(self._compute, first.trainer.fit, first.epoch.tensors, fit_inputs)
        start = 0
        for request in batch:
            end = start + len(request.fit_inputs)
            if not request.result.done():
                request.result.set_result(fitted.part(start, end, request.fit_inputs))
            start = end

    def _too_late(self) -> bool:
        """Whether no batch may begin any more."""
        if not self._stopping.is_set():
            return False
        now_s = time.monotonic()
        if self._last_begin_s is None:
            self._last_begin_s = now_s + FINISH_S
        return now_s >= self._last_begin_s

    def _next_batch(self) -> list[FitRequest]:
        """The oldest requests that share trainer and epoch, up to BATCH_USERS users."""
        first = self._waiting[0]
        batch: list[FitRequest] = []
        users = 0
        while self._waiting and self._waiting[0].epoch is first.epoch and self._waiting[0].trainer is first.trainer:
            users += len(self._waiting[0].fit_inputs)
            if batch and users > BATCH_USERS:
                break
            batch.append(self._waiting.pop(0))
        return batch


def _fail(request: FitRequest, error: Exception) -> None:
    if not request.result.done():
        request.result.set_exception(error)
