"""The arms a request chooses from: those it sends, or those of the catalogue that it names or does not exclude."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from metaban.models.features import FeatureError, Features, Vectors, assemble
from metaban.models.learner import arm_key
from metaban.service.engine.commands import RecommendCommand
from metaban.service.engine.model.lifecycle import ModelHost, Serving
from metaban.service.engine.recommend.catalogue import ArmTable, Catalogue, Rows
from metaban.service.engine.store_guard import StoreAccess, StoreGuard
from metaban.service.errors import InvalidInput, Unavailable
from metaban.store.errors import StoreUnavailable

ID_OF: Final = attrgetter("id")

FEATURES_OF: Final = attrgetter("features")

EMPTY_CATALOGUE: Final = (
    "are missing, and the catalogue is empty: send arms, or add some to the catalogue with PUT /admin/arms/{id} or "
    "POST /admin/arms/import"
)

NO_ARM: Final = "is no arm of the catalogue: GET /admin/arms lists them"


@final
@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """The arms of one request as inputs of the learner."""

    #: float32 [n, d]
    inputs: Vectors
    #: `arm_key` of each id, int64 [n].
    keys: NDArray[np.int64]
    #: Arms to choose.
    k: int
    #: Ids and features as sent; row i of the inputs is the arm at places[i], or at i when `places` is None.
    ids: Sequence[str]
    features: Sequence[Features]
    places: Rows | None
    from_catalogue: bool

    def arm_id(self, row: int) -> str:
        """The id of the arm in this row of the inputs."""
        return self.ids[row if self.places is None else int(self.places[row])]

    def features_of(self, row: int) -> Features:
        """The features of the arm in this row of the inputs."""
        return self.features[row if self.places is None else int(self.places[row])]

    def rows_by_id(self) -> dict[str, int]:
        """The row of each arm."""
        return {self.arm_id(row): row for row in range(len(self.inputs))}

    def refusal(self, row: int, message: str) -> InvalidInput:
        """The error for an arm that cannot be used."""
        if self.from_catalogue:
            return _unusable(self.arm_id(row), message)
        place = row if self.places is None else int(self.places[row])
        return InvalidInput(("arms", place, "features"), message)


@final
class CandidateFinder:
    """Finds the arms of requests of one namespace; the first request fixes the feature layout."""

    def __init__(self, guard: StoreGuard, host: ModelHost, catalogue: Catalogue) -> None:
        self._guard = guard
        self._host = host
        self._catalogue = catalogue

    async def gather(self, command: RecommendCommand, store: StoreAccess) -> tuple[Serving, Candidates]:
        """The serving parts and the arms to choose from; InvalidInput when there is no arm or one does not fit."""
        return await (self._from_request(command) if command.arms else self._from_catalogue(command, store))

    async def names(self, command: RecommendCommand, store: StoreAccess) -> tuple[list[str], int]:
        """The ids of the arms to choose from, and how many to choose; features are not looked at."""
        if command.arms:
            return [arm.id for arm in command.arms if arm.id not in command.exclude], command.k
        table = await self._catalogue.follow(store)
        rows = named_rows(table, command)
        ids = list(table.ids) if rows is None else [table.ids[row] for row in rows.tolist()]
        return ids, min(command.k, len(ids))

    async def _from_request(self, command: RecommendCommand) -> tuple[Serving, Candidates]:
        features = list(map(FEATURES_OF, command.arms))
        try:
            serving = self._host.serving or await self._begin(features, command.context)
            inputs = assemble(serving.layout, features, command.context)
        except FeatureError as error:
            raise InvalidInput(error.field, error.message) from error
        ids = list(map(ID_OF, command.arms))
        keys, places = np.array([arm_key(arm_id) for arm_id in ids], dtype=np.int64), None
        if command.exclude:
            places = np.flatnonzero([arm_id not in command.exclude for arm_id in ids])
            inputs, keys = inputs[places], keys[places]
        return serving, Candidates(inputs, keys, command.k, ids, features, places, from_catalogue=False)

    async def _from_catalogue(self, command: RecommendCommand, store: StoreAccess) -> tuple[Serving, Candidates]:
        table = await self._catalogue.follow(store)
        rows = named_rows(table, command)
        count = len(table.ids) if rows is None else len(rows)
        try:
            serving = self._host.serving
            if serving is None:
                chosen = table.features if rows is None else [table.features[row] for row in rows.tolist()]
                serving = await self._begin(chosen, command.context)
            encoded = await self._catalogue.encode(table, serving.layout)
            fits = encoded.fits if rows is None else encoded.fits[rows]
            if not fits.all():
                row = int(fits.argmin())
                raise FeatureError(("arms", row, "features"), encoded.misfits[row if rows is None else int(rows[row])])
            inputs = await self._catalogue.inputs(encoded, rows, command.context)
        except FeatureError as error:
            match error.field:
                case ("arms", int(row), *_):
                    place = row if rows is None else int(rows[row])
                    raise _unusable(table.ids[place], error.message) from error
            raise InvalidInput(error.field, error.message) from error
        k, keys = min(command.k, count), table.keys if rows is None else table.keys[rows]
        return serving, Candidates(inputs, keys, k, table.ids, table.features, rows, from_catalogue=True)

    async def _begin(self, features: Sequence[Features], context: Features | None) -> Serving:
        """Fix the feature layout by the first request, which needs the store, and start serving."""
        try:
            return await self._guard.call(lambda: self._host.fix_layout(features, context))
        except StoreUnavailable as error:
            raise Unavailable("The store does not answer, and no model is loaded yet; try again later.") from error


def named_rows(table: ArmTable, command: RecommendCommand) -> Rows | None:
    """The rows of the arms that a request chooses from; None means all, in their order."""
    rows: Rows | None = None
    if command.arm_ids is not None:
        rows = table.rows_of(command.arm_ids)
        if (rows < 0).any():
            raise InvalidInput(("arm_ids", int((rows < 0).argmax())), NO_ARM)
    elif not table.ids:
        raise InvalidInput(("arms",), EMPTY_CATALOGUE)
    if command.exclude:
        out = table.rows_of(tuple(command.exclude))
        left = np.ones(len(table.ids), dtype=np.bool_)
        left[out[out >= 0]] = False
        rows = np.flatnonzero(left) if rows is None else rows[left[rows]]
        if not len(rows):
            raise InvalidInput(("exclude",), "leaves no arm to choose from")
    return rows


def _unusable(arm_id: str, message: str) -> InvalidInput:
    return InvalidInput(("arms",), f"the features of the catalogue's arm {arm_id!r} cannot be used: {message}")
