"""Between what crosses the edge and what is stored: rewards to events, decisions to answers."""

from __future__ import annotations

import time

from service.contracts import Recommendation, Rejection, RewardCommand
from service.errors import DecisionConflict
from store.decisions import BASELINE, Decision
from store.events import RewardEvent
from store.reward_rules import RewardRules
from store.rewards import plain_event_id


def reward_event(
    command: RewardCommand, decision: Decision | None, index: int, rules: RewardRules, window_ms: int
) -> RewardEvent | Rejection:
    """What a reward of a decision has to be learned from, or why it cannot be.

    A decision takes rewards for `window_ms` since it counts.
    """
    if decision is None:
        return Rejection(index, "unknown-decision", "no such decision, or it is not kept any more")
    arms = {item.arm_id: place for place, item in enumerate(decision.items)}
    arm_id = command.arm_id
    if arm_id is None:
        if len(arms) > 1:
            return Rejection(index, "arm-required", f"the decision chose {len(arms)} arms: name one in arm_id")
        arm_id = decision.items[0].arm_id
    if arm_id not in arms:
        return Rejection(index, "unknown-arm", "the decision did not choose this arm")
    if decision.policy == BASELINE:
        return Rejection(index, "not-learned", "the decision is of the baseline, and nothing is learned from it")
    received_ms = now_ms()
    if received_ms > decision.open_until_ms(window_ms):
        return Rejection(index, "late", "the reward window is over: the reward is counted as late and not learned")
    if not decision.active:
        return Rejection(index, "not-activated", "the decision is deferred: activate it, then send the reward again")
    return RewardEvent.of(
        decision,
        arms[arm_id],
        command.reward,
        rules.range,
        event_id=command.event_id or plain_event_id(decision.decision_id, arm_id),
        received_ms=received_ms,
    )


def recommendation_of(decision: Decision, fingerprint: str, *, replayed: bool, logged: bool = True) -> Recommendation:
    """A decision as the answer to a request; DecisionConflict when it answered another one."""
    if decision.fingerprint != fingerprint:
        raise DecisionConflict("this decision_id belongs to a request with another body")
    return Recommendation(
        decision_id=decision.decision_id,
        items=decision.items,
        policy=decision.policy,
        model_version=decision.epoch,
        cold_start=None if decision.cold_start is None else "fusion" if decision.cold_start == "fusion" else "meta",
        user_version=decision.user_version,
        replayed=replayed,
        logged=logged,
    )


def now_ms() -> int:
    """Milliseconds since 1970."""
    return int(time.time() * 1_000)
