"""Admin: create, restore, list and verify snapshots, and the checks of their records against the learner."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any, final

import numpy as np
import structlog
import torch

from metaban.models.features import FeatureLayout
from metaban.models.learner import Learner
from metaban.models.presets import build_learner
from metaban.models.settings import stored_settings
from metaban.service.engine.admin.jobs import JobTable, ProcessJob
from metaban.service.engine.commands import CheckResult
from metaban.service.errors import JobRunning, NotFound
from metaban.service.settings.environment import Settings
from metaban.store.client.connection import Store
from metaban.store.errors import SnapshotError, StoreError, StoreReset, StoreUnavailable
from metaban.store.namespaces import NamespaceRecord, NamespaceStore
from metaban.store.snapshots.create import Progress, create_snapshot
from metaban.store.snapshots.folder import Listed, SnapshotFolder
from metaban.store.snapshots.restore import restore_snapshot
from metaban.store.snapshots.restore_intent import RestoreStore

log = structlog.get_logger()


@final
class SnapshotAdmin:
    """The snapshots of one served namespace, and its jobs."""

    def __init__(self, redis: Store, settings: Settings, record: NamespaceRecord) -> None:
        self._redis = redis
        self._namespace = record.name
        self._rules = KnownLearners()
        self._folder = SnapshotFolder(settings.data_dir, record.name, self._rules)
        self._restores = RestoreStore(redis, record.keys, record.store_id)
        self._verifying: asyncio.Task[list[Listed]] | None = None
        self.jobs = JobTable(record.name)

    def create(self, name: str) -> ProcessJob:
        """Start a job that creates a snapshot."""

        async def work(report: Progress) -> dict[str, Any]:
            record = await NamespaceStore(self._redis).load(self._namespace)
            if record is None or record.state == "deleted":
                raise SnapshotError("the store was emptied or replaced, or the namespace was deleted")
            taken = await create_snapshot(
                self._redis, record, self._folder.path, self._rules, name=name, progress=report
            )
            return {"snapshot": taken.id, "users": taken.users, "events": taken.events, "damaged": taken.damaged}

        return self.jobs.start("snapshot-create", work)

    async def restore(self, snapshot_id: str) -> ProcessJob:
        """Start a job that restores a snapshot; NotFound when there is none of that id."""
        if all(entry.id != snapshot_id for entry in await self.list(verify=False)):
            raise NotFound("There is no such snapshot here: GET /admin/snapshots lists them.")
        path = await asyncio.to_thread(self._folder.find, snapshot_id)

        async def work(report: Progress) -> dict[str, Any]:
            return asdict(await restore_snapshot(self._redis, path, self._namespace, self._rules, progress=report))

        return self.jobs.start("snapshot-restore", work)

    async def list(self, *, verify: bool) -> tuple[Listed, ...]:
        """All snapshots of the namespace on this machine, the newest first, including unreadable ones.

        JobRunning while another request verifies them.
        """
        if not verify:
            return tuple(await asyncio.to_thread(self._folder.list))
        if self._verifying is not None and not self._verifying.done():
            raise JobRunning("Another request is verifying the snapshots; wait until it has ended.")
        self._verifying = asyncio.create_task(asyncio.to_thread(self._folder.list, verify=True))
        # Shielded: the thread goes on when the client disconnects, and blocks other verifications until it ends.
        return tuple(await asyncio.shield(self._verifying))

    async def check(self) -> CheckResult | None:
        """The check of a restore that runs or was left unfinished; None when there is none."""
        try:
            restoring = await self._restores.unfinished()
        except (StoreUnavailable, StoreReset):
            raise
        except StoreError as error:
            log.error("restore_unreadable", namespace=self._namespace, reason=str(error))
            return CheckResult(False, "the record of a restore is damaged: restore a snapshot, which replaces it")
        if restoring is None:
            return None
        if restoring.alive:
            return CheckResult(True, f"snapshot {restoring.snapshot} is being restored")
        return CheckResult(
            False,
            f"the restore of snapshot {restoring.snapshot} is unfinished: only some users are restored, and no "
            f"epoch is published. Complete it with `metaban snapshot restore {restoring.snapshot}`",
        )


@final
class LearnerRecords:
    """Checks records of a snapshot against one learner."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._fields = {name: tuple(shape) for name, shape in learner.fields.items()}

    def check_epoch(self, tensors: dict[str, np.ndarray]) -> None:
        """ValueError unless shared state has the learner's names and shapes and is finite."""
        wrong = self._learner.misfits({name: tensor.shape for name, tensor in tensors.items()})
        if wrong:
            raise ValueError(f"{', '.join(wrong)} have the wrong shape, or are missing or unknown")
        _check_finite(tensors)

    def check_state(self, tensors: dict[str, np.ndarray]) -> None:
        """ValueError unless a user's state has the learner's fields and is finite."""
        _check(tensors, self._fields)

    def check_sample_size(self, inputs: int, notes: int) -> None:
        """ValueError unless a sample has as many inputs and notes as the learner."""
        expected = (self._learner.input_size, self._learner.noted)
        if (inputs, notes) != expected:
            raise ValueError(f"a sample has {inputs} inputs and {notes} notes, not {expected[0]} and {expected[1]}")

    def epoch_due(self, epoch_events: int, total_events: int) -> bool:
        """Whether a new epoch is due after the one derived at `epoch_events` events."""
        return self._learner.epoch_due(epoch_events, total_events)

    def renumber(self, tensors: dict[str, np.ndarray], number: int) -> dict[str, np.ndarray]:
        """Shared state as it is published as epoch `number`."""
        shared = {name: torch.from_numpy(array.copy()) for name, array in tensors.items()}
        return {name: tensor.numpy() for name, tensor in self._learner.with_epoch_number(shared, number).items()}


@final
class KnownLearners:
    """The learners of this version of metaban."""

    def records(self, learner: dict[str, Any], layout: dict[str, Any]) -> LearnerRecords:
        """The checks for a learner with these settings."""
        inputs = FeatureLayout.from_json(layout)
        return LearnerRecords(build_learner(stored_settings(learner), inputs.parts))

    def difference(self, learner: dict[str, Any], other: dict[str, Any]) -> str:
        """The settings that make the records of the two learners incompatible, as text."""
        served, stored = stored_settings(learner).structure(), stored_settings(other).structure()
        names = [name for name in served if stored.get(name) != served[name]]
        return ", ".join(f"its {name} is {served[name]!r}, the snapshot's {stored.get(name)!r}" for name in names)


def _check(tensors: dict[str, np.ndarray], expected: dict[str, tuple[int, ...]]) -> None:
    found = {name: array.shape for name, array in tensors.items()}
    if found != expected:
        wrong = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
        raise ValueError(f"{', '.join(wrong)} have the wrong shape, or are missing or unknown")
    _check_finite(tensors)


def _check_finite(tensors: dict[str, np.ndarray]) -> None:
    for name, array in tensors.items():
        if not np.isfinite(array).all():
            raise ValueError(f"{name} is not finite")
