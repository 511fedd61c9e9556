"""Profiles: what requests tell of users, kept as they told it last."""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final, final

from store.connection import Store, as_bytes, as_text, command, pipeline
from store.errors import CorruptRecord
from store.keys import NamespaceKeys

#: Users whose profile is remembered to be stored; the one who asked longest ago goes first.
REMEMBERED_MAX: Final = 65_536
#: After so long a profile is written again all the same: another service may have stored another one, or the store
#: may have lost it.
REMEMBERED_S: Final = 60.0


def encode_profile(features: Sequence[float] | Mapping[str, Any]) -> bytes:
    """A profile as it is stored: the same bytes for the same features in any order."""
    return json.dumps(features, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def decode_profile(stored: bytes) -> list[Any] | dict[str, Any]:
    """A profile that was stored."""
    try:
        profile = json.loads(as_text(stored))
    except (ValueError, RecursionError) as error:
        raise CorruptRecord("a profile is not JSON") from error
    if not isinstance(profile, list | dict):
        raise CorruptRecord("a profile is neither a list nor an object")
    return profile


@final
class ProfileStore:
    """The profiles of one namespace. They are written with decisions, by `DecisionStore.put`."""

    def __init__(self, redis: Store, keys: NamespaceKeys) -> None:
        self._redis = redis
        self._keys = keys

    async def get(self, user_id: str) -> list[Any] | dict[str, Any] | None:
        """What was told of a user."""
        stored = await command(self._redis, "GET", self._keys.profile(user_id))
        return None if stored is None else decode_profile(stored)

    async def load(self, user_ids: Sequence[str]) -> dict[str, bytes]:
        """What was told of these users, as it is stored; of whom nothing was told is absent."""
        replies = await pipeline(self._redis, [("GET", self._keys.profile(user)) for user in user_ids])
        return {user: as_bytes(reply) for user, reply in zip(user_ids, replies, strict=True) if reply is not None}


@final
class ProfileMemo:
    """Remembers which profiles were stored lately, so that not every request of a user writes theirs again."""

    def __init__(self) -> None:
        self._stored: OrderedDict[str, tuple[int, bytes, float]] = OrderedDict()

    def news(self, user_id: str, incarnation: int, profile: bytes) -> bytes:
        """The profile if it has to be written, or nothing; one told in another incarnation is news."""
        known = self._stored.get(user_id)
        if known is None or known[:2] != (incarnation, _digest(profile)):
            return profile
        return profile if time.monotonic() - known[2] > REMEMBERED_S else b""

    def stored(self, user_id: str, incarnation: int, profile: bytes) -> None:
        """Remember that a profile was written."""
        self._stored[user_id] = (incarnation, _digest(profile), time.monotonic())
        self._stored.move_to_end(user_id)
        while len(self._stored) > REMEMBERED_MAX:
            self._stored.popitem(last=False)


def _digest(profile: bytes) -> bytes:
    return blake2b(profile, digest_size=16).digest()
