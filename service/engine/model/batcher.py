"""Micro-batching: requests that arrive while the model is busy are scored together in the next pass."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final, final

from metaban.service.engine.model.served_model import ServedModel
from metaban.service.engine.model.types import Chosen, Draw, ScoreRequest
from metaban.service.errors import Overloaded
from metaban.service.telemetry.metrics import NamespaceMetrics

#: Most requests scored in one pass.
BATCH_REQUESTS: Final = 64

#: Most arms scored in one pass, each request counted as large as the largest; a single request may have more.
BATCH_ARMS: Final = 4_096

#: Most requests that wait. Further ones are refused: they would wait longer than their clients do.
WAITING_REQUESTS_MAX: Final = 1_024


@final
@dataclass(frozen=True, slots=True)
class _Waiting:
    request: ScoreRequest
    draw: Draw
    answer: asyncio.Future[Chosen]


@final
class Batcher:
    """Feeds the served model, one batch at a time, off the event loop."""

    def __init__(self, model: ServedModel, compute: Executor, metrics: NamespaceMetrics) -> None:
        self._model = model
        self._compute = compute
        self._metrics = metrics
        self._waiting: deque[_Waiting] = deque()
        self._drain: asyncio.Task[None] | None = None

    async def choose(self, request: ScoreRequest, draw: Draw) -> Chosen:
        """Score the arms of one request and choose among them by `draw`, which runs on the model's thread."""
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
            results: Sequence[Chosen | Exception]
            try:
                results = await loop.run_in_executor(self._compute, self._score, batch)
            except Exception as error:
                results = [error] * len(batch)
            for waiting, result in zip(batch, results, strict=True):
                if waiting.answer.done():  # its client has disconnected
                    continue
                if isinstance(result, Exception):
                    waiting.answer.set_exception(result)
                else:
                    waiting.answer.set_result(result)

    def _score(self, batch: list[_Waiting]) -> list[Chosen | Exception]:
        return self._model.choose([(waiting.request, waiting.draw) for waiting in batch])

    def _next_batch(self) -> list[_Waiting]:
        batch = [self._waiting.popleft()]
        largest = batch[0].request.inputs.shape[0]
        while self._waiting and len(batch) < BATCH_REQUESTS:
            largest = max(largest, self._waiting[0].request.inputs.shape[0])
            if largest * (len(batch) + 1) > BATCH_ARMS:
                break
            batch.append(self._waiting.popleft())
        return batch
