"""The catalogue: arms that a namespace knows, so that requests need not bring them.

Every change makes a revision. Whoever has the arms of one asks for what changed since; removed arms leave tombstones
for that, of which the latest are kept: a reader from before is told to begin anew. A store that comes back without its
latest writes gives a revision twice, and the stamp tells the two apart.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, final

from store.connection import Argument, Store, as_bytes, as_int, as_text, command
from store.errors import ArmConflict, CatalogueFull, CorruptRecord, StoreReset, StoreUnavailable
from store.keys import NamespaceKeys
from store.scripts import load_script

#: Arms changed by one script, which is one revision.
BATCH_ARMS: Final = 500
#: Features sent in one batch or told in one page, unless those of a single arm are longer.
BATCH_BYTES: Final = 1_048_576
#: Tombstones kept, more than one batch leaves.
TOMBSTONES_KEPT: Final = 2_000
#: Revisions whose stamps are kept: a reader from before them begins anew.
STAMPS_KEPT: Final = 10_000
#: A reader that is overtaken by so many changes more often than this gives up.
MAX_RESTARTS: Final = 8
#: Ids read in one go where all of them are looked through.
IDS_READ: Final = 5_000

#: What a client says of an arm: plain numbers, or an object of named values.
ArmFeatures: TypeAlias = list[float] | dict[str, float | str | bool]


@final
@dataclass(frozen=True, slots=True)
class Arm:
    """One arm of the catalogue."""

    id: str
    features: ArmFeatures
    version: int  # 1 at first, grows with every change, also when it is removed and written again
    updated_ms: int


@final
@dataclass(frozen=True, slots=True)
class ArmPage:
    """Some arms in the order of their ids, and where to go on; no cursor when these were the last."""

    arms: tuple[Arm, ...]
    cursor: str | None


@final
@dataclass(frozen=True, slots=True)
class ArmWrite:
    """A change of one arm: its features from now on, or its removal when there are none."""

    id: str
    features: bytes
    expected: int | None = None  # the version it must have, 0 for an arm that must not be there

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
    """The version of an arm before a change, 0 when there was none, and after it, of a removed one that of its
    tombstone; the same when nothing changed."""

    before: int
    version: int

    @property
    def changed(self) -> bool:
        return self.before != self.version


@final
@dataclass(frozen=True, slots=True)
class Standing:
    """One state of the catalogue; no other has both numbers."""

    revision: int = 0
    stamp: str = ""


@final
@dataclass(frozen=True, slots=True)
class Changes:
    """What a reader has to do to be up to date: to every id its encoded features, None for an arm that is gone.

    With `anew` these are all arms there are, and what the reader has is to be forgotten.
    """

    arms: dict[str, bytes | None]
    standing: Standing
    anew: bool


@final
@dataclass(frozen=True, slots=True)
class _ChangesPage:
    arms: dict[str, bytes | None]
    standing: Standing  # of the store, when it was asked
    after: int  # the revision to go on after
    more: bool


@final
class CatalogueStore:
    """The catalogue of one namespace."""

    def __init__(
        self,
        redis: Store,
        keys: NamespaceKeys,
        store_epoch: str,
        *,
        arms_max: int,
        tombstones_kept: int = TOMBSTONES_KEPT,
        stamps_kept: int = STAMPS_KEPT,
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._store_epoch = store_epoch
        self.arms_max = arms_max
        self._tombstones_kept = tombstones_kept
        self._stamps_kept = stamps_kept
        self._change = load_script(redis, "change_arms")
        self._changes = load_script(redis, "arm_changes")
        self._range = load_script(redis, "arm_range")

    async def change(self, writes: Sequence[ArmWrite], *, now_ms: int, arms_max: int | None = None) -> list[ArmOutcome]:
        """Change arms of distinct ids, at most BATCH_ARMS, all of them or none.

        Raises CatalogueFull when there would be more arms than `arms_max`, and ArmConflict for the first arm that has
        not the version it should. Features that are the same as before change nothing.
        """
        if len(writes) > BATCH_ARMS or len({write.id for write in writes}) < len(writes):
            raise ValueError(f"a batch has at most {BATCH_ARMS} arms, and each of them once")
        keys = self._keys
        limit = self.arms_max if arms_max is None else arms_max
        arguments: list[Argument] = [
            self._store_epoch, secrets.token_hex(8), now_ms, limit, self._tombstones_kept, self._stamps_kept
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
            raise CatalogueFull(f"the catalogue has {as_int(rest[0])} arms and may have {limit}")
        if status == b"corrupt":
            raise CorruptRecord("an arm of the catalogue has no version")
        self._check(status)
        numbers = [as_int(number) for number in rest]
        return [ArmOutcome(before, now) for before, now in zip(numbers[0::2], numbers[1::2], strict=True)]

    async def standing(self) -> Standing:
        """The latest revision; cheap."""
        revision, stamp = await command(self._redis, "HMGET", self._keys.catalogue, "revision", "stamp")
        return Standing(as_int(revision, absent=0), as_text(stamp or b""))

    async def changes_since(self, standing: Standing) -> Changes:
        """What changed since a reader was at `standing`, removals included; the empty one is that of a new reader."""
        for _ in range(MAX_RESTARTS):
            changes = await self._walk(standing)
            if changes is not None:
                return changes
            standing = Standing()
        raise StoreUnavailable("the catalogue changes faster than it can be read")

    async def _walk(self, standing: Standing) -> Changes | None:
        """All pages after a standing; None when it is not in the history, or removals since then are not."""
        arms: dict[str, bytes | None] = {}
        anchor, after = standing, standing.revision
        while True:
            page = await self._changes_page(anchor, after)
            if page is None:
                return None
            arms |= page.arms
            if not page.more:
                return Changes(arms, page.standing, anew=standing == Standing())
            if anchor == Standing():
                # Whatever was removed before is of no concern to who had nothing.
                anchor = page.standing
            after = page.after

    async def _changes_page(self, anchor: Standing, after: int) -> _ChangesPage | None:
        keys = self._keys
        status, *rest = await self._changes.call(
            [keys.record, keys.catalogue, keys.catalogue_log, keys.arms, keys.arm_changes],
            [self._store_epoch, anchor.revision, anchor.stamp, after, BATCH_ARMS + 1, BATCH_BYTES],
        )
        if status == b"anew":
            return None
        self._check(status)
        revision, stamp, reached, more, *rows = rest
        arms = {as_text(arm): as_bytes(blob) or None for arm, blob in zip(rows[0::2], rows[1::2], strict=True)}
        page = _ChangesPage(arms, Standing(as_int(revision), as_text(stamp)), as_int(reached), bool(more))
        if page.more and page.after == after:
            raise CorruptRecord("a revision of the catalogue has more arms than one can change")
        return page

    async def page(self, *, limit: int, cursor: str | None = None) -> ArmPage:
        """Arms in the order of their ids, after `cursor`; fewer than `limit` when they are large."""
        more, arms = await self._between("-" if cursor is None else f"({cursor}", "+", limit)
        return ArmPage(arms, arms[-1].id if more else None)

    async def get(self, arm_id: str) -> Arm | None:
        """One arm."""
        _, arms = await self._between(f"[{arm_id}", f"[{arm_id}", 1)
        return arms[0] if arms else None

    async def count(self) -> int:
        """How many arms there are."""
        return as_int(await command(self._redis, "HLEN", self._keys.arms))

    async def ids(self) -> list[str]:
        """The ids of all arms, in order; arms that come or go meanwhile may be among them or not."""
        found: list[str] = []
        while True:
            start = f"({found[-1]}" if found else "-"
            reply = await command(
                self._redis, "ZRANGE", self._keys.arm_order, start, "+", "BYLEX", "LIMIT", 0, IDS_READ
            )
            found += [as_text(arm_id) for arm_id in reply]
            if len(reply) < IDS_READ:
                return found

    async def _between(self, first: str, last: str, limit: int) -> tuple[bool, tuple[Arm, ...]]:
        keys = self._keys
        more, *rows = await self._range.call(
            [keys.arms, keys.arm_versions, keys.arm_order], [first, last, limit, BATCH_BYTES]
        )
        return bool(more), tuple(
            _decode_arm(*fields) for fields in zip(rows[0::3], rows[1::3], rows[2::3], strict=True)
        )

    def _check(self, status: bytes) -> None:
        if status != b"ok":
            raise StoreReset(f"the record of namespace {self._keys.namespace} vanished or is of another store")


def in_batches(writes: Iterable[ArmWrite]) -> Iterator[list[ArmWrite]]:
    """Changes in as few batches as their numbers and sizes allow."""
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
    """The features of an arm as they are stored; anything else is a CorruptRecord."""
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


def _decode_arm(arm_id: Any, line: Any, features: Any) -> Arm:
    version, _, updated = as_text(line).partition(":")
    return Arm(as_text(arm_id), decode_features(as_bytes(features)), as_int(version), as_int(updated))
