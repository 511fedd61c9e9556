"""Profiles: the user_features of requests, the latest of each user."""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final, final

from metaban.store.client.connection import Store, as_bytes, as_text, command, pipeline
from metaban.store.errors import CorruptRecord
from metaban.store.keys import NamespaceKeys

#: Most users of the memo; the least recently stored is dropped.
REMEMBERED_MAX: Final = 65_536

#: A profile is written again after this time: another service may have stored another one, or the store may have lost
#: it.
REMEMBERED_S: Final = 60.0


def encode_profile(features: Sequence[float] | Mapping[str, Any]) -> bytes:
    """Stored form of a profile: the same bytes for the same features in any order."""
    return json.dumps(features, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def decode_profile(stored: bytes) -> list[Any] | dict[str, Any]:
    """Decode a stored profile."""
    try:
        profile = json.loads(as_text(stored))
    except (ValueError, RecursionError) as error:
        raise CorruptRecord("a profile is not JSON") from error
    if not isinstance(profile, list | dict):
        raise CorruptRecord("a profile is neither a list nor an object")
    return profile


@final
class ProfileStore:
    """Profiles of one namespace. `DecisionStore.put` writes them."""

    def __init__(self, redis: Store, keys: NamespaceKeys) -> None:
        self._redis = redis
        self._keys = keys

    async def get(self, user_id: str) -> list[Any] | dict[str, Any] | None:
        """Profile of a user."""
        stored = await command(self._redis, "GET", self._keys.profile(user_id))
        return None if stored is None else decode_profile(stored)

    async def load(self, user_ids: Sequence[str]) -> dict[str, bytes]:
        """Stored profiles of these users; users without one are absent."""
        replies = await pipeline(self._redis, [("GET", self._keys.profile(user)) for user in user_ids])
        return {user: as_bytes(reply) for user, reply in zip(user_ids, replies, strict=True) if reply is not None}


@final
class ProfileMemo:
    """Remembers recently stored profiles, so that not every request writes its user's profile again."""

    def __init__(self) -> None:
        #: User id → incarnation, digest of the profile, time of the write; the latest write last.
        self.entries: OrderedDict[str, tuple[int, bytes, float]] = OrderedDict()

    def news(self, user_id: str, incarnation: int, profile: bytes) -> bytes:
        """The profile if it must be written, otherwise empty. One stored for another incarnation must be written."""
        known = self.entries.get(user_id)
        if known is None or known[:2] != (incarnation, _digest(profile)):
            return profile
        return profile if time.monotonic() - known[2] > REMEMBERED_S else b""

    def stored(self, user_id: str, incarnation: int, profile: bytes) -> None:
        """Remember that a profile was written."""
        self.entries[user_id] = (incarnation, _digest(profile), time.monotonic())
        self.entries.move_to_end(user_id)
        while len(self.entries) > REMEMBERED_MAX:
            self.entries.popitem(last=False)


def _digest(profile: bytes) -> bytes:
    return blake2b(profile, digest_size=16).digest()
