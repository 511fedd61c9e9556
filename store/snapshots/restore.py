"""Restores a namespace to a snapshot while it is in use.

The snapshot is verified first. Then an intent is written, every user is restored or dropped, partition by partition,
and the snapshot's epoch is published under a new number, which deletes the intent. If the restore is interrupted the
intent stays: no epoch is published until a restore, of this or another snapshot, completes.

Incarnations are raised, so that earlier decisions and computations no longer apply. Users get the number of the coming
epoch, for which services wait before they switch. A user who was not fitted under the snapshot's epoch gets an older
number, and workers refit them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, final
from uuid import uuid4

from metaban.store.client.connection import Store
from metaban.store.errors import SnapshotError
from metaban.store.failpoints import reach
from metaban.store.namespaces import NamespaceRecord, NamespaceStore
from metaban.store.shared.epochs import Epoch, EpochStore
from metaban.store.shared.fusion import FusionStore
from metaban.store.shared.leases import Lease, hold_lease
from metaban.store.shared.transfer import TransferStore
from metaban.store.snapshots.create import LEASE_WAIT_S, Progress, no_progress
from metaban.store.snapshots.file import SnapshotReader
from metaban.store.snapshots.manifest import Manifest
from metaban.store.snapshots.records import LearnerRules, RecordRules, UserRecord, rules_for
from metaban.store.snapshots.restore_intent import RestoreStore, Restoring
from metaban.store.users.users import UserStore

#: Users and bytes of one script call, which blocks the server while it runs.
WRITE_USERS: Final = 64
WRITE_BYTES: Final = 1 << 20

#: Least number of a restored epoch: services never load epoch 0, the learner's initial state.
FIRST_NUMBER: Final = 1


@final
@dataclass(frozen=True, slots=True)
class Restored:
    """Result of a restore."""

    snapshot: str
    epoch: int  # published by it
    users: int  # restored
    dropped: int  # not in the snapshot
    forgotten: int  # in the snapshot, but forgotten since


async def restore_snapshot(
    redis: Store,
    path: Path,
    namespace: str,
    rules: LearnerRules,
    *,
    rename: bool = False,
    progress: Progress = no_progress,
    lease_wait_s: float = LEASE_WAIT_S,
) -> Restored:
    """Restore a namespace to a snapshot; it is created if it does not exist.

    A snapshot of another namespace is refused unless `rename` is set.
    """
    reader = await asyncio.to_thread(SnapshotReader, path)
    with reader:
        manifest = reader.manifest
        if manifest.namespace != namespace and not rename:
            raise SnapshotError(
                f"snapshot {manifest.id} is of namespace {manifest.namespace}, not of {namespace}: set "
                "METABAN_NAMESPACE to that one, or restore it under another name with --as"
            )
        record_rules = await asyncio.to_thread(rules_for, rules, manifest.learner, manifest.layout)
        report = _report(progress, "verified")
        await asyncio.to_thread(reader.verify, record_rules, report)
        record = await _open(redis, namespace, manifest, rules)
        epochs = EpochStore(redis, record.keys, record.store_id)
        async with hold_lease(epochs, f"restore {uuid4().hex}", wait_s=lease_wait_s, for_restore=True) as lease:
            return await _Restorer(redis, record, reader, record_rules, progress).run(lease)


async def _open(redis: Store, namespace: str, manifest: Manifest, rules: LearnerRules) -> NamespaceRecord:
    """Namespace to restore: checked against the snapshot, or created."""
    namespaces = NamespaceStore(redis)
    record = await namespaces.load(namespace)
    if record is not None and record.state == "deleted":
        record = None  # a deleted namespace is created again
    if record is not None:
        _check_fits(record, manifest, rules)
    if record is None or record.state == "creating":
        learner, seed = manifest.learner, manifest.seed
        record = await namespaces.open_or_create(namespace, partitions=manifest.partitions, seed=seed, learner=learner)
        _check_fits(record, manifest, rules)
    if record.layout is None:
        record = await namespaces.set_layout(record, manifest.layout)
        _check_fits(record, manifest, rules)
    return record


def _check_fits(record: NamespaceRecord, manifest: Manifest, rules: LearnerRules) -> None:
    difference = rules.difference(record.learner, manifest.learner)
    if record.partitions != manifest.partitions:
        difference = f"it has {record.partitions} partitions, the snapshot {manifest.partitions}"
    elif record.layout is not None and record.layout != manifest.layout:
        difference = "its features are laid out differently"
    if difference:
        raise SnapshotError(
            f"snapshot {manifest.id} does not fit namespace {record.name}: {difference}. Restore it into a store "
            "without that namespace, or with --as under another name"
        )


@final
class _Restorer:
    """Runs one restore."""

    def __init__(
        self, redis: Store, record: NamespaceRecord, reader: SnapshotReader, rules: RecordRules, progress: Progress
    ) -> None:
        self._record = record
        self._reader = reader
        self._manifest = reader.manifest
        self._rules = rules
        self._progress = progress
        self._namespaces = NamespaceStore(redis)
        self._users = UserStore(redis, record.keys, record.store_id, samples_kept=1)
        self._epochs = EpochStore(redis, record.keys, record.store_id)
        self._fusion = FusionStore(redis, record.keys, record.store_id)
        self._transfer = TransferStore(redis, record.keys, record.store_id)
        self._restores = RestoreStore(redis, record.keys, record.store_id)
        self._put_back = self._dropped = self._forgotten = 0

    async def run(self, lease: Lease) -> Restored:
        epoch = await asyncio.to_thread(self._reader.epoch)
        least = max(self._manifest.epoch, FIRST_NUMBER)
        restoring = await self._restores.begin(self._manifest.id, lease_token=lease.token, least_number=least)
        reach("restore-after-intent")
        # After the intent: partitions that lost their users must not look intact without it.
        await self._namespaces.revive(self._record)
        for partition in range(self._record.partitions):
            await self._restore(partition, restoring, epoch, lease)
        reach("restore-before-publish")
        await lease.confirm()
        following = await self._following(epoch, restoring.target)
        await self._restores.finish(restoring, following, lease_token=lease.token)
        # A user forgotten at this moment was removed from the previous epoch only.
        await self._epochs.strike(await self._users.without_rewards(following.members))
        # Fusion and transfer jobs must not name users who are not in the snapshot.
        named = (await self._fusion.everyone()).values()
        await self._fusion.strike(await self._users.without_rewards(named))
        await self._transfer.strike(await self._users.without_rewards(await self._transfer.named()))
        reach("restore-after-publish")
        return Restored(self._manifest.id, restoring.target, self._put_back, self._dropped, self._forgotten)

    async def _following(self, epoch: Epoch, number: int) -> Epoch:
        """The snapshot's epoch under its new number.

        The counter of applied events is not reset. The epoch is dated as many events back as it was in the snapshot, so
        that the next one is due at the same distance; or now, if it would be replaced at once.
        """
        total = sum((await self._users.applied()).values())
        events = max(0, total - max(0, self._manifest.events - epoch.events))
        if self._rules.epoch_due(events, total) and not self._rules.epoch_due(epoch.events, self._manifest.events):
            events = total
        tensors = self._rules.renumber(epoch.tensors, number)
        gone = await self._users.without_rewards(epoch.members)  # forgotten since the snapshot
        members = tuple(user for user in epoch.members if user not in gone)
        return Epoch(number, events, tensors, members, int(time.time() * 1_000), refitted=number)

    async def _restore(self, partition: int, restoring: Restoring, epoch: Epoch, lease: Lease) -> None:
        # Even without users to write: from here on, older restores cannot write to the partition.
        await self._write(partition, restoring, [])
        unknown = dict.fromkeys(await self._users.versions(partition))
        chunks = self._reader.chunks(partition)
        while (records := await asyncio.to_thread(next, chunks, None)) is not None:
            await lease.confirm()
            for record in records:
                unknown.pop(record.user_id, None)
            labelled = [replace(record, epoch=_label(record, epoch, restoring.target)) for record in records]
            for batch in _batches(labelled):
                done = await self._write(partition, restoring, batch)
                self._put_back += sum(done)
                self._forgotten += len(done) - sum(done)
                self._progress("restored", self._put_back + self._forgotten, self._manifest.users)
                reach("restore-after-chunk")
        gone = [UserRecord(user, 0, 0, 0, b"") for user in unknown]
        for batch in _batches(gone):
            await lease.confirm()
            self._dropped += sum(await self._write(partition, restoring, batch))

    async def _write(self, partition: int, restoring: Restoring, records: Sequence[UserRecord]) -> list[bool]:
        return await self._restores.write(restoring, partition, records, applied=self._manifest.applied[partition])


def _label(record: UserRecord, epoch: Epoch, target: int) -> int:
    """Epoch number stored for a user: an older one if the user must be refitted.

    That is so if the last refit missed the user, or if the user was fitted under an epoch that was never published.
    """
    return target if epoch.refitted <= record.epoch <= epoch.number else target - 1


def _batches(records: Iterable[UserRecord]) -> Iterator[list[UserRecord]]:
    """Split records into batches for one script call."""
    batch: list[UserRecord] = []
    size = 0
    for record in records:
        if batch and (len(batch) == WRITE_USERS or size + record.size > WRITE_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(record)
        size += record.size
    if batch:
        yield batch


def _report(progress: Progress, step: str) -> Callable[[int, int], None]:
    """Progress callback for a thread, which calls `progress` in the current event loop."""
    loop = asyncio.get_running_loop()

    def report(done: int, total: int) -> None:
        loop.call_soon_threadsafe(progress, step, done, total)

    return report
