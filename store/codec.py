"""Arrays to bytes and back. Never pickle: reading a record must not be able to run it.

Tensors are safetensors with a `format` entry in their metadata; samples, which are many and small, are a
fixed little-endian header followed by the arm id and the raw float32 features.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final, cast, final

import numpy as np
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from store.errors import CorruptRecord
from store.reward_range import RewardRange

#: Written into every record of tensors; raised when their meaning changes.
FORMAT: Final = "metaban/1"
FORMAT_ENTRY: Final = "format"
#: What records may hold, by safetensors' names.
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
#: Written today, what is written of a reward whose range is not known, and what was written before samples had a key.
SAMPLE_FORMAT: Final = 3
RANGELESS_FORMAT: Final = 2
KEYLESS_FORMAT: Final = 1
#: By format: format, length of the arm id in bytes, number of features, length of φ, reward, propensity, epoch,
#: received_ms; then key and by_default; then the least and the greatest reward of the range.
SAMPLE_HEADERS: Final[Mapping[int, struct.Struct]] = {
    KEYLESS_FORMAT: struct.Struct("<BHIIddqq"),
    RANGELESS_FORMAT: struct.Struct("<BHIIddqqQ?"),
    SAMPLE_FORMAT: struct.Struct("<BHIIddqqQ?dd"),
}
#: Of a sample that is never taken together with another.
NO_KEY: Final = 0
FLOAT32: Final = np.dtype("<f4")
#: The library leaves its reader untyped: name, then dtype, shape and data of each tensor.
_deserialize = cast(Callable[[bytes], list[tuple[str, dict[str, Any]]]], deserialize)


def nothing_noted() -> np.ndarray:
    """φ of a learner that notes nothing when it decides."""
    return np.empty(0, dtype=FLOAT32)


def encode_tensors(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
    """Named arrays and text entries as one safetensors record."""
    if FORMAT_ENTRY in metadata:
        raise ValueError(f"the metadata entry {FORMAT_ENTRY!r} is the codec's own")
    if "__metadata__" in tensors:
        raise ValueError("a tensor cannot be called __metadata__")
    arrays = {}
    for name, tensor in tensors.items():
        if tensor.dtype.newbyteorder("<") not in DTYPES.values():
            raise ValueError(f"tensor {name!r} has dtype {tensor.dtype}, which records cannot hold")
        # safetensors writes memory as it lies, so strided views must be laid out first
        arrays[name] = np.asarray(tensor, order="C")
    return save(arrays, metadata={**metadata, FORMAT_ENTRY: FORMAT})


def decode_tensors(blob: bytes) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The arrays (writable) and text entries of `encode_tensors`; anything else is a CorruptRecord."""
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
    """The text entries of the safetensors header, which its numpy reader does not hand out."""
    size = int.from_bytes(blob[:8], "little")
    if len(blob) < 8 or size > len(blob) - 8:
        raise CorruptRecord("a record of tensors is cut short")
    header = json.loads(blob[8 : 8 + size])
    entries = header.get("__metadata__") if isinstance(header, dict) else None
    if not isinstance(entries, dict) or not all(isinstance(text, str) for text in entries.values()):
        raise CorruptRecord("a record of tensors has no metadata")
    return entries


@final
@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """What the log of a user keeps of one applied event."""

    features: np.ndarray  # float32 [d]
    reward: float  # as learners see it, from 0 to 1
    propensity: float
    epoch: int
    received_ms: int
    arm_id: str
    #: φ, float32 [q]: what the learner noted of the arm when it decided; made later, it would know the reward.
    phi: np.ndarray = field(default_factory=nothing_noted)
    #: The same in all samples of one arm of one decision; see `sample_key`.
    key: int = NO_KEY
    #: No reward came in time: the reward is the default one, and counts only while there is no other of its key.
    by_default: bool = False
    #: What the reward was sent in; None: not known, it was written before that was noted.
    reward_range: RewardRange | None = None

    def encode(self) -> bytes:
        arm = self.arm_id.encode()
        features = np.ascontiguousarray(self.features, dtype=FLOAT32)
        phi = np.ascontiguousarray(self.phi, dtype=FLOAT32)
        if features.ndim != 1 or phi.ndim != 1:
            raise ValueError(f"features and φ must be vectors, not of shapes {features.shape} and {phi.shape}")
        sent_in = self.reward_range
        form = RANGELESS_FORMAT if sent_in is None else SAMPLE_FORMAT
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
            _reward_range(header),
        )


def sample_key(decision_id: str, arm_id: str) -> int:
    """What tells the samples of one arm of one decision from all others of a user."""
    joined = f"{len(decision_id)}:{decision_id}:{arm_id}".encode()
    return int.from_bytes(blake2b(joined, digest_size=8).digest(), "little") or 1


def check_samples(blobs: Sequence[bytes]) -> set[tuple[int, int]]:
    """Read many samples as `Sample.decode` would, and have their numbers finite; what lengths features and φ have."""
    sizes = set()
    numbers = []
    for blob in blobs:
        header, _, start = _sample_header(blob)
        _reward_range(header)
        sizes.add((header[2], header[3]))
        numbers.append(blob[start:])
    if not np.isfinite(np.frombuffer(b"".join(numbers), dtype=FLOAT32)).all():
        raise CorruptRecord("the numbers of a sample are not finite")
    return sizes


def _sample_header(blob: bytes) -> tuple[tuple[Any, ...], bytes, int]:
    """What stands before the arm id, the arm id, and where the numbers begin, if all of the sample is there and its
    own numbers make sense."""
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
        raise CorruptRecord("a sample is not finite")
    arm = blob[layout.size : start]
    try:
        arm.decode()
    except UnicodeDecodeError as error:
        raise CorruptRecord("the arm id of a sample is not text") from error
    return header, arm, start


def _reward_range(header: tuple[Any, ...]) -> RewardRange | None:
    """The range at the end of a sample's header, where its format has one."""
    if header[0] != SAMPLE_FORMAT:
        return None
    try:
        return RewardRange(*header[-2:])
    except ValueError as error:
        raise CorruptRecord(f"the range of a sample makes no sense: {error}") from error
