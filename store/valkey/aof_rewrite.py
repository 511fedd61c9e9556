"""Rewrites the append-only file of a private Valkey, which otherwise keeps deleted data.

A rewrite that began before a deletion may still contain the deleted data. So a caller waits for a rewrite that begins
after the call; all callers that come while one runs share the next.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Final, final

import structlog
from redis.asyncio import Redis

from metaban.store.client.connection import Store, as_bytes, as_text, command
from metaban.store.errors import StoreError, StoreUnavailable

#: Time between two checks of a running rewrite.
POLL_S: Final = 0.05

#: First and longest wait before a failed rewrite is repeated.
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 60.0

log = structlog.wrap_logger(logging.getLogger(__name__))


@final
class AofRewriter:
    """The append-only file of a private server."""

    def __init__(self, redis: Store, folder: Path | None) -> None:
        """`folder` is the private server's data folder; None if the store is not private."""
        self._redis = redis
        self._folder = folder
        self._running: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None

    async def is_ours(self) -> bool:
        """Whether the server is the private one, whose file we may rewrite."""
        if self._folder is None or not isinstance(self._redis, Redis):
            return False
        try:
            reply = await command(self._redis, "CONFIG", "GET", "dir")
        except StoreUnavailable:
            raise
        except StoreError:  # CONFIG is not allowed
            return False
        found = reply.get(b"dir") if isinstance(reply, dict) else reply[1] if len(reply) == 2 else None
        try:
            return found is not None and await asyncio.to_thread(Path(as_text(found)).samefile, self._folder)
        except OSError:
            return False

    async def rewrite(self) -> None:
        """Rewrite the file without the data deleted so far; returns when it is done.

        A cancelled caller does not stop the rewrite; a failed rewrite is repeated.
        """
        if self._next is None:
            self._next = asyncio.create_task(self._rewrite_next())
        await asyncio.shield(self._next)

    async def stop(self) -> None:
        """Cancel the requested rewrites."""
        tasks = [task for task in (self._running, self._next) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _rewrite_next(self) -> None:
        if self._running is not None:
            await asyncio.wait([self._running])
        # From here on, later callers need the next rewrite.
        self._running, self._next = self._next, None
        pause_s = FIRST_PAUSE_S
        while not await self._rewritten():
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _rewritten(self) -> bool:
        """Request a rewrite and wait for its end; returns whether it succeeded."""
        try:
            # A rewrite that the server started by itself may have begun before the deletion.
            await self._wait_until_idle()
            await command(self._redis, "BGREWRITEAOF")
            done = await self._wait_until_idle()
        except StoreError as error:
            log.warning("aof_rewrite_failed", reason=str(error))
            return False
        if not done:
            log.warning("aof_rewrite_failed", reason="see the log of the private Valkey")
        return done

    async def _wait_until_idle(self) -> bool:
        """Wait until no rewrite runs or is scheduled; returns whether the last one succeeded."""
        while True:
            text = as_bytes(await command(self._redis, "INFO", "persistence")).decode("utf-8", "replace")
            fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
            if fields.get("aof_rewrite_in_progress") == "0" and fields.get("aof_rewrite_scheduled") == "0":
                return fields.get("aof_last_bgrewrite_status") == "ok"
            await asyncio.sleep(POLL_S)
