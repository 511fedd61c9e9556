"""Manifest of a snapshot: its namespace, the point at which it was taken, and digests of all members. Ids and names.

Ids of snapshots sort by time; a name is optional.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any, Final, final

from metaban.store.errors import SnapshotError
from metaban.store.keys import NamespaceKeys

#: Raised when older versions cannot read the files.
SNAPSHOT_FORMAT: Final = 1
DIGEST: Final = "sha256"
ID_PATTERN: Final = re.compile(r"[0-9]{8}T[0-9]{6}Z-[0-9a-f]{6}")
NAME_PATTERN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

#: Means the newest snapshot.
LATEST: Final = "latest"


@final
@dataclass(frozen=True, slots=True)
class SnapshotMember:
    """One member of the file, its digest, and the partition of a chunk of users."""

    name: str
    size: int
    sha256: str
    partition: int | None


@final
@dataclass(frozen=True, slots=True)
class Manifest:
    """Description of a snapshot. The store does not interpret `learner` and `layout`."""

    id: str
    name: str
    namespace: str
    created_ms: int
    metaban: str
    learner: dict[str, Any]
    layout: dict[str, Any]
    partitions: int
    seed: int
    epoch: int
    users: int
    damaged: int  # users skipped because their records are damaged
    applied: tuple[int, ...]  # events ever applied, by partition
    cursors: tuple[str, ...]  # line of each partition's update log at which it was read
    members: tuple[SnapshotMember, ...]
    format: int = SNAPSHOT_FORMAT

    @property
    def events(self) -> int:
        """Number of events applied before the snapshot."""
        return sum(self.applied)

    def encode(self) -> bytes:
        """Canonical JSON, with a digest of itself."""
        fields = asdict(self)
        return _canonical({**fields, DIGEST: sha256(_canonical(fields)).hexdigest()})

    @staticmethod
    def decode(blob: bytes) -> Manifest:
        """Decode a manifest; SnapshotError if it is damaged."""
        try:
            fields = json.loads(blob)
            form = fields["format"]
            if isinstance(form, int) and form > SNAPSHOT_FORMAT:
                raise SnapshotError(
                    f"the snapshot has format {form}, and this version of metaban reads up to {SNAPSHOT_FORMAT}: "
                    "restore it with the version that wrote it, or a newer one"
                )
            digest = fields.pop(DIGEST)
            canonical = _canonical(fields)
            if sha256(canonical).hexdigest() != digest or _canonical({**fields, DIGEST: digest}) != blob:
                raise SnapshotError("the manifest of the snapshot is damaged: its digest does not match")
            members = tuple(SnapshotMember(**member) for member in fields.pop("members"))
            applied, cursors = tuple(fields.pop("applied")), tuple(fields.pop("cursors"))
            manifest = Manifest(**fields, applied=applied, cursors=cursors, members=members)
            manifest.check()
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise SnapshotError(f"the snapshot has no readable manifest: {error!r}") from error
        return manifest

    def check(self) -> None:
        """Check all fields: a matching digest does not make an untrusted manifest valid."""
        numbers = (self.format, self.created_ms, self.partitions, self.seed, self.epoch, self.users, self.damaged)
        _require(all(map(_natural, (*numbers, *self.applied))), "numbers")
        _require(self.format == SNAPSHOT_FORMAT, "format")
        texts = (self.id, self.name, self.namespace, self.metaban, *self.cursors)
        _require(all(isinstance(text, str) for text in texts), "texts")
        _require(ID_PATTERN.fullmatch(self.id) is not None, "id")
        _require(not self.name or NAME_PATTERN.fullmatch(self.name) is not None, "name")
        _require(isinstance(self.learner, dict) and isinstance(self.layout, dict), "learner and layout")
        NamespaceKeys(self.namespace, self.partitions)
        _require(len(self.applied) == len(self.cursors) == self.partitions, "partitions")
        for member in self.members:
            _require(isinstance(member.name, str) and isinstance(member.sha256, str), "members")
            _require(_natural(member.size), "members")
            placed = member.partition is None or (_natural(member.partition) and member.partition < self.partitions)
            _require(placed, "members")


def _canonical(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _natural(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _require(holds: bool, field: str) -> None:
    if not holds:
        raise SnapshotError(f"the manifest of the snapshot is invalid: {field}")


def new_id(now_s: float | None = None) -> str:
    """New id of a snapshot."""
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now_s)) + "-" + secrets.token_hex(3)


def is_free_name(name: str) -> bool:
    """Whether a name is neither `latest` nor in the form of an id."""
    return name != LATEST and ID_PATTERN.fullmatch(name) is None
