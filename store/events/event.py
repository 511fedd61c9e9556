"""Reward events: the entries of the event streams."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, final
from urllib.parse import quote

import numpy as np

from metaban.store.codec import FLOAT32, ITEMS_MAX, Sample, empty_phi, sample_key
from metaban.store.decisions.decisions import DecisionRecord
from metaban.store.errors import CorruptRecord
from metaban.store.reward_rules import RewardRange

EVENT_FORMAT: Final = b"1"

INT64_MAX: Final = 2**63 - 1

#: Prefix of the event ids of default rewards. Clients cannot send it: their ids have no control characters.
DEFAULT_MARK: Final = "\x1fdefault:"


def plain_event_id(decision_id: str, arm_id: str) -> str:
    """Event id of a reward that was sent without one: one id for each arm of a decision."""
    # Both ids may contain a colon; quoting the first makes the result unique.
    return f"{quote(decision_id)}:{arm_id}"


def default_event_id(decision_id: str, arm_id: str) -> str:
    """Event id of the default reward of an arm of a decision; always the same."""
    return DEFAULT_MARK + plain_event_id(decision_id, arm_id)


@final
@dataclass(frozen=True, slots=True, eq=False)
class RewardEvent:
    """One reward with everything needed to learn from it."""

    event_id: str
    decision_id: str
    user_id: str
    arm_id: str
    features: np.ndarray  # float32 [d]: raw input of the chosen arm
    reward: float  # scaled to 0..1
    propensity: float
    epoch: int  # of the model that decided
    decided_ms: int
    received_ms: int
    phi: np.ndarray = field(default_factory=empty_phi)  # float32 [q]: from the learner, at decision time
    incarnation: int = 0  # of the user at decision time; the reward counts for this one only
    by_default: bool = False  # a default reward, since none came in time
    reward_range: RewardRange | None = None  # range that it was sent in; None in old events
    place: int = 0  # index of the arm in its decision; 0 in old events

    @staticmethod
    def of(
        decision: DecisionRecord,
        place: int,
        reward: float,
        reward_range: RewardRange,
        *,
        event_id: str,
        received_ms: int,
        by_default: bool = False,
    ) -> RewardEvent:
        """Event for a reward, given in a range, of the item at a place of a decision."""
        item = decision.items[place]
        return RewardEvent(
            event_id=event_id,
            decision_id=decision.decision_id,
            user_id=decision.user_id,
            arm_id=item.arm_id,
            features=decision.features[place],
            reward=reward_range.scaled(reward),
            propensity=item.propensity,
            epoch=decision.epoch,
            decided_ms=decision.created_ms,
            received_ms=received_ms,
            phi=decision.phi[place],
            incarnation=decision.incarnation,
            by_default=by_default,
            reward_range=reward_range,
            place=place,
        )

    def encode(self) -> dict[bytes, bytes]:
        """Fields of the stream entry; every event has the same number."""
        sent_in = self.reward_range
        return {
            b"f": EVENT_FORMAT,
            b"id": self.event_id.encode(),
            b"d": self.decision_id.encode(),
            b"u": self.user_id.encode(),
            b"a": self.arm_id.encode(),
            b"x": np.ascontiguousarray(self.features, dtype=FLOAT32).tobytes(),
            b"h": np.ascontiguousarray(self.phi, dtype=FLOAT32).tobytes(),
            b"r": repr(float(self.reward)).encode(),
            b"p": repr(float(self.propensity)).encode(),
            b"m": str(int(self.epoch)).encode(),
            b"t0": str(int(self.decided_ms)).encode(),
            b"t1": str(int(self.received_ms)).encode(),
            b"i": str(int(self.incarnation)).encode(),
            b"z": str(int(self.by_default)).encode(),
            b"g": b"" if sent_in is None else f"{float(sent_in.least)!r} {float(sent_in.greatest)!r}".encode(),
            b"k": str(int(self.place)).encode(),
        }

    @staticmethod
    def decode(fields: Mapping[bytes, bytes]) -> RewardEvent:
        """Event of a stream entry; unknown fields are ignored."""
        try:
            if fields[b"f"] != EVENT_FORMAT:
                raise CorruptRecord("an event has an unknown format")
            event = RewardEvent(
                event_id=fields[b"id"].decode(),
                decision_id=fields[b"d"].decode(),
                user_id=fields[b"u"].decode(),
                arm_id=fields[b"a"].decode(),
                features=np.frombuffer(fields[b"x"], dtype=FLOAT32).copy(),
                reward=float(fields[b"r"]),
                propensity=float(fields[b"p"]),
                epoch=int(fields[b"m"]),
                decided_ms=int(fields[b"t0"]),
                received_ms=int(fields[b"t1"]),
                phi=np.frombuffer(fields[b"h"], dtype=FLOAT32).copy(),
                incarnation=int(fields.get(b"i", b"0")),
                by_default=fields.get(b"z", b"0") != b"0",
                reward_range=_decode_range(fields.get(b"g", b"")),
                place=int(fields.get(b"k", b"0")),
            )
        except (KeyError, ValueError) as error:  # UnicodeDecodeError is a ValueError
            raise CorruptRecord(f"not a reward event: {type(error).__name__}") from error
        whole = (event.epoch, event.decided_ms, event.received_ms, event.incarnation)
        if not all(abs(number) <= INT64_MAX for number in whole):
            raise CorruptRecord("a number of a reward event is out of range")
        if not 0 <= event.place < ITEMS_MAX:
            raise CorruptRecord("the place of a reward event is out of range")
        numbers = np.concatenate([[event.reward, event.propensity], event.features, event.phi])
        if not np.isfinite(numbers).all():
            raise CorruptRecord("a number of a reward event is not finite")
        return event

    def sample(self) -> Sample:
        """Sample of this event."""
        return Sample(
            self.features,
            self.reward,
            self.propensity,
            self.epoch,
            self.received_ms,
            self.arm_id,
            self.phi,
            sample_key(self.decision_id, self.arm_id),
            self.by_default,
            self.reward_range,
            place=self.place,
        )


def _decode_range(written: bytes) -> RewardRange | None:
    """Reward range of an event; None in old events, ValueError if it is invalid."""
    if not written:
        return None
    least, greatest = map(float, written.split(b" "))
    return RewardRange(least, greatest)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Delivery:
    """An entry delivered to a consumer; `event` is None if it cannot be decoded."""

    partition: int
    entry_id: str
    event: RewardEvent | None
