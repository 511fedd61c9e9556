"""Plays trials side by side: a process each, on one core."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

from models.threads import one_thread, use_threads

Trial = TypeVar("Trial")
Outcome = TypeVar("Outcome")


def side_by_side(play: Callable[[Trial], Outcome], trials: Sequence[Trial]) -> Iterator[Outcome]:
    """What each trial comes to, in their order; in this process if there is only one core, or one trial."""
    jobs = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1, len(trials))
    if jobs <= 1:
        with one_thread():
            yield from map(play, trials)
        return
    # Spawned: a forked child would inherit torch's threads in whatever state they are.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, use_threads, (1,)) as pool:
        yield from pool.map(play, trials)
