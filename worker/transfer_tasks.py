"""From users' samples to the tasks of a transfer job: the target's and each source's, of one user or one kind of users.

Kinds are those of the current epoch, of as many users as an epoch is derived from. A task takes the newest samples of
its users, the same number of each as far as they have them, as the reward rules see them.
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

from models.learner import State
from models.normalizer import Moments, standardize, winsorize
from models.transfer_metrics import needs_groups
from models.transfer_nets import Tasks
from store.codec import Sample
from store.reward_rules import RewardRules
from store.transfer import SOURCES_MIN, TARGET_SAMPLES_MIN, TransferQuestion
from store.users import UserStore
from worker.epochs import choose_teachers, samples_each
from worker.rewards_view import learnable
from worker.trainer import Pupil, Trainer

#: Samples of one task; with many tasks of wide inputs fewer, so that all of them have at most so many numbers.
TASK_SAMPLES: Final = 512
NUMBERS_MAX: Final = 1 << 23
#: Numbers that a model sees of an input: of wider ones, fixed random directions.
INPUTS_MAX: Final = 64
#: Users of a target whose groups are compared, those with the most samples: what is said of one has to be worth it.
GROUPS_MAX: Final = 8
#: Users whose samples are read in one go.
SAMPLES_READ: Final = 64


class TransferFailed(Exception):
    """Nothing can come of a job, for a reason in words."""


@final
@dataclass(frozen=True, slots=True)
class Party:
    """Whose samples make a task: one user's, or those of a kind of users."""

    user_id: str | None
    cluster: int | None
    #: Everyone, and how many samples of them are kept.
    users: Mapping[str, int]

    @staticmethod
    def of_user(user_id: str) -> Party:
        """One user, who brings what is there."""
        return Party(user_id, None, {user_id: TASK_SAMPLES})


@final
@dataclass(frozen=True, slots=True, eq=False)
class Material:
    """Tasks, of which the target is the first, and whose they are."""

    tasks: Tasks
    parties: tuple[Party, ...]

    @property
    def samples(self) -> list[int]:
        """Of each task."""
        return [int(count) for count in self.tasks.counts]


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """The samples of one task."""

    features: np.ndarray  # float32 [m, d]
    rewards: np.ndarray  # float64 [m]
    group: np.ndarray  # int64 [m]: which of its users they are of


@final
class TransferTasks:
    """Finds the samples that a question is about."""

    def __init__(self, users: UserStore, compute: Executor, *, partitions: int) -> None:
        """`compute` is for what takes longer than a moment."""
        self._users = users
        self._compute = compute
        self._partitions = partitions

    async def gather(self, trainer: Trainer, shared: State, rules: RewardRules, question: TransferQuestion) -> Material:
        """The tasks of a question; TransferFailed when there is too little of something."""
        parties = await self._parties(trainer, shared, question)
        inputs = trainer.learner.inputs_expected
        most = max(TARGET_SAMPLES_MIN, min(TASK_SAMPLES, NUMBERS_MAX // (len(parties) * max(1, inputs))))
        rows = [await self._rows(party, rules, inputs, most) for party in parties]
        found = len(rows[0].rewards)
        if found < TARGET_SAMPLES_MIN:
            raise TransferFailed(
                f"the target has {found} rewards that are kept; it takes at least {TARGET_SAMPLES_MIN} to train with, "
                "to choose by and to judge by"
            )
        kept = [0, *(place for place in range(1, len(rows)) if len(rows[place].rewards))]
        if len(kept) <= SOURCES_MIN:
            raise TransferFailed(
                f"it takes at least {SOURCES_MIN} sources with rewards that are kept, and there are {len(kept) - 1}"
            )
        if needs_groups(question.metric) and len(np.unique(rows[0].group)) < 2:
            raise TransferFailed(f"{question.metric} compares users of the target, which has rewards of one alone")
        loop = asyncio.get_running_loop()
        bounded = question.metric != "mse"
        tasks = await loop.run_in_executor(self._compute, assembled, [rows[place] for place in kept], bounded)
        return Material(tasks, tuple(parties[place] for place in kept))

    async def _parties(self, trainer: Trainer, shared: State, question: TransferQuestion) -> list[Party]:
        """The target first, then the sources."""
        chosen = [Party.of_user(user) for user in question.sources or ()]
        if question.user_id is not None and question.sources is not None:
            return [Party.of_user(question.user_id), *chosen]
        by_kind = await self._kinds(trainer, shared)
        if question.user_id is not None:
            target = Party.of_user(question.user_id)
        else:
            held = by_kind.pop(question.cluster or 0, {})
            # Whoever is a source by themself teaches as one.
            own = {user: count for user, count in held.items() if user not in (question.sources or ())}
            most = GROUPS_MAX if needs_groups(question.metric) else len(own)
            first = sorted(own, key=lambda user: -own[user])[:most]
            target = Party(None, question.cluster, {user: own[user] for user in first})
        if question.sources is not None:
            return [target, *chosen]
        others = [
            Party(None, kind, {user: count for user, count in users.items() if user != question.user_id})
            for kind, users in sorted(by_kind.items())
        ]
        return [target, *(party for party in others if party.users)]

    async def _kinds(self, trainer: Trainer, shared: State) -> dict[int, dict[str, int]]:
        """Users of each kind, and how many samples of them are kept."""
        learned: list[str] = []
        for partition in range(self._partitions):
            standings = await self._users.versions(partition)
            learned += [user for user, (_, version) in standings.items() if version]
        ordered = choose_teachers(learned)
        most = samples_each(len(ordered), trainer.learner.inputs_expected)
        loop = asyncio.get_running_loop()
        found: dict[int, dict[str, int]] = {}
        for start in range(0, len(ordered), SAMPLES_READ):
            samples = await self._users.load_samples(ordered[start : start + SAMPLES_READ])
            pupils = [Pupil(user, 0, kept[-most:], None) for user, kept in samples.items()]
            if pupils:
                kinds = await loop.run_in_executor(self._compute, _kinds_of, trainer, shared, pupils)
                for pupil, kind in zip(pupils, kinds, strict=True):
                    found.setdefault(kind, {})[pupil.user_id] = len(samples[pupil.user_id])
        return found

    async def _rows(self, party: Party, rules: RewardRules, inputs: int, most: int) -> _Rows:
        """The newest samples of a party's users, as many of each as make `most` together."""
        # By what was kept of them a moment ago: nothing is held in memory that is not taken.
        each = quota(party.users.values(), most)
        users = list(party.users)[:most]
        taken: list[Sequence[Sample]] = []
        for start in range(0, len(users), SAMPLES_READ):
            part = await self._users.load_samples(users[start : start + SAMPLES_READ])
            taken += [learnable(samples, rules)[-each:] for samples in part.values()]
        samples = [sample for view in taken for sample in view]
        if not samples:
            return _Rows(np.zeros((0, inputs), dtype=np.float32), np.zeros(0), np.zeros(0, dtype=np.int64))
        return _Rows(
            np.stack([sample.features for sample in samples]),
            np.array([sample.reward for sample in samples]),
            np.repeat(np.arange(len(taken)), [len(view) for view in taken]),
        )


def quota(counts: Iterable[int], most: int) -> int:
    """The largest q ≥ 1 for which Σ min(count, q) ≤ most; with more users than that, 1."""
    ordered = np.sort(np.asarray(list(counts), dtype=np.int64))  # [users]
    if ordered.sum() <= most:
        return max(1, int(ordered.max(initial=1)))
    before = np.concatenate([[0], np.cumsum(ordered)[:-1]])  # what the smaller ones bring in all [users]
    left = len(ordered) - np.arange(len(ordered))
    fits = (most - before) // left  # where all smaller ones bring everything [users]
    first = int(np.argmax(fits < ordered))
    return max(1, int(fits[first]))


def assembled(rows: Sequence[_Rows], bounded: bool) -> Tasks:
    """Tasks side by side, of inputs in standard deviations, in few directions where they are wide.

    Rewards of several events may add up to more than 1: `bounded`, they are shares of what is good.
    """
    counts = [len(part.rewards) for part in rows]
    longest = max(counts)
    raw = torch.from_numpy(np.concatenate([part.features for part in rows]))  # [N, d]
    real = torch.ones(len(raw), dtype=torch.bool)  # [N]
    mean, scale = Moments.of(winsorize(raw, real), real).transform()  # [d], [d]
    seen = narrowed(standardize(raw, mean.to(raw), scale.to(raw)))  # [N, s]
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
    return Tasks(x, y, valid, group)


def narrowed(z: Tensor) -> Tensor:
    """At most INPUTS_MAX numbers of inputs [N, d]: the same orthonormal directions for all jobs of a namespace."""
    if z.shape[1] <= INPUTS_MAX:
        return z
    normal = torch.randn(z.shape[1], INPUTS_MAX, generator=torch.Generator().manual_seed(0))  # [d, s]
    directions: Tensor = torch.linalg.qr(normal)[0]  # [d, s]
    return z @ directions


def _kinds_of(trainer: Trainer, shared: State, pupils: Sequence[Pupil]) -> list[int]:
    with torch.inference_mode():
        kinds: list[int] = trainer.learner.kinds(shared, trainer.batch(pupils)).tolist()
    return kinds
