"""Populations to time decisions and updates with: users of `paper` with its reference, many users of `default`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from metaban.bench.core.local_loop import plain_layout
from metaban.bench.regret.methods import shipped_settings
from metaban.bench.serving.literal_paper import ReferenceArm, ReferenceMetaBan
from metaban.models.default.kinds import KINDS_MAX, MixtureEM
from metaban.models.default.learner import PosteriorLearner
from metaban.models.default.shared_state import SharedState
from metaban.models.features import assemble
from metaban.models.learner import Learner, State, UserBatch
from metaban.models.metaban.paper import PaperLearner
from metaban.models.numerics.arrays import Arrays
from metaban.models.policies import Slate, build_policy, decision_draws, draw_slate
from metaban.models.settings import MetaBanSettings, PosteriorSettings
from metaban.service.engine.model.served_model import ServedModel
from metaban.service.engine.model.types import ArmScores, Chosen, ScoreRequest
from metaban.store.users.records import UserState

#: Largest difference between results of the fast code and the reference: absolute below 1, relative above.
AGREEMENT: Final = 1e-4

#: Users with different states; the others have copies of these, each in its own memory.
DISTINCT_USERS: Final = 1_000

#: Samples of each of these users, and the number of applied events at the epoch.
CROWD_SAMPLES, CROWD_EVENTS = 8, 4_096

#: Events since the previous epoch; that many train the trunk.
CROWD_EPOCH_EVENTS: Final = 64
CPU: Final = torch.device("cpu")


class Disagreement(RuntimeError):
    """Fast code and reference have different results, so their times cannot be compared."""


def decide(served: ServedModel, user: str, arms: NDArray[np.float64], number: int) -> Slate:
    """A decision as the service makes it: inputs, scores, and an arm drawn by the shipped policy."""
    shipped = shipped_settings()
    policy = build_policy(shipped.policy, epsilon=shipped.epsilon, squarecb_gamma=shipped.squarecb_gamma)
    request = ScoreRequest(user, assemble(plain_layout(arms.shape[1]), arms.tolist(), None))

    def draw(scores: ArmScores) -> Slate:
        return draw_slate(policy, scores.mean, scores.bonus, 1, decision_draws(0, str(number)))

    return served.choose_one(request, draw).slate


def everything(scores: ArmScores) -> Slate:
    """A slate of all arms, to get the group size of each."""
    count = len(scores.mean)
    return Slate(tuple(range(count)), (1.0,) * count)


@final
@dataclass(frozen=True, slots=True)
class PaperPopulation:
    """Users of preset `paper` with random samples, in the fast learner and in the reference."""

    learner: PaperLearner
    shared: State
    batch: UserBatch
    previous: State
    reference: ReferenceMetaBan
    users: tuple[str, ...]

    @classmethod
    def random(cls, users: int, samples: int, dimension: int, *, seed: int) -> PaperPopulation:
        """Inputs have the norm that the preset gives them, so the reference need not prepare them."""
        settings = MetaBanSettings(seed=seed)
        learner = PaperLearner(settings, plain_layout(dimension).dimension)
        shared = learner.initial_shared()
        names = tuple(f"user-{number}" for number in range(users))
        random = np.random.default_rng(seed)
        features = random_inputs(random, users, samples, dimension)
        rewards = (random.random((users, samples)) < 0.5).astype(np.float32)
        batch = batch_of(features, rewards, learner)
        observations = {
            name: list(zip(torch.from_numpy(x), r.tolist(), strict=True))
            for name, x, r in zip(names, features, rewards, strict=True)
        }
        reference = ReferenceMetaBan(settings, shared["theta0"], observations)
        initial_user = learner.initial_user(shared)
        previous = {name: tensor.expand(users, *tensor.shape) for name, tensor in initial_user.items()}
        return cls(learner, shared, batch, previous, reference, names)

    def fit(self) -> Arrays:
        """Update all users at once."""
        with torch.inference_mode():
            return self.learner.fit(self.shared, self.batch, self.previous)

    def fit_reference(self) -> list[Tensor]:
        """Update all users with the reference, one after the other."""
        return [self.reference.gradient_descent_user(user) for user in self.users]

    def check_fits(self) -> float:
        """Largest difference of users' parameters; raises Disagreement if it is too large."""
        return largest_difference(self.fit()["theta"], torch.stack(self.fit_reference()))

    def serve(self) -> ServedModel:
        """The fast learner serving all users; the reference gets the same parameters."""
        fitted = self.fit()
        self.reference.fitted = dict(zip(self.users, fitted["theta"].clone(), strict=True))
        served = ServedModel(self.learner, CPU, pool_max=len(self.users), guests_max=1)
        served.put(list(user_states(self.users, fitted, events=self.batch.rewards.shape[1])))
        return served


def check_decision(chosen: Chosen, arms: Sequence[ReferenceArm]) -> float:
    """Largest difference of means and bonuses; raises Disagreement if it is too large or a group differs."""
    sizes = [len(arm.members) for arm in arms]
    if chosen.group_sizes != sizes:
        raise Disagreement(f"groups have {chosen.group_sizes} members, the reference's {sizes}")
    found = torch.from_numpy(np.stack([chosen.scores.mean, chosen.scores.bonus]))
    return largest_difference(found, torch.tensor([[arm.mean for arm in arms], [arm.bonus for arm in arms]]))


def largest_difference(found: Tensor, expected: Tensor) -> float:
    """Absolute below 1 and relative above; raises Disagreement above AGREEMENT."""
    difference = float(((found - expected).abs() / expected.abs().clamp_min(1)).max())
    if not difference <= AGREEMENT:
        raise Disagreement(f"results differ from the reference's by {difference:.2g}, more than {AGREEMENT:g}")
    return difference


def random_arms(random: np.random.Generator, count: int, dimension: int) -> NDArray[np.float64]:
    """Arms [count, dimension] that have, with the intercept, the norm that `paper` gives to inputs."""
    rows = random.standard_normal((count, dimension))
    length = np.sqrt(MetaBanSettings.input_norm**2 - 1)
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True) * length)


def random_inputs(random: np.random.Generator, users: int, samples: int, dimension: int) -> NDArray[np.float32]:
    """Inputs of random arms to the learner: [users, samples, d]."""
    arms = random_arms(random, users * samples, dimension)
    return assemble(plain_layout(dimension), arms.tolist(), None).reshape(users, samples, -1)


def batch_of(features: NDArray[np.float32], rewards: NDArray[np.float32], learner: Learner) -> UserBatch:
    """A batch of users [B] with equally many samples: features [B, S, d], rewards [B, S]."""
    count, samples = rewards.shape
    return UserBatch(
        features=torch.from_numpy(features),
        rewards=torch.from_numpy(rewards),
        valid=torch.ones(count, samples, dtype=torch.bool),
        events=torch.full((count,), samples),
        draw=torch.zeros(count, dtype=torch.int64),
        weight=torch.ones(count, dtype=learner.dtype),
        phi=torch.zeros(count, samples, learner.noted, dtype=learner.dtype),
        epochs=torch.zeros(count, samples, dtype=torch.int64),
        starts=torch.zeros(count, learner.start_size, dtype=torch.float64),
        arm_keys=torch.zeros(count, samples, dtype=torch.int64),
        places=torch.zeros(count, samples, dtype=torch.int64),
    )


def user_states(users: Sequence[str], states: Arrays, *, events: int) -> Iterable[UserState]:
    """Stacked states as user states by name; rows are copied, not shared."""
    arrays: dict[str, NDArray[Any]] = {name: tensor.numpy().copy() for name, tensor in states.items()}
    for row, user in enumerate(users):
        yield UserState(user, 0, events, 1, {name: np.asarray(array[row]) for name, array in arrays.items()})


@final
@dataclass(frozen=True, slots=True)
class DefaultPopulation:
    """Users of the default learner under one epoch with a trained trunk and as many kinds of users as there can be."""

    learner: PosteriorLearner
    shared: State
    distinct: Arrays

    @classmethod
    def random(cls, *, dimension: int, seed: int) -> DefaultPopulation:
        """Samples and rewards are random: the time does not depend on what was learned."""
        learner = PosteriorLearner(PosteriorSettings(seed=seed), plain_layout(dimension).dimension)
        random = np.random.default_rng(seed)
        features = random_inputs(random, DISTINCT_USERS, CROWD_SAMPLES, dimension)
        rewards = (random.random((DISTINCT_USERS, CROWD_SAMPLES)) < 0.5).astype(np.float32)
        batch = batch_of(features, rewards, learner)
        with torch.inference_mode():
            shared = learner.derive(learner.initial_shared(), [batch], CROWD_EVENTS - CROWD_EPOCH_EVENTS, CROWD_EVENTS)
            state = SharedState.stored(shared)
            heads = learner.head_samples(state, batch).statistics()
            generator = torch.Generator().manual_seed(seed)
            em = MixtureEM(state.prior, heads, torch.ones_like(heads.events))
            shared |= em.fit(KINDS_MAX, generator).padded().state()
            initial_user = learner.initial_user(shared)
            previous = {name: tensor.expand(DISTINCT_USERS, *tensor.shape) for name, tensor in initial_user.items()}
            distinct = learner.fit(shared, batch, previous)
        return cls(learner, shared, distinct)

    def serve(self, users: int, *, pool: int) -> ServedModel:
        """A model that holds this many users: `pool` in the candidate pool, the rest as guests."""
        served = ServedModel(self.learner, CPU, pool_max=pool, guests_max=users)
        names = [f"user-{number}" for number in range(users)]
        arrays = {name: tensor.numpy() for name, tensor in self.shared.items()}
        served.adopt_epoch(1, CROWD_EVENTS, arrays, names[:pool])
        for start in range(0, users, DISTINCT_USERS):
            part = names[start : start + DISTINCT_USERS]
            served.put(list(user_states(part, self.distinct, events=CROWD_SAMPLES)))
        return served
