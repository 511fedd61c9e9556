"""From JSON features to inputs: every number in its place, every refusal with its path."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metaban.models.features import (
    FORM_IS_FIXED,
    NAMES_SHOWN,
    PROFILE_HASH_DIMENSION,
    PROFILE_MAX,
    FeatureError,
    FeatureLayout,
    InputNames,
    assemble,
    infer_layout,
    infer_profile_layout,
    profile_vector,
)

LARGEST = float(np.finfo(np.float32).max)
numbers = st.floats(-1e6, 1e6, width=32)
names = st.text(min_size=1, max_size=8)
named = st.dictionaries(names, st.one_of(numbers, st.booleans(), st.text(max_size=8)), max_size=6)


def infer(arms: Any, context: Any = None, **changes: Any) -> FeatureLayout:
    options = {"products": False, "intercept": False, "hash_dimension": 16, "max_dimension": 4096, **changes}
    return infer_layout(arms, context, **options)


def assembled(arms: Any, context: Any = None, **changes: Any) -> np.ndarray:
    return assemble(infer(arms, context, **changes), arms, context)


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[Any], Any]:
    count = draw(st.integers(1, 4))

    def vector() -> Any:
        length = draw(st.integers(1, 5))
        return st.lists(numbers, min_size=length, max_size=length)

    arm = named if draw(st.booleans()) else vector()
    context = draw(st.sampled_from([st.none(), named, vector()]))
    return draw(st.lists(arm, min_size=count, max_size=count)), draw(context)


class TestLayout:
    @settings(max_examples=80, deadline=None)
    @given(requests(), st.booleans(), st.booleans())
    def test_a_request_fits_its_inferred_layout(
        self, request_: tuple[list[Any], Any], products: bool, intercept: bool
    ) -> None:
        arms, context = request_
        layout = infer(arms, context, products=products, intercept=intercept)
        inputs = assemble(layout, arms, context)
        assert inputs.dtype == np.float32
        assert inputs.shape == (len(arms), layout.dimension)
        assert np.isfinite(inputs).all()
        np.testing.assert_array_equal(inputs, assemble(layout, arms, context))
        for place, arm in enumerate(arms):  # an arm's input does not depend on the other arms
            np.testing.assert_array_equal(assemble(layout, [arm], context)[0], inputs[place])

    @settings(max_examples=40, deadline=None)
    @given(requests(), st.booleans(), st.booleans())
    def test_a_stored_layout_is_restored(
        self, request_: tuple[list[Any], Any], products: bool, intercept: bool
    ) -> None:
        layout = infer(*request_, products=products, intercept=intercept)
        assert FeatureLayout.from_json(json.loads(json.dumps(layout.to_json()))) == layout

    def test_more_inputs_than_allowed(self) -> None:
        infer([[1.0] * 8], [1.0] * 3, products=True, max_dimension=8 + 3 + 24)
        with pytest.raises(FeatureError, match="36 inputs, more than the 35") as refused:
            infer([[1.0] * 8], [1.0] * 3, products=True, intercept=True, max_dimension=8 + 3 + 24)
        assert refused.value.field == ("arms", 0, "features")


class TestPlaces:
    def test_lists_are_used_as_they_are(self) -> None:
        inputs = assembled([[1.0, 2.0], [3.0, 4.0]], [5.0, 6.0, 7.0], intercept=True)
        assert inputs.tolist() == [[1, 2, 5, 6, 7, 1], [3, 4, 5, 6, 7, 1]]

    def test_products_of_each_arm_feature_with_each_context_feature(self) -> None:
        inputs = assembled([[1.0, 2.0], [3.0, 4.0]], [5.0, 7.0], products=True, intercept=True)
        assert inputs.tolist() == [[1, 2, 5, 7, 5, 7, 10, 14, 1], [3, 4, 5, 7, 15, 21, 20, 28, 1]]

    @settings(max_examples=60, deadline=None)
    @given(named, named)
    def test_products_of_named_features(self, arm: Any, context: Any) -> None:
        inputs = assembled([arm], context, products=True)[0]
        arm_part, context_part, products = inputs[:16], inputs[16:32], inputs[32:]
        np.testing.assert_allclose(products.reshape(16, 16), np.outer(arm_part, context_part), rtol=1e-6)

    def test_products_need_a_context(self) -> None:
        assert not infer([[1.0]], None, products=True).products

    @settings(max_examples=60, deadline=None)
    @given(st.dictionaries(names, numbers, max_size=6), names)
    def test_named_values_add_up(self, values: dict[str, float], extra: str) -> None:
        layout = infer([{}])
        whole = assemble(layout, [values], None)[0]
        parts = sum((assemble(layout, [{name: value}], None)[0] for name, value in values.items()), np.zeros(16))
        np.testing.assert_allclose(whole, parts, rtol=1e-4, atol=1.0)
        place = np.flatnonzero(assemble(layout, [{extra: 1.0}], None)[0])
        assert len(place) == 1
        twice = assemble(layout, [{extra: 2.0}], None)[0]
        assert abs(twice[place[0]]) == 2

    def test_booleans_are_numbers_and_strings_are_categories(self) -> None:
        layout = infer([{}], hash_dimension=4096)
        yes, one, no, text, other = (
            assemble(layout, [{"x": value}], None)[0] for value in (True, 1.0, False, "1", "2")
        )
        np.testing.assert_array_equal(yes, one)
        assert not no.any()
        assert np.abs(text).sum() == np.abs(other).sum() == 1
        assert not np.array_equal(text, one)
        assert not np.array_equal(text, other)

    def test_hashed_positions_are_fixed(self) -> None:
        """Stored learners depend on these positions."""
        inputs = assembled([{"price": 2.5, "colour": "red", "new": True}], hash_dimension=8)
        assert inputs.tolist() == [[0.0, -2.5, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0]]

    @settings(max_examples=40, deadline=None)
    @given(named)
    def test_the_order_of_names_does_not_matter(self, values: Any) -> None:
        layout = infer([{}])
        backwards = dict(reversed(values.items()))
        np.testing.assert_allclose(
            assemble(layout, [values], None), assemble(layout, [backwards], None), rtol=1e-4, atol=1.0
        )


LISTS = FeatureLayout(arm=2, context=3, arm_named=False, context_named=False, products=False, intercept=True)
NAMED = replace(LISTS, arm=16, context=16, arm_named=True, context_named=True)


class TestRefusals:
    @pytest.mark.parametrize(
        ("layout", "arms", "context", "field", "told"),
        [
            (LISTS, [[1.0, 2.0], [1.0]], [1.0] * 3, ("arms", 1, "features"), "2 numbers, not 1"),
            (LISTS, [[1.0, 2.0, 3.0]], [1.0] * 3, ("arms", 0, "features"), "2 numbers, not 3"),
            (LISTS, [[1.0, 2.0], {"x": 1.0}], [1.0] * 3, ("arms", 1, "features"), "a list of 2 numbers"),
            (LISTS, [[1.0, 2.0]], None, ("context",), "needs a context"),
            (LISTS, [[1.0, 2.0]], [1.0], ("context",), "3 numbers, not 1"),
            (LISTS, [[1.0, 2.0]], {"x": 1.0}, ("context",), "a list of 3 numbers"),
            (NAMED, [{"x": 1.0}, [1.0]], {}, ("arms", 1, "features"), "an object of named values"),
            (NAMED, [{"x": 1.0}], [1.0], ("context",), "an object of named values"),
            (NAMED, [{"x": 1.0}], None, ("context",), "needs a context"),
            (replace(LISTS, context=0), [[1.0, 2.0]], [1.0], ("context",), "takes no context"),
            (replace(LISTS, context=0), [[1.0, 2.0]], {"x": 1.0}, ("context",), "takes no context"),
        ],
    )
    def test_errors_name_the_field(
        self, layout: FeatureLayout, arms: Any, context: Any, field: tuple[str | int, ...], told: str
    ) -> None:
        with pytest.raises(FeatureError, match=told) as refused:
            assemble(layout, arms, context)
        assert refused.value.field == field
        assert refused.value.message.endswith(FORM_IS_FIXED), "it says what to do"

    @pytest.mark.parametrize(
        ("arms", "context", "field"),
        [
            ([[1.0, 1.0], [1.0, LARGEST]], [2.0, 0.0], ("arms", 1, "features")),
            ([{"a": 1.0}, {"a": 1e30}], {"b": 1e30}, ("arms", 1, "features")),
        ],
        ids=["lists", "named"],
    )
    def test_products_too_large_for_the_learner(self, arms: Any, context: Any, field: tuple[str | int, ...]) -> None:
        """Each number fits, but their product does not and would spoil every score of the request."""
        with pytest.raises(FeatureError, match="too large") as refused:
            assembled(arms, context, products=True)
        assert refused.value.field == field

    def test_named_values_that_add_up_to_too_much(self) -> None:
        heavy = {f"name {number}": LARGEST for number in range(10)}
        with pytest.raises(FeatureError, match="too large") as refused:
            assembled([{"x": 1.0}, heavy], hash_dimension=1)
        assert refused.value.field == ("arms", 1, "features")
        with pytest.raises(FeatureError, match="too large") as refused:
            assembled([[1.0]], heavy, hash_dimension=1)
        assert refused.value.field == ("context",)


class TestNames:
    """Columns have the names the client sent."""

    def test_of_lists(self) -> None:
        layout = infer([[1, 2]], [3, 4, 5], products=True, intercept=True)
        names = [name for name, _ in InputNames(layout, [3, 4, 5]).of([1, 2], range(layout.dimension))]
        arm, context = ["arm[0]", "arm[1]"], ["context[0]", "context[1]", "context[2]"]
        products = [f"{a} × {c}" for a in arm for c in context]
        assert names == [*arm, *context, *products, "intercept"]

    @settings(max_examples=100, deadline=None, derandomize=True)
    @given(named.filter(bool), named.filter(bool), st.sampled_from([1, 3, 32]))
    def test_of_named_values(self, arm: dict[str, Any], context: dict[str, Any], places: int) -> None:
        """A value alone at its position has the sent value, whatever its hash sign."""
        layout = infer([arm], context, products=True, hash_dimension=places)
        [row] = assemble(layout, [arm], context)
        told = InputNames(layout, context).of(arm, range(layout.dimension))
        assert len(told) == layout.dimension
        sent = {
            (f"{name}={value}" if isinstance(value, str) else name): 1.0 if isinstance(value, str) else float(value)
            for name, value in arm.items()
        }
        found = set()
        for column in range(places):
            name, sign = told[column]
            if name in sent and len(sent) == len(arm):
                assert sign * row[column] == pytest.approx(sent[name], rel=1e-6)
                found.add(name)
        if places == 32 and len(sent) == len(arm) and not any("|" in name for name, _ in told[:places]):
            assert found == set(sent)
        for place in range(places * places):
            name, sign = told[2 * places + place]
            (first, one), (second, other) = told[place // places], told[places + place % places]
            assert (name, sign) == (f"{first} × {second}", one * other)

    def test_several_names_at_one_position(self) -> None:
        arm = {f"n{number}": 1.0 for number in range(9)}
        layout = infer([arm], hash_dimension=1)
        [(name, _)] = InputNames(layout, None).of(arm, [0])
        assert name.split(" | ") == [*list(arm)[:NAMES_SHOWN], "…"]
        few = {"a": 1.0, "b": "x"}
        assert [name for name, _ in InputNames(layout, None).of(few, [0])] == ["a | b=x"]

    @settings(max_examples=100, deadline=None, derandomize=True)
    @given(named.filter(bool), named.filter(bool), st.sampled_from([1, 3, 32]))
    def test_columns_of_absent_features_are_0(self, arm: dict[str, Any], context: dict[str, Any], places: int) -> None:
        layout = infer([arm], context, products=True, intercept=True, hash_dimension=places)
        names, [row] = InputNames(layout, context), assemble(layout, [arm], context)
        present = names.present(arm)
        assert present.shape == (layout.dimension - 1,)
        assert (row[:-1][~present] == 0).all()
        arms, contexts, products = np.split(present, [places, 2 * places])
        assert 1 <= arms.sum() <= len(arm)
        assert 1 <= contexts.sum() <= len(context)
        assert (products.reshape(places, places) == np.outer(arms, contexts)).all()

    def test_all_columns_of_lists_are_present(self) -> None:
        layout = infer([[0, 2]], [0, 4, 5], products=True)
        assert InputNames(layout, [0, 4, 5]).present([0, 2]).all()


# ---------------------------------------------------------------------- profiles


def test_a_list_is_used_as_it_is() -> None:
    layout = infer_profile_layout([1.0, 2.0, 3.0])
    assert layout == FeatureLayout(3, 0, False, False, False, False)
    found = profile_vector(layout, [0.5, -2.0, 1e30])
    assert found.dtype == np.float64
    assert found.tolist() == np.float32([0.5, -2.0, 1e30]).astype(np.float64).tolist()


def test_names_are_hashed_like_those_of_arms() -> None:
    told = {"age": 41.0, "country": "NL", "member": True}
    layout = infer_profile_layout(told)
    found = profile_vector(layout, told)
    assert len(found) == layout.dimension == PROFILE_HASH_DIMENSION
    assert np.array_equal(found, assemble(layout, [told], None)[0])
    assert sorted(abs(found[found != 0])) == [1.0, 1.0, 41.0]
    # Absent names count as 0; names not seen before have a position.
    fewer = profile_vector(layout, {"age": 41.0, "colour": "red"})
    assert (found != fewer).any()


def test_length_limit() -> None:
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
def test_invalid_profiles_are_refused(first: Any, told: Any, why: str) -> None:
    with pytest.raises(FeatureError, match=why) as refused:
        profile_vector(infer_profile_layout(first or told), told)
    assert refused.value.field == ("user_features",)
