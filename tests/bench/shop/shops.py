"""A catalogue and feedback made by hand, for players without data."""

from __future__ import annotations

import numpy as np

from metaban.bench.shop.player import ShownItem
from metaban.bench.worlds.shop import DEVICES, Device, ShopCatalogue, ShopItem, ShopRequest

TAGS = ("Drama", "Comedy", "Horror", "War")


def catalogue(items: int = 12, *, features: bool = True, seed: int = 0) -> ShopCatalogue:
    random = np.random.default_rng(seed)
    metadata = []
    for _ in range(items):
        tags = tuple(random.permutation(TAGS)[: random.integers(1, 4)].tolist())
        metadata.append(ShopItem(tags[0], tags, int(random.integers(1950, 1999)), float(random.uniform(5, 50))))
    return ShopCatalogue(np.arange(items), tuple(metadata) if features else None)


def feedback(count: int, *, items: int = 12, users: int = 4, seed: int = 1) -> list[ShownItem]:
    """Shown items with random clicks."""
    random = np.random.default_rng(seed)
    shown = []
    for number in range(count):
        device: Device = DEVICES[int(random.integers(3))]
        request = ShopRequest(number // 5, int(random.integers(users)), device, int(random.integers(24)))
        shown.append(ShownItem(request, int(random.integers(items)), number % 5, float(random.random() < 0.4)))
    return shown
