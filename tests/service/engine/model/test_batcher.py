"""Batches of requests: their limits, their failures, and which request gets which answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from threading import Event
from typing import Any

import numpy as np
import pytest

from metaban.models.policies import Slate
from metaban.models.presets import build_learner
from metaban.service.engine.model import batcher as scorer_module
from metaban.service.engine.model.batcher import Batcher
from metaban.service.engine.model.served_model import ServedModel
from metaban.service.engine.model.types import ArmScores, Chosen, Draw, ScoreRequest
from metaban.service.errors import Overloaded
from metaban.service.telemetry.metrics import Metrics
from tests.service.engine.model.served_models import everything
from tests.worker.workshop import CPU, INPUTS, features, small_default


def watched() -> tuple[ServedModel, list[int]]:
    """A model, and a list of its batch sizes."""
    model = ServedModel(build_learner(small_default(), INPUTS), CPU, pool_max=10, guests_max=10)
    sizes: list[int] = []
    choose = model.choose

    def counted(asked: Sequence[tuple[ScoreRequest, Draw]]) -> list[Chosen | Exception]:
        sizes.append(len(asked))
        return choose(asked)

    model.choose = counted  # type: ignore[method-assign]
    return model, sizes


def ask(seed: int, arms: int = 2) -> ScoreRequest:
    return ScoreRequest(f"user {seed}", np.stack([features(100 * seed + arm) for arm in range(arms)]))


BROKEN = ScoreRequest("broken", np.zeros((1, INPUTS + 4), dtype=np.float32))


@pytest.fixture
def busy() -> Iterator[tuple[Executor, Event]]:
    """A compute thread that is busy until the event is set."""
    free = Event()
    with ThreadPoolExecutor(max_workers=1) as executor:
        executor.submit(free.wait, 10)
        yield executor, free
        free.set()


async def all_waiting(*requests: Any) -> list[asyncio.Task[Chosen]]:
    tasks = [asyncio.create_task(request) for request in requests]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return tasks


async def answers(tasks: Sequence[asyncio.Task[Chosen]]) -> list[Any]:
    async with asyncio.timeout(30):
        return await asyncio.gather(*tasks, return_exceptions=True)


async def test_waiting_requests_are_scored_in_one_batch(busy: tuple[Executor, Event]) -> None:
    compute, free = busy
    model, sizes = watched()
    scorer = Batcher(model, compute, Metrics().of("shop"))
    requests = [ask(seed, 1 + seed % 4) for seed in range(20)]
    tasks = await all_waiting(*(scorer.choose(request, everything) for request in requests))
    free.set()
    scored = await answers(tasks)
    assert sum(sizes) == 20
    assert len(sizes) <= 2
    for request, chosen in zip(requests, scored, strict=True):
        assert chosen.slate.chosen == tuple(range(len(request.inputs)))
        np.testing.assert_allclose(chosen.scores.mean, model.score([request])[0].mean, rtol=1e-5, atol=1e-6)


async def test_batches_have_limits(busy: tuple[Executor, Event], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scorer_module, "BATCH_REQUESTS", 4)
    monkeypatch.setattr(scorer_module, "BATCH_ARMS", 6)
    compute, free = busy
    model, sizes = watched()
    scorer = Batcher(model, compute, Metrics().of("shop"))
    tasks = await all_waiting(
        *(scorer.choose(ask(seed, arms), everything) for seed, arms in enumerate((1, 1, 1, 1, 1, 5, 2, 9, 1)))
    )
    free.set()
    assert [len(chosen.scores.mean) for chosen in await answers(tasks)] == [1, 1, 1, 1, 1, 5, 2, 9, 1]
    assert sum(sizes) == 9
    assert max(sizes) <= 4


async def test_no_batch_is_larger_than_its_limit_once_padded(
    busy: tuple[Executor, Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of a batch are padded to the largest one."""
    monkeypatch.setattr(scorer_module, "BATCH_ARMS", 12)
    compute, free = busy
    model = ServedModel(build_learner(small_default(), INPUTS), CPU, pool_max=10, guests_max=10)
    batches: list[list[int]] = []
    choose = model.choose

    def noted(asked: Sequence[tuple[ScoreRequest, Draw]]) -> list[Chosen | Exception]:
        batches.append([len(request.inputs) for request, _ in asked])
        return choose(asked)

    model.choose = noted  # type: ignore[method-assign]
    scorer = Batcher(model, compute, Metrics().of("shop"))
    arms = (2, 2, 2, 10, 1, 1, 1, 6, 5, 4, 4, 4, 20, 1)
    tasks = await all_waiting(*(scorer.choose(ask(seed, count), everything) for seed, count in enumerate(arms)))
    free.set()
    assert [len(chosen.scores.mean) for chosen in await answers(tasks)] == list(arms)
    # Without padding, 10 and 1 would share a batch, and 1, 1, 1, 6 too.
    assert batches == [[2, 2, 2], [10], [1, 1, 1], [6, 5], [4, 4, 4], [20], [1]]


async def test_too_many_waiting_requests_are_refused(
    busy: tuple[Executor, Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scorer_module, "WAITING_REQUESTS_MAX", 5)
    compute, free = busy
    scorer = Batcher(watched()[0], compute, Metrics().of("shop"))
    tasks = await all_waiting(*(scorer.choose(ask(seed), everything) for seed in range(12)))
    free.set()
    scored = await answers(tasks)
    refused = [answer for answer in scored if isinstance(answer, Overloaded)]
    assert len(refused) in (6, 7)  # the first batch may have left the queue before the queue was full
    assert sum(isinstance(answer, Chosen) for answer in scored) == 12 - len(refused)
    assert isinstance(await scorer.choose(ask(99), everything), Chosen), "later requests are accepted again"


async def test_failed_batch_raises_and_the_next_is_scored(compute: Executor) -> None:
    scorer = Batcher(watched()[0], compute, Metrics().of("shop"))
    async with asyncio.timeout(30):
        with pytest.raises(ValueError, match="shapes"):
            await scorer.choose(BROKEN, everything)
        assert isinstance(await scorer.choose(ask(1), everything), Chosen)


async def test_broken_request_does_not_block_others(
    busy: tuple[Executor, Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scorer_module, "BATCH_REQUESTS", 3)
    compute, free = busy
    scorer = Batcher(watched()[0], compute, Metrics().of("shop"))
    tasks = await all_waiting(
        *(scorer.choose(request, everything) for request in (ask(1), ask(2), BROKEN, ask(3), ask(4), ask(5), ask(6)))
    )
    free.set()
    scored = await answers(tasks)
    assert isinstance(scored[2], ValueError)
    assert all(isinstance(answer, Chosen) for answer in scored[4:])
    assert all(isinstance(answer, Chosen | ValueError) for answer in scored)


async def test_cancelled_request_does_not_affect_others(busy: tuple[Executor, Event]) -> None:
    compute, free = busy
    scorer = Batcher(watched()[0], compute, Metrics().of("shop"))
    tasks = await all_waiting(*(scorer.choose(ask(seed), everything) for seed in range(4)))
    tasks[2].cancel()
    free.set()
    scored = await answers(tasks)
    assert [type(answer) for answer in scored] == [Chosen, Chosen, asyncio.CancelledError, Chosen]


async def test_requests_after_shutdown_fail_at_once() -> None:
    compute = ThreadPoolExecutor(max_workers=1)
    compute.shutdown()
    scorer = Batcher(watched()[0], compute, Metrics().of("shop"))
    async with asyncio.timeout(30):
        with pytest.raises(RuntimeError):
            await scorer.choose(ask(1), everything)


async def test_failed_draw_raises_for_its_request_only(busy: tuple[Executor, Event]) -> None:
    compute, free = busy
    model, sizes = watched()
    scorer = Batcher(model, compute, Metrics().of("shop"))

    def refuse(scores: ArmScores) -> Slate:
        raise LookupError("nothing to choose")

    tasks = await all_waiting(
        scorer.choose(ask(0), everything), *(scorer.choose(ask(n), refuse if n == 2 else everything) for n in (1, 2, 3))
    )
    free.set()
    assert [type(answer) for answer in await answers(tasks)] == [Chosen, Chosen, LookupError, Chosen]
    assert max(sizes) >= 3, "in one batch"
