"""Transfer jobs: administrators ask which users help a target, and task modeling answers (`models.transfer`).

One process at a time works on them for a namespace, by a lease of its own, on a thread of lower priority: learning goes
on meanwhile. Whoever is killed over a job leaves it to the next worker, who begins anew, but not for ever.
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

from models.threads import one_thread
from models.transfer import TransferResult, TransferSettings, model_transfer
from models.transfer_nets import NetLosses, NetSettings
from store.errors import StoreReset, StoreUnavailable
from store.failpoints import reach
from store.transfer import TransferJob, TransferStore
from store.users import UserStore
from worker.leased_job import JOB_LEASE_MS, Interrupted, LeasedJob, keep_ticking
from worker.model import NamespaceModel
from worker.transfer_tasks import Material, Party, TransferFailed, TransferTasks

#: Between two looks at whether a job waits.
TICK_S: Final = 1.0
#: How often a job is begun: one over which so many workers died is given up.
BEGINNINGS_MAX: Final = 3
#: How far a job is when the samples are read.
READ: Final = 0.1
NICENESS: Final = 10
#: What is trained for a set of sources.
NETS: Final = NetSettings()
#: Members of a set of sources, and sources from which on sets are saved where the ranking stands.
SUBSET_SIZE: Final = 5
EARLY_STOP_SOURCES: Final = 16

log = structlog.get_logger()


class _Cancelled(Exception):
    """Nobody waits for the answer any more."""


def modeling_thread() -> ThreadPoolExecutor:
    """One thread for all transfer jobs of a process, below everyone else's priority."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="transfer", initializer=_step_back)


def _step_back() -> None:
    with suppress(OSError):  # of this thread alone, where threads have priorities
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)


@final
class TransferWorker:
    """Answers what administrators ask, one question after the other."""

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
        self._checked = False

    async def run(self) -> None:
        """Work until asked to stop."""
        await keep_ticking(self._tick, self._stopping, TICK_S, "transfer jobs not looked after")

    async def _tick(self) -> None:
        if not self._checked:
            # Whoever was to do it may have died in between.
            await self._strike_forgotten(await self._transfer.named())
            self._checked = True
        if await self._next() is None or not await self._transfer.acquire_lease(self._token, JOB_LEASE_MS):
            return
        reach("transfer-leased")
        try:
            job = await self._next()
            if job is not None and not await self._strike_forgotten(job.users):
                await self._see_to(job)
        finally:
            await self._transfer.release_lease(self._token)

    async def _next(self) -> TransferJob | None:
        """Whose turn it is: first one that was left by a process that died, then by when they were asked for."""
        waiting = [job for job in await self._transfer.jobs(_now_ms()) if not job.ended]
        return min(waiting, key=lambda job: (job.state != "running", job.requested_ms), default=None)

    async def _strike_forgotten(self, users: Mapping[str, int]) -> bool:
        """Delete the jobs that name somebody who was forgotten since they were asked for; whether there were any."""
        gone = await self._users.forgotten_since(users)
        return bool(await self._transfer.strike(gone))

    async def _see_to(self, job: TransferJob) -> None:
        """Work on a job, and have it tell how that is coming along."""
        if job.begun >= BEGINNINGS_MAX:
            reason = f"{job.begun} workers ended while they were at it: they may have been out of memory; ask again"
            await self._transfer.put_job(_failed(job, reason), lease_token=self._token)
            log.error("transfer job given up", job=job.id, begun=job.begun)
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
            result = await self._work(leased)
            ended = replace(leased.job, state="done", progress=1.0, doing="", finished_ms=_now_ms())
            log.info("transfer job done", job=job.id, metric=job.question.metric)
        except TransferFailed as error:
            ended = _failed(leased.job, str(error))
            log.warning("transfer job failed", job=job.id, reason=str(error))
        except Interrupted:
            # Whoever comes next begins anew, and it does not count; without the lease this is not written.
            ended = replace(job, state="queued", started_ms=0, progress=0.0, doing="")
            log.info("transfer job interrupted", job=job.id)
        except (StoreReset, StoreUnavailable):
            raise
        except Exception as error:
            ended = _failed(leased.job, "an error of the worker's; its log tells more")
            log.exception("transfer job failed", job=job.id, error=type(error).__name__)
        finally:
            await leased.end()
        await self._transfer.put_job(ended, lease_token=self._token, result=result)
        reach("transfer-written")
        # Somebody may have been forgotten by a service that died before it came to this job.
        await self._strike_forgotten(job.users)

    async def _work(self, leased: LeasedJob[TransferJob]) -> dict[str, Any]:
        trainer, question = self._model.trainer, leased.job.question
        if trainer is None:
            raise TransferFailed("nothing was asked of this namespace yet: there is nobody to learn from")
        gathering = self._tasks.gather(trainer, self._model.epoch.tensors, self._model.rules, question)
        material = await leased.unless_interrupted(gathering)
        seed = self._model.record.seed + crc32(question.encode().encode())

        def tell(share: float) -> None:
            leased.job = replace(leased.job, doing="modeling", progress=round(READ + share * (1 - READ), 3))

        tell(0.0)
        try:
            found = await leased.unless_interrupted(self._modeled(material, question.metric, seed, tell))
        except ValueError as error:
            raise TransferFailed(str(error)) from error
        result = told(material, question.metric, found)
        if not _finite(result):
            raise TransferFailed("the models that were trained for it are not finite: look at the features of arms")
        return result

    async def _modeled(
        self, material: Material, metric: str, seed: int, tell: Callable[[float], None]
    ) -> TransferResult:
        cancelled = threading.Event()

        def check(share: float) -> None:
            if cancelled.is_set():
                raise _Cancelled

        def model() -> TransferResult:
            with one_thread():
                losses = NetLosses.from_tasks(material.tasks, 0, metric, seed=seed, settings=NETS, progress=check)
                return model_transfer(losses, settings_for(losses.sources), seed=seed, progress=tell)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._compute, model)
        finally:
            cancelled.set()


def settings_for(sources: int) -> TransferSettings:
    """How so many sources are told apart.

    Of few sources sets of five would be nearly all of them, hence nearly all the same; and sets of few are trained in a
    moment, so that no set is saved at the price of a ranking.
    """
    return TransferSettings(
        subset_size=max(1, min(SUBSET_SIZE, sources // 2)), early_stop=sources >= EARLY_STOP_SOURCES
    )


def told(material: Material, metric: str, found: TransferResult) -> dict[str, Any]:
    """What came of a job, as it is kept; sources are ranked, the most helpful first."""
    surrogate, (target, *sources), (samples, *others) = found.surrogate, material.parties, material.samples
    ranked = [
        {
            **_named(party),
            "events": others[place],
            "coefficient": float(surrogate.coefficients[place]),
            "low": float(surrogate.low[place]),
            "high": float(surrogate.high[place]),
            "selected": bool(found.chosen[place]),
            "predicted_gain": float(found.single_predicted[place]),
            "gain": float(found.single_gain[place]),
        }
        for place, party in enumerate(sources)
    ]
    return {
        "target": {**_named(target), "events": samples},
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


def _named(party: Party) -> dict[str, Any]:
    return {"user_id": party.user_id, "cluster": party.cluster, "users": len(party.users)}


def _finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_finite, value.values()))
    if isinstance(value, list):
        return all(map(_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _failed(job: TransferJob, reason: str) -> TransferJob:
    return replace(job, state="failed", doing="", reason=reason, finished_ms=_now_ms())


def _now_ms() -> int:
    return int(time.time() * 1_000)
