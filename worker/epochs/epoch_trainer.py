"""Derives shared state from users' samples and publishes it as numbered epochs.

A lease lets one process at a time do this; correctness comes from the fence: an epoch is published only on top of the
epoch it was derived from. An epoch that changes the inputs of users' heads refits all users before it is published, and
those that changed meanwhile right after.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TypeVar, final

import numpy as np
import structlog

from metaban.store.errors import FenceLost, StoreReset, StoreUnavailable
from metaban.store.failpoints import reach
from metaban.store.shared.epochs import Epoch, EpochStore
from metaban.store.shared.leases import EPOCH_LEASE_MS, keep_lease
from metaban.store.users.records import UserState
from metaban.store.users.users import UserStore
from metaban.worker.epochs.derive_shared import EPOCH_USERS_MAX, derive_shared
from metaban.worker.epochs.sample_cache import SampleCache
from metaban.worker.epochs.users_by_hash import UsersByHash
from metaban.worker.learning.model import NamespaceModel, SharedEpoch
from metaban.worker.learning.outages import store_failed
from metaban.worker.learning.pauses import QuietChecks, until_next
from metaban.worker.learning.trainer import FitInput, Trainer

#: How often to check whether an epoch is due; more rarely while no events are applied. Applied events trigger a check.
TICK_S = 1.0

#: Users loaded, fitted and written at once during a refit.
REFIT_USERS = 256

log = structlog.get_logger()

Value = TypeVar("Value")


class _Stopping(Exception):
    """The worker stops; the epoch that was due is derived by the next one."""


@final
class EpochTrainer:
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
        # One user more than the pool holds tells whether it is full.
        self._by_hash = UsersByHash(users, partitions=partitions, most=max(EPOCH_USERS_MAX, candidate_pool + 1))
        self._samples = SampleCache(users)
        self._applied: dict[int, int] = {}
        self._swept = 0  # the newest refitting epoch after which all users were checked
        self._breaks = model.breaks
        self._woken = asyncio.Event()

    def count(self, partition: int, applied: int) -> None:
        """Set how many events were ever applied in a partition; wakes the trainer when an epoch is due."""
        self._applied[partition] = applied
        trainer = self._model.trainer
        if trainer is not None and trainer.learner.epoch_due(self._model.epoch.events, sum(self._applied.values())):
            self._woken.set()

    async def run(self) -> None:
        """Publish epochs until asked to stop."""
        checks, known, woken = QuietChecks(TICK_S), self._known(), False
        while not self._stopping.is_set():
            try:
                await self._model.refresh_record()
                if checks.due or woken or known != self._known():
                    nothing_due = await self.tick()
                    checks.done(quiet=nothing_due and known == self._known())
                    known = self._known()
            except StoreUnavailable as error:
                store_failed(error)
            except _Stopping:
                return
            except StoreReset:
                raise
            except Exception:
                # Raising would also end the consumers, which can go on under the current epoch.
                log.exception("epoch_failed")
            try:
                async with asyncio.timeout(until_next(TICK_S)):
                    woken = await self._woken.wait()
                    self._woken.clear()
            except TimeoutError:
                woken = False

    def _known(self) -> tuple[int, int, int]:
        """What a check depends on and this process may learn in between."""
        applied = sum(self._applied.values())
        return self._model.record.revision, self._model.epoch.number if self._model.trainer else 0, applied

    async def tick(self) -> bool:
        """Publish the next epoch if it is due and no other process is at it; returns whether nothing was due."""
        trainer = self._model.trainer
        if trainer is None:
            return True
        await self._model.refresh_epoch()
        current = self._model.epoch
        if self._breaks != self._model.breaks:
            # The store may have been set back: the sweep, known users and samples may belong to events it lost.
            self._breaks = self._model.breaks
            self._swept = 0
            self._by_hash.clear()
            self._samples.clear()
        self._applied = await self._users.applied()
        total = sum(self._applied.values())
        due = not self._model.epoch_published or await self._due(trainer, current, total)
        if not due and self._swept >= current.refitted:
            return True
        if not await self._epochs.acquire_lease(self._token, EPOCH_LEASE_MS):
            return False
        reach("meta-leased")
        async with keep_lease(self._epochs, self._token):
            if not due:
                await self._sweep(trainer, current)
            elif self._model.epoch_published:
                await self.advance(trainer, current, total)
            else:
                await self._publish(Epoch(0, 0, _arrays(current), (), _now_ms()))
        return False

    async def _due(self, trainer: Trainer, current: SharedEpoch, total: int) -> bool:
        if trainer.learner.epoch_due(current.events, total):
            return True
        pool = self._candidate_pool
        if len(current.members) >= pool or total <= pool or await self._users.count() <= pool:
            return False
        return len(await self._by_hash.first()) > pool  # without forgotten users

    async def advance(self, trainer: Trainer, current: SharedEpoch, total: int) -> None:
        """Derive the next epoch, refit users if it changes their inputs, publish it."""
        number = current.number + 1
        first = await self._by_hash.first()
        members = list(first)[: self._candidate_pool] if len(first) > self._candidate_pool else []
        derived_from = dict(islice(first.items(), EPOCH_USERS_MAX))
        fit_inputs = await self._samples.load(derived_from, trainer.learner.input_size)
        tensors = await self._computed(
            lambda: derive_shared(trainer, current.tensors, fit_inputs, current.events, total)
        )
        if not all(tensor.isfinite().all() for tensor in tensors.values()):
            # All users and all later epochs build on it, so a bad shared state could never be repaired.
            log.error("epoch_refused", number=number, reason="shared state not finite; the previous one is kept")
            tensors = current.tensors
        refit = trainer.learner.refit_due(current.events, total)
        derived = SharedEpoch(number, total, tuple(members), tensors, number if refit else current.refitted)
        reach("meta-derived")
        if refit and not await self._refit(trainer, derived, published=False):
            log.warning("epoch_refused", number=number, reason="the lease was lost while users were refitted")
            return
        epoch = Epoch(
            number, total, _arrays(derived), derived.members, _now_ms(), derived.refitted, follows=current.stamp
        )
        if await self._publish(epoch) and refit:
            await self._sweep(trainer, derived)

    async def _sweep(self, trainer: Trainer, epoch: SharedEpoch) -> None:
        """Refit the users that a published epoch left behind.

        Events applied between their user's refit and the publication were fitted under the previous epoch. The trainer
        that published may have died before this step, so every process does it once after each refitting epoch.
        """
        if await self._refit(trainer, epoch, published=True):
            await self._users.release_replaced()
            self._swept = epoch.refitted
            reach("meta-swept")

    async def _learned_users(self) -> AsyncIterator[list[str]]:
        """All users with applied events, at most REFIT_USERS at a time."""
        for partition in range(self._partitions):
            versions = await self._users.versions(partition)
            learned = [user for user, (_, version) in versions.items() if version]
            for start in range(0, len(learned), REFIT_USERS):
                yield learned[start : start + REFIT_USERS]

    async def _refit(self, trainer: Trainer, epoch: SharedEpoch, *, published: bool) -> bool:
        """Fit again all users that were fitted under older inputs; False when the lease was lost.

        Before the publication, users that already have the epoch's number are fitted again too: another trainer
        derived an epoch of that number and died before it published it.
        """
        # Writes before the publication carry a refit number, so that a delayed trainer cannot overwrite a later one.
        number = None if published else await self._epochs.begin_refit(self._token)
        if number is None and not published:
            return False
        async for user_ids in self._learned_users():
            if not await self._epochs.renew_lease(self._token, EPOCH_LEASE_MS):
                return False
            fitted_under = await self._users.fitted_under(user_ids)
            behind = [user for user, number in fitted_under.items() if number < epoch.refitted or not published]
            stale = await self._users.load(behind)
            fit_inputs = await self._fit_inputs(stale)
            if not fit_inputs:
                continue
            fitted = await self._computed(partial(trainer.fit, epoch.tensors, fit_inputs))
            by_partition: dict[int, list[UserState]] = {}
            for fit_input, tensors in zip(fit_inputs, fitted.states, strict=True):
                before = stale[fit_input.user_id]
                state = replace(before, epoch=epoch.number, tensors=tensors)
                by_partition.setdefault(self._users.partition_of(fit_input.user_id), []).append(state)
            for partition, moved in by_partition.items():
                try:
                    await self._users.rebase(partition, moved, refit=number)
                except FenceLost as fence:
                    if fence.reason == "store-id":
                        raise StoreReset(f"partition {partition} belongs to another store now") from fence
                    return False
                reach("meta-refitted")
        return True

    async def _computed(self, work: Callable[[], Value]) -> Value:
        """The result of `work`, unless the worker is asked to stop before its turn comes.

        All namespaces share one thread: at a stop, the epochs of all of them would be derived one after another.
        """

        def work_unless_stopping() -> Value:
            if self._stopping.is_set():
                raise _Stopping
            return work()

        return await asyncio.get_running_loop().run_in_executor(self._compute, work_unless_stopping)

    async def _fit_inputs(self, states: Mapping[str, UserState]) -> list[FitInput]:
        """Users with their samples and warm starts, but without previous state, which is void under new inputs."""
        samples = await self._users.load_samples(states)
        starts = await self._users.load_warm_starts({user: states[user] for user in samples})
        return [
            FitInput(user, state.version, samples[user], None, starts[user].values if user in starts else None)
            for user, state in states.items()
            if user in samples
        ]

    async def _publish(self, epoch: Epoch) -> bool:
        reach("meta-before-publish")
        published = await self._epochs.publish(epoch, lease_token=self._token)
        reach("meta-after-publish")
        if published:
            log.info("epoch_published", number=epoch.number, events=epoch.events, pool=len(epoch.members) or "all")
            # Users forgotten during the derivation were removed only from the previous epoch.
            await self._epochs.strike(await self._users.without_rewards(epoch.members))
            await self._model.refresh_epoch()
        return published


def _arrays(epoch: SharedEpoch) -> dict[str, np.ndarray]:
    return {name: tensor.cpu().numpy() for name, tensor in epoch.tensors.items()}


def _now_ms() -> int:
    return int(time.time() * 1_000)
