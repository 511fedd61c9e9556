"""Putting a namespace back to a snapshot while it is being used.

Everything is verified before anything is touched. Then an intent is left in the store, every user is put back or
dropped, partition by partition, and the snapshot's epoch is published under a new number, which also removes the
intent. A restore that dies on the way leaves the intent: no epoch is published on top of it, and restoring again, the
same snapshot or another one, completes it.

Users' incarnations are raised, so that whatever was decided or computed before applies to nobody any more. They are
labelled with the epoch to come: services wait for it and then change over in one step. Whoever was not fitted under
the snapshot's epoch when it was taken is labelled with an older one, and workers fit them again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, final
from uuid import uuid4

from store.connection import Store
from store.epochs import Epoch, EpochStore
from store.errors import SnapshotError
from store.failpoints import reach
from store.fusion import FusionStore
from store.leases import Lease, hold_lease
from store.namespaces import NamespaceRecord, Namespaces
from store.restores import RestoreStore, Restoring
from store.snapshot_file import SnapshotReader
from store.snapshot_manifest import Manifest
from store.snapshot_records import LearnerRules, RecordRules, UserRecord, rules_for
from store.snapshots import LEASE_WAIT_S, Progress, no_progress
from store.transfer import TransferStore
from store.users import UserStore

#: Users and bytes of one script, which keeps everyone else waiting while it runs.
WRITE_USERS: Final = 64
WRITE_BYTES: Final = 1 << 20
#: Number 0 stands for what a learner starts with, which services never load.
FIRST_NUMBER: Final = 1


@final
@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore did."""

    snapshot: str
    epoch: int  # published by it
    users: int  # put back
    dropped: int  # not in the snapshot
    forgotten: int  # in the snapshot, yet forgotten on request since


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
    """Put a namespace back to a snapshot; one that does not exist is made as the snapshot's was.

    A snapshot of another namespace is refused unless `rename` says that this is meant.
    """
    reader = await asyncio.to_thread(SnapshotReader, path)
    with reader:
        manifest = reader.manifest
        if manifest.namespace != namespace and not rename:
            raise SnapshotError(
                f"snapshot {manifest.id} is of namespace {manifest.namespace}, not of {namespace}: set "
                "METABAN_NAMESPACE to that one, or say with --as that it is to become another"
            )
        record_rules = await asyncio.to_thread(rules_for, rules, manifest.learner, manifest.layout)
        report = _report(progress, "verified")
        await asyncio.to_thread(reader.verify, record_rules, report)
        record = await _open(redis, namespace, manifest, rules)
        epochs = EpochStore(redis, record.keys, record.store_epoch)
        async with hold_lease(epochs, f"restore {uuid4().hex}", wait_s=lease_wait_s, for_restore=True) as lease:
            return await _Restorer(redis, record, reader, record_rules, progress).run(lease)


async def _open(redis: Store, namespace: str, manifest: Manifest, rules: LearnerRules) -> NamespaceRecord:
    """The namespace to restore, checked against the snapshot, or made after it."""
    namespaces = Namespaces(redis)
    record = await namespaces.load(namespace)
    if record is not None and record.state == "deleted":
        record = None  # what a name had before it was deleted is no matter
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
    """One restore under way."""

    def __init__(
        self, redis: Store, record: NamespaceRecord, reader: SnapshotReader, rules: RecordRules, progress: Progress
    ) -> None:
        self._record = record
        self._reader = reader
        self._manifest = reader.manifest
        self._rules = rules
        self._progress = progress
        self._namespaces = Namespaces(redis)
        self._users = UserStore(redis, record.keys, record.store_epoch, samples_kept=1)
        self._epochs = EpochStore(redis, record.keys, record.store_epoch)
        self._fusion = FusionStore(redis, record.keys, record.store_epoch)
        self._transfer = TransferStore(redis, record.keys, record.store_epoch)
        self._restores = RestoreStore(redis, record.keys, record.store_epoch)
        self._put_back = self._dropped = self._forgotten = 0

    async def run(self, lease: Lease) -> Restored:
        epoch = await asyncio.to_thread(self._reader.epoch)
        least = max(self._manifest.epoch, FIRST_NUMBER)
        restoring = await self._restores.begin(self._manifest.id, lease_token=lease.token, least_number=least)
        reach("restore-after-intent")
        # Not before: partitions that have lost their users must not look sound while nobody puts them back.
        await self._namespaces.revive(self._record)
        for partition in range(self._record.partitions):
            await self._restore(partition, restoring, epoch, lease)
        reach("restore-before-publish")
        await lease.confirm()
        following = await self._following(epoch, restoring.target)
        await self._restores.finish(restoring, following, lease_token=lease.token)
        # Whoever was forgotten in this moment was struck out of the epoch before.
        await self._epochs.strike(await self._users.without_learner(following.members))
        # Nor do fusion and transfer jobs name whom the snapshot does not know.
        named = (await self._fusion.everyone()).values()
        await self._fusion.strike(await self._users.without_learner(named))
        await self._transfer.strike(await self._users.without_learner(await self._transfer.named()))
        reach("restore-after-publish")
        return Restored(self._manifest.id, restoring.target, self._put_back, self._dropped, self._forgotten)

    async def _following(self, epoch: Epoch, number: int) -> Epoch:
        """The snapshot's epoch under the number that ends the restore.

        What was ever applied is not turned back. So that the next epoch is due as soon as it was then, this one counts
        as derived so many events ago as it was then; or now, where that would have it replaced at once.
        """
        total = sum((await self._users.applied()).values())
        events = max(0, total - max(0, self._manifest.events - epoch.events))
        if self._rules.epoch_due(events, total) and not self._rules.epoch_due(epoch.events, self._manifest.events):
            events = total
        tensors = self._rules.renumber(epoch.tensors, number)
        gone = await self._users.without_learner(epoch.members)  # forgotten since the snapshot was taken
        members = tuple(user for user in epoch.members if user not in gone)
        return Epoch(number, events, tensors, members, int(time.time() * 1_000), refitted=number)

    async def _restore(self, partition: int, restoring: Restoring, epoch: Epoch, lease: Lease) -> None:
        # Also where there is nothing to write: from here on an older restore may not write either.
        await self._write(partition, restoring, [])
        strangers = dict.fromkeys(await self._users.versions(partition))
        chunks = self._reader.chunks(partition)
        while (records := await asyncio.to_thread(next, chunks, None)) is not None:
            await lease.confirm()
            for record in records:
                strangers.pop(record.user_id, None)
            labelled = [replace(record, epoch=_label(record, epoch, restoring.target)) for record in records]
            for batch in _batches(labelled):
                done = await self._write(partition, restoring, batch)
                self._put_back += sum(done)
                self._forgotten += len(done) - sum(done)
                self._progress("restored", self._put_back + self._forgotten, self._manifest.users)
                reach("restore-after-chunk")
        gone = [UserRecord(user, 0, 0, 0, b"") for user in strangers]
        for batch in _batches(gone):
            await lease.confirm()
            self._dropped += sum(await self._write(partition, restoring, batch))

    async def _write(self, partition: int, restoring: Restoring, records: Sequence[UserRecord]) -> list[bool]:
        return await self._restores.write(restoring, partition, records, applied=self._manifest.applied[partition])


def _label(record: UserRecord, epoch: Epoch, target: int) -> int:
    """The number of the epoch that a user counts as fitted under.

    One who was left behind by a refit, or was refitted under an epoch that never came out, has to be fitted again.
    """
    return target if epoch.refitted <= record.epoch <= epoch.number else target - 1


def _batches(records: Iterable[UserRecord]) -> Iterator[list[UserRecord]]:
    """Records in parts that one script may take."""
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


def _report(progress: Progress, what: str) -> Callable[[int, int], None]:
    """Have a thread tell of its progress on the loop that it was started from."""
    loop = asyncio.get_running_loop()

    def tell(done: int, total: int) -> None:
        loop.call_soon_threadsafe(progress, what, done, total)

    return tell
