"""Warm starts for new users in the whole loop: model fusion against other starts.

Sources play first, in turns; then new users play their first rounds, in turns. All users and the shared state keep
learning. All starts but one continue the same loop after the sources have played:

- fusion: `train_warm_starts` with its guard, `WarmStarter.start` of the new user's profile;
- fusion, unguarded: the same with blend 1 and trust ½, whatever the guard says;
- meta prior: no warm start, as for users without a profile in the service;
- random initialisation: each new user alone with a learner without other users: an untrained trunk (with its own
  seed), the initial prior and the standardisation of epoch 0, and no further epochs;
- nearest source, copied: samples, statistics and memory of the source with the nearest profile;
- nearest source: that source's head as a start, with the guard's blend and trust;
- ridge: heads by linear regression on profiles, penalty by cross-validation, with the guard's blend and trust;
- profile in the context: one network for all users, without per-user learners; it sees arms and profiles, and has
  played with the sources too;
- profile in the context, users: the whole learner with heads, and the profile as context.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final, cast, final

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from metaban.bench.core.local_loop import LocalLoop
from metaban.bench.regret.methods import VARIANTS, shipped_settings
from metaban.bench.worlds.profiles import ProfiledWorld
from metaban.models.default.learner import PosteriorLearner
from metaban.models.default.prior import prior_from_state
from metaban.models.features import infer_layout
from metaban.models.fusion.training import FusionSettings
from metaban.models.fusion.warm_start_guard import evaluate_starts
from metaban.models.fusion.warm_start_training import TrainedStarts, gather, train_warm_starts
from metaban.models.fusion.warm_starts import GuardReport, WarmStarter
from metaban.models.numerics.hardware import one_thread
from metaban.models.policies import build_policy
from metaban.models.settings import named_settings

Matrix = NDArray[np.float64]

FUSION, PRIOR, RANDOM = "fusion", "meta prior", "random initialisation"

COPIED, NEAREST, RIDGE = "nearest source, copied", "nearest source", "ridge"

CONTEXT, CONTEXT_USERS = "profile in the context", "profile in the context, users"

UNGUARDED: Final = "fusion, unguarded"
METHODS: Final = (FUSION, PRIOR, RANDOM, COPIED, NEAREST, RIDGE, CONTEXT, CONTEXT_USERS)

#: Trust in fusion without a guard.
BLIND_BLEND, BLIND_TRUST = 1.0, 0.5

#: Penalties of the ridge that cross-validation chooses from, and its folds.
PENALTIES: Final = tuple(10.0**power for power in range(-3, 5))
PARTS: Final = 5

#: Distance between the seeds of single users' learners.
MANY_USERS: Final = 100_000


@final
@dataclass(frozen=True, slots=True)
class Contest:
    """A comparison in one environment: the first users are sources, the next are new."""

    world: ProfiledWorld
    sources: int
    newcomers: int
    seed: int
    source_rounds: int
    first_rounds: int
    settings: FusionSettings | None = None
    methods: Sequence[str] = METHODS

    @property
    def teachers(self) -> list[str]:
        """User ids of the sources."""
        return [_name(user) for user in range(self.sources)]

    @property
    def new(self) -> range:
        """The new users."""
        return range(self.sources, self.sources + self.newcomers)

    @property
    def profiles(self) -> tuple[Matrix, Matrix]:
        """Profiles of the sources and of the new users."""
        return self.world.profiles[: self.sources], self.world.profiles[self.new]


@final
@dataclass(frozen=True, slots=True)
class ContestResult:
    """Mean regret of new users in each of their first rounds, by method, and the guards' reports."""

    regret: dict[str, list[float]]
    guards: dict[str, GuardReport]


def compete(contest: Contest, console: Console) -> ContestResult:
    """Run all methods of a comparison."""
    with one_thread():
        return _compete(contest, console)


def _compete(contest: Contest, console: Console) -> ContestResult:
    taught = _loop(contest)
    _play(taught, contest, range(contest.sources), contest.source_rounds)
    heads = _Heads(contest, taught)
    regret: dict[str, list[float]] = {}
    guards: dict[str, GuardReport] = {}
    for method in contest.methods:
        loop, in_context = taught, method in (CONTEXT, CONTEXT_USERS)
        if in_context:
            loop = _loop(contest, in_context=True, **(VARIANTS["shared-net"] if method == CONTEXT else {}))
            _play(loop, contest, range(contest.sources), contest.source_rounds, in_context=True)
        elif method != RANDOM:
            loop = deepcopy(taught)
        if method == COPIED:
            sources = nearest_rows(*contest.profiles)
            for user, source in zip(contest.new, sources.tolist(), strict=True):
                loop.copy_learner(_name(source), _name(user))
        elif method in (FUSION, UNGUARDED, NEAREST, RIDGE):
            starts, guards[method] = heads.starts(method)
            for user, start in zip(contest.new, starts, strict=True):
                loop.start(_name(user), start)
        if method == RANDOM:
            found = np.mean([_alone(contest, user) for user in contest.new], axis=0)
        else:
            found = _play(loop, contest, contest.new, contest.first_rounds, in_context=in_context)
        regret[method] = found.tolist()
        console.print(f"  {method}: {sum(regret[method]):.3f}", highlight=False)
    return ContestResult(regret, guards)


def starter_of(contest: Contest) -> WarmStarter:
    """The starter that the service would train once the sources have played."""
    with one_thread():
        taught = _loop(contest)
        _play(taught, contest, range(contest.sources), contest.source_rounds)
        return _Heads(contest, taught).starter()


def _alone(contest: Contest, user: int) -> Matrix:
    loop = _loop(contest, epochs=False, seed=contest.seed * MANY_USERS + user)
    return _play(loop, contest, [user], contest.first_rounds)


def _name(user: int) -> str:
    return f"user-{user}"


def _loop(contest: Contest, *, in_context: bool = False, epochs: bool = True, **overrides: Any) -> LocalLoop:
    """The service's learner with the shipped policy, pool and number of samples."""
    shipped = shipped_settings()
    layout = infer_layout(
        [[0.0] * contest.world.dimension],
        [0.0] * contest.world.profiles.shape[1] if in_context else None,
        products=False,
        intercept=shipped.intercept,
        hash_dimension=shipped.hash_dimension,
        max_dimension=shipped.max_dimension,
    )
    return LocalLoop(
        named_settings("default", **{"seed": contest.seed, **overrides}),
        build_policy(shipped.policy, epsilon=shipped.epsilon, squarecb_gamma=shipped.squarecb_gamma),
        inputs=layout,
        seed=contest.seed,
        samples_kept=shipped.samples_kept,
        pool_max=shipped.candidate_pool,
        epochs=epochs,
    )


def _play(loop: LocalLoop, contest: Contest, users: Sequence[int], rounds: int, *, in_context: bool = False) -> Matrix:
    """Rounds in turns, every user's first before any user's second: mean regret of each round [rounds]."""
    regret = np.zeros(rounds)
    for number in range(rounds):
        for user in users:
            asked = contest.world.round_of(user, number)
            context = contest.world.profiles[user] if in_context else None
            arms = cast(Sequence[Sequence[float]], asked.arms)
            choice = loop.choose(_name(user), arms, f"{user}/{number}", cast(Sequence[float] | None, context))
            loop.learn(_name(user), choice, float(asked.rewards[choice.arm]))
            regret[number] += asked.regret(choice.arm) / len(users)
    return regret


def nearest_rows(sources: Matrix, profiles: Matrix) -> NDArray[np.int64]:
    """Rows of the sources [n, d] nearest to profiles [m, d], in standard deviations of the sources."""
    scale = np.where(sources.std(0) > 0, sources.std(0), 1.0)
    gaps = np.linalg.norm((profiles[:, None] - sources) / scale, axis=-1)
    return np.asarray(gaps.argmin(1), dtype=np.int64)


@final
class _Heads:
    """Starts from the heads that sources have learned."""

    def __init__(self, contest: Contest, taught: LocalLoop) -> None:
        learner, self._shared, self._batch = taught.teaching(contest.teachers)
        if not isinstance(learner, PosteriorLearner):
            raise TypeError("only the default learner has warm starts")
        self._learner = learner
        self._contest = contest
        self._trained: TrainedStarts | None = None

    def starts(self, method: str) -> tuple[list[Matrix], GuardReport]:
        """Starts of the new users, and the guard's report."""
        return self._fused(method) if method in (FUSION, UNGUARDED) else self._foretold(method)

    def _fused(self, method: str) -> tuple[list[Matrix], GuardReport]:
        if method == FUSION:
            starter = self.starter()
        else:
            starter = self.starter(blend=np.array(BLIND_BLEND), trust=np.array(BLIND_TRUST))
        return [starter.start(profile) for profile in self._contest.profiles[1]], self._train().report

    def starter(self, **changes: Matrix) -> WarmStarter:
        """The service's starter, with some of its arrays replaced."""
        return WarmStarter.from_arrays(self._learner, {**self._train().arrays, **changes}, self._contest.profiles[0])

    def _train(self) -> TrainedStarts:
        if self._trained is None:
            self._trained = train_warm_starts(
                self._learner,
                self._shared,
                [self._batch],
                torch.from_numpy(self._contest.profiles[0]),
                seed=self._contest.seed,
                settings=self._contest.settings,
            )
        return self._trained

    def _foretold(self, method: str) -> tuple[list[Matrix], GuardReport]:
        known, new = self._contest.profiles
        foretell = ridge if method == RIDGE else _of_nearest
        prior = prior_from_state(self._shared)
        sources = gather(self._learner, self._shared, [self._batch], torch.from_numpy(known))
        heads = prior.posterior(sources.users.gram, sources.users.moment)[0].numpy()
        # Each source's head is predicted from the other sources: the guard must not see fitted values.
        part = np.arange(len(known)) % PARTS
        held = np.zeros_like(heads)
        for number in range(PARTS):
            held[part == number] = foretell(known[part != number], heads[part != number], known[part == number])
        report = evaluate_starts(prior, sources.first, torch.from_numpy(held))
        mean = prior.mean.numpy()
        found = mean + report.blend * (foretell(known, heads, new) - mean)
        raw = self._learner.starts.raw({name: tensor.numpy() for name, tensor in self._shared.items()}, found)
        return list(np.column_stack([raw, np.full(len(raw), report.trust)])), report


def _of_nearest(profiles: Matrix, heads: Matrix, asked: Matrix) -> Matrix:
    return heads[nearest_rows(profiles, asked)]


def ridge(profiles: Matrix, heads: Matrix, asked: Matrix) -> Matrix:
    """Linear in standardised profiles [n, d] → [m, D], with the penalty that predicts left-out heads [n, D] best."""
    centre, scale = profiles.mean(0), np.where(profiles.std(0) > 0, profiles.std(0), 1.0)
    x, y, middle = (profiles - centre) / scale, heads - heads.mean(0), heads.mean(0)
    part = np.arange(len(x)) % PARTS

    def weights(rows: NDArray[np.bool_], penalty: float) -> Matrix:
        gram = x[rows].T @ x[rows] + penalty * np.eye(x.shape[1])
        return np.asarray(np.linalg.solve(gram, x[rows].T @ y[rows]))

    def error(penalty: float) -> float:
        missed = [y[part == p] - x[part == p] @ weights(part != p, penalty) for p in range(PARTS)]
        return float(np.square(np.concatenate(missed) / (y.std(0) + 1e-12)).sum())

    best = min(PENALTIES, key=error)
    return np.asarray(middle + (asked - centre) / scale @ weights(np.full(len(x), True), best))
