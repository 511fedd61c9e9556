"""Encoding of arrays and samples. Never pickle: reading a record must not be able to run code.

Tensors are safetensors with a `format` entry in the metadata. Samples are many and small: a fixed little-endian header,
the arm id and the raw float32 features.
"""

from __future__ import annotations

import json
import math
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final, cast, final

import numpy as np
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from metaban.store.errors import CorruptRecord
from metaban.store.reward_rules import RewardRange

#: Format of records of tensors; raised when their meaning changes.
FORMAT: Final = "metaban/1"

FORMAT_ENTRY: Final = "format"

#: Allowed dtypes, by their safetensors names.
DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "U16": np.dtype("<u2"),
    "U32": np.dtype("<u4"),
    "U64": np.dtype("<u8"),
    "BOOL": np.dtype("?"),
}

#: Format of a sample with several rewards, with one, with one of an unknown range, and old format without a key.
REPEATED_FORMAT: Final = 4

SAMPLE_FORMAT: Final = 3

RANGELESS_FORMAT: Final = 2

KEYLESS_FORMAT: Final = 1

#: Fields by format: format, length of the arm id in bytes, number of features, length of φ, reward, propensity, epoch,
#: received_ms; then key and by_default; then the limits of the reward range; then first and total of earlier rewards.
SAMPLE_HEADERS: Final[Mapping[int, struct.Struct]] = {
    KEYLESS_FORMAT: struct.Struct("<BHIIddqq"),
    RANGELESS_FORMAT: struct.Struct("<BHIIddqqQ?"),
    SAMPLE_FORMAT: struct.Struct("<BHIIddqqQ?dd"),
    REPEATED_FORMAT: struct.Struct("<BHIIddqqQ?dddd"),
}

#: Key of a sample that is never combined with another.
NO_KEY: Final = 0

FLOAT32: Final = np.dtype("<f4")

#: Untyped in the library: name, then dtype, shape and data of each tensor.
_deserialize = cast(Callable[[bytes], list[tuple[str, dict[str, Any]]]], deserialize)


def empty_phi() -> np.ndarray:
    """φ of a learner that records none at decision time."""
    return np.empty(0, dtype=FLOAT32)


def encode_tensors(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
    """Encode named arrays and text entries as one safetensors record."""
    if FORMAT_ENTRY in metadata:
        raise ValueError(f"the metadata entry {FORMAT_ENTRY!r} is reserved")
    if "__metadata__" in tensors:
        raise ValueError("a tensor cannot be named __metadata__")
    arrays = {}
    for name, tensor in tensors.items():
        if tensor.dtype.newbyteorder("<") not in DTYPES.values():
            raise ValueError(f"tensor {name!r} has the unsupported dtype {tensor.dtype}")
        # safetensors writes the underlying memory, so strided views are copied first
        arrays[name] = np.asarray(tensor, order="C")
    return save(arrays, metadata={**metadata, FORMAT_ENTRY: FORMAT})


def now_ms() -> int:
    """The wall clock in the unit of stored times: milliseconds since 1970."""
    return int(time.time() * 1_000)


def decode_tensors(blob: bytes) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Decode `encode_tensors` to writable arrays and text entries. Raises CorruptRecord for anything else."""
    try:
        metadata = _metadata(blob)
        if metadata.pop(FORMAT_ENTRY, None) != FORMAT:
            raise CorruptRecord(f"not a {FORMAT} record")
        tensors = {}
        for name, view in _deserialize(blob):
            dtype = DTYPES[view["dtype"]]
            tensors[name] = np.frombuffer(view["data"], dtype=dtype).reshape(view["shape"])
    except (SafetensorError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise CorruptRecord(f"not a record of tensors: {error}") from error
    return tensors, metadata


def _metadata(blob: bytes) -> dict[str, str]:
    """Text entries of the safetensors header, which the library's numpy reader does not return."""
    size = int.from_bytes(blob[:8], "little")
    if len(blob) < 8 or size > len(blob) - 8:
        raise CorruptRecord("a record of tensors is cut short")
    header = json.loads(blob[8 : 8 + size])
    entries = header.get("__metadata__") if isinstance(header, dict) else None
    if not isinstance(entries, dict):
        raise CorruptRecord("a record of tensors has no metadata")
    for text in entries.values():
        if not isinstance(text, str):
            raise CorruptRecord("a record of tensors has metadata that is not text")
    return entries


@final
@dataclass(frozen=True, slots=True)
class EarlierRewards:
    """What is kept of the rewards of a sample before the latest: enough for every rule for repeated rewards."""

    first: float  # scaled to 0..1
    total: float  # sum of the rewards as sent, without the latest


@final
@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """What is kept to learn from one arm of one decision."""

    features: np.ndarray  # float32 [d]
    reward: float  # the latest, scaled to 0..1
    propensity: float
    epoch: int
    received_ms: int  # when the latest reward came
    arm_id: str
    #: φ, float32 [q]: the learner's features of the arm at decision time; computed later, they could leak the reward.
    phi: np.ndarray = field(default_factory=empty_phi)
    #: Identifies the decision and arm, see `sample_key`.
    key: int = NO_KEY
    #: A default reward, since none came in time; it counts only until another reward comes.
    by_default: bool = False
    #: Range that the reward was sent in; None in old samples.
    reward_range: RewardRange | None = None
    #: None while there is one reward.
    earlier: EarlierRewards | None = None

    def encode(self) -> bytes:
        arm = self.arm_id.encode()
        features = np.ascontiguousarray(self.features, dtype=FLOAT32)
        phi = np.ascontiguousarray(self.phi, dtype=FLOAT32)
        if features.ndim != 1 or phi.ndim != 1:
            raise ValueError(f"features and φ must be vectors, not of shapes {features.shape} and {phi.shape}")
        sent_in, earlier = self.reward_range, self.earlier
        if sent_in is None:
            if earlier is not None:
                raise ValueError("a sample with several rewards needs the range of the latest")
            form = RANGELESS_FORMAT
        else:
            form = SAMPLE_FORMAT if earlier is None else REPEATED_FORMAT
        header = SAMPLE_HEADERS[form].pack(
            form,
            len(arm),
            features.size,
            phi.size,
            self.reward,
            self.propensity,
            self.epoch,
            self.received_ms,
            self.key,
            self.by_default,
            *(() if sent_in is None else (sent_in.least, sent_in.greatest)),
            *(() if earlier is None else (earlier.first, earlier.total)),
        )
        return header + arm + features.tobytes() + phi.tobytes()

    @staticmethod
    def decode(blob: bytes) -> Sample:
        header, arm, start = _sample_header(blob)
        _, _, d, _, reward, propensity, epoch, received_ms, *more = header
        key, by_default = more[:2] or (NO_KEY, False)
        numbers = np.frombuffer(blob, dtype=FLOAT32, offset=start).copy()
        return Sample(
            numbers[:d],
            reward,
            propensity,
            epoch,
            received_ms,
            arm.decode(),
            numbers[d:],
            key,
            by_default,
            *_rewards(header),
        )


def sample_key(decision_id: str, arm_id: str) -> int:
    """Key of the sample of one arm of one decision; no other sample of a user has it."""
    joined = f"{len(decision_id)}:{decision_id}:{arm_id}".encode()
    return int.from_bytes(blake2b(joined, digest_size=8).digest(), "little") or 1


def check_samples(blobs: Sequence[bytes]) -> set[tuple[int, int]]:
    """Check many samples as `Sample.decode` does; returns the sizes of features and φ that occur."""
    sizes = set()
    numbers = []
    for blob in blobs:
        header, _, start = _sample_header(blob)
        _rewards(header)
        sizes.add((header[2], header[3]))
        numbers.append(blob[start:])
    if not np.isfinite(np.frombuffer(b"".join(numbers), dtype=FLOAT32)).all():
        raise CorruptRecord("the numbers of a sample are not finite")
    return sizes


def _sample_header(blob: bytes) -> tuple[tuple[Any, ...], bytes, int]:
    """Header fields, arm id and offset of the features; CorruptRecord if the sample is incomplete or invalid."""
    layout = SAMPLE_HEADERS.get(blob[0]) if blob else None
    if blob and layout is None:
        raise CorruptRecord(f"a sample has the unknown format {blob[0]}")
    if layout is None or len(blob) < layout.size:
        raise CorruptRecord("a sample is cut short")
    header = layout.unpack_from(blob)
    _, arm_bytes, d, q, reward, propensity, *_ = header
    start = layout.size + arm_bytes
    if len(blob) != start + (d + q) * FLOAT32.itemsize:
        raise CorruptRecord("a sample has the wrong length")
    if not (math.isfinite(reward) and math.isfinite(propensity)):
        raise CorruptRecord("the reward or propensity of a sample is not finite")
    arm = blob[layout.size : start]
    try:
        arm.decode()
    except UnicodeDecodeError as error:
        raise CorruptRecord("the arm id of a sample is not UTF-8") from error
    return header, arm, start


def _rewards(header: tuple[Any, ...]) -> tuple[RewardRange | None, EarlierRewards | None]:
    """Reward range and earlier rewards of a sample's header; None where its format has none."""
    least, greatest, *earlier = header[10:] or (None, None)
    if least is None:
        return None, None
    if not all(map(math.isfinite, earlier)):
        raise CorruptRecord("the earlier rewards of a sample are not finite")
    try:
        return RewardRange(least, greatest), EarlierRewards(*earlier) if earlier else None
    except ValueError as error:
        raise CorruptRecord(f"the reward range of a sample is invalid: {error}") from error
