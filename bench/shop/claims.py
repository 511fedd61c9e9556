"""Claims about the shop as bars, computed from the results of the variants that were run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np

from metaban.bench.core.report import Bar
from metaban.bench.shop.players import FACTORS, HASHED, OURS, OVER_HTTP, RIVALS
from metaban.bench.shop.variants import FULL_SLATES, WORLD_SWITCHES, plain_name, switch_of

#: Slates at the start of a run that have a claim of their own.
FIRST_SLATES: Final = 500

#: Limits of clicks of the shipped learner over those of the best rival: mean of all worlds and lengths, smallest, and
#: mean of the first slates of all worlds.
MEAN_RATIO_LIMIT: Final = 1.10
SMALLEST_RATIO_LIMIT: Final = 1.00
FIRST_RATIO_LIMIT: Final = 0.97

#: Limits without ids, over the best rival; without metadata, over `icf-thompson`; and with clicks only, over the
#: shipped learner's own clicks where zeros are sent.
NO_IDS_LIMIT: Final = 1.05
NO_FEATURES_LIMIT: Final = 1.00
CLICKS_ONLY_LIMIT: Final = 0.95

#: Limit of the difference between clicks through HTTP and in one process, as a share of the latter.
OVER_HTTP_LIMIT: Final = 0.03

#: Limit of the difference between clicks with more places for names and with the default, as a share of the latter.
HASHED_LIMIT: Final = 0.05


def lengths(slates: int) -> list[int]:
    """Slates over which clicks are compared in a run: its first 3,000 if it has more, and all."""
    return [FULL_SLATES, slates] if slates > FULL_SLATES else [slates]


def prefixes(slates: int) -> list[int]:
    """Slates over which clicks are counted, all from the start of a run, in ascending order."""
    return sorted({min(FIRST_SLATES, slates), *lengths(slates)})


def shop_bars(variants: Mapping[str, Any], *, quick: bool) -> list[Bar]:
    """The claims that these results are about; names say which worlds and lengths were run."""
    worlds = {name: found for name, found in variants.items() if switch_of(name) in WORLD_SWITCHES}
    bars = [*_world_bars(worlds), *_first_bars(worlds)]
    for name, found in variants.items():
        if switch_of(name) == "no-ids":
            bars += _no_ids_bars(name, found)
        if switch_of(name) == "no-features":
            bars += _no_features_bars(name, found)
        if switch_of(name) == "clicks-only":
            bars += _clicks_only_bars(name, found, variants.get(plain_name(name)))
        bars += [*_over_http_bars(name, found), *_hashed_bars(name, found)]
    note = ", quick" if quick else ""
    return [Bar(f"shop: {bar.name}{note}", bar.value, bar.sense, bar.limit) for bar in bars]


def _world_bars(worlds: Mapping[str, Any]) -> list[Bar]:
    """The mean and the smallest ratio of all worlds and lengths."""
    ratios = {
        (name, length): float(ratio)
        for name, found in worlds.items()
        for length in lengths(found["slates"])
        if (ratio := found["comparisons"][str(length)]["ratio"]) is not None
    }
    if not ratios:
        return []
    names = ", ".join(dict.fromkeys(name for name, _ in ratios))
    sizes = " and ".join(f"{length:,}" for length in sorted({length for _, length in ratios}))
    count = f"{len(ratios)} ratios" if len(ratios) > 1 else "1 ratio"
    (where, length), smallest = min(ratios.items(), key=lambda each: each[1])
    rival = _best_rival(worlds.values())
    return [
        Bar(
            f"clicks / {rival}, mean of {count} ({names}; {sizes} slates)",
            float(np.mean(list(ratios.values()))),
            ">=",
            MEAN_RATIO_LIMIT,
        ),
        Bar(
            f"clicks / {rival}, smallest of {count} ({where}, {length:,} slates)", smallest, ">=", SMALLEST_RATIO_LIMIT
        ),
    ]


def _first_bars(worlds: Mapping[str, Any]) -> list[Bar]:
    """The mean ratio over the first slates of runs that have more."""
    ratios = {
        name: float(ratio)
        for name, found in worlds.items()
        if found["slates"] > FIRST_SLATES and (ratio := found["comparisons"][str(FIRST_SLATES)]["ratio"]) is not None
    }
    if not ratios:
        return []
    name = (
        f"clicks in the first {FIRST_SLATES} slates / {_best_rival(worlds.values())} in these slates, "
        f"mean of the worlds {', '.join(ratios)}"
    )
    return [Bar(name, float(np.mean(list(ratios.values()))), ">=", FIRST_RATIO_LIMIT)]


def _no_ids_bars(name: str, found: Mapping[str, Any]) -> list[Bar]:
    compared = found["comparisons"][str(found["slates"])]
    if compared["ratio"] is None:
        return []
    rival = f"{_best_rival([found])} ({compared['best_baseline']})"
    return [Bar(f"{name}: clicks / {rival}, {found['slates']:,} slates", compared["ratio"], ">=", NO_IDS_LIMIT)]


def _no_features_bars(name: str, found: Mapping[str, Any]) -> list[Bar]:
    methods = found["methods"]
    if OURS not in methods or FACTORS not in methods or not methods[FACTORS]["clicks_mean"]:
        return []
    ratio = methods[OURS]["clicks_mean"] / methods[FACTORS]["clicks_mean"]
    return [Bar(f"{name}: clicks / {FACTORS}, {found['slates']:,} slates", ratio, ">=", NO_FEATURES_LIMIT)]


def _clicks_only_bars(name: str, found: Mapping[str, Any], plain: Mapping[str, Any] | None) -> list[Bar]:
    """Clicks over those of the plain shop, in as many slates of the same seeds."""
    slates = str(found["slates"])
    if plain is None or OURS not in found["methods"] or OURS not in plain["methods"]:
        return []
    sent = plain["methods"][OURS]["prefixes"].get(slates)
    if sent is None or not sent["clicks_mean"]:
        return []
    ratio = found["methods"][OURS]["clicks_mean"] / sent["clicks_mean"]
    what = f"{name}: clicks / own clicks in {plain_name(name)}, where zeros are sent"
    return [Bar(f"{what}, {found['slates']:,} slates", ratio, ">=", CLICKS_ONLY_LIMIT)]


def _over_http_bars(name: str, found: Mapping[str, Any]) -> list[Bar]:
    methods = found["methods"]
    if OURS not in methods or OVER_HTTP not in methods or not methods[OURS]["clicks_mean"]:
        return []
    difference = abs(methods[OVER_HTTP]["clicks_mean"] / methods[OURS]["clicks_mean"] - 1)
    what = f"{name}: difference of {OVER_HTTP} to {OURS}, as a share of its clicks"
    return [Bar(f"{what}, {found['slates']:,} slates", difference, "<=", OVER_HTTP_LIMIT)]


def _hashed_bars(name: str, found: Mapping[str, Any]) -> list[Bar]:
    """The largest difference that the number of places for names makes."""
    clicks = {method: row["clicks_mean"] for method, row in found["methods"].items() if method in (OURS, *HASHED)}
    if not clicks.get(OURS) or len(clicks) == 1:
        return []
    ratios = {method: abs(of_method / clicks[OURS] - 1) for method, of_method in clicks.items()}
    farthest = max(ratios, key=lambda method: ratios[method])
    what = f"{name}: largest difference to {OURS} by places for names ({farthest}), as a share of its clicks"
    return [Bar(f"{what}, {found['slates']:,} slates", ratios[farthest], "<=", HASHED_LIMIT)]


def _best_rival(results: Iterable[Mapping[str, Any]]) -> str:
    ran = all(name in found["methods"] for found in results for name in RIVALS)
    return "best rival" if ran else "best rival that was run"
