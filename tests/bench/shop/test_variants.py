"""Names of variants say what is in them."""

from __future__ import annotations

import pytest

from metaban.bench.shop.variants import plain_name, switch_of, variant_of
from metaban.bench.worlds.shop import ShopVariant


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("200x150", ShopVariant()),
        ("1000x943", ShopVariant(items=1_000, users=943)),
        ("200x150-arrivals", ShopVariant(arrivals=True)),
        ("60x40-no-features", ShopVariant(items=60, users=40, features=False)),
        ("200x150-no-ids", ShopVariant(ids=False)),
        ("200x150-explained", ShopVariant(explained=True)),
        ("20x1-clicks-only", ShopVariant(items=20, users=1, clicks_only=True)),
    ],
)
def test_a_name_is_items_users_and_a_switch(name: str, variant: ShopVariant) -> None:
    assert variant_of(name) == variant
    assert plain_name(name) == f"{variant.items}x{variant.users}"
    assert name == "-".join(filter(None, [plain_name(name), switch_of(name)]))


@pytest.mark.parametrize("name", ["", "plain", "200", "200x", "x150", "200x150-", "200x150-magic", "200x150arrivals"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"write items x users as in 200x150, then a dash and one of arrivals"):
        variant_of(name)


@pytest.mark.parametrize("name", ["19x150", "1683x150", "200x0", "200x944"])
def test_the_data_has_to_be_large_enough(name: str) -> None:
    with pytest.raises(ValueError, match=r"20 to 1682 items and 1 to 943 users"):
        variant_of(name)
