"""Micro-batching: requests that arrive while tensors are busy are scored together in the next pass."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import final

from service.errors import Overloaded
from service.metrics import NamespaceMetrics
from service.served import ArmScores, ScoreRequest, ServedModel

#: Requests scored in one pass.
BATCH_REQUESTS = 64
#: Arms scored in one pass, each request counted as the largest of them, unless a single request has more.
BATCH_ARMS = 4_096
#: Requests that may wait; more are turned away, since they would wait longer than their clients.
WAITING_REQUESTS_MAX = 1_024


@final
class Scorer:
    """Feeds the served model, one batch at a time, off the event loop."""

    def __init__(self, model: ServedModel, compute: Executor, metrics: NamespaceMetrics) -> None:
        self._model = model
        self._compute = compute
        self._metrics = metrics
        self._waiting: deque[tuple[ScoreRequest, asyncio.Future[ArmScores]]] = deque()
        self._drain: asyncio.Task[None] | None = None

    async def score(self, request: ScoreRequest) -> ArmScores:
        """Judge the arms of one request."""
        if len(self._waiting) >= WAITING_REQUESTS_MAX:
            raise Overloaded(f"{WAITING_REQUESTS_MAX} requests are waiting to be scored")
        answer: asyncio.Future[ArmScores] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        if self._drain is None or self._drain.done():
            self._drain = asyncio.create_task(self._score_waiting())
        return await answer

    async def _score_waiting(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            batch = self._next_batch()
            self._metrics.batch_requests.observe(len(batch))
            requests = [request for request, _ in batch]
            try:
                scores: Sequence[ArmScores] = await loop.run_in_executor(self._compute, self._model.score, requests)
            except Exception as error:
                for _, answer in batch:
                    if not answer.done():
                        answer.set_exception(error)
                continue
            for (_, answer), score in zip(batch, scores, strict=True):
                if not answer.done():  # its client may have gone
                    answer.set_result(score)

    def _next_batch(self) -> list[tuple[ScoreRequest, asyncio.Future[ArmScores]]]:
        batch = [self._waiting.popleft()]
        largest = batch[0][0].inputs.shape[0]
        while self._waiting and len(batch) < BATCH_REQUESTS:
            largest = max(largest, self._waiting[0][0].inputs.shape[0])
            if largest * (len(batch) + 1) > BATCH_ARMS:
                break
            batch.append(self._waiting.popleft())
        return batch
