"""The catalogue: stored arms of a namespace, so that requests need not send them.

Every change makes a revision. A reader asks for the changes since its revision. Removed arms leave tombstones for
that; only the latest are kept, and a reader older than those reads everything again. A store that lost its latest
writes assigns a revision twice; the stamps of the two differ.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, final

from metaban.store.client.connection import Store, as_bytes, as_int, as_text, command
from metaban.store.client.node import Argument
from metaban.store.client.scripts import load_script
from metaban.store.errors import ArmConflict, ArmLimitExceeded, CorruptRecord, StoreReset, StoreUnavailable
from metaban.store.keys import NamespaceKeys

#: Most arms changed by one script call, which makes one revision.
BATCH_ARMS: Final = 500

#: Bytes of features in one batch or page, unless those of a single arm are longer.
BATCH_BYTES: Final = 1_048_576

#: Tombstones kept; more than one batch can leave.
TOMBSTONES_KEPT: Final = 2_000

#: Revisions whose stamps are kept; an older reader reads everything again.
STAMPS_KEPT: Final = 10_000

#: Most restarts of a reader that changes overtake.
MAX_RESTARTS: Final = 8

#: Ids read at a time when all are visited.
IDS_READ: Final = 5_000

#: Features of an arm: a list of numbers, or an object of named values.
ArmFeatures: TypeAlias = list[float] | dict[str, float | str | bool]


@final
@dataclass(frozen=True, slots=True)
class CatalogueArm:
    """One arm of the catalogue."""

    id: str
    features: ArmFeatures
    version: int  # from 1, grows with every change, also over a removal
    updated_ms: int


@final
@dataclass(frozen=True, slots=True)
class ArmPage:
    """Arms in the order of their ids, and the cursor of the next page; None if these were the last."""

    arms: tuple[CatalogueArm, ...]
    cursor: str | None


@final
@dataclass(frozen=True, slots=True)
class ArmWrite:
    """Change of one arm: new features, or removal if they are empty."""

    id: str
    features: bytes
    expected: int | None = None  # version that it must have; 0: it must not exist

    @staticmethod
    def put(arm_id: str, features: ArmFeatures, *, expected: int | None = None) -> ArmWrite:
        text = json.dumps(features, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return ArmWrite(arm_id, text.encode(), expected)

    @staticmethod
    def remove(arm_id: str, *, expected: int | None = None) -> ArmWrite:
        return ArmWrite(arm_id, b"", expected)


@final
@dataclass(frozen=True, slots=True)
class ArmOutcome:
    """Versions of an arm before a change (0: it did not exist) and after it (of its tombstone if removed).

    They are equal if nothing changed.
    """

    before: int
    version: int

    @property
    def changed(self) -> bool:
        return self.before != self.version


@final
@dataclass(frozen=True, slots=True)
class CatalogueRevision:
    """Identifies one state of the catalogue."""

    revision: int = 0
    stamp: str = ""


@final
@dataclass(frozen=True, slots=True)
class Changes:
    """Changes for a reader: encoded features by arm id, None for a removed arm.

    With `anew` these are all arms of the catalogue, and replace what the reader has.
    """

    arms: dict[str, bytes | None]
    standing: CatalogueRevision
    anew: bool


@final
@dataclass(frozen=True, slots=True)
class ChangesPage:
    """One page of the changes since a revision."""

    arms: dict[str, bytes | None]
    standing: CatalogueRevision  # of the store, when the page was read
    after: int  # revision after which the next page begins
    more: bool


@final
class CatalogueStore:
    """Catalogue of one namespace."""

    def __init__(
        self,
        redis: Store,
        keys: NamespaceKeys,
        store_id: str,
        *,
        arms_max: int,
        tombstones_kept: int = TOMBSTONES_KEPT,
        stamps_kept: int = STAMPS_KEPT,
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._store_id = store_id
        self.arms_max = arms_max
        self._tombstones_kept = tombstones_kept
        self._stamps_kept = stamps_kept
        self._change = load_script(redis, "change_arms")
        self._changes = load_script(redis, "arm_changes")
        self._range = load_script(redis, "arm_range")

    async def change(self, writes: Sequence[ArmWrite], *, now_ms: int, arms_max: int | None = None) -> list[ArmOutcome]:
        """Change arms of distinct ids, at most BATCH_ARMS, all or none.

        Raises CatalogueFull if there would be more arms than `arms_max`, and ArmConflict for the first arm that does
        not have the expected version. Features equal to the stored ones change nothing.
        """
        if len(writes) > BATCH_ARMS or len({write.id for write in writes}) < len(writes):
            raise ValueError(f"a batch must have at most {BATCH_ARMS} arms, each once")
        keys = self._keys
        limit = self.arms_max if arms_max is None else arms_max
        arguments: list[Argument] = [
            self._store_id, secrets.token_hex(8), now_ms, limit, self._tombstones_kept, self._stamps_kept
        ]  # fmt: skip
        for write in writes:
            arguments += [write.id, "" if write.expected is None else write.expected, write.features]
        status, *rest = await self._change.call(
            [
                keys.record, keys.catalogue, keys.catalogue_log, keys.arms, keys.arm_order, keys.arm_versions,
                keys.arm_changes, keys.arm_removals,
            ],
            arguments,
        )  # fmt: skip
        if status == b"version":
            raise ArmConflict(writes[as_int(rest[0])].id, as_int(rest[1]))
        if status == b"full":
            raise ArmLimitExceeded(f"the catalogue has {as_int(rest[0])} arms, and its limit is {limit}")
        if status == b"corrupt":
            raise CorruptRecord("an arm of the catalogue has no version")
        self._check(status)
        numbers = [as_int(number) for number in rest]
        return [ArmOutcome(before, now) for before, now in zip(numbers[0::2], numbers[1::2], strict=True)]

    async def standing(self) -> CatalogueRevision:
        """Latest state; cheap."""
        revision, stamp = await command(self._redis, "HMGET", self._keys.catalogue, "revision", "stamp")
        return CatalogueRevision(as_int(revision, absent=0), as_text(stamp or b""))

    async def changes_since(self, standing: CatalogueRevision) -> Changes:
        """Changes since `standing`, including removals; a new reader passes the empty `CatalogueRevision()`."""
        for _ in range(MAX_RESTARTS):
            changes = await self._walk(standing)
            if changes is not None:
                return changes
            standing = CatalogueRevision()
        raise StoreUnavailable("the catalogue changes faster than it can be read")

    async def _walk(self, standing: CatalogueRevision) -> Changes | None:
        """All changes after a state; None if the state or the removals since then are no longer known."""
        arms: dict[str, bytes | None] = {}
        anchor, after = standing, standing.revision
        while True:
            page = await self.changes_page(anchor, after)
            if page is None:
                return None
            arms |= page.arms
            if not page.more:
                return Changes(arms, page.standing, anew=standing == CatalogueRevision())
            if anchor == CatalogueRevision():
                # A new reader does not need earlier removals.
                anchor = page.standing
            after = page.after

    async def changes_page(self, anchor: CatalogueRevision, after: int) -> ChangesPage | None:
        """Changes after a revision; None if the anchor, or the removals since, are no longer known."""
        keys = self._keys
        status, *rest = await self._changes.call(
            [keys.record, keys.catalogue, keys.catalogue_log, keys.arms, keys.arm_changes],
            [self._store_id, anchor.revision, anchor.stamp, after, BATCH_ARMS + 1, BATCH_BYTES],
        )
        if status == b"anew":
            return None
        self._check(status)
        revision, stamp, reached, more, *rows = rest
        arms = {as_text(arm): as_bytes(blob) or None for arm, blob in zip(rows[0::2], rows[1::2], strict=True)}
        page = ChangesPage(arms, CatalogueRevision(as_int(revision), as_text(stamp)), as_int(reached), bool(more))
        if page.more and page.after == after:
            raise CorruptRecord("a revision of the catalogue has more arms than one can change")
        return page

    async def page(self, *, limit: int, cursor: str | None = None) -> ArmPage:
        """Arms in the order of their ids, after `cursor`; fewer than `limit` if they are large."""
        more, arms = await self._between("-" if cursor is None else f"({cursor}", "+", limit)
        return ArmPage(arms, arms[-1].id if more else None)

    async def get(self, arm_id: str) -> CatalogueArm | None:
        """One arm."""
        _, arms = await self._between(f"[{arm_id}", f"[{arm_id}", 1)
        return arms[0] if arms else None

    async def count(self) -> int:
        """Number of arms."""
        return as_int(await command(self._redis, "HLEN", self._keys.arms))

    async def ids(self) -> list[str]:
        """Ids of all arms, in order; those added or removed meanwhile may be missing."""
        found: list[str] = []
        while True:
            start = f"({found[-1]}" if found else "-"
            reply = await command(
                self._redis, "ZRANGE", self._keys.arm_order, start, "+", "BYLEX", "LIMIT", 0, IDS_READ
            )
            found += [as_text(arm_id) for arm_id in reply]
            if len(reply) < IDS_READ:
                return found

    async def _between(self, first: str, last: str, limit: int) -> tuple[bool, tuple[CatalogueArm, ...]]:
        keys = self._keys
        more, *rows = await self._range.call(
            [keys.arms, keys.arm_versions, keys.arm_order], [first, last, limit, BATCH_BYTES]
        )
        return bool(more), tuple(
            _decode_arm(*fields) for fields in zip(rows[0::3], rows[1::3], rows[2::3], strict=True)
        )

    def _check(self, status: bytes) -> None:
        if status != b"ok":
            raise StoreReset(f"namespace {self._keys.namespace} was deleted or belongs to another store")


def in_batches(writes: Iterable[ArmWrite]) -> Iterator[list[ArmWrite]]:
    """Split changes into batches by number and size."""
    batch: list[ArmWrite] = []
    size = 0
    for write in writes:
        if batch and (len(batch) == BATCH_ARMS or size + len(write.features) > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(write)
        size += len(write.features)
    if batch:
        yield batch


def decode_features(blob: bytes) -> ArmFeatures:
    """Decode the stored features of an arm; CorruptRecord if they are invalid."""
    try:
        features = json.loads(blob)
        if not features or not isinstance(features, list | dict):
            raise CorruptRecord("the features of an arm are neither a list nor an object, or empty")
        values = features if isinstance(features, list) else features.values()
        kinds = {int, float} if isinstance(features, list) else {int, float, str, bool}
        if not kinds.issuperset(map(type, values)):
            raise CorruptRecord("the features of an arm hold values of a wrong type")
        if not all(map(math.isfinite, (value for value in values if type(value) is not str))):
            raise CorruptRecord("the features of an arm are not finite")
    except (ValueError, RecursionError, OverflowError) as error:
        raise CorruptRecord(f"not the features of an arm: {error}") from error
    return features


def _decode_arm(arm_id: Any, line: Any, features: Any) -> CatalogueArm:
    version, _, updated = as_text(line).partition(":")
    return CatalogueArm(as_text(arm_id), decode_features(as_bytes(features)), as_int(version), as_int(updated))
