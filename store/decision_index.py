"""The decisions kept of each user, noted beside the user: found by it when they are to be shown or forgotten.

A decision is stored first and noted after, and only while its user is in the incarnation it was made for. So of a
decision and a forgetting that race, either the forgetting finds the note, or the note finds that it comes too late and
whoever decided takes the decision back.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from hashlib import sha1
from typing import Final, TypeAlias, final

from store.connection import Store, as_bytes, as_text, command, pipeline
from store.keys import NamespaceKeys
from store.scripts import ScriptCall, load_script

#: Decisions read in one go: each holds the inputs of all that it chose.
DECISIONS_READ: Final = 64
#: Arms that a decision has, at most.
ITEMS_MAX: Final = 100
#: Times that a decision which somebody changes meanwhile is read again.
RETRACT_TRIES: Final = 5

#: Tells whether the record of a decision is to be counted, or taken back.
Concerns: TypeAlias = Callable[[bytes], bool]


@final
class DecisionIndex:
    """What is noted of the decisions of one namespace's users."""

    def __init__(self, redis: Store, keys: NamespaceKeys, store_epoch: str = "") -> None:
        """Nothing is noted but in the store of this epoch; an empty one stands for any."""
        self._redis = redis
        self._keys = keys
        self._store_epoch = store_epoch
        self._retract = load_script(redis, "retract")

    def note(
        self, user_id: str, incarnation: int, decision_id: str, *, ttl_ms: int, profile: bytes, start: bytes = b""
    ) -> ScriptCall:
        """What the script takes that notes a decision, and what came with it: a profile, and the start that was made
        of it, if they are not empty."""
        partition = self._keys.partition_of(user_id)
        keys = [
            self._keys.versions(partition),
            self._keys.decided(user_id),
            self._keys.profile(user_id),
            self._keys.marker(partition),
            self._keys.start(user_id),
        ]
        return keys, [user_id, incarnation, decision_id, ttl_ms, profile, self._store_epoch, start]

    async def unnote(self, user_id: str, decision_id: str) -> None:
        """Take back a note of what is not this user's decision."""
        await command(self._redis, "ZREM", self._keys.decided(user_id), decision_id)

    async def newest(self, user_id: str, *, most: int) -> list[str]:
        """Ids noted of a user, those that are kept longest first, at most so many; some may be over."""
        reply = await command(self._redis, "ZRANGE", self._keys.decided(user_id), 0, most - 1, "REV")
        return [as_text(decision_id) for decision_id in reply]

    async def count(self, user_id: str, concerns: Concerns) -> int:
        """How many of the decisions of a user are of a kind."""
        found = 0
        async for page in self._pages(user_id):
            found += sum(record is not None and concerns(record) for record in page.values())
        return found

    async def retract_all(self, user_id: str, concerns: Concerns) -> int:
        """Delete the decisions of a user that are of a kind, with the notes of them; how many there were."""
        deleted = 0
        async for page in self._pages(user_id):
            over = [decision_id for decision_id, record in page.items() if record is None]
            for decision_id, record in page.items():
                if record is not None and concerns(record):
                    deleted += await self._retract_latest(decision_id, record, concerns)
                    over.append(decision_id)
            if over:
                await command(self._redis, "ZREM", self._keys.decided(user_id), *over)
        return deleted

    async def retract(self, decision_id: str, record: bytes) -> bool:
        """Delete a decision and all that is kept under its id, if this is its record; whether it was.

        Whatever else is kept of a decision in its partition goes here, in the same step.
        """
        digest = sha1(record, usedforsecurity=False).hexdigest()
        keys = [self._keys.decision(decision_id), self._keys.awaiting(self._keys.partition_of(decision_id))]
        return bool(await self._retract.call(keys, [digest, decision_id, ITEMS_MAX]))

    async def _retract_latest(self, decision_id: str, record: bytes, concerns: Concerns) -> bool:
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
        """The records of all decisions noted, by id; None for one that is over."""
        # All ids at once: what a loop over pages takes out would move the pages. They are short, their records are not.
        reply = await command(self._redis, "ZRANGE", self._keys.decided(user_id), 0, -1)
        ids = [as_text(decision_id) for decision_id in reply]
        for start in range(0, len(ids), DECISIONS_READ):
            part = ids[start : start + DECISIONS_READ]
            records = await pipeline(self._redis, [("GET", self._keys.decision(decision_id)) for decision_id in part])
            yield {
                decision_id: None if record is None else as_bytes(record)
                for decision_id, record in zip(part, records, strict=True)
            }
