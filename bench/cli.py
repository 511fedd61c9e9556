"""`metaban bench …`: one command a benchmark, with the same options."""

from __future__ import annotations

import os
from dataclasses import replace
from json import dumps
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from bench.cli_options import (
    Check,
    Data,
    Env,
    Jobs,
    Json,
    Plot,
    PlotFolder,
    Quick,
    Rounds,
    Seeds,
    fail_unchecked,
    finish,
    parse_names,
    parse_seeds,
)
from bench.cli_parts import bayes, fusion, transfer

EPILOG: Final = """
[bold]Examples[/bold]

  metaban bench regret --quick           # the synthetic world, small

  metaban bench regret --env movielens --check   # 10,000 rounds, three seeds

  metaban bench regret --env yelp --methods default,vw --rounds 2000

  metaban bench scenarios --only delay --json out.json   # one claim

[bold]Environments[/bold]: synthetic needs nothing; movielens, yelp, service
and mnist read public data sets from --data, from $METABAN_BENCH_DATA or from
../shared/data, and are skipped where there are none: docs/learner.md tells
what the files hold. With --check, a run in which all is skipped fails.

[bold]Seeds[/bold] 100-102 are for reporting. Settings are chosen on others.
"""

bench_app = typer.Typer(
    help="Measure what the README claims, on this machine: a table, and JSON and pictures where asked for.",
    epilog=EPILOG,
    no_args_is_help=True,
    rich_markup_mode="rich",
)
console = Console()


@bench_app.callback()
def _bench() -> None:
    pass


for several_parts in (fusion, bayes, transfer):
    bench_app.command()(several_parts)


@bench_app.command()
def freshness(
    json: Json = None,
    plot: Plot = None,
    quick: Quick = False,
    check: Check = False,
    seeds: Seeds = "100",
) -> None:
    """How soon a reward is in the parameters that answer requests: p50 and p99 of 202 → served.

    Starts a service of its own with a private Valkey in a temporary directory, and stops it again.
    """
    from bench.freshness import FreshnessPlan, measure_freshness, plot_freshness, print_freshness

    plan = FreshnessPlan.quick() if quick else FreshnessPlan()
    report = measure_freshness(plan, parse_seeds(seeds), quick=quick, console=console)
    print_freshness(report, console)
    if plot is not None:
        plot_freshness(report, plot)
    finish(report, json, check=check, failed=False)


@bench_app.command()
def latency(json: Json = None, plot: Plot = None, quick: Quick = False, check: Check = False) -> None:
    """What a decision, an update and learning cost: ratios to named references, in turns with them on one thread.

    [bold]paper[/] runs against the paper's loops, [bold]default[/] against Vowpal Wabbit where it is installed, few
    users against many, and scoring against what the machine could do at best.
    """
    from bench.latency import LatencyPlan, measure_latency
    from bench.latency_views import plot_latency, print_latency

    report = measure_latency(LatencyPlan.quick() if quick else LatencyPlan(), quick=quick, console=console)
    print_latency(report, console)
    if plot is not None:
        plot_latency(report, plot)
    finish(report, json, check=check, failed=False)


@bench_app.command()
def hostile(
    only: Annotated[
        str | None, typer.Option("--only", help="Attacks separated by semicolons; all unless said.")
    ] = None,
    json: Json = None,
    quick: Quick = False,
    check: Check = False,
) -> None:
    """What hostile clients do to the others: p99 of good requests under each attack against their quiet p99.

    Long bodies, deep JSON, trickling connections, wrong keys, floods of headers and more, one after the other; and the
    memory that it takes. Starts a service of its own, and reads its memory from /proc, so that it needs Linux.
    """
    from bench.attacks import ATTACKS
    from bench.hostile import HostilePlan, measure_hostile, print_hostile

    plan = HostilePlan.quick() if quick else HostilePlan()
    if only is not None:
        # The names of attacks hold commas.
        plan = replace(plan, attacks=parse_names(only, ATTACKS, "--only", separator=";"))
    report = measure_hostile(plan, quick=quick, console=console)
    print_hostile(report, console)
    finish(report, json, check=check, failed=False)


@bench_app.command()
def regret(
    env: Env = "synthetic",
    methods: Annotated[
        str | None, typer.Option("--methods", help="Names separated by commas; all that can run unless said.")
    ] = None,
    rounds: Rounds = None,
    seeds: Seeds = "100-102",
    jobs: Jobs = None,
    data: Data = None,
    json: Json = None,
    plot: Plot = None,
    quick: Quick = False,
    check: Check = False,
) -> None:
    """Cumulative regret of every method on the same rounds, and its time a decision and an update.

    [bold]default[/] is what the service ships; [bold]paper[/] and [bold]pooled[/] are Meta-Ban as published and as its
    public code runs it; [bold]shared-net[/] is default without learners of users. They run as the service does, with
    2 % of the decisions spread evenly. Baselines with tuned settings: linucb, linucb-user, club, sclub, cofiba, locb,
    neuralucb-one, neuralucb-ind, vw. Rewards of arms that were not chosen are shown to nobody.
    """
    from bench.methods import known_methods
    from bench.regret import usual_methods

    _play(
        env,
        usual_methods(env) if methods is None else parse_names(methods, known_methods(), "--methods"),
        rounds=rounds, seeds=seeds, jobs=jobs, data=data, json=json, plot=plot, quick=quick, check=check,
    )  # fmt: skip


@bench_app.command()
def ablation(
    env: Env = "synthetic",
    rounds: Rounds = None,
    seeds: Seeds = "100-102",
    jobs: Jobs = None,
    data: Data = None,
    json: Json = None,
    plot: Plot = None,
    quick: Quick = False,
    check: Check = False,
) -> None:
    """What each ingredient of the default learner is worth: its regret, and that without them, one at a time."""
    from bench.regret import ablation_methods

    _play(
        env, ablation_methods(), against="default",
        rounds=rounds, seeds=seeds, jobs=jobs, data=data, json=json, plot=plot, quick=quick, check=check,
    )  # fmt: skip


@bench_app.command()
def scenarios(
    only: Annotated[str | None, typer.Option("--only", help="Names separated by commas; all unless said.")] = None,
    learner: Annotated[str, typer.Option("--learner", help="The learner that is put to the test.")] = "default",
    rounds: Annotated[
        int | None, typer.Option("--rounds", min=2, help="Decisions of each run; each scenario's own unless said.")
    ] = None,
    seeds: Seeds = "100-102",
    jobs: Jobs = None,
    data: Data = None,
    json: Json = None,
    plot: PlotFolder = None,
    quick: Quick = False,
    check: Check = False,
) -> None:
    """Claims that need a world of our own making.

    [bold]delay[/]: rewards 100 events late. [bold]switch[/]: all tastes change half-way. [bold]rare[/]: one arm in a
    hundred earns. [bold]interaction[/]: context decides which arm is liked. [bold]pool[/]: 10,000 users, a candidate
    pool of 256. [bold]nu[/]: the group tolerance of Meta-Ban's Appendix A, as a picture.
    """
    from bench.methods import LEARNERS, unavailable
    from bench.scenarios import SCENARIOS, ScenarioPlan, measure_scenarios

    names = tuple(SCENARIOS) if only is None else parse_names(only, SCENARIOS, "--only")
    (learner,) = parse_names(learner, LEARNERS, "--learner")[:1]
    if (reason := unavailable(learner)) is not None:
        raise typer.BadParameter(reason, param_hint="--learner")
    plan = ScenarioPlan(names, learner, rounds, _quick_seeds(seeds, quick), data)
    report = measure_scenarios(plan, jobs=jobs or os.cpu_count() or 1, quick=quick, console=console)
    if report.bars:
        report.print_bars(console)
    if plot is not None:
        from bench.pictures import plot_scenarios

        plot_scenarios(report, plot)
    failed = any(found.get("failures") for found in report.results.values())
    finish(report, json, check=check, failed=failed)


@bench_app.command()
def tune(
    envs: Annotated[
        str, typer.Option("--envs", help="Worlds separated by commas.")
    ] = "synthetic,movielens,yelp,service,mnist",
    methods: Annotated[
        str | None, typer.Option("--methods", help="Baselines separated by commas; all unless said.")
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Decisions of each run.")] = 10_000,
    jobs: Jobs = None,
    data: Data = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write the chosen settings here.")] = None,
) -> None:
    """Choose the settings of the baselines by grid search, on a seed that results are not reported on.

    `regret` uses the choices that came with the package; this is how they were made.
    """
    from bench.data import DataMissing
    from bench.environments import ENVIRONMENTS, build_environment
    from bench.methods import RIVALS, VOWPAL
    from bench.regret import say_skipped
    from bench.tuning import TUNING_SEED
    from bench.tuning import tune as tune_baselines
    from bench.vowpal import choose_options

    wanted = RIVALS if methods is None else parse_names(methods, RIVALS, "--methods")
    able = [name for name in wanted if name not in say_skipped(wanted, console)]
    present = []
    for env in parse_names(envs, ENVIRONMENTS, "--envs"):
        try:
            build_environment(env, seed=TUNING_SEED, data=data)
            present.append(env)
        except DataMissing as missing:
            console.print(f"skipped {env}: {missing}", highlight=False, markup=False, soft_wrap=True)
    if not present:
        console.print("nothing was tuned: there is data for none of these worlds", highlight=False, soft_wrap=True)
        raise typer.Exit(1)
    baselines = [name for name in able if name != VOWPAL]
    found = tune_baselines(present, baselines, data, rounds, jobs or os.cpu_count() or 1, console) if baselines else {}
    if VOWPAL in able:
        for env in present:
            found.setdefault(env, {})[VOWPAL] = choose_options(env, data=data, rounds=rounds, console=console)
    console.print_json(data=found)
    if json is not None:
        json.parent.mkdir(parents=True, exist_ok=True)
        json.write_text(dumps(found, indent=2) + "\n")


def _play(
    env: str,
    methods: tuple[str, ...],
    *,
    rounds: int | None,
    seeds: str,
    jobs: int | None,
    data: Path | None,
    json: Path | None,
    plot: Path | None,
    quick: bool,
    check: bool,
    against: str | None = None,
) -> None:
    from bench.data import DataMissing
    from bench.environments import ENVIRONMENTS
    from bench.regret import FULL_ROUNDS, QUICK_ROUNDS, QUICK_ROUNDS_OF, RegretPlan, measure_regret, print_regret

    if env not in ENVIRONMENTS:
        raise typer.BadParameter(f"{env} is unknown; there are {', '.join(ENVIRONMENTS)}", param_hint="--env")
    size = rounds or (QUICK_ROUNDS_OF.get(env, QUICK_ROUNDS) if quick else FULL_ROUNDS)
    plan = RegretPlan(env, methods, size, _quick_seeds(seeds, quick), data)
    try:
        report = measure_regret(plan, jobs=jobs or os.cpu_count() or 1, quick=quick, console=console)
    except DataMissing as missing:
        console.print(f"skipped {env}: {missing}", highlight=False, markup=False, soft_wrap=True)
        if check:
            fail_unchecked()
        raise typer.Exit from None
    print_regret(report, console, against=against)
    if plot is not None:
        from bench.pictures import plot_regret

        plot_regret(report, plot)
    finish(report, json, check=check, failed=bool(report.results["failures"]))


def _quick_seeds(text: str, quick: bool) -> tuple[int, ...]:
    """Two seeds are enough for a quick run."""
    seeds = parse_seeds(text)
    return tuple(seeds[:2] if quick else seeds)
