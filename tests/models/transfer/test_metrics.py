"""Metrics of many models at once, against loops over models, groups and samples."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metaban.models.transfer.metrics import METRICS, metric_named, needs_groups


def rate(hits: list[bool]) -> float:
    return sum(hits) / len(hits)


def by_group(values: list[bool], groups: list[int]) -> list[float]:
    return [rate([v for v, g in zip(values, groups, strict=True) if g == group]) for group in sorted(set(groups))]


def slow_parity(o: list[float], y: list[float], g: list[int]) -> float:
    rates = by_group([value > 0 for value in o], g)
    return max(rates) - min(rates)


def slow_opportunity(o: list[float], y: list[float], g: list[int]) -> float:
    kept = [place for place, value in enumerate(y) if value == 1]
    return slow_parity([o[place] for place in kept], [], [g[place] for place in kept]) if kept else 0.0


SLOW: dict[str, Callable[[list[float], list[float], list[int]], float]] = {
    "mse": lambda o, y, g: sum((a - b) ** 2 for a, b in zip(o, y, strict=True)) / len(o),
    "cross-entropy": lambda o, y, g: (
        sum(-math.log(1 / (1 + math.exp(-a if b == 1 else a))) for a, b in zip(o, y, strict=True)) / len(o)
    ),
    "margin": lambda o, y, g: sum(-a if b == 1 else a for a, b in zip(o, y, strict=True)) / len(o),
    "worst-group-accuracy": lambda o, y, g: (
        1 - min(by_group([(a > 0) == (b == 1) for a, b in zip(o, y, strict=True)], g))
    ),
    "demographic-parity": slow_parity,
    "equal-opportunity": slow_opportunity,
}


def test_each_has_a_reference() -> None:
    assert SLOW.keys() == METRICS.keys()


@pytest.mark.parametrize("name", METRICS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_it_equals_the_loop(name: str, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 8))
    number = st.floats(-5, 5).filter(lambda value: abs(value) > 1e-3)
    outputs = [data.draw(st.lists(number, min_size=size, max_size=size)) for _ in range(3)]
    outcomes = data.draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=size, max_size=size))
    groups = data.draw(st.lists(st.sampled_from([-1, 4, 7]), min_size=size, max_size=size))
    values = metric_named(name)(
        torch.tensor(outputs, dtype=torch.float64), torch.tensor(outcomes, dtype=torch.float64), torch.tensor(groups)
    )
    assert values.tolist() == pytest.approx([SLOW[name](row, outcomes, groups) for row in outputs])


def test_some_metrics_need_groups() -> None:
    assert [name for name in METRICS if needs_groups(name)] == [
        "worst-group-accuracy",
        "demographic-parity",
        "equal-opportunity",
    ]


@pytest.mark.parametrize("ask", [metric_named, needs_groups])
def test_an_unknown_name_lists_the_known_ones(ask: Callable[[str], object]) -> None:
    with pytest.raises(ValueError, match=r"no metric 'auc'; there are mse, cross-entropy, margin"):
        ask("auc")
