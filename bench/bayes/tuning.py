"""Settings of methods on sine tasks, by grid search on seeds that are not reported.

Every method tries inner rates and numbers of inner steps. Methods with steps on held-back points also try their number;
MAML, which has none, tries more inner steps instead. The result is recorded in `CHOSEN` of `sine.py`.
"""

from __future__ import annotations

from typing import Any, Final

from rich.console import Console

from metaban.bench.bayes.plan import BayesPlan
from metaban.bench.bayes.sine import METHODS, MetaMethod, RateAndSteps, Steps, train
from metaban.bench.bayes.tasks import SETTINGS, Setting
from metaban.bench.core.report import Bar
from metaban.models.numerics.hardware import one_thread

#: The grid: rates of steps on the mean squared error of ten points, inner steps, and steps on the ten others.
RATES: Final = (0.005, 0.01, 0.02)
INNER_STEPS: Final = (10,)
QUERY_STEPS: Final = (32,)
MAML_STEPS: Final = (5, 10, 16)

#: Seeds of the search, and the error that a diverged run counts with.
TUNING_SEEDS: Final = (50, 51, 52, 53)
NO_ERROR: Final = 1e9


def candidates(method: MetaMethod) -> list[Steps]:
    """Numbers of steps to try, each with all rates."""
    if method.gem is None:
        return [Steps(inner) for inner in MAML_STEPS]
    return [Steps(inner, query) for inner in INNER_STEPS for query in QUERY_STEPS]


def choose(method: MetaMethod, setting: Setting, plan: BayesPlan) -> tuple[RateAndSteps, dict[str, float]]:
    """The setting of least error after all adaptation steps, averaged over seeds; and the errors of all settings."""
    tried: dict[RateAndSteps, float] = {}
    seeds = TUNING_SEEDS * len(RATES)
    rates = [rate for rate in RATES for _ in TUNING_SEEDS]
    for steps in candidates(method):
        run = train(method, setting, seeds, rates, plan, inner=steps, steps=plan.tuning_steps, measured=0)
        ends = run.errors[:, -1].nan_to_num(NO_ERROR).clamp_max(NO_ERROR)  # [rates · seeds]
        means = ends.reshape(len(RATES), -1).mean(-1).tolist()  # [rates]
        tried |= {RateAndSteps(rate, steps): end for rate, end in zip(RATES, means, strict=True)}
    return min(tried, key=tried.__getitem__), {str(choice): end for choice, end in tried.items()}


def measure_tuning(plan: BayesPlan, quick: bool, console: Console) -> tuple[dict[str, Any], list[Bar]]:
    """The choice for every method in both task settings, with all errors; no bars."""
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
