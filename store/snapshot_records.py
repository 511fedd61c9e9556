"""What a snapshot holds of users: records as the store has them, byte for byte, many in one safetensors chunk.

    standings      int64 [n, 3]  incarnation, version, epoch of each user
    states         uint8         the users' state blobs end to end; an empty one: the user has none (any more)
    state_ends     int64 [n]     where each of them ends
    sample_counts  int64 [n]     how many samples each user has
    samples        uint8         all sample blobs end to end
    sample_ends    int64 [m]     where each of them ends
    starts         uint8         the starts of learners end to end; left out, with their ends, where nobody has one
    start_ends     int64 [n]     where each of them ends

User ids are a list in the metadata. Of several records of one user the last one counts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, final

import numpy as np

from store.codec import check_samples, decode_tensors, encode_tensors
from store.errors import CorruptRecord, SnapshotError
from store.starts import Start

USERS_ENTRY: Final = "users"


@final
@dataclass(frozen=True, slots=True)
class UserRecord:
    """One user as stored; without a state, one whom there is nothing to say of."""

    user_id: str
    incarnation: int
    version: int
    epoch: int
    state: bytes
    samples: tuple[bytes, ...] = ()
    start: bytes = b""

    @property
    def size(self) -> int:
        """Bytes of its blobs."""
        return len(self.state) + len(self.start) + sum(map(len, self.samples))


class RecordRules(Protocol):
    """What a namespace's learner says of records; the checks raise ValueError with the reason."""

    def check_epoch(self, tensors: dict[str, np.ndarray]) -> None:
        """Shared state has to be what the learner derives."""

    def check_state(self, tensors: dict[str, np.ndarray]) -> None:
        """A user's state has to be what the learner fits."""

    def check_sample_size(self, inputs: int, notes: int) -> None:
        """A sample has to be of the learner's inputs and notes."""

    def epoch_due(self, epoch_events: int, total_events: int) -> bool:
        """Whether shared state derived at so many events is due again."""

    def renumber(self, tensors: dict[str, np.ndarray], number: int) -> dict[str, np.ndarray]:
        """Shared state as it is when it is published as epoch `number`."""


class LearnerRules(Protocol):
    """What there is to know of learners' settings, which mean nothing to the store."""

    def records(self, learner: dict[str, Any], layout: dict[str, Any]) -> RecordRules:
        """The rules for records of such a learner; ValueError when there is none."""

    def difference(self, learner: dict[str, Any], other: dict[str, Any]) -> str:
        """What keeps one learner from using the other's records, in words; empty when nothing does."""


def rules_for(rules: LearnerRules, learner: dict[str, Any], layout: dict[str, Any]) -> RecordRules:
    """The rules for records of a learner; SnapshotError when there is none, or it would not fit into memory."""
    try:
        return rules.records(learner, layout)
    except (ValueError, TypeError, ArithmeticError, MemoryError, RuntimeError) as error:
        raise SnapshotError(f"the learner of the snapshot is not one that this version can have: {error}") from error


def check_record(record: UserRecord, rules: RecordRules) -> None:
    """Raise CorruptRecord unless the learner can use a user's record."""
    try:
        if min(record.incarnation, record.version, record.epoch) < 0:
            raise ValueError("a negative number")
        tensors, _ = decode_tensors(record.state)
        rules.check_state(tensors)
        for inputs, notes in check_samples(record.samples):
            rules.check_sample_size(inputs, notes)
        if record.start:
            Start.decode(record.incarnation, record.start)
    except (ValueError, CorruptRecord) as error:
        raise CorruptRecord(f"the record of a user: {error}") from error


def encode_chunk(records: Sequence[UserRecord]) -> bytes:
    """Records as one safetensors blob."""
    samples = [blob for record in records for blob in record.samples]
    standings = [(record.incarnation, record.version, record.epoch) for record in records]
    tensors = {
        "standings": np.array(standings, dtype=np.int64).reshape(-1, 3),
        "sample_counts": np.array([len(record.samples) for record in records], dtype=np.int64),
    }
    parts = [
        ("states", "state_ends", [record.state for record in records]),
        ("samples", "sample_ends", samples),
    ]
    if any(record.start for record in records):
        parts.append(("starts", "start_ends", [record.start for record in records]))
    for name, ends, blobs in parts:
        tensors[name] = np.frombuffer(b"".join(blobs), dtype=np.uint8)
        tensors[ends] = np.cumsum([len(blob) for blob in blobs], dtype=np.int64)
    return encode_tensors(tensors, {USERS_ENTRY: json.dumps([record.user_id for record in records])})


def decode_chunk(blob: bytes) -> list[UserRecord]:
    """The records of `encode_chunk`; anything else is a CorruptRecord."""
    tensors, metadata = decode_tensors(blob)
    try:
        users = json.loads(metadata[USERS_ENTRY])
        if not isinstance(users, list) or not all(isinstance(user, str) for user in users):
            raise CorruptRecord("the users of a chunk are not ids")
        for user in users:
            user.encode()  # an id that UTF-8 cannot hold is none
        states = _split(tensors["states"], tensors["state_ends"])
        samples = iter(_split(tensors["samples"], tensors["sample_ends"]))
        standings, counts = _integers(tensors["standings"], (len(users), 3)), tensors["sample_counts"]
        counts = _integers(counts, (len(users),))
        if standings.min(initial=0) < 0:
            raise CorruptRecord("a user of a chunk stands at a negative number")
        # Files from before there were starts have none.
        starts = _split(tensors["starts"], tensors["start_ends"]) if "starts" in tensors else [b""] * len(users)
        if (
            {len(states), len(starts)} != {len(users)}
            or counts.min(initial=0) < 0
            or counts.sum() != len(tensors["sample_ends"])
        ):
            raise CorruptRecord("a chunk does not hold as much as it says")
        return [
            UserRecord(user, incarnation, version, epoch, state, tuple(next(samples) for _ in range(count)), start)
            for user, (incarnation, version, epoch), state, count, start in zip(
                users, standings.tolist(), states, counts.tolist(), starts, strict=True
            )
        ]
    except (KeyError, ValueError, RecursionError) as error:
        raise CorruptRecord(f"not a chunk of users: {error!r}") from error


def _split(joined: np.ndarray, ends: np.ndarray) -> list[bytes]:
    ends = _integers(ends, (ends.size,))
    if joined.dtype != np.uint8 or joined.ndim != 1:
        raise CorruptRecord("the blobs of a chunk are not bytes")
    bounds = np.concatenate([np.zeros(1, np.int64), ends])
    if (np.diff(bounds) < 0).any() or bounds[-1] != joined.size:
        raise CorruptRecord("the blobs of a chunk do not end where they should")
    whole = joined.tobytes()
    return [whole[start:end] for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)]


def _integers(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if array.dtype != np.int64 or array.shape != shape:
        raise CorruptRecord("a table of a chunk has the wrong shape")
    return array
