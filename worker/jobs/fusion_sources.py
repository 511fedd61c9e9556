"""Finds the users that fusion is trained on, those with a profile and enough rewards, and loads their samples."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from metaban.models.features import FeatureLayout, assemble
from metaban.store.errors import CorruptRecord
from metaban.store.users.profiles import ProfileStore, decode_profile
from metaban.store.users.users import UserStore
from metaban.worker.epochs.derive_shared import choose_by_hash
from metaban.worker.jobs.fusion_task import batch_arrays
from metaban.worker.learning.trainer import FitInput, Trainer

#: Most sources of one training; of more users, the first by hash.
SOURCES_MAX: Final = 1_000

#: Fewest applied events of a source.
EVENTS_MIN: Final = 5

#: Most input numbers in all samples: with wide inputs, each source contributes fewer samples.
NUMBERS_MAX: Final = 1 << 24

#: Users whose profiles, or samples, are read at once.
PROFILES_READ: Final = 512
SAMPLES_READ: Final = 64


@final
@dataclass(frozen=True, slots=True, eq=False)
class SourceUser:
    """A user that fusion is trained on."""

    user_id: str
    incarnation: int
    version: int
    profile: NDArray[np.float64]


@final
class FusionSources:
    """Finds sources among the users of a namespace."""

    def __init__(self, users: UserStore, profiles: ProfileStore, *, partitions: int) -> None:
        self._users = users
        self._profiles = profiles
        self._partitions = partitions

    async def find(self, layout: FeatureLayout, *, most: int = SOURCES_MAX) -> list[SourceUser]:
        """Possible sources, ordered by hash."""
        versions: dict[str, tuple[int, int]] = {}
        for partition in range(self._partitions):
            found = await self._users.versions(partition)
            versions |= {user: version for user, version in found.items() if version[1] >= EVENTS_MIN}
        ordered = await asyncio.to_thread(choose_by_hash, list(versions), len(versions))
        sources: list[SourceUser] = []
        for start in range(0, len(ordered), PROFILES_READ):
            stored = await self._profiles.load(ordered[start : start + PROFILES_READ])
            vectors = await asyncio.to_thread(_vectors, layout, stored)
            sources += [SourceUser(user, *versions[user], vector) for user, vector in vectors.items()]
            if len(sources) >= most:
                break
        return sources[:most]

    async def batches(
        self, trainer: Trainer, sources: Sequence[SourceUser]
    ) -> tuple[list[SourceUser], list[dict[str, np.ndarray]]]:
        """The sources with samples, and the batches of their samples in the same order.

        Warm starts are left out: fusion must not learn from its own output.
        """
        each = trainer.learner.input_size + trainer.learner.noted
        most = max(1, NUMBERS_MAX // max(1, len(sources) * each))
        kept: list[SourceUser] = []
        batches = []
        for start in range(0, len(sources), SAMPLES_READ):
            part = sources[start : start + SAMPLES_READ]
            samples = await self._users.load_samples(source.user_id for source in part)
            there = [source for source in part if source.user_id in samples]
            fit_inputs = [FitInput(user.user_id, user.version, samples[user.user_id][-most:], None) for user in there]
            if fit_inputs:
                batches.append(batch_arrays(await asyncio.to_thread(trainer.batch, fit_inputs, as_numpy=True)))
                kept += there
        return kept, batches


def _vectors(layout: FeatureLayout, stored: Mapping[str, bytes]) -> dict[str, NDArray[np.float64]]:
    """Profiles as vectors; corrupt ones and those of another layout are left out."""
    found: dict[str, NDArray[np.float64]] = {}
    for user, blob in stored.items():
        try:
            found[user] = assemble(layout, [decode_profile(blob)], None)[0].astype(np.float64)
        except (CorruptRecord, ValueError, TypeError, OverflowError):  # FeatureError is a ValueError
            continue
    return found
