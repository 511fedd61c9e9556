"""The catalogue in memory, as arrays.

Every request that chooses from it asks the store for the revision, so that a removed arm is no longer chosen anywhere;
only changes are fetched. Tables are immutable: a request keeps the one it started with, and the next table shares what
did not change.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Final, TypeAlias, final

import numpy as np
import structlog
from numpy.typing import NDArray

from metaban.models.features import TOO_LARGE, FeatureError, FeatureLayout, Features, Vectors, arm_vectors, join_context
from metaban.models.learner import arm_key
from metaban.service.engine.store_guard import StoreAccess
from metaban.store.catalogue import CatalogueRevision, CatalogueStore, Changes, decode_features
from metaban.store.errors import CorruptRecord

#: Rows of arms in a table.
Rows: TypeAlias = NDArray[np.intp]

#: Inputs of more numbers than this are assembled off the event loop.
LARGE_INPUTS: Final = 1_000_000

log = structlog.get_logger()


@final
@dataclass(frozen=True, slots=True, eq=False)
class ArmTable:
    """The arms of one revision of the catalogue, sorted by id."""

    ids: tuple[str, ...]
    features: tuple[Features, ...]
    rows: dict[str, int]
    #: `arm_key` of each id, int64 [arms].
    keys: NDArray[np.int64]

    @staticmethod
    def of(arms: dict[str, Features]) -> ArmTable:
        """A table of these arms."""
        ids = tuple(sorted(arms))
        rows = dict(zip(ids, range(len(ids)), strict=True))
        keys = np.fromiter(map(arm_key, ids), dtype=np.int64, count=len(ids))
        return ArmTable(ids, tuple(map(arms.__getitem__, ids)), rows, keys)

    def rows_of(self, ids: Sequence[str]) -> Rows:
        """The row of each id, -1 for an unknown one."""
        return np.fromiter(map(self.rows.get, ids, repeat(-1)), dtype=np.intp, count=len(ids))

    def changed(self, changes: Changes) -> ArmTable:
        """The table after some changes."""
        arms: dict[str, Features] = {} if changes.anew else dict(zip(self.ids, self.features, strict=True))
        for arm_id, blob in changes.arms.items():
            features = None if blob is None else _features(blob)
            if features is None:
                arms.pop(arm_id, None)
            else:
                arms[arm_id] = features
        return ArmTable.of(arms)


@final
@dataclass(frozen=True, slots=True, eq=False)
class EncodedArms:
    """The arms of a table as vectors of a feature layout."""

    table: ArmTable
    layout: FeatureLayout
    #: The part that depends on the arm alone, float32 [arms, layout.arm]; zeros for arms that do not fit.
    vectors: Vectors
    fits: NDArray[np.bool_]
    #: Why the others do not fit, by row.
    misfits: dict[int, str]
    #: The inputs of all arms, float32 [arms, layout.dimension], if the layout has no context.
    whole: Vectors | None

    @staticmethod
    def of(table: ArmTable, layout: FeatureLayout, earlier: EncodedArms | None) -> EncodedArms:
        """Encode a table; vectors of unchanged arms are copied from an earlier one."""
        count = len(table.ids)
        vectors = np.zeros((count, layout.arm), dtype=np.float32)
        fresh: Iterable[int] = range(count)
        if earlier is not None and earlier.layout == layout:
            same = earlier._unchanged_rows(table)
            known = np.flatnonzero(same >= 0)
            vectors[known] = earlier.vectors[same[known]]
            fresh = np.flatnonzero(same < 0).tolist()
        places = list(fresh)
        misfits: dict[int, str] = {}
        try:
            if places:
                vectors[places] = arm_vectors(layout, [table.features[place] for place in places])
        except FeatureError:  # at least one does not fit: try each
            for place in places:
                try:
                    vectors[place] = arm_vectors(layout, [table.features[place]])[0]
                except FeatureError as error:
                    misfits[place] = error.message
        infinite = np.flatnonzero(~np.isfinite(vectors).all(axis=1)).tolist()
        vectors[infinite] = 0
        misfits |= dict.fromkeys(infinite, TOO_LARGE)
        fits = np.ones(count, dtype=np.bool_)
        fits[list(misfits)] = False
        if layout.context:
            return EncodedArms(table, layout, vectors, fits, misfits, None)
        whole = join_context(layout, vectors, None)
        return EncodedArms(table, layout, whole[:, : layout.arm], fits, misfits, whole)

    def inputs(self, rows: Rows | None, context: Features | None) -> Vectors:
        """The learner's inputs for the arms in these rows, or all; equal to those of `assemble`."""
        if self.whole is not None and context is None:
            return self.whole.copy() if rows is None else self.whole[rows]
        return join_context(self.layout, self.vectors if rows is None else self.vectors[rows], context)

    def _unchanged_rows(self, table: ArmTable) -> Rows:
        """For each arm of another table its row here, -1 where it is new, changed, or did not fit."""
        features, fits = self.table.features, self.fits.tolist()
        places = map(self.table.rows.get, table.ids, repeat(-1))
        return np.fromiter(
            (
                place if place >= 0 and fits[place] and features[place] is other else -1
                for place, other in zip(places, table.features, strict=True)
            ),
            dtype=np.intp,
            count=len(table.ids),
        )


@final
class Catalogue:
    """Follows the catalogue of one namespace."""

    def __init__(self, store: CatalogueStore) -> None:
        self._store = store
        self._table = ArmTable.of({})
        self._revision = CatalogueRevision()
        self._encoded: EncodedArms | None = None
        self._following = asyncio.Lock()
        self._encoding = asyncio.Lock()

    async def start(self) -> None:
        """Load the catalogue."""
        await self._catch_up()

    async def follow(self, store: StoreAccess) -> ArmTable:
        """The current arms; the last known ones if the store is unavailable and the request may go on."""
        revision = await store.run(self._store.standing)
        if revision is not None and revision != self._revision:
            # Without a time limit: loading a large catalogue may take longer than one store call may.
            await store.run(self._catch_up, budget_s=None)
        return self._table

    async def encode(self, table: ArmTable, layout: FeatureLayout) -> EncodedArms:
        """The encoded arms of a table; computed once."""
        encoded = self._encoded
        if encoded is not None and encoded.table is table and encoded.layout == layout:
            return encoded
        async with self._encoding:
            encoded = self._encoded
            if encoded is None or encoded.table is not table or encoded.layout != layout:
                encoded = await asyncio.to_thread(EncodedArms.of, table, layout, self._encoded)
                self._encoded = encoded
            return encoded

    async def inputs(self, encoded: EncodedArms, rows: Rows | None, context: Features | None) -> Vectors:
        """The learner's inputs for some arms; a FeatureError names the place among them."""
        count = len(encoded.table.ids) if rows is None else len(rows)
        if count * encoded.layout.dimension > LARGE_INPUTS:
            return await asyncio.to_thread(encoded.inputs, rows, context)
        return encoded.inputs(rows, context)

    async def _catch_up(self) -> None:
        """Fetch all changes, or none."""
        async with self._following:
            changes = await self._store.changes_since(self._revision)
            if changes.standing != self._revision or changes.anew:
                self._table = await asyncio.to_thread(self._table.changed, changes)
                self._revision = changes.standing


def _features(blob: bytes) -> Features | None:
    """Decoded features, lists as float32, which is what learners use; None when they cannot be read."""
    try:
        features = decode_features(blob)
        return features if isinstance(features, dict) else array("f", features)
    except (CorruptRecord, OverflowError) as error:
        log.error("arm_unreadable", reason=str(error), effect="it is not chosen")
        return None
