"""Runs of methods in environments."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

import numpy as np

from metaban.bench.core.summaries import Curve
from metaban.bench.regret.method import Method, VisibleRound
from metaban.bench.regret.methods import build_method
from metaban.bench.worlds.environments import Environment, build_environment

#: Rounds between two progress reports of a run.
REPORT_EVERY: Final = 100


@final
@dataclass(frozen=True, slots=True)
class Contender:
    """A method and the conditions of its run; the label names it in tables and plots."""

    label: str
    method: str
    #: Learner settings to replace, the candidate pool, and whether inputs have arm × context products.
    overrides: Mapping[str, Any] = field(default_factory=dict)
    candidate_pool: int | None = None
    products: bool = False
    #: Switches of the synthetic environment, events until a reward arrives, and rounds before the method joins.
    switches: Mapping[str, Any] = field(default_factory=dict)
    delay: int = 0
    missed: int = 0

    @classmethod
    def plain(cls, method: str) -> Contender:
        """A method without changes, under its own name."""
        return cls(method, method)


@final
@dataclass(frozen=True, slots=True)
class Run:
    """One contender in one environment."""

    contender: Contender
    env: str
    seed: int
    rounds: int
    data: Path | None = None

    @property
    def label(self) -> str:
        """The contender's."""
        return self.contender.label


@final
@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a run: regret, expected reward and a random arm's regret of each round [rounds], and times."""

    label: str
    seed: int
    regret: Curve
    earned: Curve
    random: Curve
    decision_ms: float
    update_ms: float
    settings: Mapping[str, Any]


def play(world: Environment, method: Method, run: Run, report: Callable[[int], None] = lambda rounds: None) -> Outcome:
    """Run a method round by round; a reward arrives after `delay` more decisions."""
    regret, earned, random = np.empty((3, run.rounds))
    waiting: deque[tuple[int, float]] = deque()
    clock = time.perf_counter
    deciding = learning = 0.0
    learned = 0
    for _ in range(run.contender.missed):
        world.next_round()
    for number in range(run.rounds):
        asked = world.next_round()
        question = VisibleRound(asked.user, asked.arms, asked.context)
        start = clock()
        arm = method.decide(question, number)
        deciding += clock() - start
        regret[number], earned[number] = asked.regret(arm), asked.chances[arm]
        random[number] = asked.chances.max() - asked.chances.mean()
        waiting.append((number, world.reward(asked, arm)))
        if len(waiting) > run.contender.delay:
            start = clock()
            method.learn(*waiting.popleft())
            learning += clock() - start
            learned += 1
        if number % REPORT_EVERY == REPORT_EVERY - 1:
            report(REPORT_EVERY)
    report(run.rounds % REPORT_EVERY)
    return Outcome(
        run.contender.label,
        run.seed,
        regret,
        earned,
        random,
        deciding / run.rounds * 1_000,
        learning / max(1, learned) * 1_000,
        method.settings,
    )


def execute(run: Run, report: Callable[[int], None] = lambda rounds: None) -> Outcome:
    """Build the environment and the method of a run, and run it."""
    contender = run.contender
    world = build_environment(run.env, seed=run.seed, data=run.data, **contender.switches)
    method = build_method(
        contender.method,
        world,
        env=run.env,
        seed=run.seed,
        overrides=contender.overrides,
        candidate_pool=contender.candidate_pool,
        products=contender.products,
    )
    return play(world, method, run, report)
