"""The worker process: works on every namespace of the store, with one thread for learning and one for transfer jobs."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final, final
from uuid import uuid4

import structlog
import uvloop

from metaban.models.numerics.hardware import use_threads
from metaban.store.client.connection import NO_LIMIT, check_server, connect
from metaban.store.errors import StoreReset, StoreUnavailable
from metaban.store.failpoints import armed
from metaban.store.namespaces import NamespaceStore
from metaban.worker.jobs.transfer import modeling_thread
from metaban.worker.namespace import NamespaceWorker, WorkerSettings

#: How often the store is asked for new namespaces.
NAMESPACE_POLL_S: Final = 0.25

#: Shortest and longest pause after work on a namespace failed.
BACKOFF_MIN_S: Final = 0.5
BACKOFF_MAX_S: Final = 8.0

log = structlog.get_logger()


def run_worker(redis_url: str, settings: WorkerSettings) -> None:
    """Work until SIGTERM or SIGINT; batches in progress are finished first."""
    use_threads(settings.torch_threads)
    uvloop.run(work_until_signal(redis_url, settings))


async def work_until_signal(redis_url: str, settings: WorkerSettings) -> None:
    """`run_worker` on an event loop that already runs."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    redis = connect(redis_url, shared=True)
    # A separate client: a read that waits for rewards holds its connection.
    reading = connect(redis_url, max_connections=NO_LIMIT)
    try:
        await check_server(redis)
        if armed():
            log.warning("failpoints_armed")
        # Unique per process: with a shared name, two processes could acknowledge each other's events.
        token = f"{socket.gethostname()}-{os.getpid()}-{uuid4().hex[:8]}"
        with (
            ThreadPoolExecutor(max_workers=1, thread_name_prefix="tensors") as compute,
            ThreadPoolExecutor(max_workers=1, thread_name_prefix="epochs") as deriving,
            modeling_thread() as modeling,
        ):
            worker = NamespaceWorker(redis, reading, settings, compute, deriving, modeling, token=token)
            await _work_on_all(NamespaceStore(redis), worker, stopping)
    finally:
        await redis.aclose()
        await reading.aclose()


async def _work_on_all(namespaces: NamespaceStore, worker: NamespaceWorker, stopping: asyncio.Event) -> None:
    """Run one task per namespace, from its creation to its deletion, until asked to stop.

    A failed namespace does not affect the others. StoreReset is raised only when the store lost all namespaces.
    """
    tasks: dict[str, asyncio.Task[None]] = {}
    backoff, started = Backoff(), False
    try:
        while not stopping.is_set():
            with suppress(StoreUnavailable):  # the namespaces' tasks log it
                names = await namespaces.names()
                if not started:
                    started = True
                    waits = {} if names else {"waiting_for": "a service that creates the first namespace"}
                    log.info("worker_started", namespaces=len(names), **waits)
                for name in [name for name, task in tasks.items() if task.done()]:
                    error = tasks.pop(name).exception()
                    if isinstance(error, StoreReset) and not names:
                        raise error
                    if error is not None:
                        backoff.fail(name, error)
                for name in names:
                    if name not in tasks and backoff.is_over(name):
                        tasks[name] = asyncio.create_task(worker.run(name, stopping))
            with suppress(TimeoutError):
                async with asyncio.timeout(NAMESPACE_POLL_S):
                    await stopping.wait()
    finally:
        stopping.set()
        log.info("worker_stopping", namespaces=len(tasks))
        outcomes = await asyncio.gather(*tasks.values(), return_exceptions=True)
    for name, outcome in zip(tasks, outcomes, strict=True):
        if isinstance(outcome, BaseException):
            backoff.fail(name, outcome)
    log.info("worker_process_stopped", namespaces=len(tasks))


@final
class Backoff:
    """Pauses of namespaces whose work failed, doubled with each failure in a row."""

    def __init__(self) -> None:
        self._until_s: dict[str, float] = {}
        self._last_s: dict[str, float] = {}

    def fail(self, name: str, error: BaseException) -> None:
        """Start a pause after a failure, and log it."""
        now_s = time.monotonic()
        # A namespace that worked for a while starts again with the shortest pause.
        recent = now_s - self._until_s.get(name, -math.inf) < BACKOFF_MAX_S
        pause_s = min(BACKOFF_MAX_S, 2 * self._last_s[name]) if recent else BACKOFF_MIN_S
        self._last_s[name], self._until_s[name] = pause_s, now_s + pause_s
        log.error("namespace_failed", namespace=name, retry_in_s=pause_s, exc_info=error)

    def is_over(self, name: str) -> bool:
        """Whether work on a namespace may start."""
        return time.monotonic() >= self._until_s.get(name, -math.inf)
