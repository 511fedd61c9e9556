"""Losses of a target for task modeling, for many models at once; lower is better.

Outputs [n, m] are predictions for `mse` and log odds otherwise, outcomes [m] numbers or 0 and 1, groups [m] integers.
Three concern subpopulations: the error of the worst group (Section 3.3 of task modeling), and the gap between groups in
the rate of positive predictions (demographic parity), or of true positives (equal opportunity, B.3). The paper compares
two groups; here the gap is between the largest and the smallest rate of all groups with samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import one_hot, softplus

Metric: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


def mse(outputs: Tensor, outcomes: Tensor, groups: Tensor) -> Tensor:
    """Mean squared error: [n]."""
    return (outputs - outcomes).square().mean(1)


def cross_entropy(outputs: Tensor, outcomes: Tensor, groups: Tensor) -> Tensor:
    """−log p of the outcomes: [n]."""
    return (softplus(outputs) - outcomes * outputs).mean(1)


def margin(outputs: Tensor, outcomes: Tensor, groups: Tensor) -> Tensor:
    """The negative margin: mean log odds of the wrong class (3.1): [n]."""
    return ((1 - 2 * outcomes) * outputs).mean(1)


def worst_group_accuracy(outputs: Tensor, outcomes: Tensor, groups: Tensor) -> Tensor:
    """1 − accuracy of the worst group (3.3): [n]."""
    right = (outputs > 0) == (outcomes > 0.5)  # [n, m]
    return 1 - _rates(right, groups).amin(1)


def demographic_parity(outputs: Tensor, outcomes: Tensor, groups: Tensor) -> Tensor:
    """The largest gap between groups in Pr[ŷ = 1]: [n]."""
    rates = _rates(outputs > 0, groups)  # [n, G]
    return rates.amax(1) - rates.amin(1)


def equal_opportunity(outputs: Tensor, outcomes: Tensor, groups: Tensor) -> Tensor:
    """The largest gap between groups in Pr[ŷ = 1 | y = 1]; 0 without positive outcomes (B.3): [n]."""
    positive = outcomes > 0.5  # [m]
    if not bool(positive.any()):
        return outputs.new_zeros(len(outputs))
    rates = _rates(outputs[:, positive] > 0, groups[positive])  # [n, G]
    return rates.amax(1) - rates.amin(1)


def _rates(hits: Tensor, groups: Tensor) -> Tensor:
    """Rate of hits in each group that has samples: [n, m] → [n, G]."""
    places = torch.unique(groups, return_inverse=True)[1]  # [m]
    belongs = one_hot(places).to(torch.float64)  # [m, G]
    return hits.to(torch.float64) @ belongs / belongs.sum(0)


METRICS: Final[Mapping[str, Metric]] = {
    "mse": mse,
    "cross-entropy": cross_entropy,
    "margin": margin,
    "worst-group-accuracy": worst_group_accuracy,
    "demographic-parity": demographic_parity,
    "equal-opportunity": equal_opportunity,
}
GROUPED: Final = frozenset({"worst-group-accuracy", "demographic-parity", "equal-opportunity"})


def metric_named(name: str) -> Metric:
    """The metric of this name."""
    if name not in METRICS:
        raise ValueError(f"there is no metric {name!r}; there are {', '.join(METRICS)}")
    return METRICS[name]


def needs_groups(metric: str) -> bool:
    """Whether the metric compares groups."""
    metric_named(metric)
    return metric in GROUPED
