"""Remnants of forgotten users in streams: found, counted and deleted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Final, final

from metaban.store.client.connection import Store, as_int, as_text, command
from metaban.store.client.scripts import load_script
from metaban.store.keys import NamespaceKeys

#: Entries that one script call reads. Events hold their inputs, and a running script blocks the server.
SEARCH_BATCH: Final = 256

#: Entries looked up in one pipeline.
LOOKUP_BATCH: Final = 1_000


@final
class RemnantStore:
    """Entries that name forgotten users of one namespace: events, dead letters and lines of the update log.

    Only entries of incarnations before the given one count: a forgotten user may have come back.
    """

    def __init__(self, redis: Store, keys: NamespaceKeys) -> None:
        self._redis = redis
        self._keys = keys
        self._search = load_script(redis, "search")

    async def events(self, user_id: str, incarnation: int) -> list[str]:
        """Entry ids of events that a worker has yet to void."""
        return await self._found(self._keys.events(self._partition(user_id)), {user_id: incarnation})

    async def events_left(self, user_id: str, entry_ids: Sequence[str]) -> list[str]:
        """Those of these events that are still in the stream."""
        key, left = self._keys.events(self._partition(user_id)), []
        for start in range(0, len(entry_ids), LOOKUP_BATCH):
            part = entry_ids[start : start + LOOKUP_BATCH]
            # A script, so that the inputs of the events are not sent.
            replies = await self._search.call_many([([key], [each, each, 1]) for each in part])
            left += [entry_id for entry_id, reply in zip(part, replies, strict=True) if as_int(reply[1])]
        return left

    async def letters(self, user_id: str, incarnation: int) -> int:
        """Number of dead letters."""
        return len(await self._found(self._keys.dead_letters(self._partition(user_id)), {user_id: incarnation}))

    async def lines(self, user_id: str, incarnation: int) -> int:
        """Number of lines of the update log."""
        return len(await self._found(self._keys.update_log(self._partition(user_id)), {user_id: incarnation}))

    async def delete_letters(self, partition: int, incarnations: Mapping[str, int]) -> int:
        """Delete the dead letters of users of a partition, in one pass, and return their number."""
        return await self._delete(self._keys.dead_letters(partition), incarnations)

    async def delete_lines(self, user_id: str, incarnation: int, *, before: str) -> int:
        """Delete the lines of the update log before the line of the forgetting; returns their number.

        A service that has not read them yet finds a gap and compares versions instead.
        """
        key = self._keys.update_log(self._partition(user_id))
        return await self._delete(key, {user_id: incarnation}, end=f"({before}")

    def _partition(self, user_id: str) -> int:
        return self._keys.partition_of(user_id)

    async def _found(self, key: str, incarnations: Mapping[str, int]) -> list[str]:
        return [entry_id async for page in self._pages(key, incarnations, "+") for entry_id in page]

    async def _delete(self, key: str, incarnations: Mapping[str, int], end: str = "+") -> int:
        deleted = 0
        async for page in self._pages(key, incarnations, end):
            if page:
                deleted += as_int(await command(self._redis, "XDEL", key, *page))
        return deleted

    async def _pages(self, key: str, incarnations: Mapping[str, int], end: str) -> AsyncIterator[list[str]]:
        """Ids of the entries found, up to the end that the stream has now: it may grow while it is read."""
        if end == "+":
            newest = await command(self._redis, "XREVRANGE", key, "+", "-", "COUNT", 1)
            if not newest:
                return
            end = as_text(newest[0][0])
        start, users = "-", [argument for pair in incarnations.items() for argument in pair]
        while True:
            last, n_read, *found = await self._search.call([key], [start, end, SEARCH_BATCH, *users])
            yield [as_text(entry_id) for entry_id in found]
            if as_int(n_read) < SEARCH_BATCH:
                return
            start = f"({as_text(last)}"
