"""The players of `metaban bench shop` by name, with the settings that tuning chose."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from metaban.bench.shop.hybrid_linucb import HybridLinUCB
from metaban.bench.shop.interactive_factors import InteractiveFactors
from metaban.bench.shop.item_rates import ClickRateThompson, OraclePlayer, PopularityPlayer, RandomPlayer
from metaban.bench.shop.over_http import HttpPlayer
from metaban.bench.shop.player import PlayerSettings, ShopPlayer
from metaban.bench.shop.shipped import ShippedPlayer
from metaban.bench.shop.variants import WORLDS, plain_name
from metaban.bench.shop.vowpal_ids import VowpalIds
from metaban.bench.worlds.shop import Shop

SETTINGS_FILE: Final = Path(__file__).with_name("rival_settings.json")

#: The shipped learner, in the process of the run and through HTTP.
OURS: Final = "metaban"
OVER_HTTP: Final = "metaban-http"

#: The shipped learner with so many places for names, in place of the default.
HASHED: Final = {f"metaban-hash-{places}": places for places in (64, 256, 1_024)}

VOWPAL: Final = "vw-ids"
FACTORS: Final = "icf-thompson"

#: Rivals with settings, by name: a function that builds one for a shop and a seed.
TUNED: Final[dict[str, Callable[..., ShopPlayer]]] = {
    "ctr-thompson": lambda shop, seed, **settings: ClickRateThompson(shop.catalogue, seed=seed, **settings),
    VOWPAL: lambda shop, seed, **settings: VowpalIds(shop.catalogue, seed=seed, **settings),
    "linucb-hybrid": lambda shop, seed, **settings: HybridLinUCB(
        shop.catalogue, users=shop.users, seed=seed, **settings
    ),
    FACTORS: lambda shop, seed, **settings: InteractiveFactors(shop.catalogue, users=shop.users, seed=seed, **settings),
}

#: Methods that the shipped learner has to beat, those of a default run, and all.
RIVALS: Final = ("popularity", *TUNED)
METHODS: Final = (OURS, *RIVALS, "random", "oracle")
ALL_METHODS: Final = (*METHODS, OVER_HTTP, *HASHED)


def unavailable(name: str) -> str | None:
    """The reason why a method cannot run here, or None."""
    if name == VOWPAL and find_spec("vowpalwabbit") is None:
        return "Vowpal Wabbit is not installed: pip install vowpalwabbit"
    return None


def tuned_settings(name: str, variant: str = WORLDS[0]) -> dict[str, Any]:
    """The recorded settings of a rival: of this variant, else of the plain shop of its size, else of `200x150`."""
    searches = json.loads(SETTINGS_FILE.read_text("utf-8"))[name]
    known = next(each for each in (variant, plain_name(variant), WORLDS[0]) if each in searches)
    return dict(searches[known]["settings"])


def build_player(
    name: str, shop: Shop, *, seed: int, variant_name: str = WORLDS[0], settings: PlayerSettings | None = None
) -> tuple[ShopPlayer, dict[str, Any]]:
    """A player and its settings for the report; `settings` replace the recorded ones of a tuned rival."""
    if name in TUNED:
        chosen = tuned_settings(name, variant_name) if settings is None else dict(settings)
        return TUNED[name](shop, seed, **chosen), chosen
    if name == OURS or name in HASHED:
        shipped = ShippedPlayer(shop.catalogue, seed=seed, hash_dimension=HASHED.get(name))
        return shipped, dict(shipped.settings)
    if name == OVER_HTTP:
        asked = HttpPlayer(shop.catalogue, seed=seed)
        return asked, dict(asked.settings)
    others: dict[str, Callable[[], ShopPlayer]] = {
        "popularity": lambda: PopularityPlayer(shop.catalogue, seed=seed),
        "random": lambda: RandomPlayer(seed),
        "oracle": lambda: OraclePlayer(shop.chances),
    }
    if name not in others:
        raise ValueError(f"there is no method {name!r}; choose one of {', '.join(ALL_METHODS)}")
    return others[name](), {}
