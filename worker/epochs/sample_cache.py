"""The samples that epochs are derived from, cached between epochs: only changed users are read again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, final

from metaban.store.codec import Sample
from metaban.store.users.users import UserStore
from metaban.worker.epochs.derive_shared import samples_per_user
from metaban.worker.learning.trainer import FitInput

#: Users whose samples are read at once: decoding them keeps the event loop busy.
USERS_PER_READ = 32


class CachedSamples(NamedTuple):
    """The newest samples of a user, at most `most`, and the (incarnation, version) they were read at."""

    version: tuple[int, int]
    samples: list[Sample]
    most: int

    def cut(self, most: int) -> CachedSamples:
        """At most `most` of them."""
        return self if len(self.samples) <= most else CachedSamples(self.version, self.samples[-most:], most)

    def lacks(self, most: int) -> bool:
        """Whether the store may have more of the newest `most`."""
        return len(self.samples) == self.most < most


@final
class SampleCache:
    """Users' samples, as many of each as the last derivation used."""

    def __init__(self, users: UserStore) -> None:
        self._users = users
        self._cached: dict[str, CachedSamples] = {}

    def clear(self) -> None:
        """Drop everything. In a store that was set back, the same version may stand for other events."""
        self._cached = {}

    async def load(self, versions: Mapping[str, tuple[int, int]], inputs: int) -> list[FitInput]:
        """These users with the samples to derive an epoch from, in order; users without samples are left out."""
        most = samples_per_user(len(versions), inputs)
        # Samples of an earlier incarnation belong to a user who was forgotten or restored since.
        cached = {
            user: found.cut(most)
            for user, version in versions.items()
            if (found := self._cached.get(user)) is not None and found.version[0] == version[0]
        }
        changed = [
            user
            for user, version in versions.items()
            if user not in cached or cached[user].version != version or cached[user].lacks(most)
        ]
        # An event applied since `versions` was read is included here, and read again with the next version.
        for start in range(0, len(changed), USERS_PER_READ):
            read = await self._users.load_samples(changed[start : start + USERS_PER_READ])
            for user, samples in read.items():
                cached[user] = CachedSamples(versions[user], samples[-most:], most)
        self._cached = cached
        return [FitInput(user, 0, cached[user].samples, None) for user in versions if user in cached]
