"""The fusion trainer: has warm starts trained when they are due, and publishes them.

One process at a time does this for a namespace, by a lease of its own. The training itself runs in a process of its
own (`worker.fusion_process`), which ends when the lease is lost, the time is over or the worker stops. What it was
told of users is taken back right after the publication for everyone who was forgotten meanwhile; and because a trainer
may die in between, every process looks once whether that was done.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, final

import numpy as np
import structlog

from models.features import FeatureLayout
from models.warm_starts import WarmStarter
from store.errors import CorruptRecord, StoreReset, StoreUnavailable
from store.failpoints import reach
from store.fusion import FusionJob, FusionRecord, FusionSource, FusionStanding, FusionStore, JobCause, new_token
from store.users import UserStore
from worker.fusion_child import COMMAND, TrainingFailed, train_in_child
from worker.fusion_sources import EVENTS_MIN, FusionSources, SourceUser
from worker.fusion_task import FusionTask
from worker.leased_job import JOB_LEASE_MS, Interrupted, LeasedJob, keep_ticking
from worker.model import NamespaceModel

#: Between two looks at whether a training is asked for.
TICK_S: Final = 1.0
#: Between two looks at whether one is due by itself, at least; a look goes over all users.
LOOK_S: Final = 60.0
#: A look that took long is not taken again before so many times as long.
LOOK_SHARE: Final = 20
#: After one that failed nothing is due by itself for so long.
AFTER_FAILURE_S: Final = 600.0
#: A training that takes longer is given up.
TRAINING_LIMIT_S: Final = 1_800.0
#: How far the job is when the training itself begins, and when it ends.
READ: Final = 0.1
TRAINED: Final = 0.95

log = structlog.get_logger()


@final
@dataclass(frozen=True, slots=True)
class FusionPlan:
    """When fusion is trained without being asked for, and on how many sources at least."""

    interval_s: float = 3_600.0  # since the last version, if anything was learned meanwhile
    growth: float = 0.25  # share by which sources have grown since the last version
    least_sources: int = 50
    threads: int = 1
    rounds: int | None = None  # of the fit; None: as many as it takes by default
    wanted: Literal["auto", "off"] = "auto"  # where the namespace says nothing else


@final
@dataclass(frozen=True, slots=True)
class _Cause:
    """Why fusion is to be trained; where that was found by a look, of which version."""

    by: JobCause
    looked: bool = False
    standing: FusionStanding | None = None


@final
class FusionTrainer:
    """Publishes versions of fusion when they are asked for or due."""

    def __init__(
        self,
        users: UserStore,
        fusion: FusionStore,
        sources: FusionSources,
        model: NamespaceModel,
        stopping: asyncio.Event,
        *,
        token: str,
        plan: FusionPlan,
        command: Sequence[str] = COMMAND,
        limit_s: float = TRAINING_LIMIT_S,
    ) -> None:
        """`command` starts the process that trains."""
        self._users = users
        self._fusion = fusion
        self._sources = sources
        self._model = model
        self._stopping = stopping
        self._token = token
        self._plan = plan
        self._command = command
        self._limit_s = limit_s
        self._next_look_s = 0.0
        self._looked_at: tuple[int, FusionStanding | None] | None = None
        self._checked = False

    async def run(self) -> None:
        """Train until asked to stop."""
        await keep_ticking(self._tick, self._stopping, TICK_S, "fusion not looked after")

    async def _tick(self) -> None:
        if self._model.record.overrides.get("fusion", self._plan.wanted) == "off":
            return
        if not self._checked:
            await self._strike_forgotten()
            self._checked = True
        cause = await self._cause(await self._stored_job())
        if cause is None or not await self._fusion.acquire_lease(self._token, JOB_LEASE_MS):
            return
        reach("fusion-leased")
        try:
            # Another process may have seen to it while we looked, or somebody has asked.
            job = await self._stored_job()
            if _waits(job):
                await self._see_to(job)
            elif cause.looked and await self._fusion.standing() == cause.standing:
                await self._see_to(FusionJob(by=cause.by))
        finally:
            await self._fusion.release_lease(self._token)

    async def _stored_job(self) -> FusionJob:
        try:
            return await self._fusion.job()
        except CorruptRecord as error:
            log.error("the job of fusion cannot be read", error=str(error))
            return FusionJob()

    async def _cause(self, job: FusionJob) -> _Cause | None:
        """Why fusion is to be trained now."""
        if _waits(job):
            return _Cause(job.by)
        now_s, trainer = time.monotonic(), self._model.trainer
        if now_s < self._next_look_s or trainer is None or not trainer.learner.start_size:
            return None
        try:
            return await self._due(job)
        finally:
            took_s = time.monotonic() - now_s
            self._next_look_s = now_s + max(min(LOOK_S, self._plan.interval_s), LOOK_SHARE * took_s)

    async def _due(self, job: FusionJob) -> _Cause | None:
        """Whether a training is due by itself: users are only gone over when something has changed since."""
        if self._model.record.profile_layout is None:
            return None
        if job.state == "failed" and _now_ms() - job.finished_ms < 1_000 * min(AFTER_FAILURE_S, self._plan.interval_s):
            return None
        standing = await self._fusion.standing()
        events = sum((await self._users.applied()).values())
        if standing is not None and standing.events != events:
            age_s = (_now_ms() - standing.created_ms) / 1_000
            if age_s >= self._plan.interval_s:
                return _Cause("schedule", looked=True, standing=standing)
        if (events, standing) == self._looked_at or await self._users.count() < self._plan.least_sources:
            return None
        self._looked_at = events, standing
        found = len(await self._sources.find(self._profile_layout()))
        if found < self._plan.least_sources:
            return None
        grown = standing is None or standing.struck or found >= standing.count * (1 + self._plan.growth)
        return _Cause("growth", looked=True, standing=standing) if grown else None

    def _profile_layout(self) -> FeatureLayout:
        layout = self._model.record.profile_layout
        if layout is None:
            raise TrainingFailed("nothing was told of any user yet: send user_features with recommendations")
        return FeatureLayout.from_json(layout)

    async def _see_to(self, job: FusionJob) -> None:
        """Train and publish, and have the job tell how that is coming along."""
        started = FusionJob("running", job.requested_ms, started_ms=_now_ms(), doing="reading users", by=job.by)
        leased = LeasedJob(self._fusion, self._stopping, started, token=self._token)
        await leased.begin()
        try:
            version, sources = await self._train(leased)
            ended = replace(leased.job, state="done", progress=1.0, doing="")
            log.info("fusion published", version=version, sources=sources, by=job.by)
        except TrainingFailed as error:
            ended = replace(leased.job, state="failed", doing="", reason=str(error))
            log.warning("fusion not trained", reason=str(error), by=job.by)
        except Interrupted:
            # Whoever comes next begins anew; without the lease this is not written.
            ended = replace(leased.job, state="queued", started_ms=0, progress=0.0, doing="")
            log.info("fusion interrupted", by=job.by)
        except (StoreReset, StoreUnavailable):
            raise
        except Exception as error:
            ended = replace(leased.job, state="failed", doing="", reason="an error of the worker's; its log tells more")
            log.exception("fusion not trained", error=type(error).__name__)
        finally:
            await leased.end()
        if ended.state != "queued":
            ended = replace(ended, finished_ms=_now_ms())
        await self._fusion.put_job(ended, lease_token=self._token)

    async def _train(self, leased: LeasedJob[FusionJob]) -> tuple[int, int]:
        """The version that was published, and on how many sources."""
        trainer = self._model.trainer
        if trainer is None:
            raise TrainingFailed("nothing was asked of this namespace yet: there is nobody to learn from")
        if not trainer.learner.start_size:
            raise TrainingFailed("this learner takes no warm starts: use the default preset")
        record, epoch = self._model.record, self._model.epoch
        events = sum((await self._users.applied()).values())
        standing = await self._fusion.standing()
        found = await self._sources.find(self._profile_layout())
        sources, batches = await self._sources.batches(trainer, found)
        if len(sources) < self._plan.least_sources:
            raise TrainingFailed(
                f"warm starts need {self._plan.least_sources} users with user_features and at least {EVENTS_MIN} "
                f"rewards each; there are {len(sources)}"
            )
        _tell(leased, "training", READ)
        version = 1 if standing is None else standing.version + 1
        profiles = np.stack([source.profile for source in sources])
        task = FusionTask(
            learner=record.learner,
            inputs=trainer.learner.inputs_expected,
            seed=record.seed + version,
            threads=self._plan.threads,
            rounds=self._plan.rounds,
            shared={name: tensor.cpu().numpy() for name, tensor in epoch.tensors.items()},
            batches=batches,
            profiles=profiles,
        )
        reach("fusion-before-training")
        arrays, report = await leased.unless_interrupted(
            train_in_child(
                task,
                lambda share: _tell(leased, "training", READ + share * (TRAINED - READ)),
                limit_s=self._limit_s,
                command=self._command,
            )
        )
        _tell(leased, "publishing", TRAINED)
        if self._model.record.learner != record.learner:
            raise TrainingFailed("the learner was changed meanwhile: ask again")
        try:
            await asyncio.to_thread(WarmStarter.from_arrays, trainer.learner, arrays, profiles)
        except ValueError as error:
            raise TrainingFailed(f"what was trained is no fusion of this learner's: {error}") from error
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
        told = tuple(
            FusionSource(token, source.profile, source.incarnation)
            for token, source in zip(tokens, sources, strict=True)
        )
        record = FusionRecord(version, arrays, told, report, _now_ms(), events=events)
        reach("fusion-before-publish")
        if not await self._fusion.publish(record, names, lease_token=self._token):
            raise Interrupted
        reach("fusion-after-publish")
        await self._strike_forgotten()

    async def _strike_forgotten(self) -> None:
        """Strike out whoever was forgotten since the published version read their profile."""
        try:
            current = await self._fusion.current()
        except CorruptRecord as error:
            log.error("fusion cannot be read", error=str(error))
            return
        named = await self._fusion.everyone()
        since = {source.token: source.incarnation for source in current.sources} if current else {}
        # Those of earlier versions have only names here.
        gone = await self._users.forgotten_since({user: since.get(token, 0) for token, user in named.items()})
        if await self._fusion.strike(gone):
            log.info("fusion sources struck", users=len(gone))


def _tell(leased: LeasedJob[FusionJob], doing: str, progress: float) -> None:
    """Have the next look at the job say so."""
    leased.job = replace(leased.job, doing=doing, progress=round(progress, 3))


def _waits(job: FusionJob) -> bool:
    """Whether somebody has to see to a job; one that runs without a lease was left by a process that died."""
    return job.state in ("queued", "running")


def _now_ms() -> int:
    return int(time.time() * 1_000)
