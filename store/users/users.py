"""User states, samples and versions; changed only by `apply`, `rebase`, `forget` and by a restore.

A user's version is the number of events applied in the current incarnation. Forgetting or restoring a user raises the
incarnation; it never falls. The store id, the incarnation and the version are the fence that makes every event count
exactly once. In each partition, at any moment:

    enqueued + replayed = applied + voided + buried + events waiting
    applied = Σ versions + forgotten
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Literal, TypeVar, final

import structlog

from metaban.store.client.connection import (
    BEFORE_ALL,
    Store,
    as_bytes,
    as_int,
    as_text,
    block_arguments,
    command,
    entries_by_key,
    parse_entries,
    pipeline,
)
from metaban.store.client.node import Argument, Command
from metaban.store.client.scripts import ScriptCall, load_script
from metaban.store.codec import Sample
from metaban.store.errors import CorruptRecord, FenceLost, FenceReason, StoreReset
from metaban.store.keys import LEARNERS, NamespaceKeys
from metaban.store.users.records import ForgottenUser, UpdateEntry, UserState, UserSummary, UserUpdate
from metaban.store.users.warm_starts import WARM_START_FIELDS, StoredWarmStart, decode_warm_starts

#: Fields visited by one step of a scan over the versions.
SCAN_COUNT: Final = 1_000

#: How long replaced states are kept after the epoch of the refit was published: services adopt it a little later.
REPLACED_KEPT_S: Final = 60

#: Counters of every partition.
COUNTERS: Final = (
    "enqueued", "applied", "voided", "buried", "replayed", "forgotten", "quarantined", "late", "expired", "defaulted",
)  # fmt: skip

log = structlog.wrap_logger(logging.getLogger(__name__))

Decoded = TypeVar("Decoded")

FENCE_REASONS: Final[dict[bytes, FenceReason]] = {
    b"not-pending": "not-pending",
    b"version": "version",
    b"store-id": "store-id",
    b"overtaken": "overtaken",
}


@final
class UserStore:
    """The users of one namespace."""

    def __init__(
        self,
        redis: Store,
        keys: NamespaceKeys,
        store_id: str,
        *,
        samples_kept: int,
        update_log_cap: int = 100_000,
    ) -> None:
        if samples_kept < 1 or update_log_cap < 1:
            raise ValueError("samples_kept and update_log_cap must be at least 1")
        self._redis = redis
        self._keys = keys
        self._store_id = store_id
        self._samples_kept = samples_kept
        self._log_cap = update_log_cap
        self._apply = load_script(redis, "apply")
        self._rebase = load_script(redis, "rebase")
        self._forget = load_script(redis, "forget")

    async def load(self, user_ids: Iterable[str]) -> dict[str, UserState]:
        """States of these users, including tombstones of forgotten ones.

        Users without a record, or with a damaged one, are absent.
        """
        ids = list(dict.fromkeys(user_ids))
        replies = await pipeline(self._redis, map(self._state_command, ids))
        return _undamaged(_decode_states, ids, replies)

    async def fitted_under(self, user_ids: Iterable[str]) -> dict[str, int]:
        """Number of the epoch that each of these users was last fitted under."""
        ids = list(dict.fromkeys(user_ids))
        replies = await pipeline(self._redis, [("HGET", self._keys.user(user), "epoch") for user in ids])
        return {user: as_int(reply) for user, reply in zip(ids, replies, strict=True) if reply is not None}

    async def load_samples(self, user_ids: Iterable[str]) -> dict[str, list[Sample]]:
        """Stored samples of these users, oldest first. Users without samples, or with a damaged one, are absent."""
        ids = list(dict.fromkeys(user_ids))
        replies = await pipeline(self._redis, map(self._samples_command, ids))
        return _undamaged(_decode_samples, ids, replies)

    async def load_with_warm_starts(
        self, user_ids: Iterable[str]
    ) -> tuple[dict[str, UserState], dict[str, StoredWarmStart]]:
        """`load` together with the warm starts of these users, in one round trip."""
        ids = list(dict.fromkeys(user_ids))
        replies = await pipeline(self._redis, [*map(self._state_command, ids), *map(self._start_command, ids)])
        states = _undamaged(_decode_states, ids, replies[: len(ids)])
        starts = replies[len(ids) :]
        if starts.count([None] * len(WARM_START_FIELDS)) == len(ids):
            return states, {}  # as for most users
        return states, decode_warm_starts(ids, starts, _incarnations(states))

    async def load_warm_starts(self, states: Mapping[str, UserState]) -> dict[str, StoredWarmStart]:
        """Warm starts of these users."""
        replies = await pipeline(self._redis, map(self._start_command, states))
        return decode_warm_starts(list(states), replies, _incarnations(states))

    async def load_learners(
        self, user_ids: Iterable[str]
    ) -> tuple[dict[str, UserState], dict[str, list[Sample]], dict[str, StoredWarmStart]]:
        """States, samples and warm starts of these users in one round trip: the input of an update.

        Unlike `load`, raises CorruptRecord for a damaged record: an update must not treat that user as new.
        """
        ids = list(dict.fromkeys(user_ids))
        commands = (self._state_command, self._samples_command, self._start_command)
        replies = await pipeline(self._redis, [asked(user) for asked in commands for user in ids])
        states = _decode_states(ids, replies[: len(ids)])
        samples = _decode_samples(ids, replies[len(ids) : 2 * len(ids)])
        return states, samples, decode_warm_starts(ids, replies[2 * len(ids) :], _incarnations(states))

    def _state_command(self, user_id: str) -> Command:
        return ("HMGET", self._keys.user(user_id), "incarnation", "version", "epoch", "state", "trail")

    def _start_command(self, user_id: str) -> Command:
        return ("HMGET", self._keys.start(user_id), *WARM_START_FIELDS)

    def _samples_command(self, user_id: str) -> Command:
        return ("LRANGE", self._keys.samples(user_id), 0, -1)

    async def apply(
        self, partition: int, consumer: str, entry_ids: Sequence[str], updates: Sequence[UserUpdate]
    ) -> int:
        """Write all updates, acknowledge and delete all entries. Returns the events ever applied in the partition.

        Entries in no update are acknowledged without effect and counted as voided. Raises FenceLost, with nothing
        written, if an entry is not pending for this consumer, a user is not at the expected version, or the store
        id differs.
        """
        self._check_batch(partition, entry_ids, updates)
        keys = [
            self._keys.marker(partition),
            self._keys.events(partition),
            self._keys.counters(partition),
            self._keys.update_log(partition),
            self._keys.versions(partition),
            self._keys.attempts(partition),
        ]
        arguments: list[Argument] = [
            self._store_id,
            LEARNERS,
            consumer,
            self._samples_kept,
            self._log_cap,
            len(entry_ids),
            sum(len(update.entry_ids) for update in updates),
            *entry_ids,
        ]
        for update in updates:
            keys += [self._keys.user(update.state.user_id), self._keys.samples(update.state.user_id)]
            arguments += update.arguments()
        status, detail = await self._apply.call(keys, arguments)
        if status != b"ok":
            raise FenceLost(FENCE_REASONS[status], as_bytes(detail).decode("utf-8", "replace"))
        return as_int(detail)

    def _check_batch(self, partition: int, entry_ids: Sequence[str], updates: Sequence[UserUpdate]) -> None:
        """Raise ValueError for mistakes that the script does not check: duplicates, and updates that do not advance."""
        users = [update.state.user_id for update in updates]
        named = [entry_id for update in updates for entry_id in update.entry_ids]
        if len(set(users)) != len(users) or len(set(entry_ids)) != len(entry_ids):
            raise ValueError("a batch must name each user and each entry once")
        if len(set(named)) != len(named) or not set(named) <= set(entry_ids):
            raise ValueError("the entries of the updates must be distinct entries of the batch")
        for update in updates:
            state = update.state
            if self._keys.partition_of(state.user_id) != partition:
                raise ValueError(f"a user is not in partition {partition}")
            expected = (update.expected_incarnation, update.expected_version)
            if (state.incarnation, state.version) <= expected:
                raise ValueError(f"the update of a user must advance from {expected}")

    async def rebase(self, partition: int, states: Sequence[UserState], *, refit: int | None = None) -> list[bool]:
        """Rewrite states under a newer epoch at the same version. Returns False for users updated meanwhile.

        `refit` is the number of a refit under an epoch that is not published yet; `load_replaced` finds the states
        it replaces until `release_replaced`. Raises FenceLost if a later refit wrote to the partition.
        """
        keys = [
            self._keys.marker(partition),
            self._keys.counters(partition),
            self._keys.update_log(partition),
            self._keys.versions(partition),
            self._keys.refit(partition),
            self._keys.replaced(partition),
        ]
        arguments: list[Argument] = [self._store_id, self._log_cap, "" if refit is None else refit]
        for state in states:
            if self._keys.partition_of(state.user_id) != partition:
                raise ValueError(f"a user is not in partition {partition}")
            keys.append(self._keys.user(state.user_id))
            arguments += [state.user_id, state.incarnation, state.version, state.trail, state.epoch, state.encode()]
        status, *done = await self._rebase.call(keys, arguments)
        if status != b"ok":
            raise FenceLost(FENCE_REASONS[status], f"partition {partition}")
        return [bool(flag) for flag in done]

    async def load_replaced(self, refitted: Collection[UserState]) -> dict[str, UserState]:
        """For states under an epoch that is not published yet: the states they replaced, at least as new."""
        if not refitted:
            return {}
        found = await pipeline(
            self._redis,
            [("HGET", self._keys.replaced(self.partition_of(state.user_id)), state.user_id) for state in refitted],
        )
        replaced = _undamaged(_decode_replaced, [state.user_id for state in refitted], found)
        return {
            state.user_id: earlier
            for state in refitted
            if (earlier := replaced.get(state.user_id)) is not None
            and earlier.incarnation == state.incarnation
            and earlier.version >= state.version
        }

    async def release_replaced(self) -> None:
        """Let the states that a refit replaced expire: its epoch is published."""
        partitions = range(self._keys.partitions)
        await pipeline(self._redis, [("EXPIRE", self._keys.replaced(each), REPLACED_KEPT_S) for each in partitions])

    async def forget(self, user_id: str) -> ForgottenUser:
        """Delete a user's state, samples, profile and warm start, and begin a new incarnation.

        Rewards of earlier decisions have no effect from now on. Also works for a user without a record, for whom a
        decision may be under way. The remnants in streams are found by `forgetting.py`.
        """
        status, *rest = await self._forget.call(*self._forgetting(user_id, ""))
        self._check_forgotten(status)
        return ForgottenUser(as_int(rest[0]), as_int(rest[1]), as_text(rest[2]))

    async def expire(self, user_ids: Sequence[str], day: int) -> dict[str, int]:
        """Forget those of these users whose latest decision was on this day or before; returns their incarnations.

        A user without applied rewards leaves no tombstone.
        """
        replies = await self._forget.call_many([self._forgetting(user, day) for user in user_ids])
        expired: dict[str, int] = {}
        for user, (status, *rest) in zip(user_ids, replies, strict=True):
            if status != b"seen":
                self._check_forgotten(status)
                expired[user] = as_int(rest[0])
        return expired

    def _forgetting(self, user_id: str, day: int | Literal[""]) -> ScriptCall:
        partition = self.partition_of(user_id)
        keys = [
            self._keys.marker(partition),
            self._keys.counters(partition),
            self._keys.update_log(partition),
            self._keys.versions(partition),
            self._keys.user(user_id),
            self._keys.samples(user_id),
            self._keys.profile(user_id),
            self._keys.start(user_id),
            self._keys.replaced(partition),
            self._keys.last_seen(partition),
        ]
        return keys, [self._store_id, self._log_cap, user_id, day]

    def _check_forgotten(self, status: bytes) -> None:
        if status == b"store-id":
            raise StoreReset(f"a partition of {self._keys.namespace} is empty or of another store")

    async def unseen(self, partition: int, day: int, *, count: int) -> list[str]:
        """Users of a partition whose latest decision was on this day or before, those unseen for longest first."""
        key = self._keys.last_seen(partition)
        reply = await command(self._redis, "ZRANGE", key, "-inf", day, "BYSCORE", "LIMIT", 0, count)
        return [as_text(user_id) for user_id in reply]

    async def mark_unknown(self, partition: int, cursor: str, today: int) -> str:
        """Count one page of users as seen today if it is unknown when they were seen; returns the next cursor.

        An earlier version stored users without that day; so does a restore.
        """
        reply = await command(self._redis, "HSCAN", self._keys.versions(partition), cursor, "COUNT", SCAN_COUNT)
        pairs = zip(reply[1][0::2], reply[1][1::2], strict=True)
        marks = [argument for user_id, joined in pairs if _fence_of(joined)[1] for argument in (today, user_id)]
        if marks:
            await command(self._redis, "ZADD", self._keys.last_seen(partition), "NX", *marks)
        return as_text(reply[0])

    async def without_rewards(self, user_ids: Iterable[str]) -> set[str]:
        """Those of these users without applied rewards: forgotten, or never learned."""
        ids = list(dict.fromkeys(user_ids))
        replies = await pipeline(
            self._redis, [("HGET", self._keys.versions(self._keys.partition_of(user)), user) for user in ids]
        )
        return {user for user, reply in zip(ids, replies, strict=True) if reply is None or not _fence_of(reply)[1]}

    async def forgotten_since(self, incarnations: Mapping[str, int]) -> set[str]:
        """Those of these users who were forgotten after the given incarnation, or have no applied rewards.

        A higher incarnation alone does not mean that: a restore also begins new incarnations.
        """
        fields = ("version", "forgot")
        replies = await pipeline(self._redis, [("HMGET", self._keys.user(user), *fields) for user in incarnations])
        return {
            user
            for (user, incarnation), (version, forgot) in zip(incarnations.items(), replies, strict=True)
            if not as_int(version, absent=0) or as_int(forgot, absent=0) > incarnation
        }

    async def latest_samples(self, user_id: str, most: int) -> list[Sample]:
        """A user's latest samples, newest first, without damaged ones."""
        if not most:
            return []
        found: list[Sample] = []
        for blob in reversed(await command(self._redis, "LRANGE", self._keys.samples(user_id), -most, -1)):
            with suppress(CorruptRecord):
                found.append(Sample.decode(as_bytes(blob)))
        return found

    async def summary(self, user_id: str) -> UserSummary | None:
        """Numbers about a user; None for a user without a record."""
        fields, samples = await pipeline(
            self._redis,
            [
                ("HMGET", self._keys.user(user_id), "incarnation", "version", "epoch"),
                ("LLEN", self._keys.samples(user_id)),
            ],
        )
        incarnation, version, epoch = fields
        if incarnation is None:
            return None
        return UserSummary(
            incarnation=as_int(incarnation),
            version=as_int(version),
            epoch=None if epoch is None else as_int(epoch),
            samples=as_int(samples),
            forgotten=epoch is None,
        )

    async def versions(self, partition: int) -> dict[str, tuple[int, int]]:
        """(incarnation, version) of every user of a partition."""
        found: dict[str, tuple[int, int]] = {}
        async for page in self.scan_versions(partition):
            found |= page
        return found

    async def scan_versions(self, partition: int) -> AsyncIterator[dict[str, tuple[int, int]]]:
        """`versions` in pages of about SCAN_COUNT users. One created meanwhile may be missing; one may come twice."""
        cursor = "0"
        while True:
            key = self._keys.versions(partition)
            reply = await command(self._redis, "HSCAN", key, cursor, "COUNT", SCAN_COUNT)
            yield {
                as_text(user): _fence_of(joined) for user, joined in zip(reply[1][0::2], reply[1][1::2], strict=True)
            }
            cursor = as_text(reply[0])
            if cursor == "0":
                return

    async def applied(self) -> dict[int, int]:
        """Events ever applied, by partition."""
        partitions = range(self._keys.partitions)
        replies = await pipeline(
            self._redis, [("HGET", self._keys.counters(partition), "applied") for partition in partitions]
        )
        return {partition: as_int(reply, absent=0) for partition, reply in zip(partitions, replies, strict=True)}

    async def applied_in(self, partition: int) -> int:
        """Events ever applied in one partition."""
        return as_int(await command(self._redis, "HGET", self._keys.counters(partition), "applied"), absent=0)

    async def count(self) -> int:
        """Number of users of all partitions."""
        partitions = range(self._keys.partitions)
        replies = await pipeline(self._redis, [("HLEN", self._keys.versions(partition)) for partition in partitions])
        return sum(as_int(reply) for reply in replies)

    async def count_quarantined(self, partition: int, users: int) -> None:
        """Count users whose state was reset to the prior. For monitoring only."""
        await command(self._redis, "HINCRBY", self._keys.counters(partition), "quarantined", users)

    async def count_late(self, user_ids: Iterable[str]) -> None:
        """Count rewards that came too late to be learned, one for each user id given. For monitoring only."""
        late = Counter(map(self.partition_of, user_ids))
        await pipeline(
            self._redis,
            [("HINCRBY", self._keys.counters(partition), "late", rewards) for partition, rewards in late.items()],
        )

    async def counters(self) -> dict[str, int]:
        """Each counter, summed over partitions."""
        replies = await pipeline(
            self._redis,
            [("HMGET", self._keys.counters(partition), *COUNTERS) for partition in range(self._keys.partitions)],
        )
        return {name: sum(as_int(reply[place], absent=0) for reply in replies) for place, name in enumerate(COUNTERS)}

    def partition_of(self, user_id: str) -> int:
        """Partition of a user."""
        return self._keys.partition_of(user_id)

    async def tail(self, partition: int, cursor: str, *, block_ms: int, count: int) -> list[UpdateEntry]:
        """Lines of the update log after `cursor`; waits at most `block_ms`, and less than the socket time-out."""
        wait = block_arguments(self._redis, block_ms)
        key = self._keys.update_log(partition)
        reply = await command(self._redis, "XREAD", "COUNT", count, *wait, "STREAMS", key, cursor)
        return [UpdateEntry.decode(entry_id, fields) for entry_id, fields in entries_by_key(reply).get(key, [])]

    async def lines_after(self, partition: int, cursor: str, *, count: int) -> list[UpdateEntry] | None:
        """Lines of the update log after `cursor`; None if the line at `cursor` is gone, and others perhaps with it."""
        key = self._keys.update_log(partition)
        rows = parse_entries(await command(self._redis, "XRANGE", key, cursor, "+", "COUNT", count + 1))
        if not rows or rows[0][0] != cursor:
            return None
        return [UpdateEntry.decode(entry_id, fields) for entry_id, fields in rows[1:]]

    async def log_head(self, partition: int) -> str:
        """Cursor of the newest line of the update log."""
        key = self._keys.update_log(partition)
        rows = parse_entries(await command(self._redis, "XREVRANGE", key, "+", "-", "COUNT", 1))
        return rows[0][0] if rows else BEFORE_ALL

    async def logged(self, partition: int, cursor: str) -> bool:
        """Whether a line is still in the update log: neither trimmed nor lost in a crash of the server."""
        key = self._keys.update_log(partition)
        return bool(await command(self._redis, "XRANGE", key, cursor, cursor, "COUNT", 1))


def _incarnations(states: Mapping[str, UserState]) -> dict[str, int]:
    return {user: state.incarnation for user, state in states.items()}


def _fence_of(joined: Any) -> tuple[int, int]:
    """(incarnation, version) from their stored form."""
    incarnation, _, version = as_text(joined).partition(":")
    return as_int(incarnation), as_int(version)


def _undamaged(
    decode: Callable[[Sequence[str], Sequence[Any]], dict[str, Decoded]], ids: Sequence[str], replies: Sequence[Any]
) -> dict[str, Decoded]:
    """Decode user by user, so that one damaged record does not affect the others."""
    decoded: dict[str, Decoded] = {}
    for user, reply in zip(ids, replies, strict=True):
        try:
            decoded |= decode([user], [reply])
        except CorruptRecord as error:
            # Without the user id: log files are not searched when a user is forgotten.
            log.error("user_record_damaged", reason=str(error))
    return decoded


def _decode_states(ids: Sequence[str], replies: Sequence[Any]) -> dict[str, UserState]:
    return {
        user: UserState.decode(user, *reply)
        for user, reply in zip(ids, replies, strict=True)
        if any(field is not None for field in reply)
    }


def _decode_replaced(ids: Sequence[str], replies: Sequence[Any]) -> dict[str, UserState]:
    found = [(user, as_bytes(reply).split(b":", 3)) for user, reply in zip(ids, replies, strict=True) if reply]
    if any(len(fields) < 4 for _, fields in found):
        raise CorruptRecord("a replaced state has too few fields")
    return {user: UserState.decode(user, *fields) for user, fields in found}


def _decode_samples(ids: Sequence[str], replies: Sequence[Any]) -> dict[str, list[Sample]]:
    return {
        user: [Sample.decode(as_bytes(blob)) for blob in reply]
        for user, reply in zip(ids, replies, strict=True)
        if reply
    }
