"""The catalogue in the memory of this process, as arrays that requests are answered from.

Every request that chooses from it asks the store for its revision, so that an arm that was removed anywhere is chosen
nowhere after that; only what changed is fetched. What is known of arms is kept as a picture that never changes: a
request goes on with the one it began with, and the next picture shares with it all that stayed the same.
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

from models.features import TOO_LARGE, FeatureError, FeatureLayout, Features, Vectors, arm_vectors, join_context
from service.errands import Errands
from store.catalogue import CatalogueStore, Changes, Standing, decode_features
from store.errors import CorruptRecord

#: Places of arms in a picture.
Rows: TypeAlias = NDArray[np.intp]
#: Inputs of more numbers than this are put together off the event loop.
LARGE_INPUTS: Final = 1_000_000

log = structlog.get_logger()


@final
@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """The arms of one state of the catalogue, in the order of their ids."""

    ids: tuple[str, ...]
    features: tuple[Features, ...]
    rows: dict[str, int]

    @staticmethod
    def of(arms: dict[str, Features]) -> Picture:
        """A picture of these arms."""
        ids = tuple(sorted(arms))
        return Picture(ids, tuple(map(arms.__getitem__, ids)), dict(zip(ids, range(len(ids)), strict=True)))

    def rows_of(self, ids: Sequence[str]) -> Rows:
        """The place of each, -1 for what is no arm of the catalogue."""
        return np.fromiter(map(self.rows.get, ids, repeat(-1)), dtype=np.intp, count=len(ids))

    def changed(self, changes: Changes) -> Picture:
        """The picture after some changes."""
        arms: dict[str, Features] = {} if changes.anew else dict(zip(self.ids, self.features, strict=True))
        for arm_id, blob in changes.arms.items():
            features = None if blob is None else _kept(blob)
            if features is None:
                arms.pop(arm_id, None)
            else:
                arms[arm_id] = features
        return Picture.of(arms)


@final
@dataclass(frozen=True, slots=True, eq=False)
class LaidOut:
    """The arms of a picture as a feature layout has them."""

    picture: Picture
    layout: FeatureLayout
    #: What depends on the arm alone, float32 [arms, layout.arm]; zeros for arms that do not fit.
    vectors: Vectors
    fits: NDArray[np.bool_]
    #: Why the others do not fit, by their places.
    misfits: dict[int, str]
    #: The inputs of all arms, float32 [arms, layout.dimension], where there is no context to wait for.
    whole: Vectors | None

    @staticmethod
    def of(picture: Picture, layout: FeatureLayout, earlier: LaidOut | None) -> LaidOut:
        """Lay out a picture, with the work done before for arms that are still the same."""
        count = len(picture.ids)
        vectors = np.zeros((count, layout.arm), dtype=np.float32)
        fresh: Iterable[int] = range(count)
        if earlier is not None and earlier.layout == layout:
            same = earlier._same_as(picture)
            known = np.flatnonzero(same >= 0)
            vectors[known] = earlier.vectors[same[known]]
            fresh = np.flatnonzero(same < 0).tolist()
        places = list(fresh)
        misfits: dict[int, str] = {}
        try:
            if places:
                vectors[places] = arm_vectors(layout, [picture.features[place] for place in places])
        except FeatureError:  # of one of them: which ones is told by trying each
            for place in places:
                try:
                    vectors[place] = arm_vectors(layout, [picture.features[place]])[0]
                except FeatureError as error:
                    misfits[place] = error.message
        infinite = np.flatnonzero(~np.isfinite(vectors).all(axis=1)).tolist()
        vectors[infinite] = 0
        misfits |= dict.fromkeys(infinite, TOO_LARGE)
        fits = np.ones(count, dtype=np.bool_)
        fits[list(misfits)] = False
        if layout.context:
            return LaidOut(picture, layout, vectors, fits, misfits, None)
        whole = join_context(layout, vectors, None)
        return LaidOut(picture, layout, whole[:, : layout.arm], fits, misfits, whole)

    def inputs(self, rows: Rows | None, context: Features | None) -> Vectors:
        """The learner's inputs for the arms at some places, or all: what `assemble` would make of them."""
        if self.whole is not None and context is None:
            return self.whole.copy() if rows is None else self.whole[rows]
        return join_context(self.layout, self.vectors if rows is None else self.vectors[rows], context)

    def _same_as(self, picture: Picture) -> Rows:
        """For each arm of another picture its place here, -1 where it is new, changed, or did not fit."""
        features, fits = self.picture.features, self.fits.tolist()
        places = map(self.picture.rows.get, picture.ids, repeat(-1))
        return np.fromiter(
            (
                place if place >= 0 and fits[place] and features[place] is other else -1
                for place, other in zip(places, picture.features, strict=True)
            ),
            dtype=np.intp,
            count=len(picture.ids),
        )


@final
class Catalogue:
    """Follows the catalogue of one namespace."""

    def __init__(self, store: CatalogueStore) -> None:
        self._store = store
        self._picture = Picture.of({})
        self._standing = Standing()
        self._laid: LaidOut | None = None
        self._following = asyncio.Lock()
        self._laying = asyncio.Lock()

    async def start(self) -> None:
        """Load it, so that there is something to go on with should the store go away."""
        await self._catch_up()

    async def follow(self, store: Errands) -> Picture:
        """The arms as they are now, or as they were last if the store is away and the request may go on."""
        standing = await store.run(self._store.standing)
        if standing is not None and standing != self._standing:
            # Without a budget: a large catalogue may take longer to load than a store may take to answer.
            await store.run(self._catch_up, budget_s=None)
        return self._picture

    async def laid_out(self, picture: Picture, layout: FeatureLayout) -> LaidOut:
        """A picture as a layout has it; made once."""
        laid = self._laid
        if laid is not None and laid.picture is picture and laid.layout == layout:
            return laid
        async with self._laying:
            laid = self._laid
            if laid is None or laid.picture is not picture or laid.layout != layout:
                laid = await asyncio.to_thread(LaidOut.of, picture, layout, self._laid)
                self._laid = laid
            return laid

    async def inputs(self, laid: LaidOut, rows: Rows | None, context: Features | None) -> Vectors:
        """The learner's inputs for some arms; a FeatureError names the place among them."""
        count = len(laid.picture.ids) if rows is None else len(rows)
        if count * laid.layout.dimension > LARGE_INPUTS:
            return await asyncio.to_thread(laid.inputs, rows, context)
        return laid.inputs(rows, context)

    async def _catch_up(self) -> None:
        """Fetch what changed; all of it or nothing."""
        async with self._following:
            changes = await self._store.changes_since(self._standing)
            if changes.standing != self._standing or changes.anew:
                self._picture = await asyncio.to_thread(self._picture.changed, changes)
                self._standing = changes.standing


def _kept(blob: bytes) -> Features | None:
    """Features as they are kept: numbers as float32, which learners see anyway; None when they cannot be read."""
    try:
        features = decode_features(blob)
        return features if isinstance(features, dict) else array("f", features)
    except (CorruptRecord, OverflowError) as error:
        log.error("arm of the catalogue cannot be read", reason=str(error), effect="it is not chosen")
        return None
