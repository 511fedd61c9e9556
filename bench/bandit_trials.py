"""Plays the default learner in worlds under different policies, and keeps what was foreseen and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from scipy.stats import chi2

from bench.cores import side_by_side
from bench.environments import build_environment
from bench.harness import LocalLoop
from bench.methods import layout_of, shipped_settings
from models.exploration import Policy, build_policy
from models.settings import named_settings
from models.upkeep import DEVIATION, MEAN, REACH

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]


@final
@dataclass(frozen=True, slots=True)
class Contender:
    """A policy of the default learner; None is what is shipped."""

    label: str
    policy: str
    alpha: float | None = None

    def settings(self) -> dict[str, Any]:
        """What it plays with, in full."""
        shipped = shipped_settings()
        learner = named_settings("default").to_json()
        alpha = learner["alpha"] if self.alpha is None else self.alpha
        found: dict[str, Any] = {"policy": self.policy, "alpha": alpha}
        if self.policy == "thompson":
            found |= {"draws": shipped.thompson_draws, "scale": shipped.thompson_scale}
        return {**found, "epsilon": shipped.epsilon} if self.policy == "ucb-floor" else found


@final
@dataclass(frozen=True, slots=True)
class Trial:
    """One contender in one world."""

    contender: Contender
    env: str
    seed: int
    rounds: int
    data: Path | None = None


@final
@dataclass(frozen=True, slots=True)
class Played:
    """What a trial came to, by round.

    The chosen arm's place and the chances of all are by falling chance, since arms are others in every round.
    """

    regret: Vector  # [n]
    place: NDArray[np.int64]  # [n]
    chances: Matrix  # [n, k]
    mean: Vector  # [n] what was foreseen of the chosen arm, as noted when it was chosen
    deviation: Vector  # [n]
    reach: Vector  # [n]
    reward: Vector  # [n]
    #: Rounds whose logged propensity was not the chance that the policy gave the arm.
    mislogged: int


@final
class Recording(Policy):
    """Another policy, whose latest chances can be looked at."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.name, self.draws = policy.name, policy.draws
        self.latest: Vector = np.empty(0)

    def probabilities(self, mean: Vector, bonus: Vector, drawn: Matrix | None = None) -> Vector:
        self.latest = self._policy.probabilities(mean, bonus, drawn)
        return self.latest


def play(trial: Trial) -> Played:
    """Decide and learn round by round."""
    shipped, contender = shipped_settings(), trial.contender
    world = build_environment(trial.env, seed=trial.seed, data=trial.data)
    changes = {} if contender.alpha is None else {"alpha": contender.alpha}
    policy = Recording(
        build_policy(
            contender.policy,
            epsilon=shipped.epsilon,
            squarecb_gamma=shipped.squarecb_gamma,
            thompson_draws=shipped.thompson_draws,
            thompson_scale=shipped.thompson_scale,
        )
    )
    loop = LocalLoop(
        named_settings("default", seed=trial.seed, **changes),
        policy,
        inputs=layout_of(world),
        seed=trial.seed,
        samples_kept=shipped.samples_kept,
        pool_max=shipped.candidate_pool,
    )
    regret, reward = np.empty((2, trial.rounds))
    notes, places, chances = np.empty((trial.rounds, 3)), np.empty(trial.rounds, dtype=np.int64), []
    mislogged = 0
    for number in range(trial.rounds):
        asked = world.next_round()
        context = None if asked.context is None else asked.context.tolist()
        choice = loop.choose(asked.user_id, asked.arms.tolist(), str(number), context)
        regret[number], reward[number] = asked.regret(choice.arm), world.reward(asked, choice.arm)
        notes[number] = choice.phi[[MEAN, DEVIATION, REACH]]
        order = np.argsort(-policy.latest, kind="stable")
        places[number] = int(np.flatnonzero(order == choice.arm)[0])
        mislogged += choice.propensity != policy.latest[choice.arm]
        chances.append(policy.latest[order])
        loop.learn(asked.user_id, choice, float(reward[number]))
    mean, deviation, reach = notes.T
    return Played(regret, places, np.stack(chances), mean, deviation, reach * deviation, reward, mislogged)


def play_all(trials: Sequence[Trial], console: Console) -> list[Played]:
    """All trials in their order, one core each."""
    return [_told(trial, played, console) for trial, played in zip(trials, side_by_side(play, trials), strict=True)]


def _told(trial: Trial, played: Played, console: Console) -> Played:
    console.print(
        f"{trial.env}, {trial.contender.label}, seed {trial.seed}: regret {played.regret.sum():.0f}", highlight=False
    )
    return played


#: Of chances that are 0 or 1 nothing can be told.
SURE: Final = 1e-12


def goodness_of_fit(places: NDArray[np.int64], chances: Matrix) -> float:
    """p of the hypothesis that round by round places [n] were drawn with these chances [n, k].

    Σ(seen − expected) has the covariance Σ(diag(p) − ppᵀ), of rank k − 1 at most: a chi-square test in which chances
    may differ from round to round.
    """
    seen = np.bincount(places, minlength=chances.shape[1]).astype(np.float64)
    apart = seen - chances.sum(0)
    covariance = np.diag(chances.sum(0)) - chances.T @ chances
    if np.trace(covariance) < SURE:
        return 1.0 if np.abs(apart).max() < 0.5 else 0.0
    values, vectors = np.linalg.eigh(covariance)
    kept = values > values[-1] * 1e-9
    along = vectors[:, kept].T @ apart
    return float(chi2.sf(float((along**2 / values[kept]).sum()), int(kept.sum())))
