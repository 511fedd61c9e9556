"""Sine tasks of Section 5.1 of GEM-BML: error after a few steps on ten points, GEM-BML and GEM-BML+ against MAML and
Reptile.

All methods start from the same network and see the same tasks: equal numbers of meta-updates and of tasks in each, ten
points of a task to adapt to and ten others. The settings of each method are chosen on other seeds
(`tuning.py`). All reported seeds run at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, final

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from metaban.bench.bayes.plan import BayesPlan
from metaban.bench.bayes.tasks import (
    CUT,
    SETTINGS,
    SHAPE,
    SHOTS,
    Setting,
    SineBatch,
    adapt,
    draw,
    errors,
    fresh_net,
    maml_gradient,
)
from metaban.bench.core.report import Bar
from metaban.models.bayes.gem import GemSettings, GemTrainer
from metaban.models.bayes.inference import Gaussian, InnerSettings, NetLikelihood, infer_by_steps
from metaban.models.numerics.hardware import one_thread

#: Adaptation steps after which errors are reported.
ADAPT_STEPS: Final = (1, 5, 10)
META_RATE: Final = 1e-3

#: After this share of the meta-updates, learning rates are divided by ten.
FALLS_FROM: Final = 0.7

#: Points that errors are measured at, and measurements during a run.
JUDGED_POINTS, CURVE_POINTS = 100, 10

#: Meta-batches drawn at once.
BLOCK: Final = 100

#: Limits of the claims.
DEFAULT_LIMIT, CHALLENGING_LIMIT = 1.1, 1.0


@final
@dataclass(frozen=True, slots=True)
class Steps:
    """Inner steps of a meta-update on the ten points of a task, then steps on the ten others.

    MAML takes none of the latter: its meta-gradient is that of the error on them.
    """

    inner: int
    query: int = 0


@final
@dataclass(frozen=True, slots=True)
class RateAndSteps:
    """Settings of a method: the rate of steps on the mean squared error of ten points, and the number of steps."""

    rate: float
    steps: Steps

    def __str__(self) -> str:
        return f"{self.rate:g} × {self.steps.inner}" + f" + {self.steps.query}" * bool(self.steps.query)


#: Settings of least error on seeds that are not reported, printed by `metaban bench bayes --part tuning`.
_TUNED: Final = RateAndSteps(0.01, Steps(10, 32))
CHOSEN: Final[Mapping[str, Mapping[str, RateAndSteps]]] = {
    "default": {"MAML": RateAndSteps(0.01, Steps(16)), "Reptile": _TUNED, "GEM-BML": _TUNED, "GEM-BML+": _TUNED},
    "challenging": {"MAML": RateAndSteps(0.02, Steps(5)), "Reptile": _TUNED, "GEM-BML": _TUNED, "GEM-BML+": _TUNED},
}


class MetaLearner(ABC):
    """A meta-learner in G runs at once, each with its own network [G, p]."""

    @abstractmethod
    def step(self, batch: SineBatch) -> None:
        """One meta-update from tasks [G, T]."""

    @abstractmethod
    def adapted(self, batch: SineBatch, steps: int) -> Iterator[Tensor]:
        """Networks of tasks after each step on their points: [G, T, p]."""

    @property
    @abstractmethod
    def optimiser(self) -> torch.optim.Optimizer:
        """The optimiser of the meta-updates."""

    def slow(self, share: float) -> None:
        """Multiply the meta-learning rate by this share."""
        for group in self.optimiser.param_groups:
            group["lr"] = META_RATE * share


@final
class Maml(MetaLearner):
    """MAML (Finn et al., 2017) through all inner steps."""

    def __init__(self, start: Tensor, rates: Tensor, steps: int) -> None:
        self._theta, self._rates, self._steps = start.clone(), rates, steps
        self._optimiser = torch.optim.Adam([self._theta], lr=META_RATE)

    @property
    def optimiser(self) -> torch.optim.Optimizer:
        """Adam."""
        return self._optimiser

    def step(self, batch: SineBatch) -> None:
        """Adam along the gradient of the error on the other points after adaptation."""
        self._theta.grad = maml_gradient(self._theta, batch, self._rates, self._steps)
        self._optimiser.step()

    def adapted(self, batch: SineBatch, steps: int) -> Iterator[Tensor]:
        """Networks after gradient descent."""
        nets = self._theta.unsqueeze(-2).expand(-1, batch.x.shape[-3], -1)
        for _ in range(steps):
            nets = adapt(nets, batch, self._rates, 1)
            yield nets


@final
class Gem(MetaLearner):
    """GEM-BML, GEM-BML+ and, with point posteriors, Reptile."""

    def __init__(self, start: Tensor, variance: float, settings: GemSettings, noise: float) -> None:
        self._trainer = GemTrainer(Gaussian(start, torch.full_like(start, variance)), settings)
        self._inner, self._noise, self._variance_rate = settings.inner, noise, settings.variance_rate
        self._generator = torch.Generator().manual_seed(len(start))

    @property
    def optimiser(self) -> torch.optim.Optimizer:
        """Adam."""
        return self._trainer.optimiser

    def slow(self, share: float) -> None:
        """Multiply both rates by this share: the mean does not settle while the steps still grow."""
        super().slow(share)
        self._trainer.variance_rate = self._variance_rate * share

    def step(self, batch: SineBatch) -> None:
        """Adam along the meta-gradient."""
        support = NetLikelihood(SHAPE, batch.x, batch.y, self._noise, local=False)
        query = NetLikelihood(SHAPE, batch.other_x, batch.other_y, self._noise, local=False)
        self._trainer.step(support, query, self._generator)

    def adapted(self, batch: SineBatch, steps: int) -> Iterator[Tensor]:
        """Means of the posteriors."""
        prior = self._trainer.prior.for_tasks(batch.x.shape[-3])
        support = NetLikelihood(SHAPE, batch.x, batch.y, self._noise)
        for posterior in infer_by_steps(prior, support, replace(self._inner, steps=steps), self._generator):
            yield posterior.mean


@final
@dataclass(frozen=True, slots=True)
class MetaMethod:
    """MAML, or a variant of GEM-BML."""

    gem: GemSettings | None = None

    def learner(self, start: Tensor, rates: Sequence[float], steps: Steps) -> MetaLearner:
        """Runs from networks [G, p], each with its own rate."""
        tensor = torch.tensor(rates)[:, None, None]  # [G, 1, 1]
        if self.gem is None:
            return Maml(start, tensor, steps.inner)
        # Half the sum of squares over ten points, divided by this noise, is their mean squared error; another noise
        # scales it. Steps in units of deviations are longer by the variance: at the initial variance the rate is the
        # given one.
        noise, variance = (SHOTS / 2, 1.0) if self.gem.inner.point else (NOISE, VARIANCE)
        inner = replace(self.gem.inner, steps=steps.inner, rate=tensor * 2 * noise / SHOTS / variance)
        return Gem(start, variance, replace(self.gem, inner=inner, query_steps=steps.query), noise)


#: Variance of observations that posteriors assume, and the initial variance of the prior.
NOISE, VARIANCE = 5e-2, 1e-3

#: Learning rates of the log-variance. Gradients of L[1] are larger: they are those of a task's whole way from the
#: prior.
VARIANCE_RATE, VARIANCE_RATE_PLUS = 2e-4, 4e-4

_POINTS: Final = InnerSettings(point=True, prior_weight=0.0, cut=CUT)

#: Gradients are clipped where MAML's and Reptile's are, at the initial variance.
_NORMAL: Final = InnerSettings(
    prior_weight=0.1, whitened=True, sd_rate=0.1, cut_sd=1.0, cut=CUT * SHOTS / 2 / NOISE * VARIANCE**0.5
)
METHODS: Final[Mapping[str, MetaMethod]] = {
    "MAML": MetaMethod(),
    "Reptile": MetaMethod(GemSettings(inner=_POINTS, rate=META_RATE, variance_rate=0.0)),
    "GEM-BML": MetaMethod(GemSettings(False, _NORMAL, rate=META_RATE, variance_rate=VARIANCE_RATE)),
    "GEM-BML+": MetaMethod(GemSettings(True, _NORMAL, rate=META_RATE, variance_rate=VARIANCE_RATE_PLUS)),
}


@final
@dataclass(frozen=True, slots=True)
class MetaRuns:
    """Errors after each of ADAPT_STEPS [G, steps], and during training, measured after some meta-updates."""

    errors: Tensor
    curve: list[list[float]]
    at: list[int]


def train(
    method: MetaMethod,
    setting: Setting,
    seeds: Sequence[int],
    rates: Sequence[float],
    plan: BayesPlan,
    *,
    inner: Steps,
    steps: int,
    measured: int = CURVE_POINTS,
) -> MetaRuns:
    """One run for each pair of seed and rate, all at once, measured this many times during training."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    starts = torch.stack([fresh_net(generator) for generator in generators])  # [G, p]
    judges = [torch.Generator().manual_seed(seed + 10_000) for seed in seeds]
    test = _stacked([draw(setting, judge, (plan.test_tasks,), JUDGED_POINTS) for judge in judges])
    learner = method.learner(starts, rates, inner)
    curve, at = [], []
    block: SineBatch | None = None
    for step in range(steps):
        if step % BLOCK == 0:
            block = _stacked([draw(setting, each, (BLOCK, plan.meta_tasks)) for each in generators])
        if measured and step % max(1, steps // measured) == 0:
            curve.append(_errors(learner, test)[:, -1].tolist())
            at.append(step)
        if step >= FALLS_FROM * steps:
            learner.slow(1 - 0.9 * (step / steps - FALLS_FROM) / (1 - FALLS_FROM))
        if block is not None:
            learner.step(_of(block, step % BLOCK))
    found = _errors(learner, test)
    return MetaRuns(found, [*curve, found[:, -1].tolist()], [*at, steps])


def _stacked(parts: Sequence[SineBatch]) -> SineBatch:
    """Stack the runs' networks."""
    return SineBatch(*(torch.stack(each) for each in zip(*(_tensors(part) for part in parts), strict=True)))


def _of(batch: SineBatch, place: int) -> SineBatch:
    """One meta-batch of a block: [G, BLOCK, T, ...] → [G, T, ...]."""
    return SineBatch(*(each[:, place] for each in _tensors(batch)))


def _tensors(batch: SineBatch) -> tuple[Tensor, ...]:
    return batch.x, batch.y, batch.other_x, batch.other_y


def _errors(learner: MetaLearner, test: SineBatch) -> Tensor:
    """Mean squared error on other points after each of ADAPT_STEPS: [G, steps]."""
    found = []
    for step, nets in enumerate(learner.adapted(test, max(ADAPT_STEPS)), 1):
        if step in ADAPT_STEPS:
            found.append(errors(nets, test.other_x, test.other_y).mean(-1))
    return torch.stack(found, -1)


def measure_sinusoids(plan: BayesPlan, quick: bool, console: Console) -> tuple[dict[str, Any], list[Bar]]:
    """All methods in both task settings."""
    results: dict[str, Any] = {
        "meta_updates": plan.meta_steps,
        "tasks_a_meta_update": plan.meta_tasks,
        "error": f"mean squared error on {JUDGED_POINTS} other points of {plan.test_tasks} new tasks of each seed",
        "settings": {},
    }
    with one_thread():
        for setting in SETTINGS:
            rows: dict[str, Any] = {}
            for name, method in METHODS.items():
                chosen = CHOSEN[setting.name][name]
                rates = [chosen.rate] * len(plan.seeds)
                run = train(method, setting, plan.seeds, rates, plan, inner=chosen.steps, steps=plan.meta_steps)
                rows[name] = {"chosen": str(chosen), **_row(run)}
                end = rows[name][str(ADAPT_STEPS[-1])]["mean"]
                console.print(f"{setting.name}, {name}: {chosen}: {end:.3f}", highlight=False)
            results["settings"][setting.name] = rows
    _print(results["settings"], console)
    if plan.plot is not None:
        _plot(results["settings"], plan.plot)
    return results, sine_bars(results["settings"], quick=quick)


def _row(run: MetaRuns) -> dict[str, Any]:
    row: dict[str, Any] = {"curve": run.curve, "curve_at": run.at}
    for place, steps in enumerate(ADAPT_STEPS):
        values = run.errors[:, place].double()
        spread = float(values.std()) if len(values) > 1 else 0.0
        row[str(steps)] = {"mean": float(values.mean()), "sd": spread, "values": values.tolist()}
    return row


def sine_bars(settings: Mapping[str, Any], *, quick: bool) -> list[Bar]:
    """Bars of the errors after all adaptation steps."""
    note, last = ", quick" if quick else "", str(ADAPT_STEPS[-1])

    def ratio(setting: str, ours: str, theirs: str) -> float:
        rows = settings[setting]
        return float(rows[ours][last]["mean"] / rows[theirs][last]["mean"])

    bars = [Bar(f"default: GEM-BML+ / MAML{note}", ratio("default", "GEM-BML+", "MAML"), "<=", DEFAULT_LIMIT)]
    for ours in ("GEM-BML", "GEM-BML+"):
        for theirs in ("MAML", "Reptile"):
            value = ratio("challenging", ours, theirs)
            bars.append(Bar(f"challenging: {ours} / {theirs}{note}", value, "<=", CHALLENGING_LIMIT))
    return bars


def _print(settings: Mapping[str, Any], console: Console) -> None:
    for setting, rows in settings.items():
        heads = [f"{steps} step{'s' * (steps > 1)}" for steps in ADAPT_STEPS]
        table = Table(f"{setting}: MSE", "rate × steps", *heads, box=None, pad_edge=False)
        for name, row in rows.items():
            cells = [row[str(steps)] for steps in ADAPT_STEPS]
            table.add_row(name, row["chosen"], *[f"{cell['mean']:.3f} ± {cell['sd']:.3f}" for cell in cells])
        console.print(table)


def _plot(settings: Mapping[str, Any], folder: Path) -> None:
    """Errors after all adaptation steps by the number of meta-updates; means over seeds."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(10, 4), layout="constrained")
    places = figure.subplots(1, len(settings), squeeze=False)[0]
    for axes, (setting, rows) in zip(places, settings.items(), strict=True):
        for name, row in rows.items():
            curve = torch.tensor(row["curve"])  # [measured, G]
            axes.plot(row["curve_at"], curve.mean(-1), label=name)
            axes.fill_between(row["curve_at"], curve.amin(-1), curve.amax(-1), alpha=0.15, lw=0)
        axes.set(title=setting, xlabel="meta-updates", ylabel=f"MSE after {ADAPT_STEPS[-1]} steps", yscale="log")
        axes.grid(alpha=0.3)
    places[-1].legend()
    figure.savefig(folder / "bayes-sinusoids.png", dpi=150)
