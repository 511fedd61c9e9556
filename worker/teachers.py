"""The samples that epochs are derived from, kept between epochs so that only what changed is read again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from store.codec import Sample
from store.users import UserStore
from worker.epochs import choose_teachers, samples_each
from worker.trainer import Pupil


@final
class Teachers:
    """The teachers' samples as of the versions they were read at."""

    def __init__(self, users: UserStore) -> None:
        self._users = users
        self._held: dict[str, tuple[tuple[int, int], list[Sample]]] = {}

    def forget(self) -> None:
        """Read everyone again: in a store that was set back, a version may have come about by other events."""
        self._held = {}

    async def pupils(self, standings: Mapping[str, tuple[int, int]], inputs: int) -> list[Pupil]:
        """Whom to learn from, of all users with their (incarnation, version); users without samples are left out."""
        chosen = choose_teachers(list(standings))
        most = samples_each(len(chosen), inputs)
        # What is held of an earlier incarnation is of a user who was forgotten, or put back to another past.
        held = {
            user: self._held[user]
            for user in chosen
            if user in self._held and self._held[user][0][0] == standings[user][0]
        }
        behind = [user for user in chosen if user not in held or held[user][0] != standings[user]]
        # An event may be applied between the look at versions and this one; it is read again with the next version.
        for user, samples in (await self._users.load_samples(behind)).items():
            held[user] = standings[user], samples
        self._held = {user: (standing, samples[-most:]) for user, (standing, samples) in held.items()}
        return [Pupil(user, 0, self._held[user][1], None) for user in chosen if user in self._held]
