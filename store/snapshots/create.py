"""Takes a snapshot of a namespace while it goes on learning.

The epoch lease is held, so that no epoch is derived and no user refitted. For each partition: remember the end of the
update log, read all users, then read again those with later lines in the log; the last ones are read together with the
log by one script. So the snapshot has every partition exactly as it was at one line of its log.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any, Final, TypeAlias, final
from uuid import uuid4

import structlog

from metaban.store.client.connection import BEFORE_ALL, Store, as_bytes, as_int, as_text, parse_entries, pipeline
from metaban.store.client.scripts import load_script
from metaban.store.errors import CorruptRecord, SnapshotError, StoreReset
from metaban.store.failpoints import reach
from metaban.store.namespaces import NamespaceRecord
from metaban.store.shared.epochs import Epoch, EpochStore
from metaban.store.shared.leases import Lease, hold_lease
from metaban.store.snapshots.file import SnapshotWriter
from metaban.store.snapshots.manifest import Manifest, new_id
from metaban.store.snapshots.records import LearnerRules, RecordRules, UserRecord, check_record, rules_for
from metaban.store.snapshots.restore_intent import RestoreStore
from metaban.store.users.users import UserStore
from metaban.store.users.warm_starts import WARM_START_FIELDS, decode_warm_starts

#: Called with the name of the step, the amount done and the total.
Progress: TypeAlias = Callable[[str, int, int], None]

#: Approximate bytes and users of a chunk.
CHUNK_BYTES: Final = 8 << 20
CHUNK_USERS: Final = 4_096

#: Users read in one pipeline.
LOAD_USERS: Final = 64

#: Most updated users that are read by one script together with the log.
MOVED_USERS: Final = 64
LOG_LINES: Final = 512

#: Most lines of the log that the script reads.
MOVED_LINES: Final = 4_096

#: Passes over the log of a partition before the snapshot fails because of too many updates.
MAX_PASSES: Final = 200

#: Times that a partition is read from its beginning.
MAX_COPIES: Final = 3

#: Longest wait for an epoch that is being derived.
LEASE_WAIT_S: Final = 60.0

log = structlog.wrap_logger(logging.getLogger(__name__))


def no_progress(step: str, done: int, total: int) -> None:
    """Progress callback that does nothing."""


async def create_snapshot(
    redis: Store,
    record: NamespaceRecord,
    folder: Path,
    rules: LearnerRules,
    *,
    name: str = "",
    progress: Progress = no_progress,
    lease_wait_s: float = LEASE_WAIT_S,
) -> Manifest:
    """Take a snapshot of a namespace. Its file appears in the folder when it is complete."""
    if record.layout is None:
        raise SnapshotError(f"namespace {record.name} has learned nothing yet: there is nothing to keep")
    unfinished = await RestoreStore(redis, record.keys, record.store_id).unfinished()
    if unfinished is not None:
        raise SnapshotError(
            f"the restore of snapshot {unfinished.snapshot} is not finished: restore it again, then take this snapshot"
        )
    # In a thread: making the tensors of a large learner takes a while.
    record_rules = await asyncio.to_thread(rules_for, rules, record.learner, record.layout)
    epochs = EpochStore(redis, record.keys, record.store_id)
    with await asyncio.to_thread(SnapshotWriter, folder) as writer:
        async with hold_lease(epochs, f"snapshot {uuid4().hex}", wait_s=lease_wait_s) as lease:
            return await _Snapshotter(redis, record, record_rules, writer, progress).take(name, lease)


class _PlaceLost(Exception):
    """Our line of the update log was deleted."""


@final
@dataclass(frozen=True, slots=True)
class _Point:
    """Line of the update log at which a partition was read, and the events applied by then."""

    cursor: str
    applied: int


@final
class _Snapshotter:
    """Takes one snapshot."""

    def __init__(
        self, redis: Store, record: NamespaceRecord, rules: RecordRules, writer: SnapshotWriter, progress: Progress
    ) -> None:
        self._redis = redis
        self._record = record
        self._keys = record.keys
        self._rules = rules
        self._writer = writer
        self._progress = progress
        self._users = UserStore(redis, record.keys, record.store_id, samples_kept=1)
        self._epochs = EpochStore(redis, record.keys, record.store_id)
        self._collect = load_script(redis, "collect")
        self._waiting: list[UserRecord] = []
        self._waiting_bytes = 0
        self._damaged: set[str] = set()
        self._held: dict[str, bool] = {}  # users of the current partition: whether their last record has a state
        self._read = 0
        self._total = 0

    async def take(self, name: str, lease: Lease) -> Manifest:
        created_ms = int(time.time() * 1_000)
        epoch = await self._sound_epoch()
        self._total = await self._users.count()
        points: list[_Point] = []
        users = 0
        for partition in range(self._record.partitions):
            self._held = {}
            points.append(await self._copy(partition, lease))
            users += sum(self._held.values())
        # No epoch is published meanwhile, but members may have been forgotten.
        epoch = replace(epoch, members=await self._epochs.members())
        await asyncio.to_thread(self._writer.add_epoch, epoch.encode())
        manifest = Manifest(
            id=new_id(created_ms / 1_000),
            name=name,
            namespace=self._record.name,
            created_ms=created_ms,
            metaban=version_of("metaban"),
            learner=self._record.learner,
            layout=self._record.layout or {},
            partitions=self._record.partitions,
            seed=self._record.seed,
            epoch=epoch.number,
            users=users,
            damaged=len(self._damaged),
            applied=tuple(point.applied for point in points),
            cursors=tuple(point.cursor for point in points),
            members=tuple(self._writer.members),
        )
        # The lease was held all the time, so the epoch and all users are consistent.
        await lease.confirm()
        await asyncio.to_thread(self._writer.finish, manifest)
        return manifest

    async def _sound_epoch(self) -> Epoch:
        try:
            epoch = await self._epochs.current()
            if epoch is None:
                raise SnapshotError(f"namespace {self._record.name} has no epoch yet: start a worker, then try again")
            self._rules.check_epoch(epoch.tensors)
        except (CorruptRecord, ValueError) as error:
            raise SnapshotError(f"the epoch of namespace {self._record.name} is damaged: {error}") from error
        return epoch

    async def _copy(self, partition: int, lease: Lease) -> _Point:
        """Write the users of a partition; returns the point at which they were read.

        If our line of the log is gone (trimmed, or its user was forgotten), all users are read again.
        """
        for _ in range(MAX_COPIES):
            with suppress(_PlaceLost):
                return await self._copy_once(partition, lease)
        raise self._too_busy(partition)

    async def _copy_once(self, partition: int, lease: Lease) -> _Point:
        cursor = await self._users.log_head(partition)
        users = list(await self._users.versions(partition))
        for start in range(0, len(users), LOAD_USERS):
            await self._add(partition, await self._load(users[start : start + LOAD_USERS]), lease)
        for _ in range(MAX_PASSES):
            moved, n_lines, end = await self._moved(partition, cursor)
            if len(moved) > MOVED_USERS or n_lines > MOVED_LINES // 2:
                for start in range(0, len(moved), LOAD_USERS):
                    await self._add(partition, await self._load(moved[start : start + LOAD_USERS]), lease)
                cursor = end
                continue
            records, lines, applied = await self._load_with_log(partition, cursor, moved)
            await self._check_gap(partition, cursor)
            if {user for _, user in lines} <= set(moved) and len(lines) < MOVED_LINES:
                await self._add(partition, records, lease)
                await self._flush(partition, lease)
                return _Point(lines[-1][0] if lines else cursor, applied)
        raise self._too_busy(partition)

    async def _moved(self, partition: int, cursor: str) -> tuple[list[str], int, str]:
        """Users with lines in the log after the cursor, the number of lines, and the end of the log."""
        moved: dict[str, None] = {}
        n_lines, end = 0, cursor
        while lines := await self._users.tail(partition, end, block_ms=0, count=LOG_LINES):
            moved |= dict.fromkeys(line.user_id for line in lines)
            n_lines, end = n_lines + len(lines), lines[-1].cursor
        await self._check_gap(partition, cursor)
        return list(moved), n_lines, end

    async def _check_gap(self, partition: int, cursor: str) -> None:
        if cursor != BEFORE_ALL and not await self._users.logged(partition, cursor):
            raise _PlaceLost

    def _too_busy(self, partition: int) -> SnapshotError:
        return SnapshotError(f"users of partition {partition} change faster than they can be read: try again later")

    async def _load(self, users: Sequence[str]) -> list[UserRecord]:
        """Records of users. A user updated meanwhile has a line in the log and is read again."""
        commands: list[tuple[str, ...]] = []
        for user in users:
            commands.append(("HMGET", self._keys.user(user), "incarnation", "version", "epoch", "state"))
            commands.append(("LRANGE", self._keys.samples(user), "0", "-1"))
            commands.append(("HMGET", self._keys.start(user), *WARM_START_FIELDS))
        return await self._decode(users, await pipeline(self._redis, commands))

    async def _load_with_log(
        self, partition: int, cursor: str, users: Sequence[str]
    ) -> tuple[list[UserRecord], list[tuple[str, str]], int]:
        """Records of users, (cursor, user) of the lines after a cursor, and the applied events, at one moment."""
        keys = [self._keys.marker(partition), self._keys.counters(partition), self._keys.update_log(partition)]
        for user in users:
            keys += [self._keys.user(user), self._keys.samples(user), self._keys.start(user)]
        status, *rest = await self._collect.call(keys, [self._record.store_id, cursor, MOVED_LINES])
        if status != b"ok":
            raise StoreReset(f"partition {partition} of {self._record.name} belongs to another store")
        applied, rows, *replies = rest
        lines = [(entry_id, as_text(fields.get(b"u"))) for entry_id, fields in parse_entries(rows)]
        return await self._decode(users, replies), lines, as_int(applied)

    async def _decode(self, users: Sequence[str], replies: Sequence[Any]) -> list[UserRecord]:
        rows = zip(users, replies[0::3], replies[1::3], replies[2::3], strict=True)
        return await asyncio.to_thread(lambda: [self._record_of(*row) for row in rows])

    def _record_of(self, user: str, fields: Any, samples: Any, start: Any) -> UserRecord:
        """Record of a user; without a state if there is none, or if it is damaged."""
        nothing = UserRecord(user, 0, 0, 0, b"")
        self._damaged.discard(user)
        if fields[3] is None:
            return nothing
        try:
            incarnation, version, epoch = (as_int(field) for field in fields[:3])
            blobs = tuple(map(as_bytes, samples))
            record = UserRecord(user, incarnation, version, epoch, as_bytes(fields[3]), blobs)
            if decode_warm_starts([user], [start], {user: incarnation}):
                record = replace(record, start=as_bytes(start[1]))
            check_record(record, self._rules)
        except CorruptRecord as error:
            log.error("snapshot_user_skipped", namespace=self._record.name, reason=str(error))
            self._damaged.add(user)
            return nothing
        return record

    async def _add(self, partition: int, records: Iterable[UserRecord], lease: Lease) -> None:
        for record in records:
            known = self._held.get(record.user_id)
            if known is None:
                self._read += 1
            if record.state or known:  # a user without a state needs no record unless an earlier one has a state
                self._waiting.append(record)
                self._waiting_bytes += record.size
                self._held[record.user_id] = bool(record.state)
        if len(self._waiting) >= CHUNK_USERS or self._waiting_bytes >= CHUNK_BYTES:
            await self._flush(partition, lease)
        self._progress("users", self._read, max(self._read, self._total))

    async def _flush(self, partition: int, lease: Lease) -> None:
        records, self._waiting, self._waiting_bytes = self._waiting, [], 0
        if records:
            await lease.confirm()
            await asyncio.to_thread(self._writer.add_users, partition, records)
            reach("snapshot-after-chunk")
