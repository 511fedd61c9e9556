"""Runs of methods in environments, in parallel: one process and one core a run, with a common progress bar."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.queues import Queue
from pathlib import Path
from queue import Empty
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from metaban.bench.regret.method import Method, VisibleRound
from metaban.bench.regret.methods import build_method
from metaban.bench.worlds.environments import Environment, build_environment
from metaban.models.numerics.hardware import one_thread, use_threads

Curve = NDArray[np.float64]

#: Rounds between two progress reports of a run.
REPORT_EVERY: Final = 100

#: Interval at which the bar reads reports, and the time it averages over: methods differ a hundredfold in speed.
LOOK_EVERY_S: Final = 0.2
SPEED_OVER_S: Final = 300.0

#: Variables that numerical libraries read when loaded; they give a run one core.
ONE_THREAD: Final = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@final
@dataclass(frozen=True, slots=True)
class Contender:
    """A method and the conditions of its run; the label names it in tables and plots."""

    label: str
    method: str
    #: Learner settings to replace, the candidate pool, and whether inputs have arm × context products.
    overrides: Mapping[str, Any] = field(default_factory=dict)
    candidate_pool: int | None = None
    products: bool = False
    #: Switches of the synthetic environment, events until a reward arrives, and rounds before the method joins.
    switches: Mapping[str, Any] = field(default_factory=dict)
    delay: int = 0
    missed: int = 0

    @classmethod
    def plain(cls, method: str) -> Contender:
        """A method without changes, under its own name."""
        return cls(method, method)


@final
@dataclass(frozen=True, slots=True)
class Run:
    """One contender in one environment."""

    contender: Contender
    env: str
    seed: int
    rounds: int
    data: Path | None = None


@final
@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a run: regret, expected reward and a random arm's regret of each round [rounds], and times."""

    label: str
    seed: int
    regret: Curve
    earned: Curve
    random: Curve
    decision_ms: float
    update_ms: float
    settings: Mapping[str, Any]


@final
@dataclass(frozen=True, slots=True)
class Failure:
    """A run that raised an exception."""

    label: str
    seed: int
    error: str

    def __str__(self) -> str:
        return f"{self.label}, seed {self.seed}: {self.error}"


def play(world: Environment, method: Method, run: Run, report: Callable[[int], None] = lambda rounds: None) -> Outcome:
    """Run a method round by round; a reward arrives after `delay` more decisions."""
    regret, earned, random = np.empty((3, run.rounds))
    waiting: deque[tuple[int, float]] = deque()
    clock = time.perf_counter
    deciding = learning = 0.0
    learned = 0
    for _ in range(run.contender.missed):
        world.next_round()
    for number in range(run.rounds):
        asked = world.next_round()
        question = VisibleRound(asked.user, asked.arms, asked.context)
        start = clock()
        arm = method.decide(question, number)
        deciding += clock() - start
        regret[number], earned[number] = asked.regret(arm), asked.chances[arm]
        random[number] = asked.chances.max() - asked.chances.mean()
        waiting.append((number, world.reward(asked, arm)))
        if len(waiting) > run.contender.delay:
            start = clock()
            method.learn(*waiting.popleft())
            learning += clock() - start
            learned += 1
        if number % REPORT_EVERY == REPORT_EVERY - 1:
            report(REPORT_EVERY)
    report(run.rounds % REPORT_EVERY)
    return Outcome(
        run.contender.label,
        run.seed,
        regret,
        earned,
        random,
        deciding / run.rounds * 1_000,
        learning / max(1, learned) * 1_000,
        method.settings,
    )


def execute(run: Run, report: Callable[[int], None] = lambda rounds: None) -> Outcome:
    """Build the environment and the method of a run, and run it."""
    contender = run.contender
    world = build_environment(run.env, seed=run.seed, data=run.data, **contender.switches)
    method = build_method(
        contender.method,
        world,
        env=run.env,
        seed=run.seed,
        overrides=contender.overrides,
        candidate_pool=contender.candidate_pool,
        products=contender.products,
    )
    return play(world, method, run, report)


def execute_all(runs: Sequence[Run], *, jobs: int, console: Console) -> tuple[list[Outcome], list[Failure]]:
    """Run all, `jobs` at a time; results in order. A run that raises does not stop the others."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("rounds"))
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    bar = Progress(*columns, *times, console=console, transient=True, speed_estimate_period=SPEED_OVER_S)
    with bar, _one_thread():
        task = bar.add_task(f"{len(runs)} runs", total=sum(run.rounds for run in runs))

        def advance(rounds: int) -> None:
            bar.advance(task, rounds)

        ended = _here(runs, advance) if jobs == 1 else _in_processes(runs, jobs, advance)
    return [end for end in ended if isinstance(end, Outcome)], [end for end in ended if isinstance(end, Failure)]


def _here(runs: Sequence[Run], advance: Callable[[int], None]) -> list[Outcome | Failure]:
    with one_thread():
        return [_guarded(run, partial(execute, run, advance)) for run in runs]


def _in_processes(runs: Sequence[Run], jobs: int, advance: Callable[[int], None]) -> list[Outcome | Failure]:
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
        futures = [pool.submit(_in_child, run) for run in runs]
        pending: set[Future[Outcome]] = set(futures)
        try:
            while pending:
                _, pending = wait(pending, LOOK_EVERY_S, FIRST_COMPLETED)
                drain()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        drain()
    return [_guarded(run, future.result) for run, future in zip(runs, futures, strict=True)]


def _guarded(run: Run, ending: Callable[[], Outcome]) -> Outcome | Failure:
    try:
        return ending()
    except Exception as error:
        return Failure(run.contender.label, run.seed, f"{type(error).__name__}: {error}")


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


def _in_child(run: Run) -> Outcome:
    queue = _Reporter.queue
    return execute(run, queue.put if queue is not None else lambda rounds: None)
