"""What a decision and an update cost, as ratios to named references that run in turns with them on the same machine.

Wall-clock times differ from machine to machine and from minute to minute; two sides that take turns are slowed alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any, Final, final

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress

from bench.environments import Round, SyntheticGroups
from bench.harness import plain_layout
from bench.methods import VOWPAL, Method, Question, build_method, shipped_settings, unavailable
from bench.populations import Crowd, PaperPopulation, check_decision, decide, everything, random_arms
from bench.reference import FROZEN_FROM
from bench.report import Bar, Report
from bench.roofline import AIM, COPIED_BYTES, bytes_a_user, measure_machine, roofline_row
from bench.timing import Race, Work, take_turns
from models.exploration import Slate
from models.features import assemble
from models.learner import Learner
from models.presets import build_learner
from models.settings import named_settings
from models.threads import one_thread
from service.scorer import BATCH_REQUESTS
from service.scoring import ArmScores, ScoreRequest
from service.served import BRIEFS_MAX, ServedModel

#: The claims: times faster than the looped reference, at least.
DECISION_SPEEDUP, UPDATE_SPEEDUP = 100.0, 50.0
#: A `default` decision over one of Vowpal Wabbit's, and p50 among many users over p50 among few, at most.
VOWPAL_RATIO, CROWD_RATIO = 1.0, 1.5
#: CPU that learning from an event may take, everything included.
TRAINING_LIMIT_MS: Final = 2.0
#: Whose options Vowpal Wabbit runs with: the world that has this benchmark's sizes, and the options that cost least.
VOWPAL_ENV: Final = "movielens"
#: Hidden groups of the world that `default` and Vowpal Wabbit learn in, and tastes of each.
WORLD: Final[dict[str, Any]] = {"groups": 4, "tastes": 2}
#: What is chosen of a request where only scoring is timed.
FIRST_ARM: Final = Slate((0,), (1.0,))
#: Dimensions and presets whose bytes a user are reported.
DIMENSIONS: Final = (20, 793)
SIZED: Final = ("default", "paper")


@final
@dataclass(frozen=True, slots=True)
class LatencyPlan:
    """Sizes of a run."""

    users: int = 100
    arms: int = 10
    dimension: int = 20
    #: Samples of each user in the decisions of `paper`; with more, only the reference has more to do.
    decision_samples: int = 5
    decision_rounds: int = 9
    updated_users: int = 64
    update_samples: int = 50
    update_rounds: int = 9
    #: Fast calls for each call of the looped reference.
    fast_calls: int = 20
    warm_events: int = 2_000
    events: int = 4_000
    #: Decisions in a row: a replica decides again and again, and learning goes on elsewhere.
    block: int = 20
    few_users: int = 10_000
    many_users: int = 100_000
    crowd_rounds: int = 3_000
    roofline_rounds: int = 100
    copied_bytes: int = COPIED_BYTES
    seed: int = 100

    @classmethod
    def quick(cls) -> LatencyPlan:
        """A run of about a minute."""
        return cls(
            decision_rounds=4, update_rounds=4, warm_events=1_000, events=2_000, few_users=4_000, many_users=40_000,
            crowd_rounds=1_000, roofline_rounds=40,
        )  # fmt: skip


def measure_latency(plan: LatencyPlan, *, quick: bool, console: Console) -> Report:
    """All measurements, one after the other, on one thread."""
    results: dict[str, Any] = {}
    with one_thread(), Progress(console=console, transient=True) as progress:

        def bar(name: str, total: int) -> Callable[[], None]:
            task = progress.add_task(name, total=total)
            return lambda: progress.advance(task)

        results |= _paper_decisions(plan, bar("paper: decisions", 2 * plan.decision_rounds + 2))
        results |= _paper_updates(plan, bar("paper: updates", plan.update_rounds + 1))
        results |= _default_decisions(plan, console, bar("default: decisions and learning", plan.events))
        results |= _crowds(plan, bar("default: many users", plan.crowd_rounds + plan.roofline_rounds + 2))
    results["bytes_a_user"] = {
        preset: {str(d): bytes_a_user(_learner(preset, d)) for d in DIMENSIONS} for preset in SIZED
    }
    settings = {**asdict(plan), "threads": 1, "reference": f"tests/models/literal.py at {FROZEN_FROM}"}
    return Report("latency", settings, results, latency_bars(plan, results, quick=quick), quick)


def latency_bars(plan: LatencyPlan, results: dict[str, Any], *, quick: bool) -> list[Bar]:
    """The claims, with the sizes they were measured at."""
    note = ", quick" if quick else ""
    shape = f"n = {plan.users}, k = {plan.arms}, d = {plan.dimension}"
    bars = [
        Bar(f"paper: a decision, times faster than the reference, {shape}{note}",
            results["paper_decision"]["ratio"], ">=", DECISION_SPEEDUP),
        Bar(f"paper: {plan.updated_users} user updates, times faster than the reference{note}",
            results["paper_updates"]["ratio"], ">=", UPDATE_SPEEDUP),
        Bar(f"default: p50 with {plan.many_users:,} users over p50 with {plan.few_users:,}{note}",
            results["crowd"]["ratio"], "<=", CROWD_RATIO),
        Bar(f"default: learning, CPU ms an event{note}",
            results["training"]["cpu_ms_an_event"], "<=", TRAINING_LIMIT_MS),
    ]  # fmt: skip
    if "vowpal" in results:
        name = f"default: a decision over Vowpal Wabbit's, {shape}{note}"
        bars.insert(2, Bar(name, results["vowpal"]["ratio"], "<=", VOWPAL_RATIO))
    return bars


def _paper_decisions(plan: LatencyPlan, done: Callable[[], None]) -> dict[str, Any]:
    """Algorithm 1 for one user among all: against the reference, with users' gradients stored and computed anew."""
    population = PaperPopulation.random(plan.users, plan.decision_samples, plan.dimension, seed=plan.seed)
    served, reference = population.serve(), population.reference
    arms = random_arms(np.random.default_rng(plan.seed), plan.arms, plan.dimension)
    inputs = assemble(plain_layout(plan.dimension), arms.tolist(), None)
    asking, vectors = population.users[0], list(torch.from_numpy(inputs))
    judged = served.choose_one(ScoreRequest(asking, inputs), everything)
    difference = check_decision(judged, reference.recommend(asking, vectors))

    def anew(number: int) -> None:
        population.fit()
        decide(served, asking, arms, number)

    def race_with(name: str, fast: Work) -> dict[str, Any]:
        sides = take_turns(
            {f"paper decision, reference of {FROZEN_FROM}": lambda _: reference.recommend(asking, vectors), name: fast},
            rounds=plan.decision_rounds,
            calls=(1, plan.fast_calls),
            between=lambda _: done(),
        )
        return Race(*sides).to_json() | {
            "difference": difference,
            "group_size_mean": float(np.mean(judged.group_sizes)),
        }

    return {
        "paper_decision": race_with("paper decision", lambda number: decide(served, asking, arms, number)),
        "paper_decision_anew": race_with("paper decision, users fitted anew for it", anew),
    }


def _paper_updates(plan: LatencyPlan, done: Callable[[], None]) -> dict[str, Any]:
    """Algorithm 3 for many users; the fast fit computes each user's share of Algorithm 2 besides."""
    population = PaperPopulation.random(plan.updated_users, plan.update_samples, plan.dimension, seed=plan.seed)
    difference = population.check_fits()
    sides = take_turns(
        {
            f"paper, {plan.updated_users} updates, reference of {FROZEN_FROM}": lambda _: population.fit_reference(),
            f"paper, {plan.updated_users} updates in one fit": lambda _: population.fit(),
        },
        rounds=plan.update_rounds,
        calls=(1, plan.fast_calls),
        between=lambda _: done(),
    )
    return {"paper_updates": Race(*sides).to_json() | {"difference": difference}}


def _default_decisions(plan: LatencyPlan, console: Console, done: Callable[[], None]) -> dict[str, Any]:
    """Decisions of `default` and Vowpal Wabbit, a block of each in turns; and what learning costs `default`.

    Between blocks both learn from all of them, so that hardly a user is asked about twice in the same state.
    """
    world = SyntheticGroups(seed=plan.seed, users=plan.users, arms=plan.arms, dimension=plan.dimension, **WORLD)
    rounds = [world.next_round() for _ in range(plan.events)]
    missing = unavailable(VOWPAL)
    if missing is not None:
        console.print(f"skipped the comparison with Vowpal Wabbit: {missing}", highlight=False, markup=False)
    names = {"default": "default decision"}
    if missing is None:
        names[VOWPAL] = f"Vowpal Wabbit {version('vowpalwabbit')} decision"
    methods = [build_method(name, world, env=VOWPAL_ENV, seed=plan.seed) for name in names]
    chosen: list[dict[int, int]] = [{} for _ in methods]
    budget = Budget(plan.dimension)

    def decider(place: int, first: int) -> Work:
        def work(call: int) -> None:
            asked = rounds[first + call]
            chosen[place][first + call] = methods[place].decide(Question(asked.user, asked.arms), first + call)

        return work

    def learn(first: int, count: int) -> None:
        for number in range(first, first + count):
            budget.learn(methods[0], number, rounds[number], chosen[0][number])
            for method, arms in zip(methods[1:], chosen[1:], strict=True):
                method.learn(number, float(rounds[number].rewards[arms[number]]))
            done()

    for number in range(plan.warm_events):
        for place in range(len(methods)):
            decider(place, 0)(number)
        learn(number, 1)
    sides = take_turns(
        {name: decider(place, plan.warm_events) for place, name in enumerate(names.values())},
        rounds=(plan.events - plan.warm_events) // plan.block - 1,
        calls=[plan.block] * len(names),
        between=lambda turn: learn(plan.warm_events + turn * plan.block, plan.block),
    )
    results = {"default_decision": sides[0].summary(), "training": budget.summary()}
    if missing is None:
        results["vowpal"] = Race(*sides).to_json() | dict(methods[1].settings)
    return results


def _learner(preset: str, dimension: int) -> Learner:
    return build_learner(named_settings(preset), plain_layout(dimension).dimension)


@final
class Budget:
    """CPU that learning takes, and how it is split: an event that makes an epoch due pays for that too."""

    def __init__(self, dimension: int) -> None:
        self._learner = _learner("default", dimension)
        self._epoch_events = 0
        self._plain: list[float] = []
        self._epochs: list[float] = []

    def learn(self, method: Method, number: int, asked: Round, arm: int) -> None:
        """Let a method learn what an arm earned; events are told one after the other."""
        start = time.process_time()
        method.learn(number, float(asked.rewards[arm]))
        took = time.process_time() - start
        applied = len(self._plain) + len(self._epochs) + 1
        if self._learner.epoch_due(self._epoch_events, applied):
            self._epoch_events = applied
            self._epochs.append(took)
        else:
            self._plain.append(took)

    def summary(self) -> dict[str, Any]:
        """CPU milliseconds an event: all, fitting the user, and epochs spread over all events."""
        events = len(self._plain) + len(self._epochs)
        total = (sum(self._plain) + sum(self._epochs)) / events
        fit = float(np.mean(self._plain)) if self._plain else total
        return {
            "events": events,
            "epochs": len(self._epochs),
            "cpu_ms_an_event": total * 1_000,
            "fit_ms_an_event": fit * 1_000,
            "epoch_ms_an_event": (total - fit) * 1_000,
            "fit_ms": [round(each * 1_000, 6) for each in self._plain],
            "epoch_ms": [round(each * 1_000, 6) for each in self._epochs],
        }


def _crowds(plan: LatencyPlan, done: Callable[[], None]) -> dict[str, Any]:
    """Scoring among few and many users with the same candidate pool; and among few against the machine's speeds.

    One arm of each request is taken to be chosen, and it is counted who agrees about it.
    """
    pool = min(shipped_settings().candidate_pool, plan.few_users)
    crowd = Crowd.random(dimension=plan.dimension, seed=plan.seed)
    random = np.random.default_rng(plan.seed)

    def requests(users: int, count: int) -> list[ScoreRequest]:
        arms = random_arms(random, count * plan.arms, plan.dimension)
        inputs = assemble(plain_layout(plan.dimension), arms.tolist(), None)
        who = [f"user-{number}" for number in random.integers(users, size=count)]
        return [ScoreRequest(user, part) for user, part in zip(who, np.split(inputs, count), strict=True)]

    def first(scores: ArmScores) -> Slate:
        return FIRST_ARM

    def scoring(served: ServedModel, asked: list[ScoreRequest], size: int) -> Work:
        choices = [(request, first) for request in asked]
        return lambda number: served.choose(choices[number * size : (number + 1) * size])

    crowds = {users: crowd.serve(users, pool=pool) for users in (plan.many_users, plan.few_users)}
    sides = take_turns(
        {
            f"default score, {users:,} users": scoring(served, requests(users, plan.crowd_rounds + 1), 1)
            for users, served in crowds.items()
        },
        rounds=plan.crowd_rounds,
        between=lambda _: done(),
    )
    # The bound is of judging arms, so whoever asks has been briefed before, as those asked about lately are.
    familiar = min(plan.few_users, BRIEFS_MAX // 2)
    batches = requests(familiar, BATCH_REQUESTS * (plan.roofline_rounds + 1))
    for start in range(0, len(batches), BATCH_REQUESTS):
        crowds[plan.few_users].score(batches[start : start + BATCH_REQUESTS])
    sizes = (1, BATCH_REQUESTS)
    batched = take_turns(
        {f"default score, batch {size}": scoring(crowds[plan.few_users], batches, size) for size in sizes},
        rounds=plan.roofline_rounds,
        between=lambda _: done(),
    )
    machine = measure_machine(plan.copied_bytes)
    rows = [
        roofline_row(crowd.learner, machine, float(np.median(side.times)), requests=size, arms=plan.arms, pool=pool)
        for side, size in zip(batched, sizes, strict=True)
    ]
    return {
        "crowd": Race(*sides).to_json() | {"pool": pool},
        "batches": [side.summary() for side in batched],
        "roofline": {"machine": asdict(machine), "aim": AIM, "rows": rows},
    }
