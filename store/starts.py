"""Warm starts: what a user's learner began with instead of what everyone begins with, made from their profile."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np

from store.codec import decode_tensors, encode_tensors
from store.connection import as_bytes, as_int
from store.errors import CorruptRecord

#: Of the hash that holds a start; the incarnation is beside the blob, for scripts to compare.
START_FIELDS: Final = ("incarnation", "start")
FLOAT64: Final = np.dtype("<f8")
log = logging.getLogger(__name__)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """What one user's learner started from, and where that comes from."""

    incarnation: int  # of the user: it is nobody else's
    values: np.ndarray  # float64 [learner.start_size]
    version: int  # of the fusion that made it
    nearest: tuple[tuple[str, float], ...]  # tokens of the sources nearest to the profile, with their distances
    created_ms: int

    def encode(self) -> bytes:
        """All but the incarnation."""
        fields = {"version": self.version, "nearest": self.nearest, "created_ms": self.created_ms}
        values = np.asarray(self.values, dtype=FLOAT64)
        if values.ndim != 1 or not np.isfinite(values).all():
            raise ValueError("the values of a start must be a vector of finite numbers")
        return encode_tensors({"values": values}, {"start": json.dumps(fields, allow_nan=False)})

    @staticmethod
    def decode(incarnation: Any, blob: bytes) -> Start:
        tensors, metadata = decode_tensors(blob)
        try:
            fields: dict[str, Any] = json.loads(metadata["start"])
            start = Start(
                incarnation=as_int(incarnation),
                values=tensors["values"],
                version=as_int(fields["version"]),
                nearest=tuple((_text(token), float(distance)) for token, distance in fields["nearest"]),
                created_ms=as_int(fields["created_ms"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptRecord("not a start") from error
        if start.values.dtype != FLOAT64 or start.values.ndim != 1 or not np.isfinite(start.values).all():
            raise CorruptRecord("the values of a start are not a vector of finite numbers")
        return start


def decode_starts(user_ids: Sequence[str], replies: Sequence[Any], incarnations: Mapping[str, int]) -> dict[str, Start]:
    """The starts that hold among those stored: of users' present incarnations (0 for one not given), and undamaged."""
    found: dict[str, Start] = {}
    for user, (incarnation, blob) in zip(user_ids, replies, strict=True):
        if blob is None:
            continue
        try:
            start = Start.decode(incarnation, as_bytes(blob))
        except CorruptRecord as error:
            # Not whose: a line of a log outlives the user.
            log.error("the start of a user cannot be read: %s", error)
            continue
        if start.incarnation == incarnations.get(user, 0):
            found[user] = start
    return found


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise CorruptRecord(f"expected text in a start, got {type(value).__name__}")
    return value
