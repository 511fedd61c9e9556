"""MovieLens users as tasks: predict a user's ratings from factors of films, computed from other users' ratings."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from metaban.bench.worlds.data import data_folder, movielens_ratings
from metaban.models.transfer.nets import NetLosses, NetSettings, TaskTensors

#: The most active users are tasks; the factors of films come from all others.
RATERS: Final = 200
FACTORS: Final = 12

#: Least ratings of a target, most ratings used of a target, and most ratings used of a source.
TARGET_RATINGS: Final = (350, 600)
SOURCE_RATINGS: Final = 200

#: Ratings of a target to train with and to choose by; the rest is held out.
SHARES: Final = (0.2, 0.4)


@lru_cache(maxsize=2)
def film_factors(folder: Path | None) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The most active users, and factors of films [items, factors] from the ratings of all others."""
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
    """One target, by its number, and its sources, drawn from the most active users."""
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
    tasks = TaskTensors(x, y, valid, torch.zeros_like(valid, dtype=torch.int64))
    return NetLosses.from_tasks(tasks, 0, "mse", seed=seed * 1_000 + number, settings=settings, shares=SHARES)
