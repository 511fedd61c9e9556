"""What a request chooses from: the arms it brings, or those of the catalogue that it names or does not exclude."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import numpy as np

from models.features import FeatureError, Features, Vectors, assemble
from service.breaker import StoreBreaker
from service.catalogue import Catalogue, Picture, Rows
from service.contracts import RecommendCommand
from service.errands import Errands
from service.errors import InvalidInput, Unavailable
from service.serving import Serving, ServingRoom
from store.errors import StoreUnavailable

EMPTY_CATALOGUE: Final = (
    "are left out, and the catalogue has none: send arms, or put some into the catalogue with PUT /admin/arms/{id} or "
    "POST /admin/arms/import"
)
NO_ARM: Final = "is no arm of the catalogue: GET /admin/arms lists them"


@final
@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """The arms of one request as the learner sees them."""

    #: float32 [n, d]
    inputs: Vectors
    #: How many of them to choose.
    k: int
    #: Names, and features as they were sent, that the rows of the inputs are taken from: those at `places`, or all.
    ids: Sequence[str]
    features: Sequence[Features]
    places: Rows | None
    from_catalogue: bool

    def arm_id(self, row: int) -> str:
        """The id of the arm in a row of the inputs."""
        return self.ids[self._place(row)]

    def features_of(self, row: int) -> Features:
        """The features of the arm in a row of the inputs."""
        return self.features[self._place(row)]

    def rows_by_id(self) -> dict[str, int]:
        """The row of each arm."""
        return {self.arm_id(row): row for row in range(len(self.inputs))}

    def refusal(self, row: int, message: str) -> InvalidInput:
        """What is said of an arm that cannot be used."""
        if self.from_catalogue:
            return _refused(self.arm_id(row), message)
        return InvalidInput(("arms", self._place(row), "features"), message)

    def _place(self, row: int) -> int:
        return row if self.places is None else int(self.places[row])


@final
class CandidateDesk:
    """Finds what the requests of one namespace choose from, and fixes its feature layout by the first of them."""

    def __init__(self, breaker: StoreBreaker, room: ServingRoom, catalogue: Catalogue) -> None:
        self._breaker = breaker
        self._room = room
        self._catalogue = catalogue

    async def gather(self, command: RecommendCommand, store: Errands) -> tuple[Serving, Candidates]:
        """What serves, and what there is to choose from; InvalidInput when that does not fit or is nothing."""
        return await (self._brought(command) if command.arms else self._catalogued(command, store))

    async def names(self, command: RecommendCommand, store: Errands) -> tuple[list[str], int]:
        """The ids of what there is to choose from, and how many to choose, whatever the features are."""
        if command.arms:
            return [arm.id for arm in command.arms if arm.id not in command.exclude], command.k
        picture = await self._catalogue.follow(store)
        rows = named_rows(picture, command)
        ids = list(picture.ids) if rows is None else [picture.ids[row] for row in rows.tolist()]
        return ids, min(command.k, len(ids))

    async def _brought(self, command: RecommendCommand) -> tuple[Serving, Candidates]:
        features = [arm.features for arm in command.arms]
        try:
            serving = self._room.serving or await self._begin(features, command.context)
            inputs = assemble(serving.layout, features, command.context)
        except FeatureError as error:
            raise InvalidInput(error.field, error.message) from error
        ids = [arm.id for arm in command.arms]
        places = None
        if command.exclude:
            places = np.flatnonzero([arm_id not in command.exclude for arm_id in ids])
            inputs = inputs[places]
        return serving, Candidates(inputs, command.k, ids, features, places, from_catalogue=False)

    async def _catalogued(self, command: RecommendCommand, store: Errands) -> tuple[Serving, Candidates]:
        picture = await self._catalogue.follow(store)
        rows = named_rows(picture, command)
        count = len(picture.ids) if rows is None else len(rows)
        try:
            serving = self._room.serving
            if serving is None:
                chosen = picture.features if rows is None else [picture.features[row] for row in rows.tolist()]
                serving = await self._begin(chosen, command.context)
            laid = await self._catalogue.laid_out(picture, serving.layout)
            fits = laid.fits if rows is None else laid.fits[rows]
            if not fits.all():
                row = int(fits.argmin())
                raise FeatureError(("arms", row, "features"), laid.misfits[row if rows is None else int(rows[row])])
            inputs = await self._catalogue.inputs(laid, rows, command.context)
        except FeatureError as error:
            match error.field:
                case ("arms", int(row), *_):
                    place = row if rows is None else int(rows[row])
                    raise _refused(picture.ids[place], error.message) from error
            raise InvalidInput(error.field, error.message) from error
        k = min(command.k, count)
        return serving, Candidates(inputs, k, picture.ids, picture.features, rows, from_catalogue=True)

    async def _begin(self, features: Sequence[Features], context: Features | None) -> Serving:
        """Start to serve by what the first request shows; that takes a store."""
        try:
            return await self._breaker.call(lambda: self._room.fix_layout(features, context))
        except StoreUnavailable as error:
            raise Unavailable(
                "The store does not answer, and nothing is in memory yet to decide from; try again later."
            ) from error


def named_rows(picture: Picture, command: RecommendCommand) -> Rows | None:
    """The places of the arms that a request chooses from; None for all of them in their order."""
    rows: Rows | None = None
    if command.arm_ids is not None:
        rows = picture.rows_of(command.arm_ids)
        if (rows < 0).any():
            raise InvalidInput(("arm_ids", int((rows < 0).argmax())), NO_ARM)
    elif not picture.ids:
        raise InvalidInput(("arms",), EMPTY_CATALOGUE)
    if command.exclude:
        out = picture.rows_of(tuple(command.exclude))
        left = np.ones(len(picture.ids), dtype=np.bool_)
        left[out[out >= 0]] = False
        rows = np.flatnonzero(left) if rows is None else rows[left[rows]]
        if not len(rows):
            raise InvalidInput(("exclude",), "leaves no arm to choose from")
    return rows


def _refused(arm_id: str, message: str) -> InvalidInput:
    return InvalidInput(("arms",), f"the features of the catalogue's arm {arm_id!r} cannot be used: {message}")
