"""Task modeling: which sources help a target (Algorithm 1 of *Task Modeling: Approximating Multitask Predictions*).

f_t(S) is the loss of a target whose model was trained together with a set S of sources (Eq. 1). It is measured for some
hundred small random sets, all trained in one batch, and a linear function of their indicator vectors is fitted (Eq. 2):

    g(S) = f_t(∅) + Σ_{i in S} θ_i                    `fit_surrogate`
    S* = {i: θ_i < γ}                                 `choose_sources`; all together `model_transfer`

Sets of one size do not identify an intercept, and without one (the published g) all coefficients share a positive part.
So the empty set is measured too and is the intercept: θ_i < 0 means that source i helps, as far as effects are
additive.

A `SubsetLosses` defines the model and its training.

Letters in shape comments: k sources, n sets, B parts of the held-out samples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor

#: Candidate ridges, relative to how often a source occurs.
RIDGES: Final = tuple(10.0**power for power in range(-4, 3))

#: One set in so many is held out to validate the surrogate before it joins the fit.
VALIDATE_EVERY: Final = 5

#: Fewest sets per source before early stopping.
FEWEST: Final = 4

#: A gain counts if it is larger than so many of its standard errors.
GUARD_ERRORS: Final = 2.0

#: Largest number of cuts between coefficients that are tried.
CUTS_MAX: Final = 64


class SubsetLosses(ABC):
    """f_t: the target's loss after training with sets of sources."""

    sources: int

    @abstractmethod
    def validation(self, members: Tensor) -> Tensor:
        """f_t(S) of Eq. 1 for sets [n, k], bool, of any size, the empty set included: [n]."""

    @abstractmethod
    def held_out(self, members: Tensor) -> Tensor:
        """The same on B disjoint parts of samples that are used for nothing else: [n, B]."""


@final
@dataclass(frozen=True, slots=True)
class TransferSettings:
    """Number and size of sets, and how sources are chosen."""

    #: α of Algorithm 1, at most k − 1.
    subset_size: int = 5
    subsets_per_source: int = 8
    #: Shrinks coefficients to their mean; relative to how often a source occurs. None: chosen by cross-validation.
    ridge: float | None = None
    #: Confidence level of the coefficients' intervals.
    confidence: float = 0.9
    #: Sets are trained in so many batches; the surrogate is validated after each.
    batches: int = 4
    early_stop: bool = True
    #: Stop when the error on held-out sets is at most (1 + this) times the residual variance.
    tolerance: float = 0.1
    #: A cut may lose this share of the best cut's gain over no and all sources, see `choose_sources`.
    slack: float = 0.2


def draw_subsets(sources: int, size: int, count: int, generator: torch.Generator) -> Tensor:
    """Uniform sets of one size, at least 1 and at most k − 1: [n, k]."""
    size = max(1, min(size, sources - 1))
    keys = torch.rand((count, sources), generator=generator, device=generator.device)  # [n, k]
    members = torch.zeros((count, sources), dtype=torch.bool, device=generator.device)  # [n, k]
    return members.scatter_(1, keys.topk(size, dim=1).indices, True)


def each_once(members: Tensor) -> Tensor:
    """The different sets among [n, k], in the order of their first draw.

    Two models of one set are the same model. As two samples it would count twice in the degrees of freedom, and a set
    that tests the surrogate could be one of those it was fitted to.
    """
    different = list(dict.fromkeys(map(tuple, members.tolist())))
    return torch.tensor(different, dtype=torch.bool, device=members.device)


@final
@dataclass(frozen=True, slots=True)
class Surrogate:
    """g, Eq. 2, with its accuracy."""

    intercept: float
    coefficients: Tensor  # [k]
    errors: Tensor  # their standard errors [k]
    freedom: float  # their degrees of freedom
    confidence: float  # level of the intervals
    ridge: float
    #: Mean squared error on held-out sets, before they joined the fit.
    held_out_error: float
    #: Variance of f_t over the sets.
    variance: float
    #: The residual variance of the linear fit.
    residual: float

    @property
    def low(self) -> Tensor:
        """Lower ends of the intervals of coefficients [k]."""
        return self.coefficients - self._reach()

    @property
    def high(self) -> Tensor:
        """Upper ends [k]."""
        return self.coefficients + self._reach()

    def _reach(self) -> Tensor:
        # Imported here: it takes a third of a second, and serving and training do not need it.
        from scipy.special import stdtrit

        return float(stdtrit(self.freedom, 0.5 + self.confidence / 2)) * self.errors

    def predict(self, members: Tensor) -> Tensor:
        """g(S) of sets [n, k]: [n]."""
        return self.intercept + members.to(self.coefficients) @ self.coefficients


def fit_surrogate(members: Tensor, losses: Tensor, settings: TransferSettings) -> Surrogate:
    """Eq. 2 by ridge regression, from sets [n, k] and their f_t [n].

    The intercept is the loss of the empty set, or 0 without one, as published. Coefficients are shrunk to their mean,
    not to 0: a common effect of all sources is as plausible as none.
    """
    x, y = members.double(), losses.double()  # [n, k], [n]
    empty = ~members.any(1)  # [n]
    intercept = float(y[empty].mean()) if bool(empty.any()) else 0.0
    x, y = x[~empty], y[~empty] - intercept
    if len(y) < 2:
        raise ValueError("a surrogate needs at least two sets that have members")
    validation = torch.arange(len(y), device=y.device) % VALIDATE_EVERY == VALIDATE_EVERY - 1  # [n]
    ridge = settings.ridge if settings.ridge is not None else _chosen_ridge(x, y)
    error = 0.0
    if bool(validation.any()):
        before = _Ridge(x[~validation], y[~validation], ridge)
        error = float((x[validation] @ before.coefficients - y[validation]).square().mean())
    fit = _Ridge(x, y, ridge)
    return Surrogate(
        intercept,
        fit.coefficients,
        (fit.residual * fit.inverse.diagonal()).clamp_min(0).sqrt(),
        max(1.0, len(y) - fit.freedom),
        settings.confidence,
        ridge,
        error,
        float(y.var(correction=0)),
        fit.residual,
    )


@final
class _Ridge:
    """argmin ‖xθ − y‖² + λ‖θ − mean θ‖², and its residuals."""

    def __init__(self, x: Tensor, y: Tensor, ridge: float) -> None:
        sources = x.shape[1]
        gram = x.T @ x  # [k, k]
        scale = gram.diagonal().mean()
        pull = torch.eye(sources, dtype=x.dtype, device=x.device) - 1 / sources  # [k, k]
        # Keeps the matrix invertible for a source in no set without a ridge.
        floor = 1e-10 * scale * torch.eye(sources, dtype=x.dtype, device=x.device)  # [k, k]
        self.inverse = torch.linalg.inv(gram + ridge * scale * pull + floor)  # [k, k]
        self.coefficients = self.inverse @ (x.T @ y)  # [k]
        self.freedom = float((self.inverse * gram).sum())
        rest = float((x @ self.coefficients - y).square().sum())
        self.residual = rest / max(1.0, len(y) - self.freedom)
        #: Generalised cross-validation.
        self.criterion = len(y) * rest / max(1.0, len(y) - self.freedom) ** 2


def _chosen_ridge(x: Tensor, y: Tensor) -> float:
    return min(RIDGES, key=lambda ridge: _Ridge(x, y, ridge).criterion)


@final
@dataclass(frozen=True, slots=True)
class TaskModelResult:
    """Result of Algorithm 1. Gains are losses saved: positive is good."""

    surrogate: Surrogate
    gamma: float
    chosen: Tensor  # [k]
    #: Held-out losses of the target alone, with all sources and with the chosen ones.
    alone: float
    everything: float
    with_chosen: float
    predicted_gain: float
    #: On held-out samples, chosen sources against the target alone, and its standard error over parts.
    gain: float
    gain_error: float
    #: Gain of each single source over the target alone, on validation samples: measured, and by the surrogate.
    single_gain: Tensor  # [k]
    single_predicted: Tensor  # [k]
    subsets: int
    stopped_early: bool

    @property
    def applies(self) -> bool:
        """The guard: whether the chosen sources clearly helped on held-out samples."""
        return self.gain > GUARD_ERRORS * self.gain_error

    def to_json(self) -> dict[str, Any]:
        """Numbers and lists."""
        found = self.surrogate
        return {
            "intercept": found.intercept,
            "coefficients": found.coefficients.tolist(),
            "low": found.low.tolist(),
            "high": found.high.tolist(),
            "ridge": found.ridge,
            "held_out_error": found.held_out_error,
            "variance": found.variance,
            "residual": found.residual,
            "gamma": self.gamma,
            "chosen": self.chosen.nonzero().squeeze(-1).tolist(),
            "alone": self.alone,
            "everything": self.everything,
            "with_chosen": self.with_chosen,
            "predicted_gain": self.predicted_gain,
            "gain": self.gain,
            "gain_error": self.gain_error,
            "single_gain": self.single_gain.tolist(),
            "single_predicted": self.single_predicted.tolist(),
            "subsets": self.subsets,
            "stopped_early": self.stopped_early,
            "applies": self.applies,
        }


def model_transfer(
    losses: SubsetLosses,
    settings: TransferSettings | None = None,
    *,
    seed: int,
    progress: Callable[[float], None] | None = None,
) -> TaskModelResult:
    """Algorithm 1, with γ chosen by validation, and a guard.

    `progress` is called with the share done, and may raise to cancel.
    """
    settings, sources = settings or TransferSettings(), losses.sources
    if sources < 2:
        raise ValueError(f"choosing among sources takes at least 2 of them, not {sources}")
    report = progress or _no_progress
    members, values, stopped = _measured(losses, settings, seed, report)
    alone, single = float(values[0]), values[1 : sources + 1]
    # Lines 1-2. Single sources are measured too, but do not enter the regression.
    kept = torch.cat([members[:1], members[sources + 1 :]])  # [1 + n, k]
    surrogate = fit_surrogate(kept, torch.cat([values[:1], values[sources + 1 :]]), settings)
    report(0.85)
    chosen, gamma = choose_sources(losses, surrogate.coefficients, settings.slack)
    report(0.95)
    nothing, everything = torch.zeros_like(chosen), torch.ones_like(chosen)  # [k]
    held_out = losses.held_out(torch.stack([nothing, everything, chosen])).double()  # [3, B]
    gains = held_out[0] - held_out[2]  # [B]
    parts = len(gains)
    report(1.0)
    return TaskModelResult(
        surrogate,
        gamma,
        chosen,
        alone=float(held_out[0].mean()),
        everything=float(held_out[1].mean()),
        with_chosen=float(held_out[2].mean()),
        predicted_gain=surrogate.intercept - float(surrogate.predict(chosen.unsqueeze(0))),
        gain=float(gains.mean()),
        gain_error=float(gains.std() / parts**0.5) if parts > 1 else 0.0,
        single_gain=alone - single,
        single_predicted=-surrogate.coefficients,
        subsets=len(kept) - 1,
        stopped_early=stopped,
    )


def _no_progress(share: float) -> None:
    """Ignores progress."""


def _measured(
    losses: SubsetLosses, settings: TransferSettings, seed: int, report: Callable[[float], None]
) -> tuple[Tensor, Tensor, bool]:
    """Line 1: the empty set, each single source, and random sets until more of them would add little.

    Stops when the error on held-out sets is close to the residual variance of f_t, which more sets do not lower:
    error ≤ (1 + tolerance) · residual variance. Both are estimates, so at least `FEWEST` sets per source are measured.
    """
    generator = torch.Generator().manual_seed(seed)
    sources = losses.sources
    drawn = each_once(draw_subsets(sources, settings.subset_size, settings.subsets_per_source * sources, generator))
    count = len(drawn)
    first = torch.cat([torch.zeros(1, sources, dtype=torch.bool), torch.eye(sources, dtype=torch.bool)])  # [1 + k, k]
    members = first
    values = losses.validation(first).to(first.device, torch.float64)  # [1 + k]
    share = -(-count // settings.batches)
    done = 0
    while done < count:
        report(0.1 + 0.75 * done / count)
        batch = drawn[done : done + share]  # [n, k]
        members, done = torch.cat([members, batch]), done + len(batch)
        values = torch.cat([values, losses.validation(batch).to(values)])
        if settings.early_stop and FEWEST * sources <= done < count:
            kept = torch.cat([members[:1], members[sources + 1 :]])  # [1 + n, k]
            found = fit_surrogate(kept, torch.cat([values[:1], values[sources + 1 :]]), settings)
            if found.held_out_error <= (1 + settings.tolerance) * found.residual:
                return members, values, True
    return members, values, False


def choose_sources(losses: SubsetLosses, coefficients: Tensor, slack: float) -> tuple[Tensor, float]:
    """Line 3, with γ between two of the coefficients [k]: the chosen sources [k], and γ.

    The set of each cut is measured. Losses of single sets are noisy, and the least of many is partly luck. So among the
    cuts that keep most of the best gain, over the target alone and over all sources, the one in the widest gap between
    coefficients wins, each gap multiplied by the number of sources kept.
    """
    order = coefficients.argsort()  # [k]
    ordered = coefficients[order]  # [k]
    sources, device = len(order), coefficients.device
    sizes = torch.linspace(0, sources, min(sources, CUTS_MAX) + 1, device=device).round().long()  # [c]
    ranks = torch.empty_like(order).scatter_(0, order, torch.arange(sources, device=device))  # [k]
    candidates = ranks < sizes.unsqueeze(1)  # [c, k]
    values = losses.validation(candidates).to(device, torch.float64)  # [c]
    best = values.min()
    near = values <= best + slack * (torch.minimum(values[0], values[-1]) - best)  # [c]
    padded = torch.cat([ordered[:1], ordered, ordered[-1:]])  # [k + 2]
    gaps = sizes * (padded[sizes + 1] - padded[sizes])  # [c], 0 at both ends
    gaps = torch.where(near, gaps, -1.0)
    cut = int(gaps.argmax()) if float(gaps.max()) > 0 else int(values.argmin())
    size = int(sizes[cut])
    # At either end any number beyond the last coefficient works.
    if size in (0, sources):
        edge = float(ordered[0]) if size == 0 else float(ordered[-1]) + max(1e-12, abs(float(ordered[-1])) * 1e-9)
        return candidates[cut], edge
    return candidates[cut], float((ordered[size - 1] + ordered[size]) / 2)
