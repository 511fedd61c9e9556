"""What streams still hold of a user who was forgotten: found, counted and deleted, a part of a stream at a time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Final, final

from store.connection import Store, as_int, as_text, command
from store.keys import NamespaceKeys
from store.scripts import load_script

#: Entries that one script looks at: events hold all their inputs, and everyone else waits meanwhile.
SEARCHED_AT_ONCE: Final = 256
#: Entries asked after in one go.
ASKED_AT_ONCE: Final = 1_000


@final
class Traces:
    """The entries that name users of one namespace: events, dead letters and lines of the update log.

    Only those of earlier incarnations than the one given are traces: a user who was forgotten may be back.
    """

    def __init__(self, redis: Store, keys: NamespaceKeys) -> None:
        self._redis = redis
        self._keys = keys
        self._search = load_script(redis, "search")

    async def events(self, user_id: str, incarnation: int) -> list[str]:
        """The entry ids of events that wait to be voided by a worker."""
        return await self._found(self._keys.events(self._partition(user_id)), user_id, incarnation)

    async def events_left(self, user_id: str, entry_ids: Sequence[str]) -> list[str]:
        """Which of these events are still there."""
        key, left = self._keys.events(self._partition(user_id)), []
        for start in range(0, len(entry_ids), ASKED_AT_ONCE):
            part = entry_ids[start : start + ASKED_AT_ONCE]
            # By a script, which leaves their inputs where they are.
            replies = await self._search.call_many([([key], [user_id, 0, each, each, 1]) for each in part])
            left += [entry_id for entry_id, reply in zip(part, replies, strict=True) if as_int(reply[1])]
        return left

    async def letters(self, user_id: str, incarnation: int) -> int:
        """How many dead letters there are."""
        return len(await self._found(self._keys.dead_letters(self._partition(user_id)), user_id, incarnation))

    async def lines(self, user_id: str, incarnation: int) -> int:
        """How many lines of the update log there are."""
        return len(await self._found(self._keys.update_log(self._partition(user_id)), user_id, incarnation))

    async def delete_letters(self, user_id: str, incarnation: int) -> int:
        """Delete the dead letters; how many there were."""
        return await self._delete(self._keys.dead_letters(self._partition(user_id)), user_id, incarnation)

    async def delete_lines(self, user_id: str, incarnation: int, *, before: str) -> int:
        """Delete the lines of the update log before the one that tells the forgetting; how many there were.

        A service that has not read them yet misses the events that they name, and compares versions instead.
        """
        key = self._keys.update_log(self._partition(user_id))
        return await self._delete(key, user_id, incarnation, end=f"({before}")

    def _partition(self, user_id: str) -> int:
        return self._keys.partition_of(user_id)

    async def _found(self, key: str, user_id: str, incarnation: int) -> list[str]:
        return [entry_id async for page in self._pages(key, user_id, incarnation, "+") for entry_id in page]

    async def _delete(self, key: str, user_id: str, incarnation: int, end: str = "+") -> int:
        deleted = 0
        async for page in self._pages(key, user_id, incarnation, end):
            if page:
                deleted += as_int(await command(self._redis, "XDEL", key, *page))
        return deleted

    async def _pages(self, key: str, user_id: str, incarnation: int, end: str) -> AsyncIterator[list[str]]:
        """Ids of the entries found, as far as the stream goes now: one that grows as fast as it is read has an end."""
        if end == "+":
            newest = await command(self._redis, "XREVRANGE", key, "+", "-", "COUNT", 1)
            if not newest:
                return
            end = as_text(newest[0][0])
        start = "-"
        while True:
            last, looked, *found = await self._search.call([key], [user_id, incarnation, start, end, SEARCHED_AT_ONCE])
            yield [as_text(entry_id) for entry_id in found]
            if as_int(looked) < SEARCHED_AT_ONCE:
                return
            start = f"({as_text(last)}"
