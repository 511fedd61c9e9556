"""Derives the shared state of an epoch from users' samples, without a store; benchmarks replay it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

from metaban.models.learner import State
from metaban.worker.learning.trainer import FitInput, Trainer

#: Most users whose samples an epoch is derived from; of more users, a fixed subset by hash.
EPOCH_USERS_MAX = 2_048

#: Most input numbers in all samples of a derivation: with wide inputs, each user contributes fewer samples.
EPOCH_NUMBERS_MAX = 1 << 26

#: Users in one batch of a derivation.
USERS_PER_BATCH = 256


def hash_order(user_id: str) -> bytes:
    """Sort key that orders users pseudo-randomly, in the same way in every process."""
    return blake2b(user_id.encode(), digest_size=8).digest()


def choose_by_hash(user_ids: Sequence[str], most: int = EPOCH_USERS_MAX) -> list[str]:
    """At most `most` users, the first by hash; the order of the argument does not matter."""
    return sorted(user_ids, key=hash_order)[:most]


def samples_per_user(users: int, inputs: int) -> int:
    """How many of the newest samples each of `users` users contributes to a derivation."""
    return max(1, EPOCH_NUMBERS_MAX // max(1, users * inputs))


def derive_shared(
    trainer: Trainer, shared: State, fit_inputs: Sequence[FitInput], epoch_events: int, total_events: int
) -> State:
    """Shared state of the next epoch; samples of other sizes than the learner's are left out."""
    most = samples_per_user(len(fit_inputs), trainer.learner.input_size)
    cut = [replace(each, samples=trainer.readable(each.samples)[-most:]) for each in fit_inputs]
    cut = [fit_input for fit_input in cut if fit_input.samples]
    batches = [trainer.batch(cut[start : start + USERS_PER_BATCH]) for start in range(0, len(cut), USERS_PER_BATCH)]
    return trainer.learner.derive(shared, batches, epoch_events, total_events)
