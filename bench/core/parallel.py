"""Parallel trials: one process a core. Runs share a progress bar; one that raises does not stop the others."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.queues import Queue
from queue import Empty
from typing import Final, Protocol, TypeAlias, TypeVar, final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from metaban.models.numerics.hardware import one_thread, use_threads

Task = TypeVar("Task")

Result = TypeVar("Result")

#: Interval at which the bar reads reports, and the time it averages over: methods differ a hundredfold in speed.
LOOK_EVERY_S: Final = 0.2
SPEED_OVER_S: Final = 300.0

#: Variables that numerical libraries read when loaded; they give a run one core.
ONE_THREAD: Final = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def run_parallel(play: Callable[[Task], Result], trials: Sequence[Task]) -> Iterator[Result]:
    """The result of each trial, in order; in this process if there is only one core or one trial."""
    jobs = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1, len(trials))
    if jobs <= 1:
        with one_thread():
            yield from map(play, trials)
        return
    # Spawned: a forked child would inherit torch's threads in an undefined state.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, use_threads, (1,)) as pool:
        yield from pool.map(play, trials)


class SeededRun(Protocol):
    """A run of a method: its name in tables, its seed, and its rounds for the progress bar."""

    @property
    def label(self) -> str: ...

    @property
    def seed(self) -> int: ...

    @property
    def rounds(self) -> int: ...


#: Called by a run with the number of rounds played since the last call.
Advance: TypeAlias = Callable[[int], None]

SomeRun = TypeVar("SomeRun", bound=SeededRun)


@final
@dataclass(frozen=True, slots=True)
class Failure:
    """A run that raised an exception."""

    label: str
    seed: int
    error: str

    def __str__(self) -> str:
        return f"{self.label}, seed {self.seed}: {self.error}"


def run_all(
    execute: Callable[[SomeRun, Advance], Result],
    runs: Sequence[SomeRun],
    *,
    jobs: int,
    console: Console,
    unit: str = "rounds",
) -> tuple[list[Result], list[Failure]]:
    """Execute all runs, `jobs` at a time; results in order. `execute` is a function of a module."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit))
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    bar = Progress(*columns, *times, console=console, transient=True, speed_estimate_period=SPEED_OVER_S)
    with bar, _one_thread():
        task = bar.add_task(f"{len(runs)} runs", total=sum(run.rounds for run in runs))

        def advance(rounds: int) -> None:
            bar.advance(task, rounds)

        ended = (
            _in_processes(execute, runs, jobs, advance) if min(jobs, len(runs)) > 1 else _here(execute, runs, advance)
        )
    return [end for end in ended if not isinstance(end, Failure)], [end for end in ended if isinstance(end, Failure)]


def _here(
    execute: Callable[[SomeRun, Advance], Result], runs: Sequence[SomeRun], advance: Advance
) -> list[Result | Failure]:
    with one_thread():
        return [_guarded(run, partial(execute, run, advance)) for run in runs]


def _in_processes(
    execute: Callable[[SomeRun, Advance], Result], runs: Sequence[SomeRun], jobs: int, advance: Advance
) -> list[Result | Failure]:
    # Spawned: a forked child would inherit torch's threads in an undefined state.
    context = multiprocessing.get_context("spawn")
    reports: Queue[int] = context.Queue()

    def drain() -> None:
        try:
            while True:
                advance(reports.get_nowait())
        except Empty:
            return

    with ProcessPoolExecutor(min(jobs, len(runs)), context, _start_child, (reports,)) as pool:
        futures = [pool.submit(_in_child, execute, run) for run in runs]
        pending: set[Future[Result]] = set(futures)
        try:
            while pending:
                _, pending = wait(pending, LOOK_EVERY_S, FIRST_COMPLETED)
                drain()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        drain()
    return [_guarded(run, future.result) for run, future in zip(runs, futures, strict=True)]


def _guarded(run: SeededRun, ending: Callable[[], Result]) -> Result | Failure:
    try:
        return ending()
    except Exception as error:
        return Failure(run.label, run.seed, f"{type(error).__name__}: {error}")


@contextmanager
def _one_thread() -> Iterator[None]:
    """Set the variables of `ONE_THREAD` for child processes, which load their libraries anew."""
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ.update(ONE_THREAD)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@final
class _Reporter:
    """Where a child process sends its progress; set once at its start."""

    queue: Queue[int] | None = None


def _start_child(queue: Queue[int]) -> None:
    use_threads(1)
    queue.cancel_join_thread()  # an unread report must not keep the process alive
    _Reporter.queue = queue


def _in_child(execute: Callable[[SomeRun, Advance], Result], run: SomeRun) -> Result:
    queue = _Reporter.queue
    return execute(run, queue.put if queue is not None else lambda rounds: None)
