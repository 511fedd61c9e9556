"""One reward, as it travels from the service to a worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, final
from urllib.parse import quote

import numpy as np

from store.codec import FLOAT32, Sample, nothing_noted, sample_key
from store.decisions import Decision
from store.errors import CorruptRecord
from store.reward_range import RewardRange

EVENT_FORMAT: Final = b"1"
INT64_MAX: Final = 2**63 - 1
#: How the event ids of default rewards begin, and none that a client can send: those have no control characters.
DEFAULT_MARK: Final = "\x1fdefault:"


def plain_event_id(decision_id: str, arm_id: str) -> str:
    """The id of a reward that comes without one: there is one for each arm of a decision."""
    # A colon may stand in both ids; quoted, it ends the first.
    return f"{quote(decision_id)}:{arm_id}"


def default_event_id(decision_id: str, arm_id: str) -> str:
    """The id of the default reward of an arm of a decision, whoever makes it and however often."""
    return DEFAULT_MARK + plain_event_id(decision_id, arm_id)


@final
@dataclass(frozen=True, slots=True, eq=False)
class RewardEvent:
    """One reward, with all that is needed to learn from it."""

    event_id: str
    decision_id: str
    user_id: str
    arm_id: str
    features: np.ndarray  # float32 [d]: the raw assembled input of the chosen arm
    reward: float  # as learners see it, from 0 to 1
    propensity: float
    epoch: int  # of the model that decided
    decided_ms: int
    received_ms: int
    phi: np.ndarray = field(default_factory=nothing_noted)  # float32 [q]: noted by the learner at decision time
    incarnation: int = 0  # of the user when it was decided: the reward counts for no other
    by_default: bool = False  # nobody sent it: no reward came in time
    reward_range: RewardRange | None = None  # what it was sent in; None: not known

    @staticmethod
    def of(
        decision: Decision,
        place: int,
        reward: float,
        reward_range: RewardRange,
        *,
        event_id: str,
        received_ms: int,
        by_default: bool = False,
    ) -> RewardEvent:
        """The reward, in the numbers of a range, of the item at a place of a decision."""
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
        )

    def encode(self) -> dict[bytes, bytes]:
        """The fields of a stream entry, as many of every event."""
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
        }

    @staticmethod
    def decode(fields: Mapping[bytes, bytes]) -> RewardEvent:
        """The event of a stream entry; fields of others beside ours are ignored."""
        try:
            if fields[b"f"] != EVENT_FORMAT:
                raise CorruptRecord(f"an event has the unknown format {fields[b'f']!r}")
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
            )
        except (KeyError, ValueError) as error:  # UnicodeDecodeError is a ValueError
            raise CorruptRecord(f"not a reward event: {error!r}") from error
        whole = (event.epoch, event.decided_ms, event.received_ms, event.incarnation)
        if not all(abs(number) <= INT64_MAX for number in whole):
            raise CorruptRecord("a number of a reward event is out of range")
        numbers = np.concatenate([[event.reward, event.propensity], event.features, event.phi])
        if not np.isfinite(numbers).all():
            raise CorruptRecord("a reward event is not finite")
        return event

    def sample(self) -> Sample:
        """What the log of the user keeps."""
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
        )


def _decode_range(written: bytes) -> RewardRange | None:
    """The range of an event; None where it was not written, ValueError for what is none."""
    if not written:
        return None
    least, greatest = map(float, written.split(b" "))
    return RewardRange(least, greatest)
