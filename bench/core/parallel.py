"""Parallel trials: one process a core."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

from metaban.models.numerics.hardware import one_thread, use_threads

Task = TypeVar("Task")

Result = TypeVar("Result")


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
