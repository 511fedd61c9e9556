"""Variants of the shop by name, such as `200x150-arrivals`: items, users, and what differs from the plain shop."""

from __future__ import annotations

import re
from typing import Any, Final

from metaban.bench.worlds.shop import EXAMINATION, ShopVariant

#: By the end of a name, the switch that it sets; a plain shop has no end.
SWITCHES: Final[dict[str, dict[str, Any]]] = {
    "": {},
    "arrivals": {"arrivals": True},
    "no-features": {"features": False},
    "no-ids": {"ids": False},
    "explained": {"explained": True},
    "clicks-only": {"clicks_only": True},
}

#: Ends of the names of the worlds in which the shipped learner is compared with all rivals.
WORLD_SWITCHES: Final = ("", "arrivals")

#: The worlds of the claims, and all variants of a default run.
WORLDS: Final = ("200x150", "1000x150", "200x943", "1000x943", "200x150-arrivals")
VARIANTS: Final = (*WORLDS, "200x150-no-features", "200x150-no-ids", "200x150-explained", "200x150-clicks-only")

#: Slates of a run in these worlds, and in the other variants. Clicks over the latter count in both.
WORLD_SLATES: Final = 10_000
FULL_SLATES: Final = 3_000

#: Fewest items, so that a slate can be filled; and what MovieLens-100k has.
ITEMS_MIN: Final = 4 * len(EXAMINATION)
ITEMS_MAX: Final = 1_682
USERS_MAX: Final = 943


def variant_of(name: str) -> ShopVariant:
    """The variant of a name. Raises ValueError if it cannot be read or the data is too small for it."""
    items, users, switch = _parts(name)
    if not (ITEMS_MIN <= items <= ITEMS_MAX and 1 <= users <= USERS_MAX):
        raise ValueError(f"{name}: a shop has {ITEMS_MIN} to {ITEMS_MAX} items and 1 to {USERS_MAX} users")
    return ShopVariant(items=items, users=users, **SWITCHES[switch])


def plain_name(name: str) -> str:
    """The name of the plain shop of the same size."""
    items, users, _ = _parts(name)
    return f"{items}x{users}"


def switch_of(name: str) -> str:
    """The end of a name, empty for a plain shop."""
    return _parts(name)[2]


def usual_slates(name: str) -> int:
    """Slates of a run in a variant."""
    return WORLD_SLATES if switch_of(name) in WORLD_SWITCHES else FULL_SLATES


def _parts(name: str) -> tuple[int, int, str]:
    found = re.fullmatch(r"(\d{1,6})x(\d{1,6})(?:-(.+))?", name)
    if found is None or (found[3] or "") not in SWITCHES:
        ends = ", ".join(filter(None, SWITCHES))
        raise ValueError(
            f"{name!r} is no variant; write items x users as in {WORLDS[0]}, then a dash and one of {ends}"
        )
    return int(found[1]), int(found[2]), found[3] or ""
