"""Warm starts for new users in the whole loop: fused from profiles, against other ways to begin.

Sources play first, in turn; then new users play their first rounds, in turn. Everybody keeps learning, and so does the
meta-learner. All but one of the ways begin where the same loop stands after the sources have played:

- fusion: `train_warm_starts` with its guard, `WarmStarter.start` of the new user's profile;
- meta prior: no starts, as the service treats users without a profile;
- random initialisation: each new user alone with a learner of their own that has seen nobody, from epoch 0;
- nearest source, copied: samples, statistics and memory of the source with the nearest profile;
- nearest source: that source's head as a start, as far as the guard blends and trusts it;
- ridge: heads by linear regression on profiles, its penalty by cross-validation, as far as the guard blends and trusts;
- profile in the context: no users at all, one network that sees arms and profiles, and played with the sources too.
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

from bench.harness import LocalLoop
from bench.methods import VARIANTS, shipped_settings
from bench.profile_world import ProfiledWorld
from models.exploration import build_policy
from models.features import infer_layout
from models.fusion_training import FusionSettings
from models.posterior import PosteriorLearner, stored_prior
from models.settings import named_settings
from models.threads import one_thread
from models.warm_start_guard import judge
from models.warm_start_training import gather, train_warm_starts
from models.warm_starts import GuardReport, WarmStarter

Matrix = NDArray[np.float64]

FUSION, PRIOR, RANDOM = "fusion", "meta prior", "random initialisation"
COPIED, NEAREST, RIDGE = "nearest source, copied", "nearest source", "ridge"
CONTEXT: Final = "profile in the context"
METHODS: Final = (FUSION, PRIOR, RANDOM, COPIED, NEAREST, RIDGE, CONTEXT)
#: Rounds of a source and of a new user.
SOURCE_ROUNDS, FIRST_ROUNDS = 60, 20
#: Penalties of the ridge that cross-validation chooses from, and its parts.
PENALTIES: Final = tuple(10.0**power for power in range(-3, 5))
PARTS: Final = 5


@final
@dataclass(frozen=True, slots=True)
class Contest:
    """Who plays in a world: the first users teach, the next are new."""

    world: ProfiledWorld
    sources: int
    newcomers: int
    seed: int
    source_rounds: int = SOURCE_ROUNDS
    first_rounds: int = FIRST_ROUNDS
    settings: FusionSettings | None = None
    methods: Sequence[str] = METHODS

    @property
    def teachers(self) -> list[str]:
        """Names of the sources."""
        return [_name(user) for user in range(self.sources)]

    @property
    def new(self) -> range:
        """The new users."""
        return range(self.sources, self.sources + self.newcomers)


@final
@dataclass(frozen=True, slots=True)
class Outcome:
    """Mean regret of a new user in each of the first rounds, by method, and what the guards of starts found."""

    regret: dict[str, list[float]]
    guards: dict[str, GuardReport]


def compete(contest: Contest, console: Console) -> Outcome:
    """All methods of a contest."""
    with one_thread():
        return _compete(contest, console)


def _compete(contest: Contest, console: Console) -> Outcome:
    taught = _loop(contest, {})
    _play(taught, contest, range(contest.sources), contest.source_rounds, in_context=False)
    regret: dict[str, list[float]] = {}
    guards: dict[str, GuardReport] = {}
    for method in contest.methods:
        if method == RANDOM:
            found = [
                _play(_loop(contest, {"seed": user}), contest, [user], contest.first_rounds) for user in contest.new
            ]
            regret[method] = np.mean(found, axis=0).tolist()
            continue
        loop = deepcopy(taught)
        if method == CONTEXT:
            loop = _loop(contest, VARIANTS["shared-net"], in_context=True)
            _play(loop, contest, range(contest.sources), contest.source_rounds, in_context=True)
        elif method == COPIED:
            for user, source in zip(contest.new, _nearest(contest), strict=True):
                loop.copy_learner(_name(int(source)), _name(user))
        elif method != PRIOR:
            starts, guards[method] = _starts(taught, contest, method)
            for user, start in zip(contest.new, starts, strict=True):
                loop.start(_name(user), start)
        regret[method] = _play(loop, contest, contest.new, contest.first_rounds, in_context=method == CONTEXT).tolist()
        console.print(f"  {method}: {sum(regret[method]):.2f}", highlight=False)
    return Outcome(regret, guards)


def _name(user: int) -> str:
    return f"user-{user}"


def _loop(contest: Contest, overrides: dict[str, Any], *, in_context: bool = False) -> LocalLoop:
    """The service's learner with the policy, the pool and the samples that it ships with."""
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
    )


def _play(loop: LocalLoop, contest: Contest, users: Sequence[int], rounds: int, *, in_context: bool = False) -> Matrix:
    """Rounds in turn, everybody's first before anybody's second: the mean regret of each [rounds]."""
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


def _nearest(contest: Contest) -> NDArray[np.int64]:
    """The source with the nearest profile in standard deviations, for each new user."""
    return nearest_rows(contest.world.profiles[: contest.sources], contest.world.profiles[contest.new])


def nearest_rows(sources: Matrix, profiles: Matrix) -> NDArray[np.int64]:
    """The rows of the sources [n, d] nearest to profiles [m, d], in standard deviations of the sources."""
    scale = np.where(sources.std(0) > 0, sources.std(0), 1.0)
    gaps = np.linalg.norm((profiles[:, None] - sources) / scale, axis=-1)
    return np.asarray(gaps.argmin(1), dtype=np.int64)


def _starts(taught: LocalLoop, contest: Contest, method: str) -> tuple[list[Matrix], GuardReport]:
    """What new users start with, and how far the guard trusts it."""
    learner, shared, batch = taught.teaching(contest.teachers)
    assert isinstance(learner, PosteriorLearner)
    known, new = contest.world.profiles[: contest.sources], contest.world.profiles[contest.new]
    if method == FUSION:
        trained = train_warm_starts(
            learner, shared, [batch], torch.from_numpy(known), seed=contest.seed, settings=contest.settings
        )
        starter = WarmStarter.from_arrays(learner, trained.arrays, known)
        return [starter.start(profile) for profile in new], trained.report
    foretell = ridge if method == RIDGE else _of_nearest
    prior = stored_prior(shared)
    sources = gather(learner, shared, [batch], torch.from_numpy(known))
    heads = prior.posterior(sources.users.gram, sources.users.moment)[0].numpy()
    # Every source's head from the profiles of others: what the guard is shown must not be known.
    part = np.arange(len(known)) % PARTS
    held = np.zeros_like(heads)
    for number in range(PARTS):
        held[part == number] = foretell(known[part != number], heads[part != number], known[part == number])
    report = judge(prior, sources.first, torch.from_numpy(held))
    mean = prior.mean.numpy()
    found = mean + report.blend * (foretell(known, heads, new) - mean)
    raw = learner.starts.raw({name: tensor.numpy() for name, tensor in shared.items()}, found)
    return list(np.column_stack([raw, np.full(len(raw), report.trust)])), report


def _of_nearest(profiles: Matrix, heads: Matrix, asked: Matrix) -> Matrix:
    return heads[nearest_rows(profiles, asked)]


def ridge(profiles: Matrix, heads: Matrix, asked: Matrix) -> Matrix:
    """Linear in standardised profiles [n, d] → [m, D], with the penalty that foretells left-out heads [n, D] best."""
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
