"""Whom fusion is trained on: users of whom a profile was told and enough was learned, and what they are asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from models.features import FeatureLayout, assemble
from store.errors import CorruptRecord
from store.profiles import ProfileStore, decode_profile
from store.users import UserStore
from worker.epochs import choose_teachers
from worker.fusion_task import batch_arrays
from worker.trainer import Pupil, Trainer

#: Sources of one training; with more users, those first by hash.
SOURCES_MAX: Final = 1_000
#: Events of a user from which on what was learned of them says something.
EVENTS_MIN: Final = 5
#: Numbers that all their samples may have together; wide inputs leave fewer samples a source.
NUMBERS_MAX: Final = 1 << 24
#: Users whose profiles, and whose samples, are read in one go.
PROFILES_READ: Final = 512
SAMPLES_READ: Final = 64


@final
@dataclass(frozen=True, slots=True, eq=False)
class SourceUser:
    """A user to learn from."""

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
        """Users who may teach, in an order that does not depend on how they are stored."""
        standings: dict[str, tuple[int, int]] = {}
        for partition in range(self._partitions):
            found = await self._users.versions(partition)
            standings |= {user: standing for user, standing in found.items() if standing[1] >= EVENTS_MIN}
        ordered = await asyncio.to_thread(choose_teachers, list(standings), len(standings))
        sources: list[SourceUser] = []
        for start in range(0, len(ordered), PROFILES_READ):
            told = await self._profiles.load(ordered[start : start + PROFILES_READ])
            vectors = await asyncio.to_thread(_vectors, layout, told)
            sources += [SourceUser(user, *standings[user], vector) for user, vector in vectors.items()]
            if len(sources) >= most:
                break
        return sources[:most]

    async def batches(
        self, trainer: Trainer, sources: Sequence[SourceUser]
    ) -> tuple[list[SourceUser], list[dict[str, np.ndarray]]]:
        """The batches of sources' samples, and those sources who have any, in the same order.

        Without their starts: fusion must not be taught what it said itself.
        """
        each = trainer.learner.inputs_expected + trainer.learner.noted
        most = max(1, NUMBERS_MAX // max(1, len(sources) * each))
        kept: list[SourceUser] = []
        batches = []
        for start in range(0, len(sources), SAMPLES_READ):
            part = sources[start : start + SAMPLES_READ]
            samples = await self._users.load_samples(source.user_id for source in part)
            there = [source for source in part if source.user_id in samples]
            pupils = [Pupil(user.user_id, user.version, samples[user.user_id][-most:], None) for user in there]
            if pupils:
                batches.append(batch_arrays(await asyncio.to_thread(trainer.batch, pupils, as_numpy=True)))
                kept += there
        return kept, batches


def _vectors(layout: FeatureLayout, told: Mapping[str, bytes]) -> dict[str, NDArray[np.float64]]:
    """Profiles as numbers, without those that are damaged or do not fit."""
    found: dict[str, NDArray[np.float64]] = {}
    for user, stored in told.items():
        try:
            found[user] = assemble(layout, [decode_profile(stored)], None)[0].astype(np.float64)
        except (CorruptRecord, ValueError, TypeError, OverflowError):  # FeatureError is a ValueError
            continue
    return found
