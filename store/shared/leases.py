"""Holding the epoch lease: while an epoch is derived, and while a snapshot is taken or restored."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from contextvars import copy_context
from threading import Event
from typing import Final, final

import structlog

from metaban.store.errors import SnapshotError, StoreError, StoreUnavailable
from metaban.store.shared.epochs import EpochStore

#: Short: after a process was killed, others wait until its lease expires.
EPOCH_LEASE_MS: Final = 3_000

#: A process whose event loop has not run for so long gives its lease up.
HUNG_AFTER_S: Final = 60.0

POLL_S: Final = 0.05

log = structlog.wrap_logger(logging.getLogger(__name__))


@final
class Lease:
    """The epoch lease, held by `hold_lease`."""

    def __init__(self, epochs: EpochStore, token: str) -> None:
        self.token = token
        self._epochs = epochs

    async def confirm(self) -> None:
        """Raise SnapshotError if the lease was lost since it was acquired."""
        if not await self._epochs.renew_lease(self.token, EPOCH_LEASE_MS):
            raise SnapshotError("the epoch lease was lost: try again")


@asynccontextmanager
async def hold_lease(
    epochs: EpochStore, token: str, *, wait_s: float, for_restore: bool = False
) -> AsyncIterator[Lease]:
    """The lease, once it is free. Raises SnapshotError if that takes longer than `wait_s`."""
    deadline = time.monotonic() + wait_s
    while not await epochs.acquire_lease(token, EPOCH_LEASE_MS, for_restore=for_restore):
        if time.monotonic() > deadline:
            raise SnapshotError(
                f"an epoch, or another snapshot or restore, has been under way for {wait_s:g} s: try again later"
            )
        await asyncio.sleep(POLL_S)
    async with keep_lease(epochs, token):
        yield Lease(epochs, token)


@asynccontextmanager
async def keep_lease(epochs: EpochStore, token: str) -> AsyncIterator[None]:
    """Renew an acquired lease until the block ends, then release it.

    Renewed on a thread with its own connection, so that a process with a busy event loop keeps it. A lost lease is
    noticed by whoever uses it: each publication checks it.
    """
    loop, ended = asyncio.get_running_loop(), Event()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="lease") as thread:
        # In a copy of the context: log lines of the thread carry the namespace.
        renewing = loop.run_in_executor(thread, copy_context().run, _renew_until, ended, loop, epochs, token)
        try:
            yield
        finally:
            ended.set()
            await renewing
            with suppress(StoreError):  # it expires by itself
                await epochs.release_lease(token)


def _renew_until(ended: Event, loop: asyncio.AbstractEventLoop, epochs: EpochStore, token: str) -> None:
    """Renew the lease until `ended`, until it is lost, or until the event loop hangs."""
    ran_s = time.monotonic()

    def run() -> None:
        nonlocal ran_s
        ran_s = time.monotonic()

    while not ended.wait(EPOCH_LEASE_MS / 3_000) and not loop.is_closed():
        try:
            loop.call_soon_threadsafe(run)
            if time.monotonic() - ran_s > HUNG_AFTER_S:
                log.error("lease_given_up", reason=f"the event loop has not run for {HUNG_AFTER_S:g} s")
                return
            if not asyncio.run(epochs.renew_lease_separately(token, EPOCH_LEASE_MS)):
                log.warning("lease_lost")
                return
        except StoreUnavailable as error:
            log.warning("store_unavailable", error=str(error))
        except Exception:
            log.exception("lease_renewal_failed")  # tried again: the work under the lease goes on
