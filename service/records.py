"""Between what crosses the edge and what is stored: rewards to events, decisions to answers."""

from __future__ import annotations

import time
from urllib.parse import quote

from service.contracts import Recommendation, Rejection, RewardCommand
from service.errors import DecisionConflict
from store.decisions import Decision
from store.events import RewardEvent


def reward_event(command: RewardCommand, decision: Decision | None, index: int) -> RewardEvent | Rejection:
    """What a reward of a decision has to be learned from, or why it cannot be."""
    if decision is None:
        return Rejection(index, "unknown-decision", "no such decision, or its reward window is over")
    arms = {item.arm_id: place for place, item in enumerate(decision.items)}
    arm_id = command.arm_id
    if arm_id is None:
        if len(arms) > 1:
            return Rejection(index, "arm-required", f"the decision chose {len(arms)} arms: name one in arm_id")
        arm_id = decision.items[0].arm_id
    if arm_id not in arms:
        return Rejection(index, "unknown-arm", "the decision did not choose this arm")
    item = decision.items[arms[arm_id]]
    return RewardEvent(
        # A colon may stand in both ids; quoted, it ends the first.
        event_id=command.event_id or f"{quote(decision.decision_id)}:{arm_id}",
        decision_id=decision.decision_id,
        user_id=decision.user_id,
        arm_id=arm_id,
        features=decision.features[arms[arm_id]],
        reward=command.reward,
        propensity=item.propensity,
        epoch=decision.epoch,
        decided_ms=decision.created_ms,
        received_ms=now_ms(),
        phi=decision.phi[arms[arm_id]],
        incarnation=decision.incarnation,
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
        cold_start=decision.cold_start,
        user_version=decision.user_version,
        replayed=replayed,
        logged=logged,
    )


def now_ms() -> int:
    """Milliseconds since 1970."""
    return int(time.time() * 1_000)
