"""What a training of fusion is given and what it answers, as the process that trains reads and writes it.

In: eight bytes of length and one blob; the pipe then stays open for as long as the answer is wanted. Out: lines of
JSON, `{"progress": 0.5}` or `{"failed": "why"}`, and at the end `{"blob": n}` with n bytes after it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, final

import numpy as np
import torch

from models.learner import State, UserBatch
from store.codec import decode_tensors, encode_tensors
from store.errors import CorruptRecord

LENGTH: Final = struct.Struct("<Q")
#: An answer that says to be longer is none.
ANSWER_BYTES_MAX: Final = 1 << 28
LINE_BYTES_MAX: Final = 1 << 14
SHARED: Final = "shared."
BATCH: Final = "batch."
PROFILES: Final = "profiles"


@final
@dataclass(frozen=True, slots=True, eq=False)
class FusionTask:
    """Sources to train on, without a word on who they are."""

    learner: dict[str, Any]  # settings, as the namespace's record has them
    inputs: int
    seed: int
    threads: int
    rounds: int | None  # of the fit; None: as many as it takes by default
    shared: Mapping[str, np.ndarray]
    batches: Sequence[Mapping[str, np.ndarray]]  # of each the fields of a UserBatch
    profiles: np.ndarray  # float64 [n, d], in the order of the batches

    def encode(self) -> bytes:
        tensors = {PROFILES: self.profiles}
        tensors |= {SHARED + name: array for name, array in self.shared.items()}
        for place, batch in enumerate(self.batches):
            tensors |= {f"{BATCH}{place}.{name}": array for name, array in batch.items()}
        told = {name: getattr(self, name) for name in ("learner", "inputs", "seed", "threads", "rounds")}
        return encode_tensors(tensors, {"task": json.dumps(told), "batches": str(len(self.batches))})

    @staticmethod
    def decode(blob: bytes) -> FusionTask:
        tensors, metadata = decode_tensors(blob)
        names = [field.name for field in fields(UserBatch)]
        return FusionTask(
            **json.loads(metadata["task"]),
            shared={name.removeprefix(SHARED): array for name, array in tensors.items() if name.startswith(SHARED)},
            batches=[
                {name: tensors[f"{BATCH}{place}.{name}"] for name in names} for place in range(int(metadata["batches"]))
            ],
            profiles=tensors[PROFILES],
        )

    @property
    def state(self) -> State:
        """The shared state as tensors."""
        return {name: torch.from_numpy(array) for name, array in self.shared.items()}

    @property
    def user_batches(self) -> list[UserBatch]:
        """The batches as tensors."""
        return [UserBatch(**{name: torch.from_numpy(array) for name, array in batch.items()}) for batch in self.batches]


def batch_arrays(batch: UserBatch) -> dict[str, np.ndarray]:
    """The fields of a batch of numpy arrays."""
    return {field.name: np.asarray(getattr(batch, field.name)) for field in fields(UserBatch)}


def encode_answer(arrays: Mapping[str, np.ndarray], report: Mapping[str, Any]) -> bytes:
    """What was trained, and what its guard found."""
    return encode_tensors(arrays, {"report": json.dumps(report, allow_nan=False)})


def decode_answer(blob: bytes) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Both again; CorruptRecord when it is anything else, or holds a number that is none."""
    arrays, metadata = decode_tensors(blob)
    try:
        report = json.loads(metadata["report"])
    except (KeyError, ValueError, RecursionError) as error:
        raise CorruptRecord("the report of a training is not JSON") from error
    if not isinstance(report, dict) or not arrays:
        raise CorruptRecord("a training answers with nothing")
    if not all(np.isfinite(array).all() for array in arrays.values()):
        raise CorruptRecord("what was trained is not finite")
    return arrays, report
