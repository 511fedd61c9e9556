"""Items and contexts as players take them: numbers for those that take vectors, named values for the service."""

from __future__ import annotations

from typing import Final

import numpy as np

from metaban.bench.worlds.shop import DEVICES, HOURS, Matrix, ShopCatalogue, ShopItem, ShopRequest

#: Hours in one part of the day.
PART_HOURS: Final = 4

#: Numbers of a context: a constant, devices and parts of the day.
CONTEXT_NUMBERS: Final = 1 + len(DEVICES) + HOURS // PART_HOURS


def item_inputs(catalogue: ShopCatalogue) -> Matrix:
    """A constant, a column for each tag, and the standardised year and price, [N, d]; the constant alone if hidden."""
    constant = np.ones((len(catalogue.identities), 1))
    items = catalogue.metadata
    if items is None:
        return constant
    tags = sorted({tag for item in items for tag in item.tags})
    tagged = np.array([[float(tag in item.tags) for tag in tags] for item in items])  # [N, tags]
    numbers = np.array([[float(item.year), item.price] for item in items])  # [N, 2]
    spread = numbers.std(0)
    scaled = (numbers - numbers.mean(0)) / np.where(spread > 0, spread, 1.0)
    return np.concatenate([constant, tagged, scaled], axis=1)


def context_inputs(request: ShopRequest) -> Matrix:
    """A constant, the device and the part of the day as columns of 0 and 1, [`CONTEXT_NUMBERS`]."""
    inputs = np.zeros(CONTEXT_NUMBERS)
    inputs[0] = 1.0
    inputs[1 + DEVICES.index(request.device)] = 1.0
    inputs[1 + len(DEVICES) + request.hour // PART_HOURS] = 1.0
    return inputs


def named_features(item: ShopItem) -> dict[str, str | float | bool]:
    """Named features of an item; tags are booleans, since the service takes no lists."""
    return {"category": item.category, "year": item.year, "price": item.price, **dict.fromkeys(item.tags, True)}


def named_context(request: ShopRequest) -> dict[str, str | float | bool]:
    """The context of a request."""
    return {"device": request.device, "hour": request.hour}
