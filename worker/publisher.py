"""Events in, users' new states out: load, fit, and apply with the acknowledgement in one atomic step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import final

import structlog

from store.errors import FenceLost, StoreReset
from store.events import Delivery, EventStream, RewardEvent
from store.failpoints import reach
from store.users import UserState, UserStore, UserUpdate
from worker.desk import FittingDesk
from worker.model import NamespaceModel, SharedEpoch
from worker.trainer import Fitted, Pupil, Trainer

#: Times a batch is computed anew because a user moved meanwhile.
FENCE_RETRIES = 8

log = structlog.get_logger()


@final
class Publisher:
    """Learns from deliveries and publishes the result."""

    def __init__(
        self,
        streams: EventStream,
        users: UserStore,
        model: NamespaceModel,
        desk: FittingDesk,
        *,
        consumer: str,
        samples_kept: int,
    ) -> None:
        self._streams = streams
        self._users = users
        self._model = model
        self._desk = desk
        self._consumer = consumer
        self._samples_kept = samples_kept

    async def publish(self, partition: int, deliveries: Sequence[Delivery]) -> int | None:
        """Apply deliveries of one partition, burying those that no learner could take.

        Events decided for another incarnation of their user are finished without an effect.

        Returns the events ever applied in the partition, None when nothing was: what another consumer has claimed
        meanwhile is left to it.
        """
        learnable = [delivery for delivery in deliveries if await self._check(delivery)]
        trainer = self._model.trainer
        if not learnable or trainer is None:
            return None
        for _ in range(FENCE_RETRIES):
            try:
                return await self._apply(partition, learnable, trainer)
            except FenceLost as fence:
                if fence.reason == "store-epoch":
                    raise StoreReset(f"partition {partition} belongs to another store now") from fence
                if fence.reason == "not-pending":
                    if len(learnable) == 1:
                        return None
                    return await self._publish_one_by_one(partition, learnable)
        raise FenceLost("version", f"users of partition {partition} keep moving")

    async def _publish_one_by_one(self, partition: int, deliveries: Sequence[Delivery]) -> int | None:
        applied = None
        for delivery in deliveries:
            applied = await self.publish(partition, [delivery]) or applied
        return applied

    async def _check(self, delivery: Delivery) -> bool:
        """Whether a delivery can be learned; what cannot ever be is buried with the reason."""
        if delivery.event is None:
            await self._bury(delivery, "the entry is not a reward event")
            return False
        if not 0 <= delivery.event.reward <= 1:
            # The service takes no such reward; somebody else put it here, and it would spoil what all users share.
            await self._bury(delivery, f"a reward of {delivery.event.reward:g} does not lie between 0 and 1")
            return False
        if not self._fits(delivery.event):
            await self._model.refresh_record()
            if not self._fits(delivery.event):
                found = f"{delivery.event.features.size} inputs and {delivery.event.phi.size} notes"
                await self._bury(delivery, f"{found} do not fit the namespace's layout and learner")
                return False
        return True

    def _fits(self, event: RewardEvent) -> bool:
        if self._model.trainer is None:
            return False
        learner = self._model.trainer.learner
        return (event.features.size, event.phi.size) == (learner.inputs_expected, learner.noted)

    async def _bury(self, delivery: Delivery, reason: str) -> None:
        log.warning("event buried", partition=delivery.partition, entry=delivery.entry_id, reason=reason)
        try:
            await self._streams.bury(delivery, self._consumer, reason)
        except FenceLost:
            log.info("event claimed elsewhere", partition=delivery.partition, entry=delivery.entry_id)

    async def _apply(self, partition: int, deliveries: Sequence[Delivery], trainer: Trainer) -> int:
        found = [(delivery.entry_id, delivery.event) for delivery in deliveries if delivery.event is not None]
        states, samples, starts = await self._users.load_learners(event.user_id for _, event in found)
        by_user: dict[str, list[tuple[str, RewardEvent]]] = {}
        for entry_id, event in found:
            reach("worker-learn", event.arm_id)
            state = states.get(event.user_id)
            # Decided for another incarnation, it has no effect. Incarnations only grow: what is void now stays so,
            # and who is forgotten while the others are fitted is not at the expected version any more.
            if event.incarnation == (state.incarnation if state else 0):
                by_user.setdefault(event.user_id, []).append((entry_id, event))
        pupils = []
        for user_id, events in by_user.items():
            state = states.get(user_id)
            kept = [*samples.get(user_id, []), *(event.sample() for _, event in events)][-self._samples_kept :]
            version = (state.version if state else 0) + len(events)
            previous = None if state is None or state.forgotten else state.tensors
            start = starts.get(user_id)
            pupils.append(Pupil(user_id, version, kept, previous, None if start is None else start.values))
        epoch = self._model.epoch
        fitted = await self._desk.fit(trainer, epoch, pupils) if pupils else Fitted([], ())
        if fitted.quarantined:
            # Not who: a line of a log outlives the user.
            log.warning(
                "learner quarantined",
                partition=partition,
                users=len(fitted.quarantined),
                reason="not finite; put back to the prior",
            )
        updates = []
        for pupil, tensors in zip(pupils, fitted.states, strict=True):
            before = states.get(pupil.user_id)
            incarnation = before.incarnation if before else 0
            events = by_user[pupil.user_id]
            updates.append(
                UserUpdate(
                    state=UserState(pupil.user_id, incarnation, pupil.events, epoch.number, tensors),
                    expected_version=before.version if before else 0,
                    expected_incarnation=incarnation,
                    samples=[event.sample() for _, event in events],
                    entry_ids=[entry_id for entry_id, _ in events],
                    expected_trail=before.trail if before else "",
                )
            )
        entry_ids = [delivery.entry_id for delivery in deliveries]
        reach("worker-before-apply")
        applied = await self._users.apply(partition, self._consumer, entry_ids, updates)
        reach("worker-after-apply")
        void = len(entry_ids) - sum(len(events) for events in by_user.values())
        if void:
            log.info("events without effect", partition=partition, events=void, reason="their users began anew since")
        if fitted.quarantined:
            await self._users.count_quarantined(partition, len(fitted.quarantined))
        if updates:
            await self._catch_up(
                partition, epoch, pupils, [replace(update.state, trail=update.trail) for update in updates]
            )
        return applied

    async def _catch_up(
        self, partition: int, epoch: SharedEpoch, pupils: Sequence[Pupil], states: Sequence[UserState]
    ) -> None:
        """Fit users again whom a new epoch has overtaken.

        Looked at after the apply: whoever publishes an epoch fits those again who were applied before, so an event is
        seen by one of the two, however they race.
        """
        while True:
            await self._model.refresh_epoch()
            trainer, newest = self._model.trainer, self._model.epoch
            if trainer is None or epoch.number >= newest.refitted:
                return
            void = [replace(pupil, previous=None) for pupil in pupils]
            fitted = await self._desk.fit(trainer, newest, void)
            again = [
                UserState(state.user_id, state.incarnation, state.version, newest.number, tensors, state.trail)
                for state, tensors in zip(states, fitted.states, strict=True)
            ]
            await self._users.rebase(partition, again)
            epoch = newest
