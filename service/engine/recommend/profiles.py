"""Profiles as vectors. The first profile fixes the layout of all profiles of a namespace."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import final

import numpy as np
import structlog
from numpy.typing import NDArray

from metaban.models.features import FeatureError, FeatureLayout, infer_profile_layout, profile_vector
from metaban.service.engine.commands import Features
from metaban.service.engine.model.lifecycle import ModelHost
from metaban.service.engine.store_guard import StoreAccess
from metaban.service.errors import InvalidInput
from metaban.service.settings.environment import SettingsError
from metaban.service.settings.namespace import LiveSettings
from metaban.store.namespaces import NamespaceStore

log = structlog.get_logger()


@final
class ProfileReader:
    """Reads the profiles of one namespace; the first one fixes their layout."""

    def __init__(self, live: LiveSettings, namespaces: NamespaceStore, host: ModelHost) -> None:
        self._live = live
        self._namespaces = namespaces
        self._host = host

    async def read(self, features: Features, store: StoreAccess) -> NDArray[np.float64]:
        """A profile as a vector; InvalidInput when it does not fit the layout.

        Checked even if fusion is off, so that stored profiles are usable when it is turned on.
        """
        try:
            return profile_vector(await self._layout(features, store), features)
        except FeatureError as error:
            raise InvalidInput(error.field, error.message) from error

    async def _layout(self, features: Features, store: StoreAccess) -> FeatureLayout:
        """The layout of all profiles. While the store is unavailable, a first profile does not fix it for others."""
        known = self._live.record.profile_layout
        if known is None:
            layout = infer_profile_layout(features)
            # A profile that does not fit its own layout must not fix it.
            profile_vector(layout, features)
            record = await store.run(partial(self._namespaces.set_profile_layout, self._live.record, layout.to_json()))
            if record is None or record.profile_layout is None:
                return layout
            with suppress(SettingsError):  # the next probe logs it
                self._host.adopt(record)
            known = record.profile_layout
            log.info("profile_layout_fixed", namespace=record.name, **known)
        return FeatureLayout.from_json(known)
