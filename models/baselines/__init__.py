"""Published bandits to compare with, in numpy, under one interface: choose an arm, learn what it earned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from models.baselines.base import Baseline
from models.baselines.club import Club
from models.baselines.cofiba import Cofiba
from models.baselines.linucb import LinUCB
from models.baselines.locb import Locb
from models.baselines.neuralucb import NeuralUCB
from models.baselines.sclub import Sclub

#: By name, what builds a baseline from users, dimension, seed and its own settings.
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
    """A baseline that has learned nothing; settings are its hyper-parameters: regularization, exploration, …"""
    if name not in BASELINES:
        raise ValueError(f"{name!r} is no baseline; there are {', '.join(BASELINES)}")
    return BASELINES[name](users=users, dimension=dimension, seed=seed, **settings)


__all__ = ["BASELINES", "Baseline", "build_baseline"]
