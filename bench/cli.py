"""`metaban bench …`: one command per benchmark, the options that they share, and how a run ends.

The modules of a benchmark are imported by its command, because most of them are slow to import.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NoReturn, Protocol, Self, final

import typer
from rich.console import Console

if TYPE_CHECKING:
    from metaban.bench.core.report import Report

EPILOG: Final = """
[bold]Examples[/bold]

  metaban bench regret --quick           # synthetic environment, small

  metaban bench regret --env movielens --check   # 10,000 rounds, 3 seeds

  metaban bench regret --env yelp --methods default,vw --rounds 2000

  metaban bench scenarios --only delay --json out.json   # one claim

  metaban bench shop --variants 200x150 --methods metaban,vw-ids --slates 3000

[bold]Output[/bold]: a table, then the bars: claims of the documentation with
their limits. --json adds the raw results, --plot a picture, and --check makes
the exit status 1 if a bar does not hold.

[bold]Environments[/bold]: synthetic, digits and categories need no data;
movielens, yelp, service, revenue and mnist read public data sets from --data,
from $METABAN_BENCH_DATA or from ../shared/data, and are skipped if these are
missing (docs/benchmarks.md describes the files). With --check, a run that skips everything fails.

[bold]Seeds[/bold] 100-102, and 300-304 of shop, are for reporting; settings
are chosen on others.
"""

#: Modules of the extra `bench` that every installation of it has.
EXTRA_MODULES: Final = ("matplotlib", "sklearn")

console = Console()

bench_app = typer.Typer(
    help="Measure what the documentation claims, on this machine. Needs the extra `bench`.",
    epilog=EPILOG,
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
)

Json = Annotated[
    Path | None, typer.Option("--json", help="Write machine, versions, settings, results and bars to this file.")
]

Plot = Annotated[Path | None, typer.Option("--plot", help="Draw the results to this file (.png, .svg or .pdf).")]

PlotFolder = Annotated[Path | None, typer.Option("--plot", help="Draw one plot per scenario into this folder.")]

PartPlots = Annotated[Path | None, typer.Option("--plot", help="Draw one plot per part into this folder.")]

Parts = Annotated[
    str | None,
    typer.Option("--part", help="Parts to run, separated by commas. Default: all but those said to be optional."),
]

Quick = Annotated[bool, typer.Option("--quick", help="Smaller sizes, under two minutes. Bars are not judged.")]

Check = Annotated[
    bool,
    typer.Option(
        "--check",
        help="Exit with status 1 if a bar does not hold or all of them were skipped. --quick: only the latter.",
    ),
]

Seeds = Annotated[str, typer.Option("--seeds", help="Seeds of the environments: 100, 100-102 or 100,105.")]

Env = Annotated[
    str,
    typer.Option(
        "--env",
        help="Environment: synthetic, movielens, yelp, service, mnist, digits, categories-50, …-200 or revenue.",
    ),
]

Rounds = Annotated[
    int | None, typer.Option("--rounds", min=1, help="Decisions of each run. Default: 10,000, fewer with --quick.")
]

Jobs = Annotated[int | None, typer.Option("--jobs", min=1, help="Parallel runs, one core each. Default: all cores.")]

Data = Annotated[
    Path | None, typer.Option("--data", help="Folder of the public data sets; docs/benchmarks.md describes the files.")
]


@bench_app.callback()
def _require_extra() -> None:
    """Exit before any benchmark starts if the extra is not installed."""
    if any(find_spec(name) is None for name in EXTRA_MODULES):
        Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(
            "metaban bench needs packages that are not installed: pip install '.[bench]' in a clone of metaban"
        )
        raise typer.Exit(2)


@bench_app.command()
def regret(
    env: Env = "synthetic",
    methods: Annotated[
        str | None,
        typer.Option("--methods", help="Methods to run, separated by commas. Default: all that are available."),
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
    """Cumulative regret of every method on the same rounds, and its time per decision and per update.

    [bold]default[/] is the shipped learner; [bold]paper[/] is Meta-Ban as published; [bold]pooled[/] is Meta-Ban as in
    its public code; [bold]shared-net[/] is default without per-user learners. These run with the service's default
    policy, which spreads 2 % of the decisions evenly. The baselines have tuned settings: linucb, linucb-user, club,
    sclub, cofiba, locb, neuralucb-one, neuralucb-ind, vw. A method sees the reward of the chosen arm only.
    """
    from metaban.bench.regret.methods import known_methods
    from metaban.bench.regret.regret import usual_methods

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
    """Regret of the default learner without one of its components, for each component."""
    from metaban.bench.regret.regret import ablation_methods

    _play(
        env, ablation_methods(), against="default",
        rounds=rounds, seeds=seeds, jobs=jobs, data=data, json=json, plot=plot, quick=quick, check=check,
    )  # fmt: skip


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
    from metaban.bench.regret.regret import (
        FULL_ROUNDS,
        QUICK_ROUNDS,
        QUICK_ROUNDS_OF,
        RegretPlan,
        measure_regret,
        print_regret,
    )
    from metaban.bench.worlds.data import DataMissing
    from metaban.bench.worlds.environments import ENVIRONMENTS

    if env not in ENVIRONMENTS:
        raise typer.BadParameter(
            f"there is no environment {env}; choose one of {', '.join(ENVIRONMENTS)}", param_hint="--env"
        )
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
        from metaban.bench.regret.plots import plot_regret

        plot_regret(report, plot)
    finish(report, json, check=check, failed=bool(report.results["failures"]))


@bench_app.command()
def scenarios(
    only: Annotated[
        str | None, typer.Option("--only", help="Scenarios to run, separated by commas. Default: all.")
    ] = None,
    learner: Annotated[
        str, typer.Option("--learner", help="The learner to test: default, paper, pooled or shared-net.")
    ] = "default",
    rounds: Annotated[
        int | None, typer.Option("--rounds", min=2, help="Decisions of each run. Default: the scenario's own number.")
    ] = None,
    seeds: Seeds = "100-102",
    jobs: Jobs = None,
    data: Data = None,
    json: Json = None,
    plot: PlotFolder = None,
    quick: Quick = False,
    check: Check = False,
) -> None:
    """Claims that need a simulated environment: delay, drift, rare rewards, context, a candidate pool.

    [bold]delay[/]: rewards arrive 100 events late. [bold]switch[/]: all tastes change half-way. [bold]rare[/]: a random
    arm has a reward rate of 1 %. [bold]interaction[/]: the context decides which arm is liked. [bold]pool[/]: 10,000
    users with a candidate pool of 256. [bold]nu[/]: regret by the group tolerance ν of Meta-Ban's Appendix A (no
    bar, needs data).
    """
    from metaban.bench.regret.methods import LEARNERS, unavailable
    from metaban.bench.regret.scenarios import SCENARIOS, ScenarioPlan, measure_scenarios

    names = tuple(SCENARIOS) if only is None else parse_names(only, SCENARIOS, "--only")
    (learner,) = parse_names(learner, LEARNERS, "--learner")[:1]
    if (reason := unavailable(learner)) is not None:
        raise typer.BadParameter(reason, param_hint="--learner")
    plan = ScenarioPlan(names, learner, rounds, _quick_seeds(seeds, quick), data)
    report = measure_scenarios(plan, jobs=jobs or os.cpu_count() or 1, quick=quick, console=console)
    if report.bars:
        report.print_bars(console)
    if plot is not None:
        from metaban.bench.regret.plots import plot_scenarios

        plot_scenarios(report, plot)
    failed = any(found.get("failures") for found in report.results.values())
    finish(report, json, check=check, failed=failed)


@bench_app.command()
def shop(
    variants: Annotated[
        str | None,
        typer.Option(
            "--variants",
            "--variant",
            help="Variants to run, separated by commas. Default: all. Other sizes than those named can be written too.",
        ),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option("--methods", help="Methods to run, separated by commas. Default: all that are available."),
    ] = None,
    http: Annotated[
        bool,
        typer.Option("--http", help="Compare metaban-http with metaban: 200x150, 3,000 slates and the first seed."),
    ] = False,
    slates: Annotated[
        int | None,
        typer.Option("--slates", min=1, help="Slates of each run. Default: 10,000 or 3,000 by variant; --quick: 300."),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option("--seeds", help="Seeds of the shop. Default: 300-304, the reporting seeds; --quick: 240-241."),
    ] = None,
    jobs: Jobs = None,
    data: Data = None,
    json: Json = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw one plot per variant into this folder.")] = None,
    quick: Quick = False,
    check: Check = False,
) -> None:
    """Clicks in a shop: slates of five from a catalogue with ids and metadata, clicks that arrive 1 to 39 slates later.

    [bold]metaban[/] is the shipped learner. Rivals: popularity, and with tuned settings ctr-thompson, vw-ids (Vowpal
    Wabbit with ids), linucb-hybrid and icf-thompson. random and oracle are the ends of the scale. Variants are named by
    items x users. 10,000 slates: [bold]200x150[/], [bold]1000x150[/], [bold]200x943[/], [bold]1000x943[/] and
    [bold]200x150-arrivals[/], half of the items arrive later. 3,000 slates: [bold]200x150-no-features[/];
    [bold]200x150-no-ids[/]; [bold]200x150-explained[/], tastes follow the metadata; [bold]200x150-clicks-only[/], no
    zeros are sent. --quick runs 60x40. [bold]metaban-http[/], which runs with --http or when named, is the same learner
    in a real service with its worker, asked through the client.
    """
    from metaban.bench.shop.players import ALL_METHODS
    from metaban.bench.shop.shop import ShopPlan, measure_shop, print_shop
    from metaban.bench.worlds.data import DataMissing

    usual = ShopPlan.through_http(quick=quick) if http else ShopPlan.usual(quick=quick)
    plan = ShopPlan(
        usual.variants if variants is None else parse_variants(variants),
        usual.methods if methods is None else parse_names(methods, ALL_METHODS, "--methods"),
        slates or usual.slates,
        usual.seeds if seeds is None else _quick_seeds(seeds, quick)[: 1 if http else None],
        data,
    )
    try:
        report = measure_shop(plan, jobs=jobs or os.cpu_count() or 1, quick=quick, console=console)
    except DataMissing as missing:
        console.print(f"skipped shop: {missing}", highlight=False, markup=False, soft_wrap=True)
        if check:
            fail_unchecked()
        raise typer.Exit from None
    print_shop(report, console)
    if plot is not None:
        from metaban.bench.shop.plots import plot_shop

        plot_shop(report, plot)
    finish(report, json, check=check, failed=bool(report.results["failures"]))


def parse_variants(text: str) -> tuple[str, ...]:
    """Names of variants of the shop from a list with commas, each once."""
    from metaban.bench.shop.variants import VARIANTS, variant_of

    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    try:
        for name in names or ("",):
            variant_of(name)
    except ValueError as refused:
        hint = f"{refused}; the usual ones are {', '.join(VARIANTS)}"
        raise typer.BadParameter(hint, param_hint="--variants") from None
    return names


@bench_app.command(name="tune-shop")
def tune_shop(
    methods: Annotated[
        str | None, typer.Option("--methods", help="Rivals to tune, separated by commas. Default: all with settings.")
    ] = None,
    variants: Annotated[
        str, typer.Option("--variants", "--variant", help="Variants to tune in, separated by commas.")
    ] = "200x150",
    slates: Annotated[int, typer.Option("--slates", min=1, help="Slates of each run.")] = 3_000,
    jobs: Jobs = None,
    data: Data = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write the chosen settings to this file.")] = None,
) -> None:
    """Choose the settings of the rivals of `metaban bench shop`, on seeds 200-202, which are not reported.

    `metaban bench shop` uses the recorded choices; this command reproduces them.
    """
    from metaban.bench.shop.players import TUNED, unavailable
    from metaban.bench.shop.tuning import tune_rival
    from metaban.bench.worlds.data import DataMissing

    found: dict[str, dict[str, object]] = {}
    worlds = parse_variants(variants)
    for name in tuple(TUNED) if methods is None else parse_names(methods, TUNED, "--methods"):
        if (reason := unavailable(name)) is not None:
            console.print(f"skipped {name}: {reason}", highlight=False, markup=False)
            continue
        search = partial(tune_rival, name, data=data, jobs=jobs or os.cpu_count() or 1, console=console, slates=slates)
        try:
            found[name] = {world: search(variant_name=world) for world in worlds}
        except DataMissing as missing:
            console.print(f"nothing was tuned: {missing}", highlight=False, markup=False, soft_wrap=True)
            raise typer.Exit(1) from None
    console.print_json(data=found)
    if json is not None:
        json.parent.mkdir(parents=True, exist_ok=True)
        json.write_text(dumps(found, indent=2) + "\n")


@bench_app.command()
def tune(
    envs: Annotated[
        str, typer.Option("--envs", help="Environments to tune in, separated by commas.")
    ] = "synthetic,movielens,yelp,service,mnist,digits,categories-50,categories-200,revenue",
    methods: Annotated[
        str | None, typer.Option("--methods", help="Baselines to tune, separated by commas. Default: all.")
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Decisions of each run.")] = 10_000,
    jobs: Jobs = None,
    data: Data = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write the chosen settings to this file.")] = None,
) -> None:
    """Choose the settings of the baselines by grid search, on seeds that are not reported.

    `metaban bench regret` uses the recorded choices; this command reproduces them.
    """
    from metaban.bench.regret.methods import RIVALS
    from metaban.bench.regret.regret import print_skipped
    from metaban.bench.regret.tuning import tune as tune_baselines
    from metaban.bench.regret.tuning import tuning_seeds
    from metaban.bench.regret.vowpal import VOWPAL
    from metaban.bench.regret.vowpal_tuning import choose_options
    from metaban.bench.worlds.data import DataMissing
    from metaban.bench.worlds.environments import ENVIRONMENTS, build_environment

    wanted = RIVALS if methods is None else parse_names(methods, RIVALS, "--methods")
    able = [name for name in wanted if name not in print_skipped(wanted, console)]
    present = []
    for env in parse_names(envs, ENVIRONMENTS, "--envs"):
        try:
            build_environment(env, seed=tuning_seeds(env)[0], data=data)
            present.append(env)
        except DataMissing as missing:
            console.print(f"skipped {env}: {missing}", highlight=False, markup=False, soft_wrap=True)
    if not present:
        console.print("nothing was tuned: no data was found for these environments", highlight=False, soft_wrap=True)
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


@bench_app.command()
def fusion(
    seeds: Seeds = "100-102",
    data: Data = None,
    json: Json = None,
    plot: PartPlots = None,
    part: Parts = None,
    quick: Quick = False,
    check: Check = False,
) -> None:
    """Warm starts by model fusion: learners for new profiles, before and after a few samples, against other starts.

    [bold]sine[/]: networks for y = a sin(x + b), from 800 of the model-fusion authors' networks, and from five sources
    a band with targets in the gaps between them. [bold]profiles[/]: first rounds of new users in an environment where
    the profile predicts what they like. [bold]movielens[/]: the same with age, gender and occupation, which predict
    little. [bold]timing[/]: time to train fusion, and time of a warm start.
    """
    from metaban.bench.warm_starts.command import PARTS, measure_fusion
    from metaban.bench.warm_starts.plan import FusionBenchPlan

    plan = FusionBenchPlan(seeds=tuple(parse_seeds(seeds)), data=data, plot=plot)
    PartOptions(json, part, quick, check).run(measure_fusion, plan, tuple(PARTS))


@bench_app.command()
def bayes(
    seeds: Seeds = "100-102",
    data: Data = None,
    json: Json = None,
    plot: PartPlots = None,
    part: Parts = None,
    quick: Quick = False,
    check: Check = False,
) -> None:
    """Bayesian meta-learning: GEM-BML against MAML and Reptile, and the quality of the posteriors.

    [bold]sinusoids[/]: error on new sine tasks after a few steps. [bold]gradient[/]: error of the meta-gradient against
    the analytic one. [bold]cost[/]: memory and time of a meta-update. [bold]heads[/]: users' heads against the analytic
    posterior. [bold]fewshot[/]: coverage of intervals after ten points (LLAMA). [bold]bandits[/]: Thompson sampling
    against UCB. [bold]calibration[/]: predicted against observed rewards. [bold]tuning[/] (optional, runs only when
    named): grid search of the settings of sinusoids.
    """
    from metaban.bench.bayes.command import PARTS, USUAL, measure_bayes
    from metaban.bench.bayes.plan import BayesPlan

    plan = BayesPlan(seeds=tuple(parse_seeds(seeds)), data=data, plot=plot)
    PartOptions(json, part, quick, check).run(measure_bayes, plan, tuple(PARTS), USUAL)


@bench_app.command()
def transfer(
    seeds: Seeds = "100-102",
    data: Data = None,
    json: Json = None,
    plot: PartPlots = None,
    part: Parts = None,
    quick: Quick = False,
    check: Check = False,
) -> None:
    """Task modeling: which sources help a target, whether they are found, and how much they help.

    [bold]linear[/]: related and unrelated sources in a linear model. [bold]surrogate[/]: predicted against measured
    losses of sets of sources, with MovieLens users as tasks. [bold]selection[/]: loss of targets with the selected
    sources, against all, none and those of first-order methods. [bold]speed[/]: training sets in one batch against one
    by one.
    """
    from metaban.bench.transfer.command import PARTS, measure_transfer
    from metaban.bench.transfer.plan import TransferPlan

    plan = TransferPlan(seeds=tuple(parse_seeds(seeds)), data=data, plot=plot)
    PartOptions(json, part, quick, check).run(measure_transfer, plan, tuple(PARTS))


class Plan(Protocol):
    """Sizes of a benchmark."""

    def quick(self) -> Self:
        """Smaller sizes."""
        ...


@final
@dataclass(frozen=True, slots=True)
class PartOptions:
    """Options of a benchmark that consists of parts."""

    json: Path | None
    part: str | None
    quick: bool
    check: bool

    def run(
        self, measure: Callable[..., Report], plan: Plan, known: Sequence[str], usual: Sequence[str] | None = None
    ) -> None:
        """Measure the parts named on the command line, or the usual ones (default: all), and report."""
        parts = tuple(usual or known) if self.part is None else parse_names(self.part, known, "--part")
        report = measure(plan.quick() if self.quick else plan, parts, quick=self.quick, console=console)
        report.print_bars(console)
        finish(report, self.json, check=self.check, failed=False)


@bench_app.command()
def freshness(
    json: Json = None,
    plot: Plot = None,
    quick: Quick = False,
    check: Check = False,
    seeds: Seeds = "100",
) -> None:
    """Delay from an accepted reward (202) to its use in answers: p50 and p99, idle and at 100 events/s.

    Starts its own service with a private Valkey in a temporary directory, and stops it afterwards.
    """
    from metaban.bench.serving.freshness import FreshnessPlan, measure_freshness, plot_freshness, print_freshness

    plan = FreshnessPlan.quick() if quick else FreshnessPlan()
    report = measure_freshness(plan, parse_seeds(seeds), quick=quick, console=console)
    print_freshness(report, console)
    if plot is not None:
        plot_freshness(report, plot)
    finish(report, json, check=check, failed=False)


@bench_app.command()
def latency(json: Json = None, plot: Plot = None, quick: Quick = False, check: Check = False) -> None:
    """Time of a decision, of an update and of learning, as ratios to references measured in turns on one thread.

    Compares [bold]paper[/] with the paper's loops, [bold]default[/] with Vowpal Wabbit (if installed), decisions among
    many users with those among few, and scoring with the lower bound of this machine (roofline). Also prints the bytes
    that one user takes.
    """
    from metaban.bench.serving.latency import LatencyPlan, measure_latency, plot_latency, print_latency

    report = measure_latency(LatencyPlan.quick() if quick else LatencyPlan(), quick=quick, console=console)
    print_latency(report, console)
    if plot is not None:
        plot_latency(report, plot)
    finish(report, json, check=check, failed=False)


@bench_app.command()
def hostile(
    only: Annotated[
        str | None, typer.Option("--only", help="Attacks to run, separated by semicolons. Default: all.")
    ] = None,
    json: Json = None,
    quick: Quick = False,
    check: Check = False,
) -> None:
    """Latency of good requests during attacks, as the ratio of their p99 to that without attack.

    The attacks run one after the other: 64 MB bodies, deeply nested JSON, slow connections, wrong keys, endless
    headers, one-byte chunks, pipelined requests, clients that never read. Also measures the memory that they take.
    Starts its own service and reads its memory from /proc, so it needs Linux.
    """
    from metaban.bench.serving.attacks import ATTACKS
    from metaban.bench.serving.hostile import HostilePlan, measure_hostile, print_hostile

    plan = HostilePlan.quick() if quick else HostilePlan()
    if only is not None:
        # Names of attacks contain commas.
        plan = replace(plan, attacks=parse_names(only, ATTACKS, "--only", separator=";"))
    report = measure_hostile(plan, quick=quick, console=console)
    print_hostile(report, console)
    finish(report, json, check=check, failed=False)


def parse_seeds(text: str) -> list[int]:
    """Seeds from numbers and ranges separated by commas."""
    seeds: list[int] = []
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            seeds.extend(range(int(first), int(last or first) + 1))
    except ValueError:
        seeds = []
    if not seeds:
        raise typer.BadParameter(f"{text!r} is no list of seeds; write 100, 100-102 or 100,105", param_hint="--seeds")
    return seeds


def _quick_seeds(text: str, quick: bool) -> tuple[int, ...]:
    """The seeds of a run; a quick one uses the first two."""
    seeds = parse_seeds(text)
    return tuple(seeds[:2] if quick else seeds)


def parse_names(text: str, known: Collection[str], option: str, *, separator: str = ",") -> tuple[str, ...]:
    """Known names from a list with separators, each once."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(separator) if part.strip()))
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        what = f"unknown: {', '.join(unknown)}" if unknown else "no name given"
        raise typer.BadParameter(f"{what}; choose from {', '.join(known)}", param_hint=option)
    return names


def finish(report: Report, json: Path | None, *, check: bool, failed: bool) -> None:
    """Write the JSON if requested; exit with 1 if a run failed or, with --check, a bar does not hold.

    The bars of a quick run are not judged; with --check it says so.
    """
    if json is not None:
        report.write(json)
    if check and not report.bars and report.skipped:
        fail_unchecked()
    if failed or (check and any(report.verdict(bar) is False for bar in report.bars)):
        raise typer.Exit(1)
    if check and report.quick:
        console.print("--check: all runs finished; no claim was checked. Leave --quick out to check the claims.")


def fail_unchecked() -> NoReturn:
    """Exit with 1: --check must not succeed when nothing was checked."""
    Console(stderr=True).print(
        "nothing was checked: the data or packages that the claims need are missing, which fails --check. "
        "Put the files that docs/benchmarks.md describes into a folder and name it with --data or METABAN_BENCH_DATA, "
        "install the packages reported as missing, or leave --check out.",
        highlight=False, markup=False, soft_wrap=True,
    )  # fmt: skip
    raise typer.Exit(1)
