"""User records of a snapshot: the stored bytes of many users in one safetensors chunk.

    standings      int64 [n, 3]  incarnation, version, epoch of each user
    states         uint8         concatenated state blobs; empty for a user without a state
    state_ends     int64 [n]     end of each
    sample_counts  int64 [n]     number of samples of each user
    samples        uint8         concatenated sample blobs
    sample_ends    int64 [m]     end of each
    starts         uint8         concatenated warm starts; absent, like their ends, if no user has one
    start_ends     int64 [n]     end of each

User ids are a list in the metadata. Of several records of one user the last counts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, final

import numpy as np

from metaban.store.codec import check_samples, decode_tensors, encode_tensors
from metaban.store.errors import CorruptRecord, SnapshotError
from metaban.store.users.warm_starts import StoredWarmStart

USERS_ENTRY: Final = "users"


@final
@dataclass(frozen=True, slots=True)
class UserRecord:
    """Stored bytes of one user; an empty state means that the user has none."""

    user_id: str
    incarnation: int
    version: int
    epoch: int
    state: bytes
    samples: tuple[bytes, ...] = ()
    start: bytes = b""

    @property
    def size(self) -> int:
        """Size of its blobs in bytes."""
        return len(self.state) + len(self.start) + sum(map(len, self.samples))


class RecordRules(Protocol):
    """Checks of records by a namespace's learner; they raise ValueError with the reason."""

    def check_epoch(self, tensors: dict[str, np.ndarray]) -> None:
        """Check the tensors of an epoch."""

    def check_state(self, tensors: dict[str, np.ndarray]) -> None:
        """Check the tensors of a user's state."""

    def check_sample_size(self, inputs: int, notes: int) -> None:
        """Check the sizes of a sample's features and φ."""

    def epoch_due(self, epoch_events: int, total_events: int) -> bool:
        """Whether a new epoch is due, given the events of the last one and all events."""

    def renumber(self, tensors: dict[str, np.ndarray], number: int) -> dict[str, np.ndarray]:
        """Tensors of an epoch when published as `number`."""


class LearnerRules(Protocol):
    """Interprets the settings of learners for the store."""

    def records(self, learner: dict[str, Any], layout: dict[str, Any]) -> RecordRules:
        """Rules for records of such a learner; ValueError if the settings are invalid."""

    def difference(self, learner: dict[str, Any], other: dict[str, Any]) -> str:
        """Why one learner cannot use the other's records, as text; empty if it can."""


def rules_for(rules: LearnerRules, learner: dict[str, Any], layout: dict[str, Any]) -> RecordRules:
    """Rules for records of a learner; SnapshotError if its settings are invalid or need too much memory."""
    try:
        return rules.records(learner, layout)
    except (ValueError, TypeError, ArithmeticError, MemoryError, RuntimeError) as error:
        raise SnapshotError(f"this version does not support the learner of the snapshot: {error}") from error


def check_record(record: UserRecord, rules: RecordRules) -> None:
    """Raise CorruptRecord if the learner cannot use a user's record."""
    try:
        if min(record.incarnation, record.version, record.epoch) < 0:
            raise ValueError("a negative number")
        tensors, _ = decode_tensors(record.state)
        rules.check_state(tensors)
        for inputs, notes in check_samples(record.samples):
            rules.check_sample_size(inputs, notes)
        if record.start:
            StoredWarmStart.decode(record.incarnation, record.start)
    except (ValueError, CorruptRecord) as error:
        raise CorruptRecord(f"the record of a user: {error}") from error


def encode_chunk(records: Sequence[UserRecord]) -> bytes:
    """Encode records as one safetensors blob."""
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
    """Decode `encode_chunk`; CorruptRecord for anything else."""
    tensors, metadata = decode_tensors(blob)
    try:
        users = json.loads(metadata[USERS_ENTRY])
        if not isinstance(users, list) or not all(isinstance(user, str) for user in users):
            raise CorruptRecord("the users of a chunk are not ids")
        for user in users:
            user.encode()  # raises for lone surrogates
        states = _split(tensors["states"], tensors["state_ends"])
        samples = iter(_split(tensors["samples"], tensors["sample_ends"]))
        standings, counts = _integers(tensors["standings"], (len(users), 3)), tensors["sample_counts"]
        counts = _integers(counts, (len(users),))
        if standings.min(initial=0) < 0:
            raise CorruptRecord("a user of a chunk has a negative number")
        # Old files have no warm starts.
        starts = _split(tensors["starts"], tensors["start_ends"]) if "starts" in tensors else [b""] * len(users)
        if (
            {len(states), len(starts)} != {len(users)}
            or counts.min(initial=0) < 0
            or counts.sum() != len(tensors["sample_ends"])
        ):
            raise CorruptRecord("the tables of a chunk have different lengths")
        return [
            UserRecord(user, incarnation, version, epoch, state, tuple(next(samples) for _ in range(count)), start)
            for user, (incarnation, version, epoch), state, count, start in zip(
                users, standings.tolist(), states, counts.tolist(), starts, strict=True
            )
        ]
    except (KeyError, ValueError, RecursionError) as error:
        raise CorruptRecord(f"not a chunk of users: {type(error).__name__}") from error


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
