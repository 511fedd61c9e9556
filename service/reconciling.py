"""Settings of the environment against those that a namespace was learned with."""

from __future__ import annotations

from models.settings import LearnerSettings
from service.learner_checks import stored_learner
from service.settings import SettingsError
from store.errors import NamespaceConflict
from store.namespaces import NamespaceRecord, Namespaces


async def reconcile(namespaces: Namespaces, record: NamespaceRecord, wanted: LearnerSettings) -> NamespaceRecord:
    """Take over changed learner settings, unless stored learners would no longer mean the same."""
    try:
        stored = stored_learner(record)
    except SettingsError:
        # Stored by a version that allowed more. They may go, where what was learned does not depend on them.
        same = all(record.learner.get(name) == value for name, value in wanted.structure().items())
        if record.layout is not None and not same:
            raise
    else:
        if stored == wanted:
            return record
        if stored.structure() != wanted.structure() and record.layout is not None:
            raise _void(record, stored, wanted)
    try:
        return await namespaces.replace_learner(record, wanted.to_json())
    except NamespaceConflict:
        # Another service that starts at the same time was first.
        current = await namespaces.load(record.name)
        if current is None or current.revision == record.revision:
            raise
        return await reconcile(namespaces, current, wanted)


def _void(record: NamespaceRecord, stored: LearnerSettings, wanted: LearnerSettings) -> SettingsError:
    # Learners of different presets have settings of their own: only what both have can be told apart.
    before, after = stored.structure(), wanted.structure()
    changed = [name for name in before if name in after and before[name] != after[name]]
    told = ", ".join(f"{name} from {before[name]!r} to {after[name]!r}" for name in changed)
    return SettingsError(
        f"namespace {record.name} has learners that a change of {told} would void: "
        "set the old values, or use another METABAN_NAMESPACE"
    )
