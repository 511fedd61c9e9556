"""Training of fusion in a child process: the task, the answer, their format on the pipes, and the parent's side.

stdin: eight bytes of length, then one blob; it stays open as long as the answer is wanted. stdout: lines of JSON,
`{"progress": 0.5}` or `{"failed": "why"}`, and at the end `{"blob": n}` followed by n bytes. `fusion_process.py` is the
child.
"""

from __future__ import annotations

import asyncio
import json
import struct
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, final

import numpy as np
import torch

from metaban.models.features import InputParts
from metaban.models.learner import State, UserBatch
from metaban.store.codec import decode_tensors, encode_tensors
from metaban.store.errors import CorruptRecord

#: Length of the blob that follows.
LENGTH: Final = struct.Struct("<Q")

#: Starts the child.
COMMAND: Final = (sys.executable, "-P", "-m", f"{__package__}.fusion_process")

#: Longer answers and lines are refused.
ANSWER_BYTES_MAX: Final = 1 << 28
LINE_BYTES_MAX: Final = 1 << 14

#: Names of tensors in the blob of a task: two prefixes and a name.
SHARED: Final = "shared."
BATCH: Final = "batch."
PROFILES: Final = "profiles"


@final
@dataclass(frozen=True, slots=True, eq=False)
class FusionTask:
    """What to train on: samples and profiles of the sources, without their ids."""

    learner: dict[str, Any]  # settings, as in the namespace's record
    inputs: InputParts
    seed: int
    threads: int
    rounds: int | None  # of the fit; None: the default
    shared: Mapping[str, np.ndarray]
    batches: Sequence[Mapping[str, np.ndarray]]  # each holds the fields of a UserBatch
    profiles: np.ndarray  # float64 [n, d], in the order of the batches

    def encode(self) -> bytes:
        tensors = {PROFILES: self.profiles}
        tensors |= {SHARED + name: array for name, array in self.shared.items()}
        for place, batch in enumerate(self.batches):
            tensors |= {f"{BATCH}{place}.{name}": array for name, array in batch.items()}
        plain = {name: getattr(self, name) for name in ("learner", "seed", "threads", "rounds")}
        plain["inputs"] = asdict(self.inputs)
        return encode_tensors(tensors, {"task": json.dumps(plain), "batches": str(len(self.batches))})

    @staticmethod
    def decode(blob: bytes) -> FusionTask:
        tensors, metadata = decode_tensors(blob)
        names, plain = [field.name for field in fields(UserBatch)], json.loads(metadata["task"])
        return FusionTask(
            **plain | {"inputs": InputParts(**plain["inputs"])},
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
    """The fields of a batch as numpy arrays."""
    return {field.name: np.asarray(getattr(batch, field.name)) for field in fields(UserBatch)}


def encode_answer(arrays: Mapping[str, np.ndarray], report: Mapping[str, Any]) -> bytes:
    """The trained arrays and the report of the warm-start guard as one blob."""
    return encode_tensors(arrays, {"report": json.dumps(report, allow_nan=False)})


def decode_answer(blob: bytes) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays and report of `encode_answer`; CorruptRecord when the blob is invalid or not finite."""
    arrays, metadata = decode_tensors(blob)
    try:
        report = json.loads(metadata["report"])
    except (KeyError, ValueError, RecursionError) as error:
        raise CorruptRecord("the report is not JSON") from error
    if not isinstance(report, dict) or not arrays:
        raise CorruptRecord("the report or the arrays are missing")
    if not all(np.isfinite(array).all() for array in arrays.values()):
        raise CorruptRecord("the trained arrays are not finite")
    return arrays, report


class TrainingFailed(Exception):
    """The training failed; the message says why and contains no user ids."""


async def train_in_child(
    task: FusionTask,
    progress: Callable[[float], None],
    *,
    limit_s: float,
    command: Sequence[str] = COMMAND,
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Train in a child process; returns arrays and report. Raises TrainingFailed on an invalid or late answer.

    The child has ended when this returns, raises or is cancelled.
    """
    blob = await asyncio.to_thread(task.encode)
    # A new session: Ctrl-C in a terminal must reach only the worker, which then ends the child.
    process = await asyncio.create_subprocess_exec(
        *command, stdin=PIPE, stdout=PIPE, limit=LINE_BYTES_MAX, start_new_session=True
    )
    try:
        async with asyncio.timeout(limit_s):
            answer = await _answer(process, blob, progress)
        return await asyncio.to_thread(decode_answer, answer)
    except TimeoutError:
        raise TrainingFailed(f"the training took longer than {limit_s:g} s") from None
    except CorruptRecord as error:
        raise TrainingFailed(f"the training process sent an invalid answer: {error}") from error
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await asyncio.shield(_end(process))


async def _answer(process: Process, blob: bytes, progress: Callable[[float], None]) -> bytes:
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the training process was started without pipes")
    sending = asyncio.create_task(_send_task(process.stdin, blob))
    try:
        answer = await _read_answer(process, process.stdout, progress)
        if status := await _end(process):
            raise TrainingFailed(f"the training process ended with status {status} after its answer")
        return answer
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


async def _end(process: Process) -> int:
    """Wait for the end of a process; returns its status. Reads the rest of its output, or the pipe would stay open."""
    while process.stdout is not None and await process.stdout.read(LINE_BYTES_MAX):
        continue
    return await process.wait()


async def _send_task(pipe: asyncio.StreamWriter, blob: bytes) -> None:
    """Write the task. The pipe stays open: the child ends itself when it is closed."""
    with suppress(ConnectionError):  # the child has ended; its output says why
        pipe.write(LENGTH.pack(len(blob)))
        pipe.write(blob)
        await pipe.drain()


async def _read_answer(process: Process, output: asyncio.StreamReader, progress: Callable[[float], None]) -> bytes:
    """Read lines of progress until the blob of the answer."""
    while True:
        try:
            line = await output.readline()
            message = json.loads(line) if line else None
        except (ValueError, RecursionError):
            raise TrainingFailed("the training process wrote an invalid line") from None
        match message:
            case None:
                raise TrainingFailed(f"the training process ended with status {await process.wait()} and no answer")
            case {"progress": int() | float() as share} if 0 <= share <= 1:
                progress(float(share))
            case {"failed": str() as reason}:
                raise TrainingFailed(reason)
            case {"blob": int() as size} if 0 < size <= ANSWER_BYTES_MAX:
                return await _read_blob(process, output, size)
            case _:
                raise TrainingFailed("the training process wrote an invalid line")


async def _read_blob(process: Process, output: asyncio.StreamReader, size: int) -> bytes:
    try:
        return await output.readexactly(size)
    except asyncio.IncompleteReadError:
        status = await process.wait()
        raise TrainingFailed(f"the training process ended with status {status} within its answer") from None
