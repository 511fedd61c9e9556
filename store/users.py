"""Users' learners: state, samples and versions, changed only through `apply`, `rebase` and `forget`, and by a restore.

A user's version is the number of events applied in this incarnation; restoring or forgetting a user raises
the incarnation, and nothing ever lowers it. Both, with the store epoch, are the fence that makes every event count
exactly once. Of the counters, in each partition and at every moment:

    enqueued + replayed = applied + voided + buried + the events waiting
    applied = Σ versions + forgotten
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar, final

from store.codec import Sample
from store.connection import (
    BEFORE_ALL,
    Argument,
    Command,
    Store,
    as_bytes,
    as_int,
    as_text,
    block_arguments,
    command,
    parse_entries,
    pipeline,
    stream_entries,
)
from store.errors import CorruptRecord, FenceLost, FenceReason, StoreReset
from store.keys import LEARNERS, NamespaceKeys
from store.scripts import load_script
from store.starts import START_FIELDS, Start, decode_starts
from store.user_records import Forgotten, UpdateEntry, UserState, UserSummary, UserUpdate

__all__ = ["Forgotten", "UpdateEntry", "UserState", "UserStore", "UserSummary", "UserUpdate"]

#: Fields looked at by one step of a scan over the versions.
SCAN_COUNT: Final = 1_000
#: What is counted in every partition.
COUNTERS: Final = ("enqueued", "applied", "voided", "buried", "replayed", "forgotten", "quarantined", "late")
log = logging.getLogger(__name__)
Decoded = TypeVar("Decoded")
FENCE_REASONS: Final[dict[bytes, FenceReason]] = {
    b"not-pending": "not-pending",
    b"version": "version",
    b"store-epoch": "store-epoch",
    b"overtaken": "overtaken",
}


@final
class UserStore:
    """The users of one namespace."""

    def __init__(
        self,
        redis: Store,
        keys: NamespaceKeys,
        store_epoch: str,
        *,
        samples_kept: int,
        update_log_cap: int = 100_000,
    ) -> None:
        if samples_kept < 1 or update_log_cap < 1:
            raise ValueError("at least one sample and one line of the log must be kept")
        self._redis = redis
        self._keys = keys
        self._store_epoch = store_epoch
        self._samples_kept = samples_kept
        self._log_cap = update_log_cap
        self._apply = load_script(redis, "apply")
        self._rebase = load_script(redis, "rebase")
        self._forget = load_script(redis, "forget")

    async def load(self, user_ids: Iterable[str]) -> dict[str, UserState]:
        """The states of these users, tombstones of forgotten ones included.

        Users never learned are absent, and so are those whose state is damaged.
        """
        ids = list(dict.fromkeys(user_ids))
        replies = await pipeline(self._redis, map(self._state_command, ids))
        return _undamaged(_decode_states, ids, replies)

    async def fitted_under(self, user_ids: Iterable[str]) -> dict[str, int]:
        """The number of the epoch that each of these users was last fitted under."""
        ids = list(dict.fromkeys(user_ids))
        replies = await pipeline(self._redis, [("HGET", self._keys.user(user), "epoch") for user in ids])
        return {user: as_int(reply) for user, reply in zip(ids, replies, strict=True) if reply is not None}

    async def load_samples(self, user_ids: Iterable[str]) -> dict[str, list[Sample]]:
        """The samples kept of these users, oldest first; users without any, or with a damaged one, are absent."""
        ids = list(dict.fromkeys(user_ids))
        replies = await pipeline(self._redis, map(self._samples_command, ids))
        return _undamaged(_decode_samples, ids, replies)

    async def load_with_starts(self, user_ids: Iterable[str]) -> tuple[dict[str, UserState], dict[str, Start]]:
        """`load` with the starts that these users' learners have, in one round trip."""
        ids = list(dict.fromkeys(user_ids))
        replies = await pipeline(self._redis, [*map(self._state_command, ids), *map(self._start_command, ids)])
        states = _undamaged(_decode_states, ids, replies[: len(ids)])
        return states, decode_starts(ids, replies[len(ids) :], _incarnations(states))

    async def load_starts(self, states: Mapping[str, UserState]) -> dict[str, Start]:
        """The starts that the learners of these users have."""
        replies = await pipeline(self._redis, map(self._start_command, states))
        return decode_starts(list(states), replies, _incarnations(states))

    async def load_learners(
        self, user_ids: Iterable[str]
    ) -> tuple[dict[str, UserState], dict[str, list[Sample]], dict[str, Start]]:
        """`load` and `load_samples` in one round trip, with starts: what an update of these users starts from.

        Unlike `load`, raises CorruptRecord for a damaged user, whom an update must not take for a new one.
        """
        ids = list(dict.fromkeys(user_ids))
        commands = (self._state_command, self._samples_command, self._start_command)
        replies = await pipeline(self._redis, [asked(user) for asked in commands for user in ids])
        states = _decode_states(ids, replies[: len(ids)])
        samples = _decode_samples(ids, replies[len(ids) : 2 * len(ids)])
        return states, samples, decode_starts(ids, replies[2 * len(ids) :], _incarnations(states))

    def _state_command(self, user_id: str) -> Command:
        return ("HMGET", self._keys.user(user_id), "incarnation", "version", "epoch", "state", "trail")

    def _start_command(self, user_id: str) -> Command:
        return ("HMGET", self._keys.start(user_id), *START_FIELDS)

    def _samples_command(self, user_id: str) -> Command:
        return ("LRANGE", self._keys.samples(user_id), 0, -1)

    async def apply(
        self, partition: int, consumer: str, entry_ids: Sequence[str], updates: Sequence[UserUpdate]
    ) -> int:
        """Write all updates, acknowledge and delete all entries; the events ever applied in the partition.

        Entries in no update are acknowledged without an effect, and counted as voided. FenceLost, with nothing
        written, when an entry is not pending for this consumer, a user is not at the expected version, or the
        store is another one.
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
            self._store_epoch,
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
        """Refuse what the script's checks cannot see: the same thing twice, or moves that are none."""
        users = [update.state.user_id for update in updates]
        named = [entry_id for update in updates for entry_id in update.entry_ids]
        if len(set(users)) != len(users) or len(set(entry_ids)) != len(entry_ids):
            raise ValueError("a batch names each user and each entry once")
        if len(set(named)) != len(named) or not set(named) <= set(entry_ids):
            raise ValueError("the entries of the updates must be distinct entries of the batch")
        for update in updates:
            state = update.state
            if self._keys.partition_of(state.user_id) != partition:
                raise ValueError(f"a user is not in partition {partition}")
            expected = (update.expected_incarnation, update.expected_version)
            if (state.incarnation, state.version) <= expected:
                raise ValueError(f"the update of a user does not move on from {expected}")

    async def rebase(self, partition: int, states: Sequence[UserState], *, refit: int | None = None) -> list[bool]:
        """Rewrite states under a newer epoch at the same version; False for users that moved meanwhile.

        `refit` is the number of a refit under an epoch that is not out yet; FenceLost when a later one wrote here.
        """
        keys = [
            self._keys.marker(partition),
            self._keys.counters(partition),
            self._keys.update_log(partition),
            self._keys.versions(partition),
            self._keys.refit(partition),
        ]
        arguments: list[Argument] = [self._store_epoch, self._log_cap, "" if refit is None else refit]
        for state in states:
            if self._keys.partition_of(state.user_id) != partition:
                raise ValueError(f"a user is not in partition {partition}")
            keys.append(self._keys.user(state.user_id))
            arguments += [state.user_id, state.incarnation, state.version, state.trail, state.epoch, state.encode()]
        status, *done = await self._rebase.call(keys, arguments)
        if status != b"ok":
            raise FenceLost(FENCE_REASONS[status], f"partition {partition}")
        return [bool(flag) for flag in done]

    async def forget(self, user_id: str) -> Forgotten:
        """Delete a user's state, samples, profile and start and begin a new incarnation.

        Rewards of decisions made before have no effect from now on, wherever they are. Works for a user without any
        record too, of whom a decision may be under way. What else there is of the user is for `store.traces` to find.
        """
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
        ]
        status, *rest = await self._forget.call(keys, [self._store_epoch, self._log_cap, user_id])
        if status != b"ok":
            raise StoreReset(f"partition {partition} of {self._keys.namespace} lost its marker or is of another store")
        return Forgotten(as_int(rest[0]), as_int(rest[1]), as_text(rest[2]))

    async def without_learner(self, user_ids: Iterable[str]) -> set[str]:
        """Who of these was forgotten or never learned."""
        ids = list(dict.fromkeys(user_ids))
        replies = await pipeline(
            self._redis, [("HGET", self._keys.versions(self._keys.partition_of(user)), user) for user in ids]
        )
        return {user for user, reply in zip(ids, replies, strict=True) if reply is None or not _standing(reply)[1]}

    async def forgotten_since(self, incarnations: Mapping[str, int]) -> set[str]:
        """Who of these was forgotten since they were in this incarnation, or has no learner any more.

        A restore begins new incarnations too, of people who were not forgotten.
        """
        fields = ("version", "forgot")
        replies = await pipeline(self._redis, [("HMGET", self._keys.user(user), *fields) for user in incarnations])
        return {
            user
            for (user, incarnation), (version, forgot) in zip(incarnations.items(), replies, strict=True)
            if not as_int(version, absent=0) or as_int(forgot, absent=0) > incarnation
        }

    async def latest_samples(self, user_id: str, most: int) -> list[Sample]:
        """The samples kept of the latest rewards of a user, the newest first; damaged ones are left out."""
        if not most:
            return []
        found: list[Sample] = []
        for blob in reversed(await command(self._redis, "LRANGE", self._keys.samples(user_id), -most, -1)):
            with suppress(CorruptRecord):
                found.append(Sample.decode(as_bytes(blob)))
        return found

    async def summary(self, user_id: str) -> UserSummary | None:
        """What is stored of a user; None for one who was never learned nor forgotten."""
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
        cursor = "0"
        while True:
            key = self._keys.versions(partition)
            reply = await command(self._redis, "HSCAN", key, cursor, "COUNT", SCAN_COUNT)
            for user_id, joined in zip(reply[1][0::2], reply[1][1::2], strict=True):
                found[as_text(user_id)] = _standing(joined)
            cursor = as_text(reply[0])
            if cursor == "0":
                return found

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
        """Users of all partitions."""
        partitions = range(self._keys.partitions)
        replies = await pipeline(self._redis, [("HLEN", self._keys.versions(partition)) for partition in partitions])
        return sum(as_int(reply) for reply in replies)

    async def count_quarantined(self, partition: int, users: int) -> None:
        """Count learners that were put back to the prior; for people to see, nothing depends on it."""
        await command(self._redis, "HINCRBY", self._keys.counters(partition), "quarantined", users)

    async def count_late(self, user_ids: Iterable[str]) -> None:
        """Count rewards that came too late to be learned, one for each name; for people to see too."""
        late = Counter(map(self.partition_of, user_ids))
        await pipeline(
            self._redis,
            [("HINCRBY", self._keys.counters(partition), "late", rewards) for partition, rewards in late.items()],
        )

    async def counters(self) -> dict[str, int]:
        """Sums over partitions of what was counted, ever."""
        replies = await pipeline(
            self._redis,
            [("HMGET", self._keys.counters(partition), *COUNTERS) for partition in range(self._keys.partitions)],
        )
        return {name: sum(as_int(reply[place], absent=0) for reply in replies) for place, name in enumerate(COUNTERS)}

    def partition_of(self, user_id: str) -> int:
        """The partition that holds a user."""
        return self._keys.partition_of(user_id)

    async def tail(self, partition: int, cursor: str, *, block_ms: int, count: int) -> list[UpdateEntry]:
        """Lines of the update log after `cursor`; waits at most `block_ms`, and below the socket time-out."""
        wait = block_arguments(self._redis, block_ms)
        key = self._keys.update_log(partition)
        reply = await command(self._redis, "XREAD", "COUNT", count, *wait, "STREAMS", key, cursor)
        return [UpdateEntry.decode(entry_id, fields) for entry_id, fields in stream_entries(reply)]

    async def log_head(self, partition: int) -> str:
        """The cursor of the newest line of the update log."""
        key = self._keys.update_log(partition)
        rows = parse_entries(await command(self._redis, "XREVRANGE", key, "+", "-", "COUNT", 1))
        return rows[0][0] if rows else BEFORE_ALL

    async def logged(self, partition: int, cursor: str) -> bool:
        """Whether a line is in the update log: neither trimmed nor lost by a server that was restarted."""
        key = self._keys.update_log(partition)
        return bool(await command(self._redis, "XRANGE", key, cursor, cursor, "COUNT", 1))


def _incarnations(states: Mapping[str, UserState]) -> dict[str, int]:
    return {user: state.incarnation for user, state in states.items()}


def _standing(joined: Any) -> tuple[int, int]:
    incarnation, _, version = as_text(joined).partition(":")
    return as_int(incarnation), as_int(version)


def _undamaged(
    decode: Callable[[Sequence[str], Sequence[Any]], dict[str, Decoded]], ids: Sequence[str], replies: Sequence[Any]
) -> dict[str, Decoded]:
    """Decode user by user: one damaged record must not keep the others from being served."""
    decoded: dict[str, Decoded] = {}
    for user, reply in zip(ids, replies, strict=True):
        try:
            decoded |= decode([user], [reply])
        except CorruptRecord as error:
            # Not who: a line of a log outlives the user.
            log.error("a user cannot be read: %s", error)
    return decoded


def _decode_states(ids: Sequence[str], replies: Sequence[Any]) -> dict[str, UserState]:
    return {
        user: UserState.decode(user, *reply)
        for user, reply in zip(ids, replies, strict=True)
        if any(field is not None for field in reply)
    }


def _decode_samples(ids: Sequence[str], replies: Sequence[Any]) -> dict[str, list[Sample]]:
    return {
        user: [Sample.decode(as_bytes(blob)) for blob in reply]
        for user, reply in zip(ids, replies, strict=True)
        if reply
    }
