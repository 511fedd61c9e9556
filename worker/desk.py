"""Fits of several partitions in one tensor program: what arrives while the tensors are busy goes into the next fit."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import final

from worker.model import SharedEpoch
from worker.trainer import Fitted, Pupil, Trainer

#: Users fitted in one go; more wait for the next.
BATCH_USERS = 256


@final
@dataclass(frozen=True, slots=True)
class Errand:
    """One partition's pupils, and who waits for them."""

    trainer: Trainer
    epoch: SharedEpoch
    pupils: Sequence[Pupil]
    answer: asyncio.Future[Fitted]


@final
class FittingDesk:
    """Takes pupils from all consumers and fits them together, off the event loop."""

    def __init__(self, compute: Executor) -> None:
        self._compute = compute
        self._waiting: list[Errand] = []
        self._work: asyncio.Task[None] | None = None

    async def fit(self, trainer: Trainer, epoch: SharedEpoch, pupils: Sequence[Pupil]) -> Fitted:
        """Fit users; no user may be fitted twice at once, which partitions see to."""
        answer: asyncio.Future[Fitted] = asyncio.get_running_loop().create_future()
        self._waiting.append(Errand(trainer, epoch, pupils, answer))
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._serve())
        return await answer

    async def _serve(self) -> None:
        while self._waiting:
            batch = self._next_batch()
            try:
                await self._fit(batch)
            except Exception as error:
                if len(batch) == 1:
                    _refuse(batch[0], error)
                    continue
                for errand in batch:  # one of them cannot be fitted, and the others are not to suffer for it
                    try:
                        await self._fit([errand])
                    except Exception as own_error:
                        _refuse(errand, own_error)

    async def _fit(self, batch: Sequence[Errand]) -> None:
        first = batch[0]
        pupils = [pupil for errand in batch for pupil in errand.pupils]
        loop = asyncio.get_running_loop()
        fitted = await loop.run_in_executor(self._compute, first.trainer.fit, first.epoch.tensors, pupils)
        start = 0
        for errand in batch:
            end = start + len(errand.pupils)
            if not errand.answer.done():
                errand.answer.set_result(fitted.part(start, end, errand.pupils))
            start = end

    def _next_batch(self) -> list[Errand]:
        """Errands of one epoch, in the order they came, up to the limit."""
        first = self._waiting[0]
        batch: list[Errand] = []
        users = 0
        while self._waiting and self._waiting[0].epoch is first.epoch and self._waiting[0].trainer is first.trainer:
            users += len(self._waiting[0].pupils)
            if batch and users > BATCH_USERS:
                break
            batch.append(self._waiting.pop(0))
        return batch


def _refuse(errand: Errand, error: Exception) -> None:
    if not errand.answer.done():
        errand.answer.set_exception(error)
