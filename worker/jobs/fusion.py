"""Trains warm starts by model fusion when they are due or requested, and publishes them.

A lease lets one worker at a time do this for a namespace. A child process (`fusion_process.py`) trains; it ends when
the lease is lost, the time limit is over or the worker stops. Users forgotten during the training are removed right
after the publication; because a worker may die in between, every worker checks this once when it starts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, final

import numpy as np
import structlog

from metaban.models.features import FeatureLayout
from metaban.models.fusion.warm_starts import WarmStarter
from metaban.store.errors import CorruptRecord, StoreReset, StoreUnavailable
from metaban.store.failpoints import reach
from metaban.store.shared.fusion import (
    FusionJobRecord,
    FusionRecord,
    FusionSource,
    FusionStanding,
    FusionStore,
    JobCause,
    new_token,
)
from metaban.store.users.users import UserStore
from metaban.worker.jobs.fusion_sources import EVENTS_MIN, FusionSources, SourceUser
from metaban.worker.jobs.fusion_task import COMMAND, FusionTask, TrainingFailed, train_in_child
from metaban.worker.jobs.leased_job import INTERNAL_ERROR, JOB_LEASE_MS, Interrupted, LeasedJob, run_periodically
from metaban.worker.learning.model import NamespaceModel

#: How often requests are checked.
TICK_S: Final = 1.0

#: Shortest time between two checks whether a training is due; a check goes over all users.
CHECK_S: Final = 60.0

#: The next check waits at least this many times as long as the last one took.
CHECK_PAUSE_FACTOR: Final = 20

#: No training starts without a request for this long after one failed.
AFTER_FAILURE_S: Final = 600.0

#: Time limit of a training.
TRAINING_LIMIT_S: Final = 1_800.0

#: Progress of the job when the training starts and when it ends.
PROGRESS_READ: Final = 0.1
PROGRESS_TRAINED: Final = 0.95

log = structlog.get_logger()


@final
@dataclass(frozen=True, slots=True)
class FusionSchedule:
    """When fusion is trained without a request, and how."""

    interval_s: float = 3_600.0  # since the last version, if events were applied meanwhile
    growth: float = 0.25  # relative growth of the number of sources since the last version
    min_sources: int = 50
    threads: int = 1
    rounds: int | None = None  # of the fit; None: the default
    mode: Literal["auto", "off"] = "auto"  # unless the namespace has its own setting


@final
@dataclass(frozen=True, slots=True)
class _Cause:
    """Why fusion is to be trained; if it is due without a request, since which version."""

    by: JobCause
    due: bool = False
    standing: FusionStanding | None = None


@final
class FusionTrainer:
    """Publishes versions of fusion when they are requested or due."""

    def __init__(
        self,
        users: UserStore,
        fusion: FusionStore,
        sources: FusionSources,
        model: NamespaceModel,
        stopping: asyncio.Event,
        *,
        token: str,
        schedule: FusionSchedule,
        command: Sequence[str] = COMMAND,
        limit_s: float = TRAINING_LIMIT_S,
    ) -> None:
        """`command` starts the child process that trains."""
        self._users = users
        self._fusion = fusion
        self._sources = sources
        self._model = model
        self._stopping = stopping
        self._token = token
        self._schedule = schedule
        self._command = command
        self._limit_s = limit_s
        self._next_check_s = 0.0
        self._last_checked: tuple[int, FusionStanding | None] | None = None
        self._struck = False

    async def run(self) -> None:
        """Train until asked to stop."""
        await run_periodically(self.tick, self._stopping, TICK_S, failure_event="fusion_check_failed")

    async def tick(self) -> None:
        """Run one training if it is requested or due and no other worker has the lease."""
        if self._model.record.overrides.get("fusion", self._schedule.mode) == "off":
            return
        if not self._struck:
            await self._strike_forgotten()
            self._struck = True
        cause = await self._cause(await self._stored_job())
        if cause is None or not await self._fusion.acquire_lease(self._token, JOB_LEASE_MS):
            return
        reach("fusion-leased")
        try:
            # Read again under the lease: another worker may have finished the job, or a request may have come.
            job = await self._stored_job()
            if _unfinished(job):
                await self._run_job(job)
            elif cause.due and await self._fusion.standing() == cause.standing:
                await self._run_job(FusionJobRecord(by=cause.by))
        finally:
            await self._fusion.release_lease(self._token)

    async def _stored_job(self) -> FusionJobRecord:
        try:
            return await self._fusion.job()
        except CorruptRecord as error:
            log.error("fusion_job_corrupt", error=str(error))
            return FusionJobRecord()

    async def _cause(self, job: FusionJobRecord) -> _Cause | None:
        """Why fusion is to be trained now; None when it is not."""
        if _unfinished(job):
            return _Cause(job.by)
        now_s, trainer = time.monotonic(), self._model.trainer
        if now_s < self._next_check_s or trainer is None or not trainer.learner.start_size:
            return None
        try:
            return await self._due(job)
        finally:
            took_s = time.monotonic() - now_s
            self._next_check_s = now_s + max(min(CHECK_S, self._schedule.interval_s), CHECK_PAUSE_FACTOR * took_s)

    async def _due(self, job: FusionJobRecord) -> _Cause | None:
        """Whether a training is due without a request; sources are counted only if something changed meanwhile."""
        schedule = self._schedule
        if self._model.record.profile_layout is None:
            return None
        if job.state == "failed" and _now_ms() - job.finished_ms < 1_000 * min(AFTER_FAILURE_S, schedule.interval_s):
            return None
        standing = await self._fusion.standing()
        events = sum((await self._users.applied()).values())
        if standing is not None and standing.events != events:
            age_s = (_now_ms() - standing.created_ms) / 1_000
            if age_s >= schedule.interval_s:
                return _Cause("schedule", due=True, standing=standing)
        if (events, standing) == self._last_checked or await self._users.count() < schedule.min_sources:
            return None
        self._last_checked = events, standing
        found = len(await self._sources.find(self._profile_layout()))
        if found < schedule.min_sources:
            return None
        grown = standing is None or standing.struck or found >= standing.count * (1 + schedule.growth)
        return _Cause("growth", due=True, standing=standing) if grown else None

    def _profile_layout(self) -> FeatureLayout:
        layout = self._model.record.profile_layout
        if layout is None:
            raise TrainingFailed("no user has a profile yet: send user_features with recommendations")
        return FeatureLayout.from_json(layout)

    async def _run_job(self, job: FusionJobRecord) -> None:
        """Train and publish, and store the status of the job."""
        started = FusionJobRecord("running", job.requested_ms, started_ms=_now_ms(), doing="reading users", by=job.by)
        leased = LeasedJob(self._fusion, self._stopping, started, token=self._token)
        await leased.begin()
        try:
            version, sources = await self._train(leased)
            ended = replace(leased.job, state="done", progress=1.0, doing="")
            log.info("fusion_published", version=version, sources=sources, by=job.by)
        except TrainingFailed as error:
            ended = replace(leased.job, state="failed", doing="", reason=str(error))
            log.warning("fusion_failed", reason=str(error), by=job.by)
        except Interrupted:
            # Another worker starts it again. If the lease was lost, the status is not written.
            ended = replace(leased.job, state="queued", started_ms=0, progress=0.0, doing="")
            log.info("fusion_interrupted", by=job.by)
        except (StoreReset, StoreUnavailable):
            raise
        except Exception as error:
            ended = replace(leased.job, state="failed", doing="", reason=INTERNAL_ERROR)
            log.exception("fusion_failed", error=type(error).__name__)
        finally:
            await leased.end()
        if ended.state != "queued":
            ended = replace(ended, finished_ms=_now_ms())
        await self._fusion.put_job(ended, lease_token=self._token)

    async def _train(self, leased: LeasedJob[FusionJobRecord]) -> tuple[int, int]:
        """Train and publish; returns the version and the number of sources."""
        trainer = self._model.trainer
        if trainer is None:
            raise TrainingFailed("the namespace has no users yet: send requests to /recommend first")
        if not trainer.learner.start_size:
            raise TrainingFailed("this learner does not support warm starts: use the default preset")
        record, epoch = self._model.record, self._model.epoch
        events = sum((await self._users.applied()).values())
        standing = await self._fusion.standing()
        found = await self._sources.find(self._profile_layout())
        sources, batches = await self._sources.batches(trainer, found)
        if len(sources) < self._schedule.min_sources:
            raise TrainingFailed(
                f"warm starts need {self._schedule.min_sources} users with user_features and at least {EVENTS_MIN} "
                f"rewards each; there are {len(sources)}"
            )
        _set_progress(leased, "training", PROGRESS_READ)
        version = 1 if standing is None else standing.version + 1
        profiles = np.stack([source.profile for source in sources])
        task = FusionTask(
            learner=record.learner,
            inputs=trainer.learner.parts,
            seed=record.seed + version,
            threads=self._schedule.threads,
            rounds=self._schedule.rounds,
            shared={name: tensor.cpu().numpy() for name, tensor in epoch.tensors.items()},
            batches=batches,
            profiles=profiles,
        )

        def on_progress(share: float) -> None:
            _set_progress(leased, "training", PROGRESS_READ + share * (PROGRESS_TRAINED - PROGRESS_READ))

        reach("fusion-before-training")
        arrays, report = await leased.unless_interrupted(
            train_in_child(task, on_progress, limit_s=self._limit_s, command=self._command)
        )
        _set_progress(leased, "publishing", PROGRESS_TRAINED)
        if self._model.record.learner != record.learner:
            raise TrainingFailed("the learner was changed during the training: request a new one")
        try:
            await asyncio.to_thread(WarmStarter.from_arrays, trainer.learner, arrays, profiles)
        except ValueError as error:
            raise TrainingFailed(f"the trained fusion does not fit the learner: {error}") from error
        await self._publish(version, arrays, report, sources, events)
        return version, len(sources)

    async def _publish(
        self,
        version: int,
        arrays: dict[str, np.ndarray],
        report: dict[str, Any],
        sources: Sequence[SourceUser],
        events: int,
    ) -> None:
        known = {user: token for token, user in (await self._fusion.everyone()).items()}
        tokens = [known.get(source.user_id) or new_token() for source in sources]
        names = dict(zip(tokens, (source.user_id for source in sources), strict=True))
        stored = tuple(
            FusionSource(token, source.profile, source.incarnation)
            for token, source in zip(tokens, sources, strict=True)
        )
        record = FusionRecord(version, arrays, stored, report, _now_ms(), events=events)
        reach("fusion-before-publish")
        if not await self._fusion.publish(record, names, lease_token=self._token):
            raise Interrupted
        reach("fusion-after-publish")
        await self._strike_forgotten()

    async def _strike_forgotten(self) -> None:
        """Remove the users who were forgotten after the published version read their profiles."""
        try:
            current = await self._fusion.current()
        except CorruptRecord as error:
            log.error("fusion_corrupt", error=str(error))
            return
        named = await self._fusion.everyone()
        since = {source.token: source.incarnation for source in current.sources} if current else {}
        # Sources of earlier versions are only in `named`.
        gone = await self._users.forgotten_since({user: since.get(token, 0) for token, user in named.items()})
        if await self._fusion.strike(gone):
            log.info("fusion_sources_removed", users=len(gone))


def _set_progress(leased: LeasedJob[FusionJobRecord], doing: str, progress: float) -> None:
    leased.job = replace(leased.job, doing=doing, progress=round(progress, 3))


def _unfinished(job: FusionJobRecord) -> bool:
    """Whether a job is to be run; one that is `running` while the lease is free was left by a dead worker."""
    return job.state in ("queued", "running")


def _now_ms() -> int:
    return int(time.time() * 1_000)
