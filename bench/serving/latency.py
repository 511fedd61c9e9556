"""`metaban bench latency`: time of decisions and updates as ratios to references; measures, prints and plots.

Both sides of a ratio take turns on the same machine, because wall-clock times differ between machines and minutes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from metaban.bench.core.local_loop import plain_layout
from metaban.bench.core.report import Bar, Report
from metaban.bench.core.timing import Race, Work, take_turns
from metaban.bench.regret.method import Method, VisibleRound
from metaban.bench.regret.methods import build_method, shipped_settings, unavailable
from metaban.bench.regret.vowpal import VOWPAL
from metaban.bench.serving.literal_paper import FROZEN_FROM
from metaban.bench.serving.populations import (
    DefaultPopulation,
    PaperPopulation,
    check_decision,
    decide,
    everything,
    random_arms,
)
from metaban.bench.serving.roofline import AIM, COPIED_BYTES, bytes_a_user, measure_machine, roofline_row
from metaban.bench.worlds.environments import EnvironmentRound, SyntheticGroups
from metaban.models.features import assemble
from metaban.models.learner import Learner
from metaban.models.numerics.hardware import one_thread
from metaban.models.policies import Slate
from metaban.models.presets import build_learner
from metaban.models.settings import named_settings
from metaban.service.engine.model.batcher import BATCH_REQUESTS
from metaban.service.engine.model.served_model import BRIEFS_MAX, ServedModel
from metaban.service.engine.model.types import ArmScores, ScoreRequest

#: Limits: at least this many times faster than the looped reference.
DECISION_SPEEDUP, UPDATE_SPEEDUP = 100.0, 50.0

#: Limits: a `default` decision over one of Vowpal Wabbit, and p50 among many users over p50 among few.
VOWPAL_RATIO, CROWD_RATIO = 1.0, 1.5

#: Limit of the CPU time of learning per event, everything included.
TRAINING_LIMIT_MS: Final = 2.0

#: Environment whose tuned options Vowpal Wabbit runs with: it has the sizes of this benchmark and the cheapest options.
VOWPAL_ENV: Final = "movielens"

#: Hidden groups and tastes of the environment that `default` and Vowpal Wabbit learn in.
WORLD: Final[dict[str, Any]] = {"groups": 4, "tastes": 2}

#: The slate where only scoring is timed.
FIRST_ARM: Final = Slate((0,), (1.0,))

#: Dimensions and presets whose bytes per user are reported.
DIMENSIONS: Final = (20, 793)
SIZED: Final = ("default", "paper")

#: Races in the order of the table; skipped ones are left out.
RACES: Final = ("paper_decision", "paper_decision_anew", "paper_updates", "vowpal", "crowd")

#: Races printed as a speed-up: their reference is the slower side.
SPEEDUPS: Final = frozenset({"paper_decision", "paper_decision_anew", "paper_updates"})


@final
@dataclass(frozen=True, slots=True)
class LatencyPlan:
    """Sizes of a run."""

    users: int = 100
    arms: int = 10
    dimension: int = 20
    #: Samples of each user in decisions of `paper`; more samples slow only the reference.
    decision_samples: int = 5
    decision_rounds: int = 9
    updated_users: int = 64
    update_samples: int = 50
    update_rounds: int = 9
    #: Fast calls per call of the looped reference.
    fast_calls: int = 20
    warm_events: int = 2_000
    events: int = 4_000
    #: Decisions in a row: a replica only decides, learning happens in the worker.
    block: int = 20
    few_users: int = 10_000
    many_users: int = 100_000
    crowd_rounds: int = 3_000
    roofline_rounds: int = 100
    copied_bytes: int = COPIED_BYTES
    seed: int = 100

    @classmethod
    def quick(cls) -> LatencyPlan:
        """Sizes of a run of about a minute."""
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
    """Bars, with the sizes they were measured at."""
    note = ", quick" if quick else ""
    shape = f"n = {plan.users}, k = {plan.arms}, d = {plan.dimension}"
    bars = [
        Bar(f"paper: a decision, times faster than the reference, {shape}{note}",
            results["paper_decision"]["ratio"], ">=", DECISION_SPEEDUP),
        Bar(f"paper: {plan.updated_users} user updates, times faster than the reference{note}",
            results["paper_updates"]["ratio"], ">=", UPDATE_SPEEDUP),
        Bar(f"default: p50 with {plan.many_users:,} users / p50 with {plan.few_users:,}{note}",
            results["crowd"]["ratio"], "<=", CROWD_RATIO),
        Bar(f"default: learning, CPU ms per event{note}",
            results["training"]["cpu_ms_an_event"], "<=", TRAINING_LIMIT_MS),
    ]  # fmt: skip
    if "vowpal" in results:
        name = f"default: decision / Vowpal Wabbit's, {shape}{note}"
        bars.insert(2, Bar(name, results["vowpal"]["ratio"], "<=", VOWPAL_RATIO))
    return bars


def _paper_decisions(plan: LatencyPlan, done: Callable[[], None]) -> dict[str, Any]:
    """Algorithm 1 for one user against the reference, with stored user gradients and with gradients computed again."""
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
        "paper_decision_anew": race_with("paper decision, users fitted again for it", anew),
    }


def _paper_updates(plan: LatencyPlan, done: Callable[[], None]) -> dict[str, Any]:
    """Algorithm 3 for many users; the fast fit also computes each user's term of Algorithm 2."""
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
    """Decisions of `default` and Vowpal Wabbit in alternating blocks, and the cost of learning for `default`.

    Both learn from all decisions between blocks, so that users are rarely asked about twice in the same state.
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
            chosen[place][first + call] = methods[place].decide(VisibleRound(asked.user, asked.arms), first + call)

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


def _crowds(plan: LatencyPlan, done: Callable[[], None]) -> dict[str, Any]:
    """Scoring among few and many users with the same candidate pool; and among few against the machine's lower bound.

    The first arm of each request counts as chosen, and the users who agree on it are counted.
    """
    pool = min(shipped_settings().candidate_pool, plan.few_users)
    crowd = DefaultPopulation.random(dimension=plan.dimension, seed=plan.seed)
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
    # The bound covers scoring of arms only, so all asking users are prepared first, as recently asked ones are.
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


@final
class Budget:
    """CPU time of learning, split into fitting users and epochs; an event that makes an epoch due includes it."""

    def __init__(self, dimension: int) -> None:
        self._learner = _learner("default", dimension)
        self._epoch_events = 0
        self._plain: list[float] = []
        self._epochs: list[float] = []

    def learn(self, method: Method, number: int, asked: EnvironmentRound, arm: int) -> None:
        """Let a method learn a reward and record the CPU time; events come one after the other."""
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
        """CPU milliseconds per event: in total, for fitting the user, and for epochs spread over all events."""
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


def _learner(preset: str, dimension: int) -> Learner:
    return build_learner(named_settings(preset), plain_layout(dimension).dimension)


def print_latency(report: Report, console: Console) -> None:
    """Print ratios, learning, the roofline and sizes, then the bars."""
    results = report.results
    table = Table("measured in turns", "p50 ms", "against", "p50 ms", "ratio", "95% interval", box=None, pad_edge=False)
    for name in RACES:
        if name in results:
            table.add_row(*_race_row(results[name], faster=name in SPEEDUPS))
    console.print(table)
    console.print()
    training = results["training"]
    console.print(
        f"learning, CPU ms per event: {training['cpu_ms_an_event']:.2f} = "
        f"{training['fit_ms_an_event']:.2f} fitting the user + {training['epoch_ms_an_event']:.2f} epochs "
        f"({training['epochs']} in {training['events']:,} events)",
        highlight=False,
    )
    console.print(f"reference: {report.settings['reference']}", highlight=False)
    console.print()
    console.print(_roofline_table(results["roofline"]))
    console.print(_machine_line(results["roofline"]), highlight=False)
    console.print()
    console.print(_sizes_table(results["bytes_a_user"]))
    console.print()
    report.print_bars(console)


def _race_row(found: Mapping[str, Any], *, faster: bool) -> list[str]:
    ours, other = ("below", "above") if faster else ("above", "below")
    low, high = found["interval"]
    sign = " ×" if faster else ""
    return [
        found[ours]["name"],
        _short(found[ours]["p50_ms"]),
        found[other]["name"],
        _short(found[other]["p50_ms"]),
        _short(found["ratio"]) + sign,
        f"{_short(low)} - {_short(high)}",
    ]


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _roofline_table(found: Mapping[str, Any]) -> Table:
    table = Table("default score", "MB", "Mflop", "bound ms", "took ms", "share of bound", box=None, pad_edge=False)
    for row in found["rows"]:
        label = f"{row['requests']} request{'s' if row['requests'] > 1 else ''}"
        numbers = [row["bytes"] / 1e6, row["flops"] / 1e6, row["bound_ms"], row["took_ms"]]
        table.add_row(label, *(f"{number:.3g}" for number in numbers), f"{row['share']:.1%}")
    return table


def _machine_line(found: Mapping[str, Any]) -> str:
    speeds = [found["machine"][name] / 1e9 for name in ("bytes_per_s", "single_flops_per_s", "double_flops_per_s")]
    return (
        f"one thread copies {speeds[0]:.1f} GB/s and multiplies at {speeds[1]:.0f} Gflop/s in single, {speeds[2]:.0f} "
        f"in double precision; the aim is {found['aim']:.0%} of the bound at {BATCH_REQUESTS} requests"
    )


def _sizes_table(found: Mapping[str, Mapping[str, int]]) -> Table:
    dimensions = list(next(iter(found.values())))
    table = Table("bytes per user", *(f"d = {d}" for d in dimensions), box=None, pad_edge=False)
    for preset, sizes in found.items():
        table.add_row(preset, *(f"{sizes[d]:,}" for d in dimensions))
    return table


def plot_latency(report: Report, path: Path) -> None:
    """Distributions of both sides of every race."""
    from matplotlib.figure import Figure

    races = [(name, report.results[name]) for name in RACES if name in report.results]
    sides = [(found[side], colour) for _, found in races for side, colour in (("above", "C1"), ("below", "C0"))]
    figure = Figure(figsize=(9, 0.45 * len(sides) + 1.5), layout="constrained")
    axes = figure.subplots()
    places = [place + place // 2 * 0.6 for place in range(len(sides))]
    boxes = axes.boxplot(
        [side["times_ms"] for side, _ in sides], positions=places, orientation="horizontal", widths=0.7,
        whis=(1, 99), showfliers=False, patch_artist=True, medianprops={"color": "black"},
    )  # fmt: skip
    for box, (_, colour) in zip(boxes["boxes"], sides, strict=True):
        box.set(facecolor=colour, alpha=0.6)
    right = max(max(side["times_ms"]) for side, _ in sides)
    for (_, found), place in zip(races, places[::2], strict=True):
        axes.text(right * 1.6, place + 0.5, _short(found["ratio"]), va="center", ha="left")
    axes.set(xscale="log", xlabel="ms; boxes: half of the calls, whiskers: 98 %, numbers: ratios of medians")
    axes.set_yticks(places, [side["name"] for side, _ in sides])
    axes.set_xlim(right=right * 4)
    axes.invert_yaxis()
    axes.set_title("Latency, one thread")
    axes.grid(axis="x", alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
