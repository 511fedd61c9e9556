"""`python -m worker.fusion_process`: trains warm starts in a process of its own, below everyone else's priority.

Learning goes on undisturbed meanwhile, and the memory that a training takes is given back with the process.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any, BinaryIO, Final

from worker.fusion_task import LENGTH, FusionTask, encode_answer

NICENESS: Final = 10


def main() -> int:
    """Train what stdin asks for; 0 when the answer is out."""
    os.nice(NICENESS)
    # Whatever a library prints must not get among the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    [length] = LENGTH.unpack(_exactly(sys.stdin.buffer, LENGTH.size))
    task = FusionTask.decode(_exactly(sys.stdin.buffer, length))
    threading.Thread(target=_end_with_the_pipe, daemon=True).start()
    try:
        blob = train(task, lambda share: _say(answers, {"progress": share}))
    except ValueError as error:
        _say(answers, {"failed": str(error)})
        return 1
    _say(answers, {"blob": len(blob)})
    answers.write(blob)
    answers.flush()
    return 0


def train(task: FusionTask, progress: Any) -> bytes:
    """The answer to a task. What is heavy is imported here: whoever only reads the task's format has no use for it."""
    import torch

    from models.fusion_training import FusionSettings
    from models.presets import build_learner
    from models.settings import stored_settings
    from models.threads import use_threads
    from models.warm_start_training import train_warm_starts

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
        raise SystemExit("whoever asked has gone")
    return content


def _say(answers: BinaryIO, what: dict[str, Any]) -> None:
    answers.write(json.dumps(what).encode() + b"\n")
    answers.flush()


def _end_with_the_pipe() -> None:
    """End when the pipe closes: whoever asked has died, however, or wants no answer any more."""
    os.read(sys.stdin.fileno(), 1)  # past the buffer, which the end of the interpreter would wait for
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
