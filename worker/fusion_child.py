"""The process that trains fusion, as seen by who waits for it: started, listened to, and never left behind."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np

from store.errors import CorruptRecord
from worker.fusion_task import ANSWER_BYTES_MAX, LENGTH, LINE_BYTES_MAX, FusionTask, decode_answer

COMMAND: Final = (sys.executable, "-P", "-m", "worker.fusion_process")


class TrainingFailed(Exception):
    """No fusion was trained; the message says why, and names nobody."""


async def train_in_child(
    task: FusionTask,
    progress: Callable[[float], None],
    *,
    limit_s: float,
    command: Sequence[str] = COMMAND,
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays and report of a training; TrainingFailed when the process does not answer as it should, or in time.

    However this ends, by a cancellation too, the process has ended.
    """
    blob = await asyncio.to_thread(task.encode)
    # A session of its own: a Ctrl-C in the terminal is for the worker, which ends it in order.
    process = await asyncio.create_subprocess_exec(
        *command, stdin=PIPE, stdout=PIPE, limit=LINE_BYTES_MAX, start_new_session=True
    )
    try:
        async with asyncio.timeout(limit_s):
            answer = await _answer(process, blob, progress)
        # Its arrays are looked through, which may take a while.
        return await asyncio.to_thread(decode_answer, answer)
    except TimeoutError:
        raise TrainingFailed(f"the training took longer than {limit_s:g} s") from None
    except CorruptRecord as error:
        raise TrainingFailed(f"the training process answered with something else than a fusion: {error}") from error
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await asyncio.shield(_end(process))


async def _answer(process: Process, blob: bytes, progress: Callable[[float], None]) -> bytes:
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("a process was started without its pipes")
    asking = asyncio.create_task(_ask(process.stdin, blob))
    try:
        answer = await _listen(process, process.stdout, progress)
        if status := await _end(process):
            raise TrainingFailed(f"the training process ended with status {status} after its answer")
        return answer
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def _end(process: Process) -> int:
    """The status of a process that ends now; what it wrote and nobody wants is read, or its pipe would stay."""
    while process.stdout is not None and await process.stdout.read(LINE_BYTES_MAX):
        continue
    return await process.wait()


async def _ask(pipe: asyncio.StreamWriter, blob: bytes) -> None:
    """Hand the task over; the pipe stays open, since its end tells the process that nobody waits any more."""
    with suppress(ConnectionError):  # it has ended; what it said, or did not say, tells why
        pipe.write(LENGTH.pack(len(blob)))
        pipe.write(blob)
        await pipe.drain()


async def _listen(process: Process, answers: asyncio.StreamReader, progress: Callable[[float], None]) -> bytes:
    """The blob that comes after all lines."""
    while True:
        try:
            line = await answers.readline()
            said = json.loads(line) if line else None
        except (ValueError, RecursionError):
            raise TrainingFailed("the training process wrote something else than its answer") from None
        match said:
            case None:
                raise TrainingFailed(f"the training process ended with status {await process.wait()} and no answer")
            case {"progress": int() | float() as share} if 0 <= share <= 1:
                progress(float(share))
            case {"failed": str() as reason}:
                raise TrainingFailed(reason)
            case {"blob": int() as size} if 0 < size <= ANSWER_BYTES_MAX:
                return await _blob(process, answers, size)
            case _:
                raise TrainingFailed("the training process wrote something else than its answer")


async def _blob(process: Process, answers: asyncio.StreamReader, size: int) -> bytes:
    try:
        return await answers.readexactly(size)
    except asyncio.IncompleteReadError:
        status = await process.wait()
        raise TrainingFailed(f"the training process ended with status {status} before its answer was out") from None
