"""Index of the stored decisions of each user, used to list and to forget them.

A decision is stored first, but only for seconds; then it is noted in the index, while its user is in the incarnation of
the decision; then it is kept. If a forgetting races with a decision, either it finds the index entry, or the entry is
refused and the decision deleted. If the process dies before the entry is written, the decision expires; after it,
forgetting finds the decision. On a single server the three steps are sent together.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from hashlib import sha1
from typing import Final, TypeAlias, final

import structlog

from metaban.store.client.connection import Store, as_bytes, as_text, command, pipeline
from metaban.store.client.scripts import ScriptCall, load_script
from metaban.store.keys import NamespaceKeys

#: Decisions read at a time; each holds the inputs of its arms.
DECISIONS_READ: Final = 64

#: Most arms of a decision.
ITEMS_MAX: Final = 100

#: Attempts at deleting a decision that is changed meanwhile.
RETRACT_TRIES: Final = 5

#: Selects the records of decisions to count or delete.
Concerns: TypeAlias = Callable[[bytes], bool]

log = structlog.wrap_logger(logging.getLogger(__name__))


def record_digest(record: bytes) -> str:
    """Identifies a stored record in scripts, which compare it before they write."""
    return sha1(record, usedforsecurity=False).hexdigest()


@final
class DecisionIndex:
    """Index of the decisions of one namespace's users."""

    def __init__(self, redis: Store, keys: NamespaceKeys, store_id: str = "") -> None:
        """Entries are written only in the store with this id; empty means any."""
        self._redis = redis
        self._keys = keys
        self._store_id = store_id
        self._retract = load_script(redis, "retract")

    def note(
        self, user_id: str, incarnation: int, decision_id: str, *, ttl_ms: int, profile: bytes, start: bytes = b""
    ) -> ScriptCall:
        """Call of the script that notes a decision, and writes the profile and warm start if they are not empty."""
        partition = self._keys.partition_of(user_id)
        keys = [
            self._keys.versions(partition),
            self._keys.decided(user_id),
            self._keys.profile(user_id),
            self._keys.marker(partition),
            self._keys.start(user_id),
            self._keys.last_seen(partition),
        ]
        return keys, [user_id, incarnation, decision_id, ttl_ms, profile, self._store_id, start]

    async def unnote(self, user_id: str, decision_id: str) -> None:
        """Delete the index entry of a decision that is not this user's."""
        await command(self._redis, "ZREM", self._keys.decided(user_id), decision_id)

    async def has(self, user_id: str, decision_id: str) -> bool:
        """Whether a decision is in the index of a user."""
        return await command(self._redis, "ZSCORE", self._keys.decided(user_id), decision_id) is not None

    async def newest(self, user_id: str, *, most: int) -> list[str]:
        """Newest `most` decision ids of a user; some decisions may have expired."""
        reply = await command(self._redis, "ZRANGE", self._keys.decided(user_id), 0, most - 1, "REV")
        return [as_text(decision_id) for decision_id in reply]

    async def count(self, user_id: str, concerns: Concerns) -> int:
        """Number of decisions of a user that `concerns` selects."""
        found = 0
        async for page in self._pages(user_id):
            found += sum(record is not None and concerns(record) for record in page.values())
        return found

    async def retract_all(self, user_id: str, concerns: Concerns) -> int:
        """Delete the decisions of a user that `concerns` selects, and their entries; returns their number."""
        deleted, key = 0, self._keys.decided(user_id)
        if await command(self._redis, "TYPE", key) not in (b"zset", b"none"):
            # No decision can be noted in it. Those noted before it was damaged expire with their reward windows.
            log.error("decision_index_damaged", namespace=self._keys.namespace, effect="it is deleted")
            await command(self._redis, "DEL", key)
        async for page in self._pages(user_id):
            obsolete = [decision_id for decision_id, record in page.items() if record is None]
            for decision_id, record in page.items():
                if record is not None and concerns(record):
                    deleted += await self.retract_latest(decision_id, record, concerns)
                    obsolete.append(decision_id)
            if obsolete:
                await command(self._redis, "ZREM", key, *obsolete)
        return deleted

    async def retract(self, decision_id: str, record: bytes) -> bool:
        """Delete a decision and everything stored under its id, if this is its record; returns whether it was."""
        keys = [self._keys.decision(decision_id), self._keys.awaiting(self._keys.partition_of(decision_id))]
        return bool(await self._retract.call(keys, [record_digest(record), decision_id, ITEMS_MAX]))

    async def retract_latest(self, decision_id: str, record: bytes, concerns: Concerns) -> bool:
        """Delete a decision if `concerns` selects its latest record, even if it changed since it was read."""
        latest: bytes | None = record
        for _ in range(RETRACT_TRIES):
            if latest is None or not concerns(latest):
                return False
            if await self.retract(decision_id, latest):
                return True
            reply = await command(self._redis, "GET", self._keys.decision(decision_id))
            latest = None if reply is None else as_bytes(reply)
        return False

    async def _pages(self, user_id: str) -> AsyncIterator[dict[str, bytes | None]]:
        """Records of all decisions in the index, by id; None for an expired one."""
        # All ids at once: the caller deletes entries, which would shift the pages. Ids are short, records are not.
        reply = await command(self._redis, "ZRANGE", self._keys.decided(user_id), 0, -1)
        ids = [as_text(decision_id) for decision_id in reply]
        for start in range(0, len(ids), DECISIONS_READ):
            part = ids[start : start + DECISIONS_READ]
            records = await pipeline(self._redis, [("GET", self._keys.decision(decision_id)) for decision_id in part])
            yield {
                decision_id: None if record is None else as_bytes(record)
                for decision_id, record in zip(part, records, strict=True)
            }
