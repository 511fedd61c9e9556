"""Records of users: state, update, line of the update log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, final

import numpy as np

from metaban.store.client.connection import as_bytes, as_int, as_text
from metaban.store.client.node import Argument
from metaban.store.codec import Sample, decode_tensors, encode_tensors
from metaban.store.errors import CorruptRecord


@final
@dataclass(frozen=True, slots=True, eq=False)
class UserState:
    """State of one user: tensors, and the epoch they were computed under.

    A user who was forgotten, or dropped by a restore, is a tombstone: an incarnation without tensors.
    """

    user_id: str
    incarnation: int
    version: int
    epoch: int
    tensors: dict[str, np.ndarray]
    #: Digest of all applied entry ids in order. A store that lost its latest writes reaches a version by other events.
    trail: str = ""

    @property
    def forgotten(self) -> bool:
        """Whether this is a tombstone."""
        return not self.tensors

    def encode(self) -> bytes:
        """The tensors. The numbers are separate fields, which scripts compare."""
        return encode_tensors(self.tensors, {})

    @staticmethod
    def decode(user_id: str, incarnation: Any, version: Any, epoch: Any, state: Any, trail: Any = None) -> UserState:
        try:
            if state is None and as_int(version) == 0:
                return UserState(user_id, as_int(incarnation), 0, 0, {})
            tensors, _ = decode_tensors(as_bytes(state))
            stored_trail = "" if trail is None else as_text(trail)
            return UserState(user_id, as_int(incarnation), as_int(version), as_int(epoch), tensors, stored_trail)
        except CorruptRecord as error:
            raise CorruptRecord(f"the state of a user: {error}") from error


@final
@dataclass(frozen=True, slots=True, eq=False)
class UserUpdate:
    """New state of one user, the expected old one, and the events it includes."""

    state: UserState
    expected_version: int
    expected_incarnation: int
    samples: Sequence[Sample]  # new ones, added at the end
    entry_ids: Sequence[str]
    expected_trail: str = ""
    changed: Mapping[int, Sample] = field(default_factory=dict)  # by their place among the stored ones

    @property
    def trail(self) -> str:
        """Trail of the user after this update."""
        joined = ",".join([self.expected_trail, *self.entry_ids])
        return blake2b(joined.encode(), digest_size=8).hexdigest()

    def arguments(self) -> list[Argument]:
        """Arguments of the apply script for one update."""
        changed: list[Argument] = []
        for place, sample in self.changed.items():
            changed += [place, sample.encode()]
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
            len(self.changed),
            len(self.samples),
            *changed,
            *[sample.encode() for sample in self.samples],
        ]


@final
@dataclass(frozen=True, slots=True)
class UpdateEntry:
    """One line of the update log: a user's state changed.

    Without entry ids: the state was rewritten under another epoch or restored; with version 0, the user was forgotten
    or dropped by a restore.
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
    """Numbers about a stored user."""

    incarnation: int
    version: int
    epoch: int | None  # the state was fitted under it; None for a tombstone
    samples: int
    forgotten: bool


@final
@dataclass(frozen=True, slots=True)
class ForgottenUser:
    """Result of forgetting a user: the new incarnation, and the cursor of its line in the update log."""

    incarnation: int
    samples: int  # deleted
    line: str
