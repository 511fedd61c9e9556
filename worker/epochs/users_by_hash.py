"""The first users by hash: the pool of an epoch, and the users it is derived from.

All users are read once, in pages; from then on only the update log, so that an epoch costs what changed since the last
one. A partition is read again when the log has lost our place in it: trimmed, or set back with the store.
"""

from __future__ import annotations

from heapq import nsmallest
from typing import NamedTuple, final

from metaban.store.client.connection import BEFORE_ALL
from metaban.store.users.users import UserStore
from metaban.worker.epochs.derive_shared import hash_order

#: Lines of the update log read at once.
LINES_PER_PAGE = 1_000

#: More users are kept than asked for, so that forgotten ones can be replaced: between these multiples.
KEPT_AFTER_CUT = 2
KEPT_MAX = 4


class KnownUser(NamedTuple):
    """Place of a user in the order by hash, and their (incarnation, version)."""

    place: bytes
    version: tuple[int, int]


@final
class UsersByHash:
    """Users with rewards whose hash is below a limit; with few users, all of them."""

    def __init__(self, users: UserStore, *, partitions: int, most: int) -> None:
        self._users = users
        self._partitions = range(partitions)
        self._most = most
        self.clear()

    def clear(self) -> None:
        """Read everything again at the next call of `first`."""
        self._cursors = dict.fromkeys(self._partitions, BEFORE_ALL)
        self._known: dict[int, dict[str, KnownUser]] = {partition: {} for partition in self._partitions}
        self._limit: bytes | None = None  # users at or after this place are not kept

    async def first(self) -> dict[str, tuple[int, int]]:
        """(incarnation, version) of the first `most` users with rewards, in their order."""
        await self._follow()
        if self._limit is not None and sum(map(len, self._known.values())) < self._most:
            # So many were forgotten that users beyond the limit are needed.
            self.clear()
            await self._follow()
        everyone = ((known.place, user, known.version) for kept in self._known.values() for user, known in kept.items())
        return {user: version for _, user, version in nsmallest(self._most, everyone)}

    async def _follow(self) -> None:
        for partition in self._partitions:
            while lines := await self._users.lines_after(partition, self._cursors[partition], count=LINES_PER_PAGE):
                self._put(partition, {line.user_id: (line.incarnation, line.version) for line in lines})
                self._cursors[partition] = lines[-1].cursor
            if lines is None:
                await self._read_all(partition)

    async def _read_all(self, partition: int) -> None:
        # What changes during the scan is in the log behind this place.
        head = await self._users.log_head(partition)
        self._known[partition] = {}
        self._cursors[partition] = BEFORE_ALL
        async for page in self._users.scan_versions(partition):
            self._put(partition, page)
        self._cursors[partition] = head

    def _put(self, partition: int, versions: dict[str, tuple[int, int]]) -> None:
        kept = self._known[partition]
        for user, version in versions.items():
            if not version[1]:  # forgotten, or dropped by a restore
                kept.pop(user, None)
                continue
            known = kept.get(user)
            place = hash_order(user) if known is None else known.place
            if self._limit is None or place < self._limit:
                kept[user] = KnownUser(place, version)
        if sum(map(len, self._known.values())) > KEPT_MAX * self._most:
            self._cut()

    def _cut(self) -> None:
        places = sorted(known.place for kept in self._known.values() for known in kept.values())
        self._limit = places[KEPT_AFTER_CUT * self._most]
        for partition, kept in self._known.items():
            self._known[partition] = {user: known for user, known in kept.items() if known.place < self._limit}
