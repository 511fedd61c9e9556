"""Applies events to users: loads their states, fits them, and writes state and acknowledgement in one atomic step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import final

import structlog

from metaban.store.codec import Sample
from metaban.store.decisions.default_rewards import AwaitedReward, AwaitedRewardStore
from metaban.store.errors import FenceLost, StoreError, StoreReset
from metaban.store.events.event import Delivery, RewardEvent
from metaban.store.events.stream import EventStream
from metaban.store.failpoints import reach
from metaban.store.users.records import UserState, UserUpdate
from metaban.store.users.users import UserStore
from metaban.worker.learning.fit_batcher import FitBatcher
from metaban.worker.learning.model import NamespaceModel, SharedEpoch
from metaban.worker.learning.samples import add_rewards
from metaban.worker.learning.trainer import FitInput, FitResult, Trainer

#: How often a batch is computed again because a user changed meanwhile.
FENCE_RETRIES = 8

log = structlog.get_logger()


@final
class Publisher:
    """Fits users to delivered events and writes the new states."""

    def __init__(
        self,
        streams: EventStream,
        users: UserStore,
        awaiting: AwaitedRewardStore,
        model: NamespaceModel,
        fit_batcher: FitBatcher,
        *,
        consumer: str,
        samples_kept: int,
    ) -> None:
        self._streams = streams
        self._users = users
        self._awaiting = awaiting
        self._model = model
        self._fit_batcher = fit_batcher
        self._consumer = consumer
        self._samples_kept = samples_kept

    async def publish(self, partition: int, deliveries: Sequence[Delivery]) -> int | None:
        """Apply deliveries of one partition; invalid ones become dead letters.

        Events decided for another incarnation of their user are acknowledged without effect. Deliveries that another
        consumer claimed meanwhile are left to it.

        Returns the number of events ever applied in the partition; None when none was applied now.
        """
        valid = [delivery for delivery in deliveries if await self._check(delivery)]
        trainer = self._model.trainer
        if not valid or trainer is None:
            return None
        for _ in range(FENCE_RETRIES):
            try:
                return await self._apply(partition, valid, trainer)
            except FenceLost as fence:
                if fence.reason == "store-id":
                    raise StoreReset(f"partition {partition} belongs to another store now") from fence
                if fence.reason == "not-pending":
                    if len(valid) == 1:
                        return None
                    return await self._publish_one_by_one(partition, valid)
        raise FenceLost("version", f"users of partition {partition} changed during each of {FENCE_RETRIES} attempts")

    async def _publish_one_by_one(self, partition: int, deliveries: Sequence[Delivery]) -> int | None:
        applied = None
        for delivery in deliveries:
            applied = await self.publish(partition, [delivery]) or applied
        return applied

    async def _check(self, delivery: Delivery) -> bool:
        """Whether a delivery is valid; an invalid one becomes a dead letter."""
        if delivery.event is None:
            await self._bury(delivery, "the entry is not a reward event")
            return False
        if not 0 <= delivery.event.reward <= 1:
            # The service accepts no such reward, so something else wrote it; it would spoil the shared state.
            await self._bury(delivery, f"a reward of {delivery.event.reward:g} does not lie between 0 and 1")
            return False
        if not self._fits(delivery.event):
            await self._model.refresh_record()
            if not self._fits(delivery.event):
                sizes = f"{delivery.event.features.size} inputs and {delivery.event.phi.size} notes"
                await self._bury(delivery, f"{sizes} do not fit the namespace's layout and learner")
                return False
        return True

    def _fits(self, event: RewardEvent) -> bool:
        if self._model.trainer is None:
            return False
        learner = self._model.trainer.learner
        return (event.features.size, event.phi.size) == (learner.input_size, learner.noted)

    async def _bury(self, delivery: Delivery, reason: str) -> None:
        log.warning("event_dead_lettered", partition=delivery.partition, entry=delivery.entry_id, reason=reason)
        try:
            await self._streams.letters.bury(delivery, self._consumer, reason)
        except FenceLost:
            log.info("event_claimed_elsewhere", partition=delivery.partition, entry=delivery.entry_id)

    async def _apply(self, partition: int, deliveries: Sequence[Delivery], trainer: Trainer) -> int:
        found = [(delivery.entry_id, delivery.event) for delivery in deliveries if delivery.event is not None]
        states, samples, starts = await self._users.load_learners(event.user_id for _, event in found)
        by_user: dict[str, list[tuple[str, RewardEvent]]] = {}
        for entry_id, event in found:
            reach("worker-learn", event.arm_id)
            state = states.get(event.user_id)
            # An event for another incarnation is skipped. Incarnations only grow, so it stays void; a user forgotten
            # during the fit fails the version check of the apply script.
            if event.incarnation == (state.incarnation if state else 0):
                by_user.setdefault(event.user_id, []).append((entry_id, event))
        if any(event.epoch > self._model.epoch.number for _, event in found):
            # A service decided under an epoch that this process has not adopted yet.
            await self._model.refresh_epoch()
        epoch = self._model.epoch
        fit_inputs = []
        written: dict[str, tuple[list[Sample], dict[int, Sample]]] = {}
        for user_id, events in by_user.items():
            state = states.get(user_id)
            stored = samples.get(user_id, [])
            kept, changed = add_rewards(stored, (event.sample() for _, event in events), self._model.rules.range)
            written[user_id] = kept[len(stored) :], changed
            version = (state.version if state else 0) + len(events)
            # A state under other inputs is void: it is left behind by a refit, or ahead of the epoch to be published.
            continues = state is not None and not state.forgotten and epoch.refitted <= state.epoch <= epoch.number
            previous = state.tensors if state is not None and continues else None
            start = None if (warm := starts.get(user_id)) is None else warm.values
            fit_inputs.append(FitInput(user_id, version, kept[-self._samples_kept :], previous, start))
        fitted = await self._fit_batcher.fit(trainer, epoch, fit_inputs) if fit_inputs else FitResult([], ())
        if fitted.quarantined:
            # User ids are never logged: a log line outlives a forgotten user.
            log.warning(
                "learner_quarantined",
                partition=partition,
                users=len(fitted.quarantined),
                reason="state not finite or too large; reset to the prior",
            )
        updates = []
        for fit_input, tensors in zip(fit_inputs, fitted.states, strict=True):
            before = states.get(fit_input.user_id)
            incarnation = before.incarnation if before else 0
            new, changed = written[fit_input.user_id]
            updates.append(
                UserUpdate(
                    state=UserState(fit_input.user_id, incarnation, fit_input.events, epoch.number, tensors),
                    expected_version=before.version if before else 0,
                    expected_incarnation=incarnation,
                    samples=new,
                    changed=changed,
                    entry_ids=[entry_id for entry_id, _ in by_user[fit_input.user_id]],
                    expected_trail=before.trail if before else "",
                )
            )
        entry_ids = [delivery.entry_id for delivery in deliveries]
        reach("worker-before-apply")
        applied = await self._users.apply(partition, self._consumer, entry_ids, updates)
        reach("worker-after-apply")
        void = len(entry_ids) - sum(len(events) for events in by_user.values())
        if void:
            reason = "user forgotten or restored since the decision"
            log.info("events_skipped", partition=partition, events=void, reason=reason)
        if fitted.quarantined:
            await self._users.count_quarantined(partition, len(fitted.quarantined))
        await self._settle([event for _, event in found if not event.by_default])
        if updates:
            await self._catch_up(
                partition, epoch, fit_inputs, [replace(update.state, trail=update.trail) for update in updates]
            )
        return applied

    async def _settle(self, rewarded: Sequence[RewardEvent]) -> None:
        """Stop waiting for the rewards of arms that got one.

        Only to save work: if it fails, the arms are found to be rewarded once they are overdue.
        """
        if self._model.rules.default_reward is None or not rewarded:
            return
        try:
            await self._awaiting.settle_all(AwaitedReward(event.decision_id, event.place + 1) for event in rewarded)
        except StoreError as error:
            log.warning("default_rewards_not_cancelled", rewards=len(rewarded), error=str(error))

    async def _catch_up(
        self, partition: int, epoch: SharedEpoch, fit_inputs: Sequence[FitInput], states: Sequence[UserState]
    ) -> None:
        """Fit users again when a new epoch that changes the learner's inputs was published meanwhile.

        Checked after the apply. The epoch trainer refits users applied before its publication, so one of the two
        refits each user, whatever the order.
        """
        while True:
            await self._model.refresh_epoch()
            trainer, newest = self._model.trainer, self._model.epoch
            if trainer is None or epoch.number >= newest.refitted:
                return
            void = [replace(fit_input, previous=None) for fit_input in fit_inputs]
            fitted = await self._fit_batcher.fit(trainer, newest, void)
            again = [
                UserState(state.user_id, state.incarnation, state.version, newest.number, tensors, state.trail)
                for state, tensors in zip(states, fitted.states, strict=True)
            ]
            await self._users.rebase(partition, again)
            epoch = newest
