"""The manifest of a snapshot: what it is of, the point it was taken at, and a digest of everything in it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any, Final, final

from store.errors import SnapshotError
from store.keys import NamespaceKeys
from store.snapshot_names import ID_PATTERN, NAME_PATTERN

#: Raised when files of this version could not be read by the one before.
SNAPSHOT_FORMAT: Final = 1
DIGEST: Final = "sha256"


@final
@dataclass(frozen=True, slots=True)
class Member:
    """One member of the file: its digest, and for users the partition they are of."""

    name: str
    size: int
    sha256: str
    partition: int | None


@final
@dataclass(frozen=True, slots=True)
class Manifest:
    """What a snapshot says of itself; `learner` and `layout` mean nothing to the store."""

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
    damaged: int  # users left out, since their records could not be read
    applied: tuple[int, ...]  # events ever applied, by partition
    cursors: tuple[str, ...]  # the last line of each partition's update log that is in it
    members: tuple[Member, ...]
    format: int = SNAPSHOT_FORMAT

    @property
    def events(self) -> int:
        """Events ever applied when it was taken."""
        return sum(self.applied)

    def encode(self) -> bytes:
        """Canonical JSON, with a digest of itself."""
        fields = asdict(self)
        return _canonical({**fields, DIGEST: sha256(_canonical(fields)).hexdigest()})

    @staticmethod
    def decode(blob: bytes) -> Manifest:
        """The manifest that `encode` wrote; anything else is a SnapshotError."""
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
            members = tuple(Member(**member) for member in fields.pop("members"))
            applied, cursors = tuple(fields.pop("applied")), tuple(fields.pop("cursors"))
            manifest = Manifest(**fields, applied=applied, cursors=cursors, members=members)
            manifest._check()
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise SnapshotError(f"the snapshot has no readable manifest: {error!r}") from error
        return manifest

    def _check(self) -> None:
        """Refuse what a manifest with a matching digest could still get wrong: it may be somebody else's."""
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


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise SnapshotError(f"the manifest of the snapshot makes no sense: {what}")
