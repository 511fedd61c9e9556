"""The worker process: every namespace of the store, one thread for the tensors of all and one for transfer jobs."""

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

from models.threads import use_threads
from store.connection import check_server, connect
from store.errors import StoreReset, StoreUnavailable
from store.failpoints import armed
from store.namespaces import Namespaces
from worker.namespace_work import NamespaceWork, WorkerSettings
from worker.transfer import modeling_thread

#: How often the store is asked for namespaces that are not worked on yet.
NAMESPACE_POLL_S: Final = 0.25
#: How long one that failed is left alone, at first and at most.
PAUSE_MIN_S: Final = 0.5
PAUSE_MAX_S: Final = 8.0

log = structlog.get_logger()


def run_worker(redis_url: str, settings: WorkerSettings) -> None:
    """Work until SIGTERM or SIGINT; the batch at hand is finished first."""
    use_threads(settings.torch_threads)
    uvloop.run(_run(redis_url, settings))


async def _run(redis_url: str, settings: WorkerSettings) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    redis = connect(redis_url)
    try:
        await check_server(redis)
        if armed():
            log.warning("failpoints are armed: this process will kill itself")
        # Unique to the process: a name used twice would let two processes acknowledge each other's events.
        name = f"{socket.gethostname()}-{os.getpid()}-{uuid4().hex[:8]}"
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="tensors") as compute, modeling_thread() as modeling:
            work = NamespaceWork(redis_url, settings, compute, modeling, token=name)
            await _attend(Namespaces(redis), work, stopping)
    finally:
        await redis.aclose()


async def _attend(namespaces: Namespaces, work: NamespaceWork, stopping: asyncio.Event) -> None:
    """Work on every namespace there is, from when it appears to when it is deleted, until asked to stop.

    What goes wrong with one concerns the others only when the store has lost all of them: StoreReset then.
    """
    at_work: dict[str, asyncio.Task[None]] = {}
    pauses = Pauses()
    try:
        while not stopping.is_set():
            with suppress(StoreUnavailable):  # those that are worked on tell of it
                names = await namespaces.names()
                for name in [name for name, task in at_work.items() if task.done()]:
                    error = at_work.pop(name).exception()
                    if isinstance(error, StoreReset) and not names:
                        raise error
                    if error is not None:
                        pauses.begin(name, error)
                for name in names:
                    if name not in at_work and pauses.over(name):
                        at_work[name] = asyncio.create_task(work.on(name, stopping))
            with suppress(TimeoutError):
                async with asyncio.timeout(NAMESPACE_POLL_S):
                    await stopping.wait()
    finally:
        stopping.set()
        outcomes = await asyncio.gather(*at_work.values(), return_exceptions=True)
    for name, outcome in zip(at_work, outcomes, strict=True):
        if isinstance(outcome, BaseException):
            pauses.begin(name, outcome)


@final
class Pauses:
    """Namespaces that are left alone for a while because working on them failed, longer each time."""

    def __init__(self) -> None:
        self._until_s: dict[str, float] = {}
        self._last_s: dict[str, float] = {}

    def begin(self, name: str, error: BaseException) -> None:
        """Leave a namespace alone; whatever it is, somebody has to see to it."""
        now_s = time.monotonic()
        # One that went well for long begins again with the shortest.
        recent = now_s - self._until_s.get(name, -math.inf) < PAUSE_MAX_S
        pause_s = min(PAUSE_MAX_S, 2 * self._last_s[name]) if recent else PAUSE_MIN_S
        self._last_s[name], self._until_s[name] = pause_s, now_s + pause_s
        log.error("namespace not worked on", namespace=name, again_in_s=pause_s, exc_info=error)

    def over(self, name: str) -> bool:
        """Whether a namespace may be worked on."""
        return time.monotonic() >= self._until_s.get(name, -math.inf)
