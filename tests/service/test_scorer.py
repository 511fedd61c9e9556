"""Micro-batches: together when busy, never mixed up, never hanging."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from threading import Event
from typing import Any

import numpy as np
import pytest

from models.exploration import Slate
from models.presets import build_learner
from service import scorer as scorer_module
from service.errors import Overloaded
from service.metrics import Metrics
from service.scorer import Scorer
from service.scoring import ArmScores, Chosen, Draw, ScoreRequest
from service.served import ServedModel
from tests.service.serving import everything
from tests.worker.workshop import CPU, INPUTS, features, small


def watched() -> tuple[ServedModel, list[int]]:
    """A model that tells how many requests it was given at a time."""
    model = ServedModel(build_learner(small(), INPUTS), CPU, pool_max=10, guests_max=10)
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
    """A thread that does something else until the event is set."""
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


async def test_requests_that_wait_are_scored_together_and_answered_each(busy: tuple[Executor, Event]) -> None:
    compute, free = busy
    model, sizes = watched()
    scorer = Scorer(model, compute, Metrics().of("shop"))
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
    scorer = Scorer(model, compute, Metrics().of("shop"))
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
    """Arms stand side by side, so that beside a large request a small one takes as much room as the large one."""
    monkeypatch.setattr(scorer_module, "BATCH_ARMS", 12)
    compute, free = busy
    model = ServedModel(build_learner(small(), INPUTS), CPU, pool_max=10, guests_max=10)
    batches: list[list[int]] = []
    choose = model.choose

    def noted(asked: Sequence[tuple[ScoreRequest, Draw]]) -> list[Chosen | Exception]:
        batches.append([len(request.inputs) for request, _ in asked])
        return choose(asked)

    model.choose = noted  # type: ignore[method-assign]
    scorer = Scorer(model, compute, Metrics().of("shop"))
    arms = (2, 2, 2, 10, 1, 1, 1, 6, 5, 4, 4, 4, 20, 1)
    tasks = await all_waiting(*(scorer.choose(ask(seed, count), everything) for seed, count in enumerate(arms)))
    free.set()
    assert [len(chosen.scores.mean) for chosen in await answers(tasks)] == list(arms)
    # Without padding 10 and 1 would fit into one, and 1, 1, 1, 6 as well.
    assert batches == [[2, 2, 2], [10], [1, 1, 1], [6, 5], [4, 4, 4], [20], [1]]


async def test_too_many_waiting_are_turned_away(busy: tuple[Executor, Event], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scorer_module, "WAITING_REQUESTS_MAX", 5)
    compute, free = busy
    scorer = Scorer(watched()[0], compute, Metrics().of("shop"))
    tasks = await all_waiting(*(scorer.choose(ask(seed), everything) for seed in range(12)))
    free.set()
    scored = await answers(tasks)
    refused = [answer for answer in scored if isinstance(answer, Overloaded)]
    assert len(refused) in (6, 7)  # the first batch may have left the queue before the queue was full
    assert sum(isinstance(answer, Chosen) for answer in scored) == 12 - len(refused)
    assert isinstance(await scorer.choose(ask(99), everything), Chosen), "later ones are welcome again"


async def test_a_batch_that_fails_is_told_and_the_next_is_scored(compute: Executor) -> None:
    scorer = Scorer(watched()[0], compute, Metrics().of("shop"))
    async with asyncio.timeout(30):
        with pytest.raises(RuntimeError):
            await scorer.choose(BROKEN, everything)
        assert isinstance(await scorer.choose(ask(1), everything), Chosen)


async def test_nobody_hangs_beside_a_broken_request(
    busy: tuple[Executor, Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scorer_module, "BATCH_REQUESTS", 3)
    compute, free = busy
    scorer = Scorer(watched()[0], compute, Metrics().of("shop"))
    tasks = await all_waiting(
        *(scorer.choose(request, everything) for request in (ask(1), ask(2), BROKEN, ask(3), ask(4), ask(5), ask(6)))
    )
    free.set()
    scored = await answers(tasks)
    assert isinstance(scored[2], ValueError)
    assert all(isinstance(answer, Chosen) for answer in scored[4:])
    assert all(isinstance(answer, Chosen | ValueError) for answer in scored)


async def test_a_client_that_went_away_does_not_matter(busy: tuple[Executor, Event]) -> None:
    compute, free = busy
    scorer = Scorer(watched()[0], compute, Metrics().of("shop"))
    tasks = await all_waiting(*(scorer.choose(ask(seed), everything) for seed in range(4)))
    tasks[2].cancel()
    free.set()
    scored = await answers(tasks)
    assert [type(answer) for answer in scored] == [Chosen, Chosen, asyncio.CancelledError, Chosen]


async def test_after_the_end_requests_fail_and_do_not_wait() -> None:
    compute = ThreadPoolExecutor(max_workers=1)
    compute.shutdown()
    scorer = Scorer(watched()[0], compute, Metrics().of("shop"))
    async with asyncio.timeout(30):
        with pytest.raises(RuntimeError):
            await scorer.choose(ask(1), everything)


async def test_who_cannot_be_chosen_for_is_told_why_and_nobody_else(busy: tuple[Executor, Event]) -> None:
    compute, free = busy
    model, sizes = watched()
    scorer = Scorer(model, compute, Metrics().of("shop"))

    def refuse(scores: ArmScores) -> Slate:
        raise LookupError("nothing to choose")

    tasks = await all_waiting(
        scorer.choose(ask(0), everything), *(scorer.choose(ask(n), refuse if n == 2 else everything) for n in (1, 2, 3))
    )
    free.set()
    assert [type(answer) for answer in await answers(tasks)] == [Chosen, Chosen, LookupError, Chosen]
    assert max(sizes) >= 3, "in one batch"
