"""What requests tell of users, as numbers: all profiles of a namespace look as its first one did."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import final

import numpy as np
import structlog
from numpy.typing import NDArray

from models.features import FeatureError, FeatureLayout
from models.profiles import infer_profile_layout, profile_vector
from service.contracts import Features
from service.errands import Errands
from service.errors import InvalidInput
from service.live import LiveSettings
from service.serving import ServingRoom
from service.settings import SettingsError
from store.namespaces import Namespaces

log = structlog.get_logger()


@final
class ProfileDesk:
    """Reads the profiles of one namespace, and fixes what they look like by the first of them."""

    def __init__(self, live: LiveSettings, namespaces: Namespaces, room: ServingRoom) -> None:
        self._live = live
        self._namespaces = namespaces
        self._room = room

    async def read(self, features: Features, store: Errands) -> NDArray[np.float64]:
        """A profile as numbers; InvalidInput when it does not look like those before it.

        Whether anything is made of it or not: what is stored of users is to mean something when it is.
        """
        try:
            return profile_vector(await self._layout(features, store), features)
        except FeatureError as error:
            raise InvalidInput(error.field, error.message) from error

    async def _layout(self, features: Features, store: Errands) -> FeatureLayout:
        """The layout of all profiles; while the store cannot be told, a first profile fixes nothing but its own."""
        known = self._live.record.profile_layout
        if known is None:
            layout = infer_profile_layout(features)
            # Nothing is fixed by a profile that does not fit even its own layout.
            profile_vector(layout, features)
            record = await store.run(partial(self._namespaces.set_profile_layout, self._live.record, layout.to_json()))
            if record is None or record.profile_layout is None:
                return layout
            with suppress(SettingsError):  # the next probe tells of it
                self._room.take(record)
            known = record.profile_layout
            log.info("profile layout fixed", **known)
        return FeatureLayout.from_json(known)
