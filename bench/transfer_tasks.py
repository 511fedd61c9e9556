"""MovieLens users as tasks: what a user thinks of films, from factors of the films that others' ratings gave."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from bench.data import data_folder, movielens_ratings
from models.transfer_nets import NetLosses, NetSettings, Tasks

#: The most active users are tasks; the factors of films come from all others.
RATERS: Final = 200
FACTORS: Final = 12
#: Ratings that a target has at least, and of which at most so many are used; and of a source at most.
TARGET_RATINGS: Final = (350, 600)
SOURCE_RATINGS: Final = 200
#: Of a target's ratings, to train with and to choose by; the rest is held out.
SHARES: Final = (0.2, 0.4)


@lru_cache(maxsize=2)
def film_factors(folder: Path) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The most active users, and factors of films [items, factors] by the ratings of everybody else."""
    ratings = movielens_ratings(folder)
    active = np.argsort(-(ratings > 0).sum(1), kind="stable")[:RATERS]
    others = np.delete(ratings, active, axis=0)
    rated = others > 0
    means = others.sum(1) / np.maximum(rated.sum(1), 1)
    centred = np.where(rated, others - means[:, None], 0.0)
    _, values, films = np.linalg.svd(centred, full_matrices=False)
    factors = films[:FACTORS].T * np.sqrt(values[:FACTORS])
    return active, factors / factors.std(0)


def rated_losses(seed: int, number: int, sources: int, data: Path | None, settings: NetSettings) -> NetLosses:
    """One target, by its number, and its sources: all of them drawn from the most active users."""
    folder = data_folder(data)
    active, factors = film_factors(folder)
    ratings = movielens_ratings(folder)
    random = np.random.default_rng([seed, number])
    least, most = TARGET_RATINGS
    counts = (ratings[active] > 0).sum(1)
    target = random.choice(active[counts >= least])
    others = random.permutation(active[active != target])[:sources]
    x = torch.zeros(sources + 1, most, FACTORS)  # [T, m, d]
    y = torch.zeros(sources + 1, most)  # [T, m]
    valid = torch.zeros(sources + 1, most, dtype=torch.bool)  # [T, m]
    for row, user in enumerate([target, *others]):
        films = random.permutation(np.flatnonzero(ratings[user]))[: SOURCE_RATINGS if row else most]
        x[row, : len(films)] = torch.from_numpy(factors[films]).float()
        y[row, : len(films)] = torch.from_numpy(ratings[user, films]).float()
        valid[row, : len(films)] = True
    tasks = Tasks(x, y, valid, torch.zeros_like(valid, dtype=torch.int64))
    return NetLosses.from_tasks(tasks, 0, "mse", seed=seed * 1_000 + number, settings=settings, shares=SHARES)
