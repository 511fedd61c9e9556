"""Holding the meta-trainer's lease: while a snapshot is taken or restored no epoch may be derived."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final, final

from store.epochs import EpochStore
from store.errors import SnapshotError, StoreError, StoreUnavailable

#: Long enough to be renewed late on a busy machine; a killed holder's lease has to run out before others go on.
SNAPSHOT_LEASE_MS: Final = 5_000
POLL_S: Final = 0.05


@final
class Lease:
    """A lease that is held until it is found lost."""

    def __init__(self, epochs: EpochStore, token: str) -> None:
        self.token = token
        self._epochs = epochs

    async def confirm(self) -> None:
        """Raise SnapshotError unless it was ours all the time."""
        if not await self._epochs.renew_lease(self.token, SNAPSHOT_LEASE_MS):
            raise SnapshotError("the lease that keeps epochs as they are was lost: try again")

    async def keep(self) -> None:
        """Renew it for as long as this runs; a loss is found out by `confirm`."""
        while True:
            await asyncio.sleep(SNAPSHOT_LEASE_MS / 3_000)
            with suppress(StoreUnavailable):
                if not await self._epochs.renew_lease(self.token, SNAPSHOT_LEASE_MS):
                    return


@asynccontextmanager
async def hold_lease(
    epochs: EpochStore, token: str, *, wait_s: float, for_restore: bool = False
) -> AsyncIterator[Lease]:
    """The lease, once whoever has it gives it back; SnapshotError when that takes longer than `wait_s`."""
    deadline = time.monotonic() + wait_s
    while not await epochs.acquire_lease(token, SNAPSHOT_LEASE_MS, for_restore=for_restore):
        if time.monotonic() > deadline:
            raise SnapshotError(
                f"an epoch, or another snapshot or restore, has been under way for {wait_s:g} s: try again later"
            )
        await asyncio.sleep(POLL_S)
    lease = Lease(epochs, token)
    keeping = asyncio.create_task(lease.keep())
    try:
        yield lease
    finally:
        keeping.cancel()
        with suppress(asyncio.CancelledError, StoreError):
            await keeping
        with suppress(StoreError):  # it runs out by itself
            await epochs.release_lease(token)
