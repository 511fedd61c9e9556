"""Whether there can be a learner with some settings, before anything is stored or built; apart from the settings
themselves, which commands read that do without torch."""

from __future__ import annotations

from typing import Any

from models.features import FeatureLayout
from models.presets import build_learner
from models.settings import LearnerSettings, stored_settings
from service.settings import SettingsError
from store.namespaces import NamespaceRecord


def check_size(learner: LearnerSettings, layout: dict[str, Any] | None, *, blamed: str = "METABAN_LEARNER") -> None:
    """SettingsError when it would be too large, with the inputs of a layout or, while there is none, with any."""
    try:
        build_learner(learner, 1)  # told first: it is not the layout's fault then
        if layout is not None:
            build_learner(learner, FeatureLayout.from_json(layout).dimension)
    except ValueError as error:
        raise SettingsError(f"{blamed}: {error}") from error


def stored_learner(record: NamespaceRecord) -> LearnerSettings:
    """The learner's settings of a namespace; SettingsError when this version does not allow them."""
    try:
        return stored_settings(record.learner)
    except ValueError as error:
        raise SettingsError(
            f"namespace {record.name} was stored with settings of its learner that are not allowed: {error}"
        ) from error
