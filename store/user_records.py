"""What is stored of a user, and what changes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, final

import numpy as np

from store.codec import Sample, decode_tensors, encode_tensors
from store.connection import Argument, as_bytes, as_int, as_text
from store.errors import CorruptRecord


@final
@dataclass(frozen=True, slots=True, eq=False)
class UserState:
    """The learner of one user: tensors under the epoch they were computed with.

    A user who was forgotten, or dropped by a restore, has an incarnation and no tensors: a new user, for whom only what
    is decided from then on counts.
    """

    user_id: str
    incarnation: int
    version: int
    epoch: int
    tensors: dict[str, np.ndarray]
    #: Digest of all events applied, in order: a store that lost its latest writes comes to a version by other events.
    trail: str = ""

    @property
    def forgotten(self) -> bool:
        """Whether this is a tombstone."""
        return not self.tensors

    def encode(self) -> bytes:
        """The tensors; the numbers beside them are fields of their own, which scripts compare."""
        return encode_tensors(self.tensors, {})

    @staticmethod
    def decode(user_id: str, incarnation: Any, version: Any, epoch: Any, state: Any, trail: Any = None) -> UserState:
        try:
            if state is None and as_int(version) == 0:
                return UserState(user_id, as_int(incarnation), 0, 0, {})
            tensors, _ = decode_tensors(as_bytes(state))
            trod = "" if trail is None else as_text(trail)
            return UserState(user_id, as_int(incarnation), as_int(version), as_int(epoch), tensors, trod)
        except CorruptRecord as error:
            raise CorruptRecord(f"the state of a user: {error}") from error


@final
@dataclass(frozen=True, slots=True, eq=False)
class UserUpdate:
    """The new state of one user, what it replaces and the events it accounts for."""

    state: UserState
    expected_version: int
    expected_incarnation: int
    samples: Sequence[Sample]
    entry_ids: Sequence[str]
    expected_trail: str = ""

    @property
    def trail(self) -> str:
        """Of the user after this update."""
        joined = ",".join([self.expected_trail, *self.entry_ids])
        return blake2b(joined.encode(), digest_size=8).hexdigest()

    def arguments(self) -> list[Argument]:
        """What the apply script takes for one update."""
        return [
            self.state.user_id,
            f"{self.expected_incarnation}:{self.expected_version}",
            self.expected_trail,
            self.state.incarnation,
            self.state.version,
            self.state.epoch,
            self.state.encode(),
            ",".join(self.entry_ids),
            self.trail,
            len(self.samples),
            *[sample.encode() for sample in self.samples],
        ]


@final
@dataclass(frozen=True, slots=True)
class UpdateEntry:
    """One line of the update log: a user moved.

    No entry ids when only the epoch under the state changed, when a restore put the user back, or when the user was
    forgotten or dropped by a restore: then the version is 0.
    """

    cursor: str
    user_id: str
    incarnation: int
    version: int
    entry_ids: tuple[str, ...]
    applied: int

    @staticmethod
    def decode(cursor: str, fields: dict[bytes, bytes]) -> UpdateEntry:
        joined = as_text(fields.get(b"e"))
        return UpdateEntry(
            cursor=cursor,
            user_id=as_text(fields.get(b"u")),
            incarnation=as_int(fields.get(b"i")),
            version=as_int(fields.get(b"v")),
            entry_ids=tuple(joined.split(",")) if joined else (),
            applied=as_int(fields.get(b"t")),
        )


@final
@dataclass(frozen=True, slots=True)
class UserSummary:
    """What is stored of a user, in numbers."""

    incarnation: int
    version: int
    epoch: int | None  # fitted under; None for a tombstone
    samples: int
    forgotten: bool


@final
@dataclass(frozen=True, slots=True)
class Forgotten:
    """A user who was forgotten: the incarnation that begins, and the line of the update log that tells it."""

    incarnation: int
    samples: int  # there were
    line: str
