"""Makes the tasks of a transfer job from users' samples: one for the target and one for each source.

A task is made of one user or of all users of a cluster. Clusters are those of the current epoch, among the users an
epoch is derived from. A task takes the newest samples of its users, equally many of each where possible, combined by
the reward rules.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final, final

import numpy as np
import torch
from torch import Tensor

from metaban.models.learner import State
from metaban.models.numerics.normalizer import Moments, standardize, winsorize
from metaban.models.transfer.metrics import needs_groups
from metaban.models.transfer.nets import TaskTensors
from metaban.store.codec import Sample
from metaban.store.reward_rules import RewardRules
from metaban.store.shared.transfer import SOURCES_MIN, TARGET_SAMPLES_MIN, TransferQuestion
from metaban.store.users.users import UserStore
from metaban.worker.epochs.derive_shared import choose_by_hash, samples_per_user
from metaban.worker.learning.samples import combine_rewards
from metaban.worker.learning.trainer import FitInput, Trainer

#: Most samples of one task.
TASK_SAMPLES: Final = 512

#: Most input numbers in all tasks: many tasks with wide inputs have fewer samples each.
NUMBERS_MAX: Final = 1 << 23

#: Most inputs of a model; wider inputs are projected on fixed random directions.
INPUTS_MAX: Final = 64

#: Most users of a target whose rewards a metric compares, those with the most samples.
GROUPS_MAX: Final = 8

#: Users whose samples are read at once.
SAMPLES_READ: Final = 64


class TransferFailed(Exception):
    """The job failed; the message says why."""


@final
@dataclass(frozen=True, slots=True)
class TaskUsers:
    """The users of a task: one user, or the users of one cluster."""

    user_id: str | None
    cluster: int | None
    users: Mapping[str, int]  # with the number of kept samples of each

    @staticmethod
    def of_user(user_id: str) -> TaskUsers:
        """A task of one user, with up to TASK_SAMPLES samples."""
        return TaskUsers(user_id, None, {user_id: TASK_SAMPLES})


@final
@dataclass(frozen=True, slots=True, eq=False)
class TransferInput:
    """Tasks and their users; the first is the target."""

    tasks: TaskTensors
    task_users: tuple[TaskUsers, ...]

    @property
    def samples(self) -> list[int]:
        """Number of samples of each task."""
        return [int(count) for count in self.tasks.counts]


@final
@dataclass(frozen=True, slots=True, eq=False)
class TaskSamples:
    """The samples of one task."""

    features: np.ndarray  # float32 [m, d]
    rewards: np.ndarray  # float64 [m]
    group: np.ndarray  # int64 [m]: index of the user


@final
class TransferTasks:
    """Loads the samples of transfer jobs and makes tasks of them."""

    def __init__(self, users: UserStore, compute: Executor, *, partitions: int) -> None:
        """`compute` runs the long computations."""
        self._users = users
        self._compute = compute
        self._partitions = partitions

    async def gather(
        self, trainer: Trainer, shared: State, rules: RewardRules, question: TransferQuestion
    ) -> TransferInput:
        """The tasks of a question; TransferFailed when there are too few samples or sources."""
        task_users = await self._task_users(trainer, shared, question)
        inputs = trainer.learner.input_size
        most = max(TARGET_SAMPLES_MIN, min(TASK_SAMPLES, NUMBERS_MAX // (len(task_users) * max(1, inputs))))
        samples = [await self._load_samples(users, rules, inputs, most) for users in task_users]
        found = len(samples[0].rewards)
        if found < TARGET_SAMPLES_MIN:
            raise TransferFailed(
                f"the target has {found} stored rewards; a transfer job needs at least {TARGET_SAMPLES_MIN}"
            )
        kept = [0, *(place for place in range(1, len(samples)) if len(samples[place].rewards))]
        if len(kept) <= SOURCES_MIN:
            raise TransferFailed(
                f"a transfer job needs at least {SOURCES_MIN} sources with stored rewards; there are {len(kept) - 1}"
            )
        if needs_groups(question.metric) and len(np.unique(samples[0].group)) < 2:
            raise TransferFailed(f"{question.metric} compares users of the target, but only one of them has rewards")
        loop = asyncio.get_running_loop()
        bounded = question.metric != "mse"
        tasks = await loop.run_in_executor(self._compute, assemble_tasks, [samples[place] for place in kept], bounded)
        return TransferInput(tasks, tuple(task_users[place] for place in kept))

    async def _task_users(self, trainer: Trainer, shared: State, question: TransferQuestion) -> list[TaskUsers]:
        """The users of the target's task, then those of the sources."""
        chosen = [TaskUsers.of_user(user) for user in question.sources or ()]
        if question.user_id is not None and question.sources is not None:
            return [TaskUsers.of_user(question.user_id), *chosen]
        by_cluster = await self._clusters(trainer, shared)
        if question.user_id is not None:
            target = TaskUsers.of_user(question.user_id)
        else:
            held = by_cluster.pop(question.cluster or 0, {})
            # A user named as a source is not part of the target.
            own = {user: count for user, count in held.items() if user not in (question.sources or ())}
            most = GROUPS_MAX if needs_groups(question.metric) else len(own)
            first = sorted(own, key=lambda user: -own[user])[:most]
            target = TaskUsers(None, question.cluster, {user: own[user] for user in first})
        if question.sources is not None:
            return [target, *chosen]
        others = [
            TaskUsers(None, cluster, {user: count for user, count in users.items() if user != question.user_id})
            for cluster, users in sorted(by_cluster.items())
        ]
        return [target, *(source for source in others if source.users)]

    async def _clusters(self, trainer: Trainer, shared: State) -> dict[int, dict[str, int]]:
        """Users of each cluster, with the number of kept samples of each."""
        user_ids: list[str] = []
        for partition in range(self._partitions):
            versions = await self._users.versions(partition)
            user_ids += [user for user, (_, version) in versions.items() if version]
        ordered = await asyncio.to_thread(choose_by_hash, user_ids)
        most = samples_per_user(len(ordered), trainer.learner.input_size)
        loop = asyncio.get_running_loop()
        found: dict[int, dict[str, int]] = {}
        for start in range(0, len(ordered), SAMPLES_READ):
            samples = await self._users.load_samples(ordered[start : start + SAMPLES_READ])
            fit_inputs = [FitInput(user, 0, kept[-most:], None) for user, kept in samples.items()]
            if fit_inputs:
                clusters = await loop.run_in_executor(self._compute, _clusters_of, trainer, shared, fit_inputs)
                for fit_input, cluster in zip(fit_inputs, clusters, strict=True):
                    found.setdefault(cluster, {})[fit_input.user_id] = len(samples[fit_input.user_id])
        return found

    async def _load_samples(self, task: TaskUsers, rules: RewardRules, inputs: int, most: int) -> TaskSamples:
        """The newest samples of a task's users, at most `most` in all."""
        # The quota uses the counts read before, so that only the samples used are held in memory.
        each = quota(task.users.values(), most)
        users = list(task.users)[:most]
        taken: list[Sequence[Sample]] = []
        for start in range(0, len(users), SAMPLES_READ):
            part = await self._users.load_samples(users[start : start + SAMPLES_READ])
            taken += [combine_rewards(samples, rules)[-each:] for samples in part.values()]
        samples = [sample for view in taken for sample in view]
        if not samples:
            return TaskSamples(np.zeros((0, inputs), dtype=np.float32), np.zeros(0), np.zeros(0, dtype=np.int64))
        return TaskSamples(
            np.stack([sample.features for sample in samples]),
            np.array([sample.reward for sample in samples]),
            np.repeat(np.arange(len(taken)), [len(view) for view in taken]),
        )


def quota(counts: Iterable[int], most: int) -> int:
    """The largest q ≥ 1 for which Σ min(count, q) ≤ most; with more users than that, 1."""
    ordered = np.sort(np.asarray(list(counts), dtype=np.int64))  # [users]
    if ordered.sum() <= most:
        return max(1, int(ordered.max(initial=1)))
    before = np.concatenate([[0], np.cumsum(ordered)[:-1]])  # samples of all users with fewer [users]
    left = len(ordered) - np.arange(len(ordered))
    fits = (most - before) // left  # quota if all users with fewer give all of theirs [users]
    first = int(np.argmax(fits < ordered))
    return max(1, int(fits[first]))


def assemble_tasks(rows: Sequence[TaskSamples], bounded: bool) -> TaskTensors:
    """Tasks as padded tensors, with inputs standardised and, where wide, projected.

    Summed rewards may exceed 1; `bounded` clamps them to [0, 1].
    """
    counts = [len(part.rewards) for part in rows]
    longest = max(counts)
    raw = torch.from_numpy(np.concatenate([part.features for part in rows]))  # [N, d]
    real = torch.ones(len(raw), dtype=torch.bool)  # [N]
    mean, scale = Moments.of(winsorize(raw, real), real).transform()  # [d], [d]
    seen = project_inputs(standardize(raw, mean.to(raw), scale.to(raw)))  # [N, s]
    tasks = torch.arange(len(rows)).repeat_interleave(torch.tensor(counts))  # [N]
    places = torch.cat([torch.arange(count) for count in counts])  # [N]
    shape = (len(rows), longest)
    x, y = torch.zeros(*shape, seen.shape[1]), torch.zeros(shape)  # [T, m, s], [T, m]
    valid, group = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.int64)  # [T, m]
    x[tasks, places] = seen
    outcomes = torch.from_numpy(np.concatenate([part.rewards for part in rows])).float()  # [N]
    y[tasks, places] = outcomes.clamp(0, 1) if bounded else outcomes
    valid[tasks, places] = True
    group[tasks, places] = torch.from_numpy(np.concatenate([part.group for part in rows]))
    return TaskTensors(x, y, valid, group)


def project_inputs(z: Tensor) -> Tensor:
    """Inputs [N, d] on at most INPUTS_MAX random orthonormal directions, the same for all jobs [N, s]."""
    if z.shape[1] <= INPUTS_MAX:
        return z
    normal = torch.randn(z.shape[1], INPUTS_MAX, generator=torch.Generator().manual_seed(0))  # [d, s]
    directions: Tensor = torch.linalg.qr(normal)[0]  # [d, s]
    return z @ directions


def _clusters_of(trainer: Trainer, shared: State, fit_inputs: Sequence[FitInput]) -> list[int]:
    with torch.inference_mode():
        clusters: list[int] = trainer.learner.cluster_of(shared, trainer.batch(fit_inputs)).tolist()
    return clusters
