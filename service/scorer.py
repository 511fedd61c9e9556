"""Micro-batching: requests that arrive while tensors are busy are answered together in the next pass."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import final

from service.errors import Overloaded
from service.metrics import NamespaceMetrics
from service.scoring import Chosen, Draw, ScoreRequest
from service.served import ServedModel

#: Requests scored in one pass.
BATCH_REQUESTS = 64
#: Arms scored in one pass, each request counted as the largest of them, unless a single request has more.
BATCH_ARMS = 4_096
#: Requests that may wait; more are turned away, since they would wait longer than their clients.
WAITING_REQUESTS_MAX = 1_024


@final
@dataclass(frozen=True, slots=True)
class _Waiting:
    request: ScoreRequest
    draw: Draw
    answer: asyncio.Future[Chosen]

    def tell(self, found: Chosen | Exception) -> None:
        if self.answer.done():  # its client may have gone
            return
        if isinstance(found, Exception):
            self.answer.set_exception(found)
        else:
            self.answer.set_result(found)


@final
class Scorer:
    """Feeds the served model, one batch at a time, off the event loop."""

    def __init__(self, model: ServedModel, compute: Executor, metrics: NamespaceMetrics) -> None:
        self._model = model
        self._compute = compute
        self._metrics = metrics
        self._waiting: deque[_Waiting] = deque()
        self._drain: asyncio.Task[None] | None = None

    async def choose(self, request: ScoreRequest, draw: Draw) -> Chosen:
        """Judge the arms of one request, and choose of them by `draw`, which another thread calls."""
        if len(self._waiting) >= WAITING_REQUESTS_MAX:
            raise Overloaded(f"{WAITING_REQUESTS_MAX} requests are waiting to be scored")
        answer: asyncio.Future[Chosen] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(request, draw, answer))
        if self._drain is None or self._drain.done():
            self._drain = asyncio.create_task(self._score_waiting())
        return await answer

    async def _score_waiting(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            batch = self._next_batch()
            self._metrics.batch_requests.observe(len(batch))
            asked = [(each.request, each.draw) for each in batch]
            found: Sequence[Chosen | Exception]
            try:
                found = await loop.run_in_executor(self._compute, self._model.choose, asked)
            except Exception as error:
                found = [error] * len(batch)
            for each, answer in zip(batch, found, strict=True):
                each.tell(answer)

    def _next_batch(self) -> list[_Waiting]:
        batch = [self._waiting.popleft()]
        largest = batch[0].request.inputs.shape[0]
        while self._waiting and len(batch) < BATCH_REQUESTS:
            largest = max(largest, self._waiting[0].request.inputs.shape[0])
            if largest * (len(batch) + 1) > BATCH_ARMS:
                break
            batch.append(self._waiting.popleft())
        return batch
