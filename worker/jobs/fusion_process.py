"""Child process that trains warm starts, at lower priority; started with `python -m`.

Learning goes on meanwhile, and the memory of the training is freed with the process.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any, BinaryIO, Final

from metaban.worker.jobs.fusion_task import LENGTH, FusionTask, encode_answer

NICENESS: Final = 10


def main() -> int:
    """Run the task on stdin; 0 when the answer was written."""
    os.nice(NICENESS)
    # Output of libraries goes to stderr, so that stdout carries only the answer.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    [length] = LENGTH.unpack(_exactly(sys.stdin.buffer, LENGTH.size))
    task = FusionTask.decode(_exactly(sys.stdin.buffer, length))
    threading.Thread(target=_exit_when_stdin_closes, daemon=True).start()
    try:
        blob = train(task, lambda share: _write_line(answers, {"progress": share}))
    except ValueError as error:
        _write_line(answers, {"failed": str(error)})
        return 1
    _write_line(answers, {"blob": len(blob)})
    answers.write(blob)
    answers.flush()
    return 0


def train(task: FusionTask, progress: Any) -> bytes:
    """The answer to a task. Heavy modules are imported here, to keep the import of this module cheap."""
    import torch

    from metaban.models.fusion.training import FusionSettings
    from metaban.models.fusion.warm_start_training import train_warm_starts
    from metaban.models.numerics.hardware import use_threads
    from metaban.models.presets import build_learner
    from metaban.models.settings import stored_settings

    use_threads(task.threads)
    trained = train_warm_starts(
        build_learner(stored_settings(task.learner), task.inputs),
        task.state,
        task.user_batches,
        torch.from_numpy(task.profiles),
        seed=task.seed,
        settings=None if task.rounds is None else FusionSettings(rounds=task.rounds),
        progress=progress,
    )
    return encode_answer(trained.arrays, trained.report.to_json())


def _exactly(source: BinaryIO, size: int) -> bytes:
    content = source.read(size)
    if len(content) != size:
        raise SystemExit("stdin was closed before the task was complete")
    return content


def _write_line(answers: BinaryIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message).encode() + b"\n")
    answers.flush()


def _exit_when_stdin_closes() -> None:
    """End when the parent died or no longer wants the answer."""
    os.read(sys.stdin.fileno(), 1)  # unbuffered: a read of the buffer would block the exit of the interpreter
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
