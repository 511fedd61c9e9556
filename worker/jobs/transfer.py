"""Runs transfer jobs: which users help a target user or cluster, answered by task modeling (`models/transfer/`).

A lease lets one worker at a time run the jobs of a namespace, on a thread of lower priority. A job whose worker was
killed is started again by another worker, up to STARTS_MAX times.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, final
from zlib import crc32

import structlog

from metaban.models.transfer.nets import NetLosses, NetSettings
from metaban.models.transfer.task_modeling import TaskModelResult, TransferSettings, model_transfer
from metaban.store.errors import StoreReset, StoreUnavailable
from metaban.store.failpoints import reach
from metaban.store.shared.transfer import TransferJobRecord, TransferStore
from metaban.store.users.users import UserStore
from metaban.worker.jobs.leased_job import INTERNAL_ERROR, JOB_LEASE_MS, Interrupted, LeasedJob, run_periodically
from metaban.worker.jobs.transfer_tasks import TaskUsers, TransferFailed, TransferInput, TransferTasks
from metaban.worker.learning.model import NamespaceModel

#: How often the store is checked for jobs.
TICK_S: Final = 1.0

#: How often a job is started before it fails; a start counts unless the worker stopped in order.
STARTS_MAX: Final = 3

#: Progress of a job when the samples are read.
PROGRESS_READ: Final = 0.1
NICENESS: Final = 10

#: The nets trained on each subset of sources.
NETS: Final = NetSettings()

#: Most sources of a subset.
SUBSET_SIZE: Final = 5

#: With at least this many sources, sampling of subsets stops early once the ranking is stable.
EARLY_STOP_SOURCES: Final = 16

log = structlog.get_logger()


class _Cancelled(Exception):
    """The result is no longer wanted."""


def modeling_thread() -> ThreadPoolExecutor:
    """One thread of lower priority for all transfer jobs of a process."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="transfer", initializer=_lower_priority)


def _lower_priority() -> None:
    with suppress(OSError):  # not every system has priorities of single threads
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)


@final
class TransferWorker:
    """Runs the transfer jobs of a namespace one after the other."""

    def __init__(
        self,
        users: UserStore,
        transfer: TransferStore,
        tasks: TransferTasks,
        model: NamespaceModel,
        compute: Executor,
        stopping: asyncio.Event,
        *,
        token: str,
    ) -> None:
        self._users = users
        self._transfer = transfer
        self._tasks = tasks
        self._model = model
        self._compute = compute
        self._stopping = stopping
        self._token = token
        self._struck = False

    async def run(self) -> None:
        """Run jobs until asked to stop."""
        await run_periodically(self.tick, self._stopping, TICK_S, failure_event="transfer_check_failed")

    async def tick(self) -> None:
        """Run the next job if there is one and no other worker has the lease."""
        if not self._struck:
            # The process that forgot a user may have died before it deleted the user's jobs.
            await self._strike_forgotten(await self._transfer.named())
            self._struck = True
        if await self._next() is None or not await self._transfer.acquire_lease(self._token, JOB_LEASE_MS):
            return
        reach("transfer-leased")
        try:
            job = await self._next()
            if job is not None and not await self._strike_forgotten(job.users):
                await self._run_job(job)
        finally:
            await self._transfer.release_lease(self._token)

    async def _next(self) -> TransferJobRecord | None:
        """The next job: first one that a dead worker left running, then the oldest."""
        waiting = [job for job in await self._transfer.jobs(_now_ms()) if not job.ended]
        return min(waiting, key=lambda job: (job.state != "running", job.order), default=None)

    async def _strike_forgotten(self, users: Mapping[str, int]) -> bool:
        """Delete the jobs that name a user forgotten since the request; returns whether there were any."""
        gone = await self._users.forgotten_since(users)
        return bool(await self._transfer.strike(gone))

    async def _run_job(self, job: TransferJobRecord) -> None:
        """Run a job and store its status and result."""
        if job.begun >= STARTS_MAX:
            reason = f"{job.begun} workers ended during the job, perhaps out of memory; request it again"
            await self._transfer.put_job(_failed(job, reason), lease_token=self._token)
            log.error("transfer_job_abandoned", job=job.id, starts=job.begun)
            return
        started = replace(
            job, state="running", started_ms=_now_ms(), progress=0.0, doing="reading rewards", begun=job.begun + 1
        )
        leased = LeasedJob(self._transfer, self._stopping, started, token=self._token)
        result: dict[str, Any] | None = None
        try:
            if not await leased.begin():
                return
            reach("transfer-begun")
            result = await self._result(leased)
            ended = replace(leased.job, state="done", progress=1.0, doing="", finished_ms=_now_ms())
            log.info("transfer_job_finished", job=job.id, metric=job.question.metric)
        except TransferFailed as error:
            ended = _failed(leased.job, str(error))
            log.warning("transfer_job_failed", job=job.id, reason=str(error))
        except Interrupted:
            # Another worker starts it again, and this start does not count. If the lease was lost, nothing is written.
            ended = replace(job, state="queued", started_ms=0, progress=0.0, doing="")
            log.info("transfer_job_interrupted", job=job.id)
        except (StoreReset, StoreUnavailable):
            raise
        except Exception as error:
            ended = _failed(leased.job, INTERNAL_ERROR)
            log.exception("transfer_job_failed", job=job.id, error=type(error).__name__)
        finally:
            await leased.end()
        await self._transfer.put_job(ended, lease_token=self._token, result=result)
        reach("transfer-written")
        # A service that forgot a user may have died before it deleted this job.
        await self._strike_forgotten(job.users)

    async def _result(self, leased: LeasedJob[TransferJobRecord]) -> dict[str, Any]:
        trainer, question = self._model.trainer, leased.job.question
        if trainer is None:
            raise TransferFailed("the namespace has no users yet: send requests to /recommend first")
        gathering = self._tasks.gather(trainer, self._model.epoch.tensors, self._model.rules, question)
        transfer_input = await leased.unless_interrupted(gathering)
        seed = self._model.record.seed + crc32(question.encode().encode())

        def on_progress(share: float) -> None:
            progress = round(PROGRESS_READ + share * (1 - PROGRESS_READ), 3)
            leased.job = replace(leased.job, doing="modeling", progress=progress)

        on_progress(0.0)
        try:
            found = await leased.unless_interrupted(
                self._model_tasks(transfer_input, question.metric, seed, on_progress)
            )
        except ValueError as error:
            raise TransferFailed(str(error)) from error
        result = result_json(transfer_input, question.metric, found)
        if not _finite(result):
            raise TransferFailed("the trained models are not finite: check the features of the arms")
        return result

    async def _model_tasks(
        self, transfer_input: TransferInput, metric: str, seed: int, on_progress: Callable[[float], None]
    ) -> TaskModelResult:
        cancelled = threading.Event()

        def check(share: float) -> None:
            if cancelled.is_set():
                raise _Cancelled

        def model() -> TaskModelResult:
            tasks = transfer_input.tasks
            losses = NetLosses.from_tasks(tasks, 0, metric, seed=seed, settings=NETS, progress=check)
            return model_transfer(losses, settings_for(losses.sources), seed=seed, progress=on_progress)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._compute, model)
        finally:
            cancelled.set()


def settings_for(sources: int) -> TransferSettings:
    """Settings of task modeling for a number of sources.

    With few sources, subsets of five would be nearly identical, so subsets are smaller. Few sources are also cheap, so
    that an early stop, which may cost accuracy of the ranking, is not worth it.
    """
    return TransferSettings(
        subset_size=max(1, min(SUBSET_SIZE, sources // 2)), early_stop=sources >= EARLY_STOP_SOURCES
    )


def result_json(transfer_input: TransferInput, metric: str, found: TaskModelResult) -> dict[str, Any]:
    """Result of a job as it is stored; sources are ranked, the most helpful first."""
    surrogate = found.surrogate
    (target, *sources), (samples, *others) = transfer_input.task_users, transfer_input.samples
    ranked = [
        {
            **_task_json(source),
            "events": others[place],
            "coefficient": float(surrogate.coefficients[place]),
            "low": float(surrogate.low[place]),
            "high": float(surrogate.high[place]),
            "selected": bool(found.chosen[place]),
            "predicted_gain": float(found.single_predicted[place]),
            "gain": float(found.single_gain[place]),
        }
        for place, source in enumerate(sources)
    ]
    return {
        "target": {**_task_json(target), "events": samples},
        "metric": metric,
        "losses": {"alone": found.alone, "everything": found.everything, "selected": found.with_chosen},
        "predicted_gain": found.predicted_gain,
        "gain": found.gain,
        "gain_error": found.gain_error,
        "applies": found.applies,
        "gamma": found.gamma,
        "subsets": found.subsets,
        "surrogate": {"error": surrogate.held_out_error, "variance": surrogate.variance},
        "sources": sorted(ranked, key=lambda source: source["coefficient"]),
    }


def _task_json(task: TaskUsers) -> dict[str, Any]:
    return {"user_id": task.user_id, "cluster": task.cluster, "users": len(task.users)}


def _finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_finite, value.values()))
    if isinstance(value, list):
        return all(map(_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _failed(job: TransferJobRecord, reason: str) -> TransferJobRecord:
    return replace(job, state="failed", doing="", reason=reason, finished_ms=_now_ms())


def _now_ms() -> int:
    return int(time.time() * 1_000)
