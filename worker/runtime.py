"""The worker process: every namespace of the store, with one thread for the tensors of all."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final
from uuid import uuid4

import structlog
import uvloop

from models.threads import use_threads
from store.connection import check_server, connect
from store.errors import StoreUnavailable
from store.failpoints import armed
from store.namespaces import Namespaces
from worker.namespace_work import NamespaceWork, WorkerSettings

#: How often the store is asked for namespaces that are not worked on yet.
NAMESPACE_POLL_S: Final = 0.25

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
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="tensors") as compute:
            work = NamespaceWork(redis_url, settings, compute, token=name)
            await _attend(Namespaces(redis), work, stopping)
    finally:
        await redis.aclose()


async def _attend(namespaces: Namespaces, work: NamespaceWork, stopping: asyncio.Event) -> None:
    """Work on every namespace there is, from when it appears to when it is deleted, until asked to stop.

    StoreReset when one is found to be gone with the store that it was in.
    """
    at_work: dict[str, asyncio.Task[None]] = {}
    try:
        while not stopping.is_set():
            for name in [name for name, task in at_work.items() if task.done()]:
                at_work.pop(name).result()
            with suppress(StoreUnavailable):  # those that are worked on tell of it
                for name in await namespaces.names():
                    if name not in at_work:
                        at_work[name] = asyncio.create_task(work.on(name, stopping))
            with suppress(TimeoutError):
                async with asyncio.timeout(NAMESPACE_POLL_S):
                    await stopping.wait()
    finally:
        stopping.set()
        outcomes = await asyncio.gather(*at_work.values(), return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
