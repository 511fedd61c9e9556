"""`metaban bench` for what comes in parts: `fusion`, `bayes` and `transfer`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self, final

from rich.console import Console

from bench.cli_options import Check, Data, Json, PartPlots, Parts, Quick, Seeds, finish, parse_names, parse_seeds

if TYPE_CHECKING:
    from bench.report import Report

console = Console()


class Plan(Protocol):
    """What a benchmark runs, how often and how large."""

    def quick(self) -> Self:
        """The same, smaller."""
        ...


@final
@dataclass(frozen=True, slots=True)
class Asked:
    """What was asked for on the command line."""

    json: Path | None
    part: str | None
    quick: bool
    check: bool

    def run(
        self, measure: Callable[..., Report], plan: Plan, known: Sequence[str], usual: Sequence[str] | None = None
    ) -> None:
        """Measure some of the known parts, or the usual ones, which are all unless said, and tell what was found."""
        parts = tuple(usual or known) if self.part is None else parse_names(self.part, known, "--part")
        report = measure(plan.quick() if self.quick else plan, parts, quick=self.quick, console=console)
        report.print_bars(console)
        finish(report, self.json, check=self.check, failed=False)


def fusion(
    seeds: Seeds = "100-102",
    data: Data = None,
    json: Json = None,
    plot: PartPlots = None,
    part: Parts = None,
    quick: Quick = False,
    check: Check = False,
) -> None:
    """Learners for new profiles out of those of others, before and after a few points, against other warm starts.

    [bold]sine[/]: networks for y = a sin(x + b), with 800 of the model-fusion authors' networks as sources, and with
    five sources a band and targets in the gaps between them. [bold]profiles[/]: first rounds of new users in a world
    where profiles tell what they like. [bold]movielens[/]: the same with age, gender and occupation, which tell little.
    [bold]timing[/]: how long training takes, and a warm start.
    """
    from bench.fusion import PARTS, measure_fusion
    from bench.fusion_plan import FusionPlan

    plan = FusionPlan(seeds=tuple(parse_seeds(seeds)), data=data, plot=plot)
    Asked(json, part, quick, check).run(measure_fusion, plan, tuple(PARTS))


def bayes(
    seeds: Seeds = "100-102",
    data: Data = None,
    json: Json = None,
    plot: PartPlots = None,
    part: Parts = None,
    quick: Quick = False,
    check: Check = False,
) -> None:
    """Priors learned from posteriors of many tasks (GEM-BML against MAML and Reptile), and what posteriors are worth.

    [bold]sinusoids[/]: error on new sine tasks after a few steps. [bold]gradient[/]: error of the meta-gradient where
    the analytic one is known. [bold]cost[/]: memory and time of a meta-update. [bold]heads[/]: users' heads against the
    analytic posterior. [bold]fewshot[/]: intervals after ten points (LLAMA). [bold]bandits[/]: Thompson sampling
    against UCB. [bold]calibration[/]: rewards against what was foreseen of them. [bold]tuning[/], only if asked for:
    how the settings of sinusoids were chosen.
    """
    from bench.bayes import PARTS, USUAL, measure_bayes
    from bench.bayes_plan import BayesPlan

    plan = BayesPlan(seeds=tuple(parse_seeds(seeds)), data=data, plot=plot)
    Asked(json, part, quick, check).run(measure_bayes, plan, tuple(PARTS), USUAL)


def transfer(
    seeds: Seeds = "100-102",
    data: Data = None,
    json: Json = None,
    plot: PartPlots = None,
    part: Parts = None,
    quick: Quick = False,
    check: Check = False,
) -> None:
    """Which sources help a target (task modeling): whether they are found, and what they are worth.

    [bold]linear[/]: related and unrelated sources of one linear vector. [bold]surrogate[/]: how well losses of sets are
    foretold, with MovieLens users as tasks. [bold]selection[/]: what targets lose with the sources that are chosen,
    against all, none, and those that first-order methods choose. [bold]speed[/]: sets at once against one by one.
    [bold]poison[/]: what users lose by others whose rewards are turned around, with and without weights of teachers.
    """
    from bench.transfer import PARTS, measure_transfer
    from bench.transfer_plan import TransferPlan

    plan = TransferPlan(seeds=tuple(parse_seeds(seeds)), data=data, plot=plot)
    Asked(json, part, quick, check).run(measure_transfer, plan, tuple(PARTS))
