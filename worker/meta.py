"""The meta-trainer: derives shared state from users' samples and publishes it as numbered epochs.

One process at a time does this, by a lease; what makes it safe is not the lease but that an epoch is published only on
top of the one it was derived from. When an epoch changes the inputs of the networks, every user is fitted again
under it before it is published, and those who moved meanwhile right after.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import replace
from typing import final

import numpy as np
import structlog

from store.epochs import Epoch, EpochStore
from store.errors import FenceLost, StoreReset, StoreUnavailable
from store.failpoints import reach
from store.users import UserState, UserStore
from worker.epochs import choose_teachers, derive_shared
from worker.model import NamespaceModel, SharedEpoch
from worker.teachers import Teachers
from worker.trainer import Pupil, Trainer

#: Longest time between two looks at whether an epoch is due; applied events wake the trainer at once.
TICK_S = 1.0
#: Short, since a killed trainer's lease has to run out before another can take over.
TRAINER_LEASE_MS = 3_000
#: Users loaded, fitted and written in one go during a refit.
REFIT_USERS = 256

log = structlog.get_logger()


@final
class MetaTrainer:
    """Publishes epochs when they are due."""

    def __init__(
        self,
        users: UserStore,
        epochs: EpochStore,
        model: NamespaceModel,
        compute: Executor,
        stopping: asyncio.Event,
        *,
        token: str,
        partitions: int,
        candidate_pool: int,
    ) -> None:
        self._users = users
        self._epochs = epochs
        self._model = model
        self._compute = compute
        self._stopping = stopping
        self._token = token
        self._partitions = partitions
        self._candidate_pool = candidate_pool
        self._teachers = Teachers(users)
        self._applied: dict[int, int] = {}
        self._swept = 0
        self._breaks = model.breaks
        self._woken = asyncio.Event()

    def count(self, partition: int, applied: int) -> None:
        """Take note of the events applied in a partition, and look now if they make an epoch due."""
        self._applied[partition] = applied
        trainer = self._model.trainer
        if trainer is not None and trainer.learner.epoch_due(self._model.epoch.events, sum(self._applied.values())):
            self._woken.set()

    async def run(self) -> None:
        """Publish epochs until asked to stop."""
        while not self._stopping.is_set():
            try:
                await self._model.refresh_record()
                await self._tick()
            except StoreUnavailable as error:
                log.warning("store unavailable", error=str(error))
            except StoreReset:
                raise
            except Exception:
                # Users go on learning under the epoch there is; the consumers would end with this task.
                log.exception("no epoch derived")
            try:
                async with asyncio.timeout(TICK_S):
                    await self._woken.wait()
                    self._woken.clear()
            except TimeoutError:
                continue

    async def _tick(self) -> None:
        trainer = self._model.trainer
        if trainer is None:
            return
        await self._model.refresh_epoch()
        current = self._model.epoch
        if self._breaks != self._model.breaks:
            # The store may have been set back: what was swept and read may be of epochs and events that it lost.
            self._breaks = self._model.breaks
            self._swept = 0
            self._teachers.forget()
        self._applied = await self._users.applied()
        total = sum(self._applied.values())
        due = not self._model.epoch_published or await self._due(trainer, current, total)
        if not due and self._swept >= current.refitted:
            return
        if not await self._epochs.acquire_lease(self._token, TRAINER_LEASE_MS):
            return
        reach("meta-leased")
        heartbeat = asyncio.create_task(self._keep_lease())
        try:
            if not due:
                await self._sweep(trainer, current)
            elif self._model.epoch_published:
                await self._advance(trainer, current, total)
            else:
                await self._publish(Epoch(0, 0, _arrays(current), (), _now_ms()))
        finally:
            heartbeat.cancel()
            await self._epochs.release_lease(self._token)

    async def _keep_lease(self) -> None:
        """Renew the lease while a derivation takes its time; a lost one is noticed where it matters, at publication."""
        kept = True
        while kept:  # not for ever: the driver may swallow a cancellation
            await asyncio.sleep(TRAINER_LEASE_MS / 3_000)
            try:
                kept = await self._epochs.renew_lease(self._token, TRAINER_LEASE_MS)
            except StoreUnavailable as error:
                log.warning("store unavailable", error=str(error))

    async def _due(self, trainer: Trainer, current: SharedEpoch, total: int) -> bool:
        if trainer.learner.epoch_due(current.events, total):
            return True
        if len(current.members) >= self._candidate_pool or await self._users.count() <= self._candidate_pool:
            return False
        return len(await self._standings()) > self._candidate_pool  # those who were forgotten do not count

    async def _advance(self, trainer: Trainer, current: SharedEpoch, total: int) -> None:
        """Derive the next epoch, refit users where it changes their inputs, publish."""
        standings = await self._standings()
        user_ids = list(standings)
        members = choose_teachers(user_ids, self._candidate_pool) if len(user_ids) > self._candidate_pool else []
        teachers = await self._teachers.pupils(standings, trainer.learner.inputs_expected)
        loop = asyncio.get_running_loop()
        tensors = await loop.run_in_executor(
            self._compute, derive_shared, trainer, current.tensors, teachers, current.events, total
        )
        if not all(tensor.isfinite().all() for tensor in tensors.values()):
            # Everyone starts from it and the next one is derived from it: there would be no way back.
            log.error("derived epoch is not finite; the one before is kept", number=current.number + 1)
            tensors = current.tensors
        number = current.number + 1
        refit = trainer.learner.refit_due(current.events, total)
        derived = SharedEpoch(number, total, tuple(members), tensors, number if refit else current.refitted)
        reach("meta-derived")
        if refit and not await self._refit(trainer, derived, user_ids, published=False):
            return
        epoch = Epoch(
            number, total, _arrays(derived), derived.members, _now_ms(), derived.refitted, follows=current.stamp
        )
        if await self._publish(epoch) and refit:
            await self._sweep(trainer, derived)

    async def _sweep(self, trainer: Trainer, epoch: SharedEpoch) -> None:
        """Fit again whoever was left behind by an epoch that is out, until nobody is.

        Events applied between their user's refit and the publication were still fitted under the epoch before; and the
        trainer that published may have died before it got here, so every process looks once after each such epoch.
        """
        if await self._refit(trainer, epoch, list(await self._standings()), published=True):
            self._swept = epoch.refitted
            reach("meta-swept")

    async def _standings(self) -> dict[str, tuple[int, int]]:
        """(incarnation, version) of everyone of whom something was learned."""
        found: dict[str, tuple[int, int]] = {}
        for partition in range(self._partitions):
            standings = await self._users.versions(partition)
            found |= {user: standing for user, standing in standings.items() if standing[1]}
        return found

    async def _refit(self, trainer: Trainer, epoch: SharedEpoch, user_ids: list[str], *, published: bool) -> bool:
        """Fit again all users that were fitted under older inputs; False when the lease was lost.

        Before an epoch is published, whoever has its number already was fitted under another one of that number, whose
        trainer did not live to publish it: they are fitted again too.
        """
        ordered = sorted(user_ids)
        loop = asyncio.get_running_loop()
        # What is written before the epoch is out carries a number: held up, we must not write over a later trainer's.
        number = None if published else await self._epochs.begin_refit(self._token)
        if number is None and not published:
            return False
        for start in range(0, len(ordered), REFIT_USERS):
            if not await self._epochs.renew_lease(self._token, TRAINER_LEASE_MS):
                return False
            fitted_under = await self._users.fitted_under(ordered[start : start + REFIT_USERS])
            behind = [user for user, number in fitted_under.items() if number < epoch.refitted or not published]
            stale = await self._users.load(behind)
            pupils = await self._pupils(stale)
            if not pupils:
                continue
            fitted = await loop.run_in_executor(self._compute, trainer.fit, epoch.tensors, pupils)
            by_partition: dict[int, list[UserState]] = {}
            for pupil, tensors in zip(pupils, fitted.states, strict=True):
                before = stale[pupil.user_id]
                state = replace(before, epoch=epoch.number, tensors=tensors)
                by_partition.setdefault(self._users.partition_of(pupil.user_id), []).append(state)
            for partition, moved in by_partition.items():
                try:
                    await self._users.rebase(partition, moved, refit=number)
                except FenceLost as fence:
                    if fence.reason == "store-epoch":
                        raise StoreReset(f"partition {partition} belongs to another store now") from fence
                    return False
                reach("meta-refitted")
        return True

    async def _pupils(self, states: Mapping[str, UserState]) -> list[Pupil]:
        """Users with their samples and starts, as new to the learner: what they were fitted to under older inputs is
        void."""
        samples = await self._users.load_samples(states)
        starts = await self._users.load_starts({user: states[user] for user in samples})
        return [
            Pupil(user, state.version, samples[user], None, starts[user].values if user in starts else None)
            for user, state in states.items()
            if user in samples
        ]

    async def _publish(self, epoch: Epoch) -> bool:
        reach("meta-before-publish")
        published = await self._epochs.publish(epoch, lease_token=self._token)
        reach("meta-after-publish")
        if published:
            log.info("epoch published", number=epoch.number, events=epoch.events, pool=len(epoch.members) or "all")
            # Whoever was forgotten while it was derived was struck out of the epoch before.
            await self._epochs.strike(await self._users.without_learner(epoch.members))
            await self._model.refresh_epoch()
        return published


def _arrays(epoch: SharedEpoch) -> dict[str, np.ndarray]:
    return {name: tensor.cpu().numpy() for name, tensor in epoch.tensors.items()}


def _now_ms() -> int:
    return int(time.time() * 1_000)
