"""Task modeling: which sources help a target (Algorithm 1 of *Task Modeling: Approximating Multitask Predictions*).

f_t(S) is the loss of a target whose model was trained together with a set S of sources (Eq. 1). It is measured for some
hundred small random sets, all trained in one program, and a line in their indicator vectors is fitted to it (Eq. 2):

    g(S) = f_t(∅) + Σ_{i in S} θ_i                    `fit_surrogate`
    S* = {i: θ_i < γ}                                 `choose_sources`; all together `model_transfer`

Sets of one size alone do not tell an intercept from a common part of all coefficients, and without one (the published
g) that part is positive whatever sources do. So the empty set is measured, too, and is the origin: θ_i < 0 says that a
source helps a target that would otherwise learn alone, as far as effects add up.

What a model is, and how sets are trained, is for a `SubsetLosses` to know.

Letters in shape comments: k sources, n sets, B parts of the samples held out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor

#: Ridges to choose from, as shares of how often a source is met.
RIDGES: Final = tuple(10.0**power for power in range(-4, 3))
#: One set in so many judges the surrogate before it joins the others.
JUDGE_EVERY: Final = 5
#: Sets a source before which it is too soon to stop.
FEWEST: Final = 4
#: Where there are more sources than this, not every cut between two coefficients is tried.
CUTS_MAX: Final = 64


class SubsetLosses(ABC):
    """f_t: what the target loses, after training with each of some sets of sources."""

    sources: int

    @abstractmethod
    def validation(self, members: Tensor) -> Tensor:
        """f_t(S) of Eq. 1 for sets [n, k], bool, of any size, none included: [n]."""

    @abstractmethod
    def held_out(self, members: Tensor) -> Tensor:
        """The same on B disjoint parts of samples that nothing else looks at: [n, B]."""


@final
@dataclass(frozen=True, slots=True)
class TransferSettings:
    """How many sets of which size, and how sources are chosen by them."""

    #: α; sets are smaller where there are few sources.
    subset_size: int = 5
    subsets_per_source: int = 8
    #: Pulls coefficients to their mean; a share of how often a source is met. None: chosen by cross-validation.
    ridge: float | None = None
    #: Of the intervals of coefficients.
    confidence: float = 0.9
    #: Sets are trained in so many batches; after each the surrogate is judged.
    batches: int = 4
    early_stop: bool = True
    #: Stop when the error on sets held out is at most 1 + this of the variance that no line explains.
    tolerance: float = 0.1
    #: A cut may lose this share of what the best one gains over none and over all sources, see `choose_sources`.
    slack: float = 0.2


def draw_subsets(sources: int, size: int, count: int, generator: torch.Generator) -> Tensor:
    """Uniform sets of one size, at least 1 and at most k − 1: [n, k]."""
    size = max(1, min(size, sources - 1))
    keys = torch.rand((count, sources), generator=generator, device=generator.device)  # [n, k]
    members = torch.zeros((count, sources), dtype=torch.bool, device=generator.device)  # [n, k]
    return members.scatter_(1, keys.topk(size, dim=1).indices, True)


@final
@dataclass(frozen=True, slots=True)
class Surrogate:
    """g, Eq. 2, with what is known of its error."""

    intercept: float
    coefficients: Tensor  # [k]
    errors: Tensor  # their standard errors [k]
    freedom: float  # degrees of freedom of these
    confidence: float  # of intervals
    ridge: float
    #: Mean squared error on sets held out, before they joined the others.
    held_out_error: float
    #: Of f_t over the sets.
    variance: float
    #: The part of it that no line explains, as estimated from the residuals.
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
        # Imported here: it takes a third of a second, and whoever serves or teaches has no use for it.
        from scipy.special import stdtrit

        return float(stdtrit(self.freedom, 0.5 + self.confidence / 2)) * self.errors

    def predict(self, members: Tensor) -> Tensor:
        """g(S) of sets [n, k]: [n]."""
        return self.intercept + members.to(self.coefficients) @ self.coefficients


def fit_surrogate(members: Tensor, losses: Tensor, settings: TransferSettings) -> Surrogate:
    """Eq. 2 by regression, from sets [n, k] and their f_t [n].

    Where the empty set is among them its loss is the intercept; otherwise that is 0, as published. Coefficients are
    pulled towards their mean, not to 0: that all sources do some good is not doubted more than that none does.
    """
    x, y = members.double(), losses.double()  # [n, k], [n]
    empty = ~members.any(1)  # [n]
    intercept = float(y[empty].mean()) if bool(empty.any()) else 0.0
    x, y = x[~empty], y[~empty] - intercept
    if len(y) < 2:
        raise ValueError("a surrogate needs at least two sets that have members")
    judges = torch.arange(len(y), device=y.device) % JUDGE_EVERY == JUDGE_EVERY - 1  # [n]
    ridge = settings.ridge if settings.ridge is not None else _chosen_ridge(x, y)
    error = 0.0
    if bool(judges.any()):
        before = _Ridge(x[~judges], y[~judges], ridge)
        error = float((x[judges] @ before.coefficients - y[judges]).square().mean())
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
    """argmin ‖xθ − y‖² + λ‖θ − mean θ‖², and what is left."""

    def __init__(self, x: Tensor, y: Tensor, ridge: float) -> None:
        sources = x.shape[1]
        gram = x.T @ x  # [k, k]
        scale = gram.diagonal().mean()
        pull = torch.eye(sources, dtype=x.dtype, device=x.device) - 1 / sources  # [k, k]
        # A source that no set has, and no ridge, would leave nothing to solve.
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
class TransferResult:
    """What Algorithm 1 found. Gains are losses saved: positive is good."""

    surrogate: Surrogate
    gamma: float
    chosen: Tensor  # [k]
    #: Held-out losses of the target by itself, with all sources and with the chosen ones.
    alone: float
    everything: float
    with_chosen: float
    predicted_gain: float
    #: On held-out samples, the chosen against alone, and its standard error over their parts.
    gain: float
    gain_error: float
    #: With one source each, against alone, on validation samples: measured, and by the surrogate.
    single_gain: Tensor  # [k]
    single_predicted: Tensor  # [k]
    subsets: int
    stopped_early: bool

    @property
    def applies(self) -> bool:
        """The guard: whether the chosen sources helped on samples that did not choose them."""
        return self.gain > 0

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
) -> TransferResult:
    """Algorithm 1, with γ chosen by what its sets lose, and a guard.

    `progress` is told the share of the work that is done, and may raise to end it.
    """
    settings, sources = settings or TransferSettings(), losses.sources
    if sources < 2:
        raise ValueError(f"choosing among sources takes at least 2 of them, not {sources}")
    report = progress or _nobody
    members, values, stopped = _measured(losses, settings, seed, report)
    alone, single = float(values[0]), values[1 : sources + 1]
    # Lines 1-2. Single sources are measured beside the sets, and do not enter the regression.
    kept = torch.cat([members[:1], members[sources + 1 :]])  # [1 + n, k]
    surrogate = fit_surrogate(kept, torch.cat([values[:1], values[sources + 1 :]]), settings)
    report(0.85)
    chosen, gamma = choose_sources(losses, surrogate.coefficients, settings.slack)
    report(0.95)
    nothing, everything = torch.zeros_like(chosen), torch.ones_like(chosen)  # [k]
    judged = losses.held_out(torch.stack([nothing, everything, chosen])).double()  # [3, B]
    gains = judged[0] - judged[2]  # [B]
    parts = len(gains)
    report(1.0)
    return TransferResult(
        surrogate,
        gamma,
        chosen,
        alone=float(judged[0].mean()),
        everything=float(judged[1].mean()),
        with_chosen=float(judged[2].mean()),
        predicted_gain=surrogate.intercept - float(surrogate.predict(chosen.unsqueeze(0))),
        gain=float(gains.mean()),
        gain_error=float(gains.std() / parts**0.5) if parts > 1 else 0.0,
        single_gain=alone - single,
        single_predicted=-surrogate.coefficients,
        subsets=len(kept) - 1,
        stopped_early=stopped,
    )


def _nobody(share: float) -> None:
    """Tells no one."""


def _measured(
    losses: SubsetLosses, settings: TransferSettings, seed: int, report: Callable[[float], None]
) -> tuple[Tensor, Tensor, bool]:
    """Line 1: the empty set, each source by itself, and random sets until more of them would tell little more.

    That is so when the error on sets held out, the surrogate's own inaccuracy included, is hardly above the variance of
    f_t around the best line, which more sets do not lower: error ≤ (1 + tolerance) · residual variance. Half of the
    sets are measured in any case, since both are estimates.
    """
    generator = torch.Generator().manual_seed(seed)
    sources = losses.sources
    count = settings.subsets_per_source * sources
    first = torch.cat([torch.zeros(1, sources, dtype=torch.bool), torch.eye(sources, dtype=torch.bool)])  # [1 + k, k]
    members = first
    values = losses.validation(first).to(first.device, torch.float64)  # [1 + k]
    share = -(-count // settings.batches)
    done = 0
    while done < count:
        report(0.1 + 0.75 * done / count)
        size = min(share, count - done)
        batch = draw_subsets(sources, settings.subset_size, size, generator)  # [n, k]
        members, done = torch.cat([members, batch]), done + size
        values = torch.cat([values, losses.validation(batch).to(values)])
        if settings.early_stop and done < count:
            kept = torch.cat([members[:1], members[sources + 1 :]])  # [1 + n, k]
            found = fit_surrogate(kept, torch.cat([values[:1], values[sources + 1 :]]), settings)
            if done >= FEWEST * sources and found.held_out_error <= (1 + settings.tolerance) * found.residual:
                return members, values, True
    return members, values, False


def choose_sources(losses: SubsetLosses, coefficients: Tensor, slack: float) -> tuple[Tensor, float]:
    """Line 3, with γ between two of the coefficients [k]: the chosen sources [k], and γ.

    Each cut gives a set, whose loss is measured; all of them at once. Losses of single sets are noisy, and the least of
    many is so by luck, in part. So the best does not win: of the cuts that keep most of its gain, over the target alone
    and over all sources, it is the one in the widest gap between coefficients, each gap times the sources it keeps.
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
    # At either end any number beyond the last coefficient would do.
    if size in (0, sources):
        edge = float(ordered[0]) if size == 0 else float(ordered[-1]) + max(1e-12, abs(float(ordered[-1])) * 1e-9)
        return candidates[cut], edge
    return candidates[cut], float((ordered[size - 1] + ordered[size]) / 2)
