"""Snapshots as the service offers them: taken and restored by jobs, listed, and watched over."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any, final

from service.contracts import CheckResult
from service.errors import JobRunning, NotFound
from service.jobs import Job, JobTable
from service.settings import Settings
from service.snapshot_rules import KnownLearners
from store.connection import Store
from store.errors import SnapshotError
from store.namespaces import NamespaceRecord, Namespaces
from store.restores import RestoreStore
from store.snapshot_folder import Listed, SnapshotFolder
from store.snapshot_restore import restore_snapshot
from store.snapshots import Progress, create_snapshot


@final
class SnapshotDesk:
    """The snapshots of one served namespace."""

    def __init__(self, redis: Store, settings: Settings, record: NamespaceRecord) -> None:
        self._redis = redis
        self._namespace = record.name
        self._rules = KnownLearners()
        self._folder = SnapshotFolder(settings.data_dir, record.name, self._rules)
        self._restores = RestoreStore(redis, record.keys, record.store_epoch)
        self._verifying: asyncio.Task[list[Listed]] | None = None
        self.jobs = JobTable()

    def create(self, name: str) -> Job:
        """Begin to take a snapshot."""

        async def work(tell: Progress) -> dict[str, Any]:
            record = await Namespaces(self._redis).load(self._namespace)
            if record is None or record.state == "deleted":
                raise SnapshotError("the store was emptied or exchanged, or the namespace deleted")
            taken = await create_snapshot(self._redis, record, self._folder.path, self._rules, name=name, progress=tell)
            return {"snapshot": taken.id, "users": taken.users, "events": taken.events, "damaged": taken.damaged}

        return self.jobs.start("snapshot-create", work)

    async def restore(self, snapshot_id: str) -> Job:
        """Begin to put everything back to a snapshot; NotFound when there is none of that id."""
        if all(entry.id != snapshot_id for entry in await self.list(verify=False)):
            raise NotFound("There is no such snapshot here: GET /admin/snapshots lists them.")
        path = await asyncio.to_thread(self._folder.find, snapshot_id)

        async def work(tell: Progress) -> dict[str, Any]:
            return asdict(await restore_snapshot(self._redis, path, self._namespace, self._rules, progress=tell))

        return self.jobs.start("snapshot-restore", work)

    async def list(self, *, verify: bool) -> tuple[Listed, ...]:
        """Every snapshot of the namespace on this machine, the newest first, and those that cannot be read.

        JobRunning while they are being verified for another.
        """
        if not verify:
            return tuple(await asyncio.to_thread(self._folder.list))
        if self._verifying is not None and not self._verifying.done():
            raise JobRunning("Snapshots are being verified for somebody else; wait for that to end.")
        self._verifying = asyncio.create_task(asyncio.to_thread(self._folder.list, verify=True))
        # The thread goes on when whoever asked has left, and counts until it has ended.
        return tuple(await asyncio.shield(self._verifying))

    async def check(self) -> CheckResult | None:
        """Whether a restore is under way, or was left unfinished, which somebody has to see to."""
        restoring = await self._restores.unfinished()
        if restoring is None:
            return None
        if restoring.alive:
            return CheckResult(True, f"snapshot {restoring.snapshot} is being restored")
        return CheckResult(
            False,
            f"the restore of snapshot {restoring.snapshot} is unfinished: users are partly those of the snapshot, and "
            f"nothing shared is learned. Complete it with `metaban snapshot restore {restoring.snapshot}`",
        )
