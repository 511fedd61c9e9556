"""Settings of methods on sine tasks, chosen by grid search on seeds that no result is reported on.

Every method tries its inner rate and its number of inner steps; those that take steps on held-back points too try their
number, and MAML, which takes none, more inner steps instead. `bench.bayes_sine.CHOSEN` has the outcome.
"""

from __future__ import annotations

from typing import Any, Final

from rich.console import Console

from bench.bayes_plan import BayesPlan
from bench.bayes_sine import METHODS, Choice, Method, Steps, train
from bench.bayes_tasks import SETTINGS, Setting
from bench.report import Bar
from models.threads import one_thread

#: What is tried: rates, of steps on mean squared errors of ten points, inner steps, and steps on the ten others.
RATES: Final = (0.005, 0.01, 0.02)
INNER_STEPS: Final = (10,)
QUERY_STEPS: Final = (32,)
MAML_STEPS: Final = (5, 10, 16)
#: Where settings are chosen, and what stands for the error of a run that diverged.
TUNING_SEEDS: Final = (50, 51, 52, 53)
NO_ERROR: Final = 1e9


def candidates(method: Method) -> list[Steps]:
    """Numbers of steps that are tried, each at all rates."""
    if method.gem is None:
        return [Steps(inner) for inner in MAML_STEPS]
    return [Steps(inner, query) for inner in INNER_STEPS for query in QUERY_STEPS]


def choose(method: Method, setting: Setting, plan: BayesPlan) -> tuple[Choice, dict[str, float]]:
    """The setting of the least error after all steps of adaptation, a mean over seeds; and the errors of all."""
    tried: dict[Choice, float] = {}
    seeds = TUNING_SEEDS * len(RATES)
    rates = [rate for rate in RATES for _ in TUNING_SEEDS]
    for steps in candidates(method):
        run = train(method, setting, seeds, rates, plan, inner=steps, steps=plan.tuning_steps, measured=0)
        ends = run.errors[:, -1].nan_to_num(NO_ERROR).clamp_max(NO_ERROR)  # [rates · seeds]
        means = ends.reshape(len(RATES), -1).mean(-1).tolist()  # [rates]
        tried |= {Choice(rate, steps): end for rate, end in zip(RATES, means, strict=True)}
    return min(tried, key=tried.__getitem__), {str(choice): end for choice, end in tried.items()}


def measure_tuning(plan: BayesPlan, quick: bool, console: Console) -> tuple[dict[str, Any], list[Bar]]:
    """The choice of every method in both settings, and all errors that it is made by; claims nothing."""
    results: dict[str, Any] = {"seeds": list(TUNING_SEEDS), "meta_updates": plan.tuning_steps, "settings": {}}
    with one_thread():
        for setting in SETTINGS:
            rows: dict[str, Any] = {}
            for name, method in METHODS.items():
                chosen, tried = choose(method, setting, plan)
                rows[name] = {"chosen": str(chosen), "tried": tried}
                console.print(f"{setting.name}, {name}: {chosen}: {tried[str(chosen)]:.3f}", highlight=False)
            results["settings"][setting.name] = rows
    return results, []
