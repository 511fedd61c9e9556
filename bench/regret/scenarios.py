"""Scenarios of the synthetic environment: delay, a change of tastes, rare rewards, context, a large pool.

A scenario is a claim, its contenders, and how their outcomes are judged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import numpy as np
from rich.console import Console
from rich.table import Table

from metaban.bench.core.parallel import run_all
from metaban.bench.core.report import Bar, Report
from metaban.bench.core.summaries import CURVE_POINTS, Curve
from metaban.bench.regret.methods import RIVALS
from metaban.bench.regret.regret import FULL_ROUNDS, print_failures, print_skipped, ratio, regret_results
from metaban.bench.regret.runs import Contender, Outcome, Run, execute
from metaban.bench.worlds.data import DataMissing
from metaban.bench.worlds.environments import build_environment

#: Delay of rewards in events, and the limit of its cost.
DELAY_EVENTS: Final = 100
DELAY_LIMIT: Final = 1.03

#: Rounds that a reward rate is averaged over, the share of the old rate that counts as recovered, and the limit of the
#: rounds to recover over those of a fresh start.
RATE_WINDOW: Final = 200
RECOVERED: Final = 0.90
RECOVERY_LIMIT: Final = 2.0

#: Reward rate of random arms where rewards are rare.
RARE_RATE: Final = 0.01

#: Users, the tested pool, and the limit of its cost against a pool of all users.
POOL_USERS: Final = 10_000
POOL_SIZE: Final = 256
POOL_LIMIT: Final = 1.03

#: ν of Eq. 4 from narrow to wide; Appendix A discusses 1.1 and 5, with the gap of Section 7.
NUS: Final = (1.1, 2.0, 5.0, 10.0, 50.0)
NU_GAMMA: Final = 0.4

#: Share of the rounds in a quick run, and their minimum.
QUICK_SHARE: Final = 0.03
QUICK_ROUNDS: Final = 300

Outcomes = Sequence[Outcome]


@final
@dataclass(frozen=True, slots=True)
class Scenario:
    """A claim and its test: contenders for a learner and a number of rounds, and the bars they have to keep.

    `judge` gets the results of all contenders, their outcomes and the rounds; it adds its measurements to the results.
    """

    claim: str
    contenders: Callable[[str, int], list[Contender]]
    judge: Callable[[dict[str, Any], Outcomes, int], list[Bar]]
    rounds: int = FULL_ROUNDS
    env: str = "synthetic"


def _delay(learner: str, rounds: int) -> list[Contender]:
    return [Contender("immediate", learner), Contender("delayed", learner, delay=DELAY_EVENTS)]


def _judge_delay(results: dict[str, Any], outcomes: Outcomes, rounds: int) -> list[Bar]:
    value = ratio(results["methods"], "delayed", "immediate")
    return [Bar(f"regret, rewards {DELAY_EVENTS} events late / immediate", value, "<=", DELAY_LIMIT)]


def _switch(learner: str, rounds: int) -> list[Contender]:
    """One learner runs through the switch in the middle; a new one sees only the rounds after it."""
    half = rounds // 2
    switches = {"switch_at": half}
    return [
        Contender("through the switch", learner, switches=switches),
        Contender("fresh start", learner, switches=switches, missed=half),
    ]


def _judge_switch(results: dict[str, Any], outcomes: Outcomes, rounds: int) -> list[Bar]:
    half = rounds // 2
    window = min(RATE_WINDOW, max(1, half // 4))
    through, fresh = (
        np.mean([outcome.earned for outcome in outcomes if outcome.label == label], axis=0)
        for label in ("through the switch", "fresh start")
    )
    old = float(through[half - window : half].mean())
    after, anew = smoothed(through[half:], window), smoothed(fresh[:half], window)
    level = RECOVERED * old
    needed, needed_fresh = rounds_to(after, level, window), rounds_to(anew, level, window)
    every = max(1, rounds // (2 * CURVE_POINTS))
    results["switch"] = {
        "window": window,
        "rate_before": old,
        "rate_after": float(after.max()),
        "level": level,
        "rounds_needed": needed,
        "rounds_needed_fresh": needed_fresh,
        "rates_every": every,
        "rates": {
            "through the switch": smoothed(through, window)[::every].tolist(),
            "fresh start": anew[::every].tolist(),
        },
    }
    # If the level is never reached, the whole half counts; the second bar shows it.
    slower = (needed or half) / (needed_fresh or half)
    return [
        Bar("rounds to recover from a switch of all tastes / rounds of a fresh start", slower, "<=", RECOVERY_LIMIT),
        Bar("best reward rate after the switch / rate before it", float(after.max()) / old, ">=", RECOVERED),
    ]


def smoothed(earned: Curve, window: int) -> Curve:
    """Moving average over a window of rounds, from the first full window on."""
    means: Curve = np.convolve(earned, np.full(window, 1 / window), mode="valid")
    return means


def rounds_to(rates: Curve, level: float, window: int) -> int | None:
    """Rounds until the smoothed rate first reaches a level; None if it never does."""
    reached = np.flatnonzero(rates >= level)
    return int(reached[0]) + window if reached.size else None


def _rare(learner: str, rounds: int) -> list[Contender]:
    return [Contender(name, name, switches={"reward_rate": RARE_RATE}) for name in (learner, *RIVALS)]


def _judge_rare(results: dict[str, Any], outcomes: Outcomes, rounds: int) -> list[Bar]:
    methods, best = results["methods"], results["best_baseline"]
    learner = next(name for name in methods if name not in RIVALS)
    name = f"regret at a reward rate of {RARE_RATE:.0%}, {learner} / best baseline ({best})"
    return [Bar(name, ratio(methods, learner, best), "<=", 1.0)]


def _interaction(learner: str, rounds: int) -> list[Contender]:
    switches = {"interaction": True}
    return [
        Contender("with products", learner, products=True, switches=switches),
        Contender("without products", learner, switches=switches),
    ]


def _judge_interaction(results: dict[str, Any], outcomes: Outcomes, rounds: int) -> list[Bar]:
    value = ratio(results["methods"], "with products", "without products")
    return [Bar("regret where arms and context interact, with / without products", value, "<=", 1.0)]


def _pool(learner: str, rounds: int) -> list[Contender]:
    switches = {"users": POOL_USERS}
    return [
        Contender(f"pool of {POOL_SIZE}", learner, candidate_pool=POOL_SIZE, switches=switches),
        Contender("pool of everyone", learner, candidate_pool=POOL_USERS, switches=switches),
    ]


def _judge_pool(results: dict[str, Any], outcomes: Outcomes, rounds: int) -> list[Bar]:
    value = ratio(results["methods"], f"pool of {POOL_SIZE}", "pool of everyone")
    return [Bar(f"regret of {POOL_USERS:,} users, pool of {POOL_SIZE} / of all users", value, "<=", POOL_LIMIT)]


def _nu(learner: str, rounds: int) -> list[Contender]:
    """Always the published learner, whichever is tested."""
    return [Contender(f"ν = {nu:g}", "paper", overrides={"nu": nu, "gamma": NU_GAMMA}) for nu in NUS]


def _judge_nothing(results: dict[str, Any], outcomes: Outcomes, rounds: int) -> list[Bar]:
    return []


SCENARIOS: Final[dict[str, Scenario]] = {
    "delay": Scenario(f"Rewards that arrive {DELAY_EVENTS} events late cost little.", _delay, _judge_delay),
    "switch": Scenario("The learner follows a change of all tastes.", _switch, _judge_switch, 2 * FULL_ROUNDS),
    "rare": Scenario("The learner works at a low reward rate.", _rare, _judge_rare),
    "interaction": Scenario("Arm × context products rank arms by context.", _interaction, _judge_interaction),
    "pool": Scenario("A bounded candidate pool costs little.", _pool, _judge_pool, 2 * FULL_ROUNDS),
    "nu": Scenario(
        "Regret by the group tolerance ν (no bar).", _nu, _judge_nothing, rounds=FULL_ROUNDS, env="movielens"
    ),
}


@final
@dataclass(frozen=True, slots=True)
class ScenarioPlan:
    """Scenarios, learner and seeds of a run; rounds None means each scenario's own number."""

    names: tuple[str, ...] = tuple(SCENARIOS)
    learner: str = "default"
    rounds: int | None = None
    seeds: tuple[int, ...] = (100, 101, 102)
    data: Path | None = None

    def rounds_of(self, scenario: Scenario, quick: bool) -> int:
        """Rounds of a scenario."""
        if self.rounds is not None:
            return self.rounds
        return max(QUICK_ROUNDS, int(scenario.rounds * QUICK_SHARE)) if quick else scenario.rounds


def measure_scenarios(plan: ScenarioPlan, *, jobs: int, quick: bool, console: Console) -> Report:
    """Run scenarios one after the other; prints those skipped for missing data."""
    results: dict[str, Any] = {}
    bars: list[Bar] = []
    for name in plan.names:
        scenario = SCENARIOS[name]
        rounds = plan.rounds_of(scenario, quick)
        try:
            build_environment(scenario.env, seed=plan.seeds[0], data=plan.data)
        except DataMissing as missing:
            console.print(f"skipped {name}: {missing}", highlight=False, markup=False)
            results[name] = {"missing": str(missing)}
            continue
        console.print(f"[bold]{name}[/] {scenario.claim}")
        contenders = scenario.contenders(plan.learner, rounds)
        skipped = print_skipped([each.method for each in contenders], console)
        runs = [
            Run(each, scenario.env, seed, rounds, plan.data)
            for each in contenders
            if each.method not in skipped
            for seed in plan.seeds
        ]
        outcomes, failures = run_all(execute, runs, jobs=jobs, console=console)
        found = regret_results(outcomes, failures)
        results[name] = {"claim": scenario.claim, "env": scenario.env, "rounds": rounds, **found, "skipped": skipped}
        if not failures:
            note = (f", {rounds:,} rounds" if rounds != scenario.rounds else "") + (", quick" if quick else "")
            judged = scenario.judge(results[name], outcomes, rounds)
            bars += [Bar(f"{name}: {bar.name}{note}", bar.value, bar.sense, bar.limit) for bar in judged]
        print_scenario(results[name], console)
    settings = {"learner": plan.learner, "scenarios": list(plan.names), "seeds": list(plan.seeds), "jobs": jobs}
    return Report("scenarios", settings, results, bars, quick)


def print_scenario(results: Mapping[str, Any], console: Console) -> None:
    """Print the regret of the contenders and the failed runs."""
    table = Table("", box=None, pad_edge=False)
    for heading in ("regret", "ms per decision", "ms per update"):
        table.add_column(heading, justify="right")
    for label, row in results["methods"].items():
        regret = f"{row['regret_mean']:.1f} ± {row['regret_sd']:.1f}"
        table.add_row(label, regret, f"{row['decision_ms']:.3f}", f"{row['update_ms']:.3f}")
    console.print(table)
    print_failures(results["failures"], console)
