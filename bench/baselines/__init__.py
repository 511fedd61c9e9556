"""Published bandits to compare with, in numpy, behind one interface: choose an arm, learn its reward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from metaban.bench.baselines.base import Baseline
from metaban.bench.baselines.club import Club
from metaban.bench.baselines.cofiba import Cofiba
from metaban.bench.baselines.linucb import LinUCB
from metaban.bench.baselines.locb import Locb
from metaban.bench.baselines.neuralucb import NeuralUCB
from metaban.bench.baselines.sclub import Sclub

#: By name, a function that builds a baseline from users, dimension, seed and its settings.
BASELINES: Final[dict[str, Callable[..., Baseline]]] = {
    "linucb": partial(LinUCB, shared=True),
    "linucb-user": partial(LinUCB, shared=False),
    "club": Club,
    "sclub": Sclub,
    "cofiba": Cofiba,
    "locb": Locb,
    "neuralucb-one": partial(NeuralUCB, shared=True),
    "neuralucb-ind": partial(NeuralUCB, shared=False),
}


def build_baseline(name: str, *, users: int, dimension: int, seed: int, settings: Mapping[str, Any]) -> Baseline:
    """An untrained baseline; settings are its hyper-parameters: regularization, exploration, …"""
    if name not in BASELINES:
        raise ValueError(f"there is no baseline {name!r}; choose one of {', '.join(BASELINES)}")
    return BASELINES[name](users=users, dimension=dimension, seed=seed, **settings)
