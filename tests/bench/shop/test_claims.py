"""Bars of the shop, from results made by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from metaban.bench.shop.claims import lengths, prefixes, shop_bars
from metaban.bench.shop.players import OURS, RIVALS
from metaban.bench.shop.variants import WORLDS


def results(slates: int, ratios: Mapping[int, float | None], *, clicks: float = 1.0, **others: float) -> dict[str, Any]:
    """Results of a variant: ratio to the best rival over each prefix, and clicks of some methods over the whole run."""

    def row(mean: float) -> dict[str, Any]:
        return {"clicks_mean": mean, "prefixes": {str(length): {"clicks_mean": mean} for length in prefixes(slates)}}

    methods = {OURS: row(clicks)} | {name: row(0.5) for name in RIVALS}
    return {
        "slates": slates,
        "methods": methods | {name.replace("_", "-"): row(mean) for name, mean in others.items()},
        "comparisons": {str(n): {"best_baseline": "vw-ids", "ratio": ratio} for n, ratio in ratios.items()},
    }


def found(variants: Mapping[str, Any], *, quick: bool = False) -> list[tuple[str, float, float, bool]]:
    bars = shop_bars(variants, quick=quick)
    assert all(bar.sense == ("<=" if "difference" in bar.name else ">=") for bar in bars)
    return [(bar.name.removeprefix("shop: "), round(bar.value, 6), bar.limit, bar.holds) for bar in bars]


def test_ten_ratios_of_five_worlds() -> None:
    worlds = {name: results(10_000, {500: 0.9, 3_000: 1.1, 10_000: 1.3}) for name in WORLDS}
    worlds["1000x943"] = results(10_000, {500: 1.2, 3_000: 0.99, 10_000: 1.3})
    listed = ", ".join(WORLDS)
    assert found(worlds) == [
        (f"clicks / best rival, mean of 10 ratios ({listed}; 3,000 and 10,000 slates)", 1.189, 1.10, True),
        ("clicks / best rival, smallest of 10 ratios (1000x943, 3,000 slates)", 0.99, 1.0, False),
        (
            "clicks in the first 500 slates / best rival in these slates, mean of the worlds " + listed,
            0.96,
            0.97,
            False,
        ),
    ]


@pytest.mark.parametrize(("clicks", "difference", "holds"), [(0.96, 0.04, True), (1.06, 0.06, False)])
def test_the_number_of_places_for_names_makes_little_difference(clicks: float, difference: float, holds: bool) -> None:
    hashed = {"metaban_hash_64": 1.01, "metaban_hash_1024": clicks}
    name = "200x150: largest difference to metaban by places for names (metaban-hash-1024), as a share of its clicks"
    expected = (f"{name}, 3,000 slates", difference, 0.05, holds)
    assert found({"200x150": results(3_000, {500: None, 3_000: None}, **hashed)}) == [expected]


def test_a_partial_run_is_named_after_what_it_ran() -> None:
    assert lengths(10_000) == [3_000, 10_000]
    assert lengths(3_000) == [3_000]
    assert prefixes(3_000) == [500, 3_000]
    assert lengths(300) == prefixes(300) == [300]
    worlds = {"200x150": results(600, {500: 1.0, 600: 1.1}), "60x40": results(600, {500: None, 600: None})}
    assert found(worlds) == [
        ("clicks / best rival, mean of 1 ratio (200x150; 600 slates)", 1.1, 1.10, True),
        ("clicks / best rival, smallest of 1 ratio (200x150, 600 slates)", 1.1, 1.0, True),
        ("clicks in the first 500 slates / best rival in these slates, mean of the worlds 200x150", 1.0, 0.97, True),
    ]
    del worlds["200x150"]["methods"]["linucb-hybrid"]
    assert found(worlds, quick=True)[0][0] == (
        "clicks / best rival that was run, mean of 1 ratio (200x150; 600 slates), quick"
    )
    assert found({"60x40": worlds["60x40"]}) == []


def test_other_variants_have_claims_of_their_own() -> None:
    short = {500: 1.0, 3_000: 1.04}
    variants = {
        "200x150-no-features": results(3_000, short, clicks=1.1, icf_thompson=1.0),
        "200x150-no-ids": results(3_000, short),
        "200x150-explained": results(3_000, short),
        "200x150-clicks-only": results(3_000, short, clicks=0.97),
    }
    expected = [
        ("200x150-no-features: clicks / icf-thompson, 3,000 slates", 1.1, 1.0, True),
        ("200x150-no-ids: clicks / best rival (vw-ids), 3,000 slates", 1.04, 1.05, False),
    ]
    assert found(variants) == expected
    # Clicks only are compared with the first 3,000 slates of the plain shop of the same size.
    plain = results(10_000, {500: None, 3_000: None, 10_000: None}, clicks=7.0)
    plain["methods"][OURS]["prefixes"]["3000"]["clicks_mean"] = 1.0
    assert found({**variants, "1000x943": plain}) == expected
    assert found({**variants, "200x150": plain}) == [
        *expected,
        ("200x150-clicks-only: clicks / own clicks in 200x150, where zeros are sent, 3,000 slates", 0.97, 0.95, True),
    ]
    del variants["200x150-no-features"]["methods"]["icf-thompson"]
    assert found({"200x150-no-features": variants["200x150-no-features"]}) == []


@pytest.mark.parametrize("slates", [2_000, 10_000])
def test_clicks_only_are_compared_over_as_many_slates(slates: int) -> None:
    ratios = dict.fromkeys(prefixes(slates))
    variants = {"60x40": results(3_000, {500: None, 3_000: None}), "60x40-clicks-only": results(slates, ratios)}
    assert found(variants) == []


@pytest.mark.parametrize(("clicks", "difference", "holds"), [(1.04, 0.04, False), (0.98, 0.02, True)])
def test_clicks_through_http_are_near_those_of_one_process(clicks: float, difference: float, holds: bool) -> None:
    variants = {"200x150": results(3_000, {500: None, 3_000: None}, metaban_http=clicks)}
    name = "200x150: difference of metaban-http to metaban, as a share of its clicks, 3,000 slates"
    assert found(variants) == [(name, difference, 0.03, holds)]
