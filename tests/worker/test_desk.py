"""The desk: one fit for all who wait, one answer for each, and nobody fails for a neighbour."""

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

from models.learner import Learner, State, UserBatch
from models.presets import build_learner
from tests.worker.workshop import CPU, INPUTS, make_sample, small
from worker import desk as desk_module
from worker.desk import FittingDesk
from worker.model import SharedEpoch
from worker.trainer import Pupil, Trainer


def watched() -> tuple[Trainer, list[int]]:
    """A trainer whose learner tells how many users it was given at a time."""
    learner = build_learner(small(), INPUTS)
    sizes: list[int] = []
    fit: Callable[[State, UserBatch, State], State] = learner.fit

    def counted(shared: State, batch: UserBatch, previous: State) -> State:
        sizes.append(batch.events.shape[0])
        return fit(shared, batch, previous)

    learner.fit = counted  # type: ignore[method-assign]
    return Trainer(learner, CPU), sizes


def epoch_of(learner: Learner, number: int = 0) -> SharedEpoch:
    return SharedEpoch(number, 0, (), learner.initial_shared())


def pupils(*names: str, samples: int = 2) -> list[Pupil]:
    return [Pupil(name, samples, [make_sample(len(name) + i) for i in range(samples)], None) for name in names]


def misfit(name: str) -> Pupil:
    """A user no learner can be made of: samples are of something else."""
    return Pupil(name, 3, [replace(make_sample(1), features=np.zeros(1, dtype=np.float32))], None)


@pytest.fixture
def busy() -> Iterator[tuple[Executor, Event]]:
    """A thread that does something else until the event is set."""
    free = Event()
    with ThreadPoolExecutor(max_workers=1) as executor:
        executor.submit(free.wait, 10)
        yield executor, free
        free.set()


async def all_waiting(*errands: Any) -> list[asyncio.Task[Any]]:
    """Start errands and let each reach the desk."""
    tasks = [asyncio.create_task(errand) for errand in errands]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return tasks


async def answers(tasks: Sequence[asyncio.Task[Any]]) -> list[Any]:
    async with asyncio.timeout(30):
        return await asyncio.gather(*tasks, return_exceptions=True)


async def test_what_arrives_while_busy_is_fitted_together(busy: tuple[Executor, Event]) -> None:
    compute, free = busy
    trainer, sizes = watched()
    epoch = epoch_of(trainer.learner)
    desk = FittingDesk(compute)
    groups = [pupils("a"), pupils("b", "cc"), pupils("ddd"), pupils("eeee", "fffff", "g")]
    tasks = await all_waiting(*(desk.fit(trainer, epoch, group) for group in groups))
    free.set()
    fitted = await answers(tasks)
    assert sizes in ([1, 6], [7])  # the first may have left before the others came
    for group, answer in zip(groups, fitted, strict=True):
        alone = trainer.fit(epoch.tensors, group)
        for state, own in zip(answer.states, alone.states, strict=True):
            np.testing.assert_allclose(state["theta"], own["theta"], rtol=1e-5, atol=1e-6)


async def test_epochs_and_trainers_are_not_mixed(busy: tuple[Executor, Event]) -> None:
    compute, free = busy
    trainer, sizes = watched()
    other, other_sizes = watched()
    old, new = epoch_of(trainer.learner, 0), epoch_of(trainer.learner, 1)
    new.tensors["scale"] = torch.arange(1.0, len(new.tensors["scale"]) + 1)
    desk = FittingDesk(compute)
    tasks = await all_waiting(
        desk.fit(trainer, old, pupils("first")),
        desk.fit(trainer, old, pupils("a", "b")),
        desk.fit(trainer, new, pupils("a")),
        desk.fit(other, new, pupils("a", "b", "c")),
        desk.fit(trainer, old, pupils("a")),
    )
    free.set()
    fitted = await answers(tasks)
    assert sum(sizes) == 5
    assert max(sizes) <= 3
    assert other_sizes == [3]
    np.testing.assert_allclose(fitted[4].states[0]["theta"], fitted[1].states[0]["theta"], rtol=1e-5, atol=1e-6)
    assert not np.allclose(fitted[2].states[0]["theta"], fitted[1].states[0]["theta"], atol=1e-6)


async def test_a_batch_has_a_limit(busy: tuple[Executor, Event], monkeypatch: pytest.MonkeyPatch) -> None:
    compute, free = busy
    monkeypatch.setattr(desk_module, "BATCH_USERS", 3)
    trainer, sizes = watched()
    epoch = epoch_of(trainer.learner)
    desk = FittingDesk(compute)
    groups = [pupils("a"), pupils("b", "c"), pupils("d", "e"), pupils("f", "g", "h", "i"), pupils("j")]
    tasks = await all_waiting(*(desk.fit(trainer, epoch, group) for group in groups))
    free.set()
    fitted = await answers(tasks)
    assert [len(answer.states) for answer in fitted] == [1, 2, 2, 4, 1]
    assert max(sizes) == 4, "a single errand may be larger than the limit, several together may not"
    assert sum(sizes) == 10


async def test_a_misfit_fails_alone(busy: tuple[Executor, Event]) -> None:
    compute, free = busy
    trainer, _ = watched()
    epoch = epoch_of(trainer.learner)
    desk = FittingDesk(compute)
    tasks = await all_waiting(
        desk.fit(trainer, epoch, pupils("a")),
        desk.fit(trainer, epoch, pupils("b")),
        desk.fit(trainer, epoch, [misfit("x")]),
        desk.fit(trainer, epoch, pupils("c", "d")),
    )
    free.set()
    first, second, broken, last = await answers(tasks)
    assert isinstance(broken, Exception)
    assert [len(answer.states) for answer in (first, second, last)] == [1, 1, 2]
    # The desk is as good as new.
    assert len((await desk.fit(trainer, epoch, pupils("e"))).states) == 1


async def test_when_nothing_can_be_fitted_everyone_is_told() -> None:
    trainer, _ = watched()
    epoch = epoch_of(trainer.learner)
    compute = ThreadPoolExecutor(max_workers=1)
    compute.shutdown()
    desk = FittingDesk(compute)
    tasks = await all_waiting(*(desk.fit(trainer, epoch, pupils(name)) for name in "abc"))
    assert all(isinstance(answer, RuntimeError) for answer in await answers(tasks))


async def test_one_who_leaves_does_not_disturb_the_rest(busy: tuple[Executor, Event]) -> None:
    compute, free = busy
    trainer, _ = watched()
    epoch = epoch_of(trainer.learner)
    desk = FittingDesk(compute)
    tasks = await all_waiting(*(desk.fit(trainer, epoch, pupils(name)) for name in ("a", "b", "c")))
    tasks[1].cancel()
    free.set()
    first, gone, last = await answers(tasks)
    assert isinstance(gone, asyncio.CancelledError)
    assert len(first.states) == len(last.states) == 1
