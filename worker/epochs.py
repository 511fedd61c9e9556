"""The derivation of an epoch from users' samples, without a store: `worker.meta` publishes it, benchmarks replay it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

from models.learner import State
from worker.trainer import Pupil, Trainer

#: Users whose samples an epoch is derived from; with more users, a fixed sample of them by hash.
TEACHERS_MAX = 2_048
#: Numbers that the inputs of all their samples may have together: wide inputs leave fewer samples a teacher.
TEACHING_NUMBERS_MAX = 1 << 26
#: Users side by side in one batch of a derivation.
USERS_PER_BATCH = 256


def hash_order(user_id: str) -> bytes:
    """A sort key that samples users evenly and alike in every process."""
    return blake2b(user_id.encode(), digest_size=8).digest()


def choose_teachers(user_ids: Sequence[str], most: int = TEACHERS_MAX) -> list[str]:
    """At most `most` users, in an order that does not depend on how they were listed."""
    return sorted(user_ids, key=hash_order)[:most]


def samples_each(teachers: int, inputs: int) -> int:
    """How many of their latest samples each of so many teachers may bring."""
    return max(1, TEACHING_NUMBERS_MAX // max(1, teachers * inputs))


def derive_shared(
    trainer: Trainer, shared: State, teachers: Sequence[Pupil], epoch_events: int, total_events: int
) -> State:
    """Shared state of the next epoch."""
    most = samples_each(len(teachers), trainer.learner.inputs_expected)
    pupils = [replace(pupil, samples=pupil.samples[-most:]) for pupil in teachers if pupil.samples]
    batches = [
        trainer.batch(pupils[start : start + USERS_PER_BATCH]) for start in range(0, len(pupils), USERS_PER_BATCH)
    ]
    return trainer.learner.derive(shared, batches, epoch_events, total_events)
