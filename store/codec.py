"""Encoding of arrays and samples. Never pickle: reading a record must not be able to run code.

Tensors are safetensors with a `format` entry in the metadata. Samples are many and small: a little-endian header whose
fields depend on the format, the arm id and the raw float32 features.
"""

from __future__ import annotations

import json
import math
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from operator import attrgetter, itemgetter
from typing import Any, Final, NamedTuple, cast, final

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

#: Most arms of one decision. Samples of a place beyond it are not read, so it must not be lowered.
ITEMS_MAX: Final = 100

#: Key of a sample that is never combined with another.
NO_KEY: Final = 0

FLOAT32: Final = np.dtype("<f4")

#: Format of a sample with one reward, with several, and with one of an unknown range. All others are of older versions.
SAMPLE_FORMAT: Final = 5

REPEATED_FORMAT: Final = 6

RANGELESS_FORMAT: Final = 2

#: Fields of `SampleHeader`, with their `struct` codes.
SAMPLE_CODES: Final[Mapping[str, str]] = {
    "form": "B",
    "arm_bytes": "H",
    "inputs": "I",
    "notes": "I",
    "reward": "d",
    "propensity": "d",
    "epoch": "q",
    "received_ms": "q",
    "key": "Q",
    "by_default": "?",
    "least": "d",
    "greatest": "d",
    "first": "d",
    "total": "d",
    "place": "H",
}

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
class SampleHeader(NamedTuple):
    """The numbers of an encoded sample; a field that its format lacks has its default."""

    form: int
    arm_bytes: int
    inputs: int
    notes: int  # length of φ
    reward: float
    propensity: float
    epoch: int
    received_ms: int
    key: int = NO_KEY
    by_default: bool = False
    least: float | None = None  # of the reward range
    greatest: float | None = None
    first: float | None = None  # of the earlier rewards
    total: float | None = None
    place: int = 0


SAMPLE_DEFAULTS: Final = tuple(SampleHeader._field_defaults.values())


@final
class SampleLayout:
    """Fields of the header of one format, in order."""

    def __init__(self, *fields: str) -> None:
        self._packed = struct.Struct("<" + "".join(SAMPLE_CODES[name] for name in fields))
        self._fields = attrgetter(*fields)
        # Where each field of a header is in the unpacked numbers followed by the defaults. Samples are read by the
        # thousand, and this is twice as fast as by name.
        numbers = [*fields, *SampleHeader._field_defaults]
        self._complete = itemgetter(*map(numbers.index, SampleHeader._fields))
        self.size = self._packed.size

    def pack(self, header: SampleHeader) -> bytes:
        return self._packed.pack(*self._fields(header))

    def unpack(self, blob: bytes) -> SampleHeader:
        return SampleHeader._make(self._complete(self._packed.unpack_from(blob) + SAMPLE_DEFAULTS))


_FIRST_FIELDS: Final = ("form", "arm_bytes", "inputs", "notes", "reward", "propensity", "epoch", "received_ms")

_KEY_FIELDS: Final = (*_FIRST_FIELDS, "key", "by_default")

_RANGE_FIELDS: Final = (*_KEY_FIELDS, "least", "greatest")

#: Layouts by format.
SAMPLE_LAYOUTS: Final[Mapping[int, SampleLayout]] = {
    1: SampleLayout(*_FIRST_FIELDS),
    2: SampleLayout(*_KEY_FIELDS),
    3: SampleLayout(*_RANGE_FIELDS),
    4: SampleLayout(*_RANGE_FIELDS, "first", "total"),
    5: SampleLayout(*_RANGE_FIELDS, "place"),
    6: SampleLayout(*_RANGE_FIELDS, "first", "total", "place"),
}


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
    #: Index of the arm in its decision, from 0; 0 in old samples.
    place: int = 0

    def encode(self) -> bytes:
        arm = self.arm_id.encode()
        features = np.ascontiguousarray(self.features, dtype=FLOAT32)
        phi = np.ascontiguousarray(self.phi, dtype=FLOAT32)
        if features.ndim != 1 or phi.ndim != 1:
            raise ValueError(f"features and φ must be vectors, not of shapes {features.shape} and {phi.shape}")
        if not 0 <= self.place < ITEMS_MAX:
            raise ValueError(f"the place of an arm must be between 0 and {ITEMS_MAX - 1}, not {self.place}")
        sent_in, earlier = self.reward_range, self.earlier
        if sent_in is None:
            if earlier is not None or self.place:
                raise ValueError("a sample with several rewards or a place needs the range of its latest reward")
            form = RANGELESS_FORMAT
        else:
            form = SAMPLE_FORMAT if earlier is None else REPEATED_FORMAT
        header = SampleHeader(
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
            None if sent_in is None else sent_in.least,
            None if sent_in is None else sent_in.greatest,
            None if earlier is None else earlier.first,
            None if earlier is None else earlier.total,
            self.place,
        )
        return SAMPLE_LAYOUTS[form].pack(header) + arm + features.tobytes() + phi.tobytes()

    @staticmethod
    def decode(blob: bytes) -> Sample:
        header, arm, start = _sample_header(blob)
        numbers = np.frombuffer(blob, dtype=FLOAT32, offset=start).copy()
        reward_range, earlier = _rewards(header)
        return Sample(
            numbers[: header.inputs],
            header.reward,
            header.propensity,
            header.epoch,
            header.received_ms,
            arm.decode(),
            numbers[header.inputs :],
            header.key,
            header.by_default,
            reward_range,
            earlier,
            header.place,
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
        sizes.add((header.inputs, header.notes))
        numbers.append(blob[start:])
    if not np.isfinite(np.frombuffer(b"".join(numbers), dtype=FLOAT32)).all():
        raise CorruptRecord("the numbers of a sample are not finite")
    return sizes


def _sample_header(blob: bytes) -> tuple[SampleHeader, bytes, int]:
    """Header, arm id and offset of the features; CorruptRecord if the sample is incomplete or invalid."""
    layout = SAMPLE_LAYOUTS.get(blob[0]) if blob else None
    if blob and layout is None:
        raise CorruptRecord(f"a sample has the unknown format {blob[0]}")
    if layout is None or len(blob) < layout.size:
        raise CorruptRecord("a sample is cut short")
    header = layout.unpack(blob)
    start = layout.size + header.arm_bytes
    if len(blob) != start + (header.inputs + header.notes) * FLOAT32.itemsize:
        raise CorruptRecord("a sample has the wrong length")
    if not (math.isfinite(header.reward) and math.isfinite(header.propensity)):
        raise CorruptRecord("the reward or propensity of a sample is not finite")
    if header.place >= ITEMS_MAX:
        raise CorruptRecord(f"a sample has the place {header.place}, and decisions have at most {ITEMS_MAX} arms")
    arm = blob[layout.size : start]
    try:
        arm.decode()
    except UnicodeDecodeError as error:
        raise CorruptRecord("the arm id of a sample is not UTF-8") from error
    return header, arm, start


def _rewards(header: SampleHeader) -> tuple[RewardRange | None, EarlierRewards | None]:
    """Reward range and earlier rewards of a sample's header; None where its format has none."""
    if header.least is None or header.greatest is None:
        return None, None
    try:
        reward_range = RewardRange(header.least, header.greatest)
    except ValueError as error:
        raise CorruptRecord(f"the reward range of a sample is invalid: {error}") from error
    if header.first is None or header.total is None:
        return reward_range, None
    if not (math.isfinite(header.first) and math.isfinite(header.total)):
        raise CorruptRecord("the earlier rewards of a sample are not finite")
    return reward_range, EarlierRewards(header.first, header.total)
