"""The append-only file of a private Valkey keeps what was deleted; having it rewritten ends that.

A rewrite that began before a deletion may still hold what was deleted. So whoever asks waits for one that begins after
they asked, and all who ask while one is under way share the next.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Final, final

from redis.asyncio import Redis

from store.connection import Store, as_bytes, as_text, command
from store.errors import StoreError, StoreUnavailable

#: Pause between two looks at a rewrite.
LOOK_EVERY_S: Final = 0.05
#: Pause before a rewrite that failed is asked for again, and the longest such pause.
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 60.0

log = logging.getLogger(__name__)


@final
class History:
    """The append-only file of the server that writes into a folder of ours."""

    def __init__(self, redis: Store, folder: Path | None) -> None:
        """`folder` is where a private server writes; None when there is none."""
        self._redis = redis
        self._folder = folder
        self._running: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None

    async def is_ours(self) -> bool:
        """Whether the server is the private one, and its file for us to see to."""
        if self._folder is None or not isinstance(self._redis, Redis):
            return False
        try:
            reply = await command(self._redis, "CONFIG", "GET", "dir")
        except StoreUnavailable:
            raise
        except StoreError:  # it does not let us ask
            return False
        found = reply.get(b"dir") if isinstance(reply, dict) else reply[1] if len(reply) == 2 else None
        try:
            return found is not None and await asyncio.to_thread(Path(as_text(found)).samefile, self._folder)
        except OSError:
            return False

    async def rewrite(self) -> None:
        """Have the file written anew, without anything that is deleted by now; returns when that is done.

        It goes on, and is tried again when it fails, also when nobody waits for it any more.
        """
        if self._next is None:
            self._next = asyncio.create_task(self._rewrite_next())
        await asyncio.shield(self._next)

    async def stop(self) -> None:
        """Ask for nothing any more."""
        tasks = [task for task in (self._running, self._next) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _rewrite_next(self) -> None:
        if self._running is not None:
            await asyncio.wait([self._running])
        # From here on it is too late for others to share this one.
        self._running, self._next = self._next, None
        pause_s = FIRST_PAUSE_S
        while not await self._rewritten():
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _rewritten(self) -> bool:
        """Ask for a rewrite and wait for its end; whether it was done."""
        try:
            # One that the server began by itself may have begun too early.
            await self._look_until_idle()
            await command(self._redis, "BGREWRITEAOF")
            done = await self._look_until_idle()
        except StoreError as error:
            log.warning("the append-only file is not rewritten yet: %s", error)
            return False
        if not done:
            log.warning("the append-only file could not be rewritten; see the log of the private Valkey")
        return done

    async def _look_until_idle(self) -> bool:
        """Wait while a rewrite is under way or about to begin; whether the last one succeeded."""
        while True:
            text = as_bytes(await command(self._redis, "INFO", "persistence")).decode("utf-8", "replace")
            fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
            if fields.get("aof_rewrite_in_progress") == "0" and fields.get("aof_rewrite_scheduled") == "0":
                return fields.get("aof_last_bgrewrite_status") == "ok"
            await asyncio.sleep(LOOK_EVERY_S)
