"""FitBatcher: waiting requests are fitted together; each gets its own result, and a failure stays with its request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch

from metaban.models.learner import Learner, State, UserBatch
from metaban.models.presets import build_learner
from metaban.store.codec import Sample
from metaban.worker.learning import fit_batcher as fit_batcher_module
from metaban.worker.learning.fit_batcher import FitAbandoned, FitBatcher
from metaban.worker.learning.model import SharedEpoch
from metaban.worker.learning.trainer import FitInput, Trainer
from tests.worker.workshop import CPU, INPUTS, NOTED, make_sample, small_default


def watched() -> tuple[Trainer, list[int]]:
    """A trainer, and the sizes of the batches its learner gets."""
    learner = build_learner(small_default(), INPUTS)
    sizes: list[int] = []
    fit: Callable[[State, UserBatch, State], State] = learner.fit

    def counted(shared: State, batch: UserBatch, previous: State) -> State:
        sizes.append(batch.events.shape[0])
        return fit(shared, batch, previous)

    learner.fit = counted  # type: ignore[method-assign]
    return Trainer(learner, CPU), sizes


def epoch_of(learner: Learner, number: int = 0) -> SharedEpoch:
    return SharedEpoch(number, 0, (), learner.initial_shared())


def fit_inputs(*names: str, samples: int = 2) -> list[FitInput]:
    def of(name: str) -> list[Sample]:
        return [make_sample(len(name) + number, noted=NOTED) for number in range(samples)]

    return [FitInput(name, samples, of(name), None) for name in names]


def misfit(name: str) -> FitInput:
    """A user who cannot be fitted: the sample has the wrong number of inputs."""
    return FitInput(name, 3, [replace(make_sample(1, noted=NOTED), features=np.zeros(1, dtype=np.float32))], None)


@pytest.fixture
def busy() -> Iterator[tuple[Executor, Event]]:
    """An executor whose only thread is busy until the event is set."""
    free = Event()
    with ThreadPoolExecutor(max_workers=1) as executor:
        executor.submit(free.wait, 10)
        yield executor, free
        free.set()


async def all_waiting(*requests: Any) -> list[asyncio.Task[Any]]:
    """Start requests and let each reach the batcher."""
    tasks = [asyncio.create_task(request) for request in requests]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return tasks


async def answers(tasks: Sequence[asyncio.Task[Any]]) -> list[Any]:
    async with asyncio.timeout(30):
        return await asyncio.gather(*tasks, return_exceptions=True)


async def test_requests_that_arrive_during_a_fit_are_fitted_together(busy: tuple[Executor, Event]) -> None:
    compute, free = busy
    trainer, sizes = watched()
    epoch = epoch_of(trainer.learner)
    fit_batcher = FitBatcher(compute, asyncio.Event())
    groups = [fit_inputs("a"), fit_inputs("b", "cc"), fit_inputs("ddd"), fit_inputs("eeee", "fffff", "g")]
    tasks = await all_waiting(*(fit_batcher.fit(trainer, epoch, group) for group in groups))
    free.set()
    fitted = await answers(tasks)
    assert sizes in ([1, 6], [7])  # the first may have started before the others arrived
    for group, answer in zip(groups, fitted, strict=True):
        alone = trainer.fit(epoch.tensors, group)
        for state, own in zip(answer.states, alone.states, strict=True):
            np.testing.assert_allclose(state["head"], own["head"], rtol=1e-5, atol=1e-6)


async def test_epochs_and_trainers_are_not_mixed(busy: tuple[Executor, Event]) -> None:
    compute, free = busy
    trainer, sizes = watched()
    other, other_sizes = watched()
    old, new = epoch_of(trainer.learner, 0), epoch_of(trainer.learner, 1)
    new.tensors["kind_centres"] = torch.ones_like(new.tensors["kind_centres"])
    fit_batcher = FitBatcher(compute, asyncio.Event())
    tasks = await all_waiting(
        fit_batcher.fit(trainer, old, fit_inputs("first")),
        fit_batcher.fit(trainer, old, fit_inputs("a", "b")),
        fit_batcher.fit(trainer, new, fit_inputs("a")),
        fit_batcher.fit(other, new, fit_inputs("a", "b", "c")),
        fit_batcher.fit(trainer, old, fit_inputs("a")),
    )
    free.set()
    fitted = await answers(tasks)
    assert sum(sizes) == 5
    assert max(sizes) <= 3
    assert other_sizes == [3]
    np.testing.assert_allclose(fitted[4].states[0]["head"], fitted[1].states[0]["head"], rtol=1e-5, atol=1e-6)
    assert not np.allclose(fitted[2].states[0]["head"], fitted[1].states[0]["head"], atol=1e-6)


async def test_a_batch_has_a_limit(busy: tuple[Executor, Event], monkeypatch: pytest.MonkeyPatch) -> None:
    compute, free = busy
    monkeypatch.setattr(fit_batcher_module, "BATCH_USERS", 3)
    trainer, sizes = watched()
    epoch = epoch_of(trainer.learner)
    fit_batcher = FitBatcher(compute, asyncio.Event())
    groups = [
        fit_inputs("a"),
        fit_inputs("b", "c"),
        fit_inputs("d", "e"),
        fit_inputs("f", "g", "h", "i"),
        fit_inputs("j"),
    ]
    tasks = await all_waiting(*(fit_batcher.fit(trainer, epoch, group) for group in groups))
    free.set()
    fitted = await answers(tasks)
    assert [len(answer.states) for answer in fitted] == [1, 2, 2, 4, 1]
    assert max(sizes) == 4, "a single request may be larger than the limit, several together may not"
    assert sum(sizes) == 10


async def test_a_misfit_fails_alone(busy: tuple[Executor, Event]) -> None:
    compute, free = busy
    trainer, _ = watched()
    epoch = epoch_of(trainer.learner)
    fit_batcher = FitBatcher(compute, asyncio.Event())
    tasks = await all_waiting(
        fit_batcher.fit(trainer, epoch, fit_inputs("a")),
        fit_batcher.fit(trainer, epoch, fit_inputs("b")),
        fit_batcher.fit(trainer, epoch, [misfit("x")]),
        fit_batcher.fit(trainer, epoch, fit_inputs("c", "d")),
    )
    free.set()
    first, second, broken, last = await answers(tasks)
    assert isinstance(broken, Exception)
    assert [len(answer.states) for answer in (first, second, last)] == [1, 1, 2]
    # Later requests work.
    assert len((await fit_batcher.fit(trainer, epoch, fit_inputs("e"))).states) == 1


async def test_when_the_executor_is_gone_all_requests_fail() -> None:
    trainer, _ = watched()
    epoch = epoch_of(trainer.learner)
    compute = ThreadPoolExecutor(max_workers=1)
    compute.shutdown()
    fit_batcher = FitBatcher(compute, asyncio.Event())
    tasks = await all_waiting(*(fit_batcher.fit(trainer, epoch, fit_inputs(name)) for name in "abc"))
    assert all(isinstance(answer, RuntimeError) for answer in await answers(tasks))


async def test_a_cancelled_request_does_not_affect_the_others(busy: tuple[Executor, Event]) -> None:
    compute, free = busy
    trainer, _ = watched()
    epoch = epoch_of(trainer.learner)
    fit_batcher = FitBatcher(compute, asyncio.Event())
    tasks = await all_waiting(*(fit_batcher.fit(trainer, epoch, fit_inputs(name)) for name in ("a", "b", "c")))
    tasks[1].cancel()
    free.set()
    first, gone, last = await answers(tasks)
    assert isinstance(gone, asyncio.CancelledError)
    assert len(first.states) == len(last.states) == 1


async def test_fits_that_wait_too_long_after_a_stop_are_abandoned(
    busy: tuple[Executor, Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit_batcher_module, "FINISH_S", 0.0)
    compute, free = busy
    trainer, sizes = watched()
    epoch = epoch_of(trainer.learner)
    stopping = asyncio.Event()
    fit_batcher = FitBatcher(compute, stopping)
    begun = await all_waiting(fit_batcher.fit(trainer, epoch, fit_inputs("a", "b")))
    waiting = await all_waiting(*(fit_batcher.fit(trainer, epoch, fit_inputs(name)) for name in "cd"))
    stopping.set()
    free.set()
    [first, *others] = await answers([*begun, *waiting])
    assert len(first.states) == 2
    assert [type(other) for other in others] == [FitAbandoned, FitAbandoned]
    assert sizes == [2]


async def test_fits_that_wait_briefly_after_a_stop_are_finished(busy: tuple[Executor, Event]) -> None:
    compute, free = busy
    trainer, _ = watched()
    epoch = epoch_of(trainer.learner)
    stopping = asyncio.Event()
    fit_batcher = FitBatcher(compute, stopping)
    tasks = await all_waiting(*(fit_batcher.fit(trainer, epoch, fit_inputs(name)) for name in "abc"))
    stopping.set()
    free.set()
    assert [len(answer.states) for answer in await answers(tasks)] == [1, 1, 1]
