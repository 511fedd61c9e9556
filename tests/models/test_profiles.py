"""Profiles as numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from models.features import FeatureError, FeatureLayout, assemble
from models.profiles import PROFILE_HASH_DIMENSION, PROFILE_MAX, infer_profile_layout, profile_vector


def test_a_list_is_taken_as_it_is() -> None:
    layout = infer_profile_layout([1.0, 2.0, 3.0])
    assert layout == FeatureLayout(3, 0, False, False, False, False)
    found = profile_vector(layout, [0.5, -2.0, 1e30])
    assert found.dtype == np.float64
    assert found.tolist() == np.float32([0.5, -2.0, 1e30]).astype(np.float64).tolist()


def test_names_are_hashed_as_those_of_arms_are() -> None:
    told = {"age": 41.0, "country": "NL", "member": True}
    layout = infer_profile_layout(told)
    found = profile_vector(layout, told)
    assert len(found) == layout.dimension == PROFILE_HASH_DIMENSION
    assert np.array_equal(found, assemble(layout, [told], None)[0])
    assert sorted(abs(found[found != 0])) == [1.0, 1.0, 41.0]
    # Names that were not told count as 0, those never seen before have a place.
    fewer = profile_vector(layout, {"age": 41.0, "colour": "red"})
    assert (found != fewer).any()


def test_as_long_as_allowed() -> None:
    assert infer_profile_layout([0.0] * PROFILE_MAX).dimension == PROFILE_MAX
    many = {f"name {number}": 1.0 for number in range(2 * PROFILE_MAX)}
    assert infer_profile_layout(many).dimension == PROFILE_HASH_DIMENSION


@pytest.mark.parametrize(
    ("first", "told", "why"),
    [
        ([1.0, 2.0], [1.0], "takes 2 numbers, not 1"),
        ([1.0, 2.0], [1.0, 2.0, 3.0], "takes 2 numbers, not 3"),
        ([1.0, 2.0], {"a": 1.0}, "takes a list of 2 numbers"),
        ({"a": 1.0}, [1.0], "takes an object of named values"),
        ([1.0, 2.0], [1.0, 1e39], "too large"),
        ({"a": 1.0}, {"a": 1e39}, "too large"),
        (None, [0.0] * (PROFILE_MAX + 1), "at most 256"),
    ],
)
def test_what_does_not_fit(first: Any, told: Any, why: str) -> None:
    with pytest.raises(FeatureError, match=why) as refused:
        profile_vector(infer_profile_layout(first or told), told)
    assert refused.value.field == ("user_features",)
