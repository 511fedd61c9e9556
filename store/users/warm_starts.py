"""Warm starts: initial parameters of new users, made from their profiles by model fusion."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
import structlog

from metaban.store.client.connection import as_bytes, as_int
from metaban.store.codec import decode_tensors, encode_tensors
from metaban.store.errors import CorruptRecord

#: Fields of the hash of a warm start; scripts compare the incarnation.
WARM_START_FIELDS: Final = ("incarnation", "start")
FLOAT64: Final = np.dtype("<f8")

log = structlog.wrap_logger(logging.getLogger(__name__))


@final
@dataclass(frozen=True, slots=True, eq=False)
class StoredWarmStart:
    """Warm start of one user, and where it comes from."""

    incarnation: int  # of the user; valid for this one only
    values: np.ndarray  # float64 [learner.start_size]
    version: int  # of the fusion that made it
    nearest: tuple[tuple[str, float], ...]  # tokens of the sources nearest to the profile, with their distances
    created_ms: int

    def encode(self) -> bytes:
        """Everything except the incarnation."""
        fields = {"version": self.version, "nearest": self.nearest, "created_ms": self.created_ms}
        values = np.asarray(self.values, dtype=FLOAT64)
        if values.ndim != 1 or not np.isfinite(values).all():
            raise ValueError("the values of a warm start must be a vector of finite numbers")
        return encode_tensors({"values": values}, {"start": json.dumps(fields, allow_nan=False)})

    @staticmethod
    def decode(incarnation: Any, blob: bytes) -> StoredWarmStart:
        tensors, metadata = decode_tensors(blob)
        try:
            fields: dict[str, Any] = json.loads(metadata["start"])
            start = StoredWarmStart(
                incarnation=as_int(incarnation),
                values=tensors["values"],
                version=as_int(fields["version"]),
                nearest=tuple((_text(token), float(distance)) for token, distance in fields["nearest"]),
                created_ms=as_int(fields["created_ms"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptRecord("not a warm start") from error
        if start.values.dtype != FLOAT64 or start.values.ndim != 1 or not np.isfinite(start.values).all():
            raise CorruptRecord("the values of a warm start are not a vector of finite numbers")
        return start


def decode_warm_starts(
    user_ids: Sequence[str], replies: Sequence[Any], incarnations: Mapping[str, int]
) -> dict[str, StoredWarmStart]:
    """Valid warm starts among the stored ones: undamaged, and of the users' incarnations (0 if not given)."""
    found: dict[str, StoredWarmStart] = {}
    for user, (incarnation, blob) in zip(user_ids, replies, strict=True):
        if blob is None:
            continue
        try:
            start = StoredWarmStart.decode(incarnation, as_bytes(blob))
        except CorruptRecord as error:
            # Without the user id: log files are not searched when a user is forgotten.
            log.error("warm_start_damaged", reason=str(error))
            continue
        if start.incarnation == incarnations.get(user, 0):
            found[user] = start
    return found


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise CorruptRecord(f"expected text in a warm start, got {type(value).__name__}")
    return value
