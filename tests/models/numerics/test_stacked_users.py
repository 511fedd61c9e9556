"""The bank behaves like a dictionary of users that is stored as tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metaban.models.numerics.stacked_users import FIRST_CAPACITY, UserBank

FIELDS: dict[str, tuple[int, ...]] = {"theta": (3,), "count": (), "past": (2, 2)}


def make_bank() -> UserBank:
    return UserBank(FIELDS, torch.float32, torch.device("cpu"))


def states(values: Sequence[float]) -> dict[str, torch.Tensor]:
    """States, each filled with one number."""
    return {
        name: torch.tensor(values).reshape(-1, *[1] * len(shape)).expand(len(values), *shape).clone()
        for name, shape in FIELDS.items()
    }


def assert_holds(bank: UserBank, expected: dict[str, int]) -> None:
    assert len(bank) == len(expected)
    assert set(bank.users) == set(expected)
    view = bank.view()
    for user, value in expected.items():
        row = bank.row(user)
        assert row is not None
        assert user in bank
        assert bank.users[row] == user
        for name, shape in FIELDS.items():
            wanted = torch.full(shape, float(value))
            assert torch.equal(bank.state(user)[name], wanted)
            assert torch.equal(view[name][row], wanted)
    assert all(column.shape == (len(expected), *FIELDS[name]) for name, column in view.items())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 8), max_size=5, unique=True), st.integers(0, 1000))))
def test_any_sequence_of_puts_and_removals(steps: list[tuple[bool, list[int], int]]) -> None:
    bank, expected = make_bank(), dict[str, int]()
    for adds, numbers, value in steps:
        users = [f"user {number}" for number in numbers]
        if adds:
            values = [value + place for place in range(len(users))]
            bank.put(users, states([float(each) for each in values]))
            expected |= dict(zip(users, values, strict=True))
        else:
            for user in users:
                if user in expected:
                    bank.remove(user)
                    del expected[user]
        assert_holds(bank, expected)


def test_putting_no_users() -> None:
    bank = make_bank()
    bank.put([], states([]))
    assert len(bank) == 0
    assert bank.capacity == FIRST_CAPACITY


def test_it_grows_and_keeps_all_users() -> None:
    bank = make_bank()
    count = 3 * FIRST_CAPACITY + 1
    for number in range(count):
        bank.put([f"user {number}"], states([float(number)]))
    assert_holds(bank, {f"user {number}": number for number in range(count)})
    assert bank.capacity == 4 * FIRST_CAPACITY


def test_one_put_larger_than_twice_the_capacity() -> None:
    bank = make_bank()
    users = [f"user {number}" for number in range(5 * FIRST_CAPACITY)]
    values = list(range(len(users)))
    bank.put(users, states([float(value) for value in values]))
    assert_holds(bank, dict(zip(users, values, strict=True)))


def test_states_of_another_dtype_are_accepted() -> None:
    bank = make_bank()
    bank.put(["a"], {name: tensor.double() for name, tensor in states([2.0]).items()})
    assert_holds(bank, {"a": 2})


def test_a_put_that_fails_leaves_the_bank_as_it_was() -> None:
    bank = make_bank()
    bank.put(["a"], states([1.0]))
    incomplete = {name: tensor for name, tensor in states([5.0, 5.0]).items() if name != "count"}
    with pytest.raises(KeyError):
        bank.put(["a", "b"], incomplete)
    with pytest.raises(ValueError, match="theta of 2 users"):
        bank.put(["a", "b"], {**states([5.0, 5.0]), "theta": torch.zeros(2, 4)})
    assert_holds(bank, {"a": 1})


def test_missing_users() -> None:
    bank = make_bank()
    assert bank.row("nobody") is None
    assert "nobody" not in bank
    with pytest.raises(KeyError):
        bank.remove("nobody")
    assert bank.view()["theta"].shape == (0, 3)


class TestTheView:
    """The view is cached between calls and always shows the current users."""

    def test_it_is_cached_until_users_change(self) -> None:
        bank = make_bank()
        bank.put(["a", "b"], states([1.0, 2.0]))
        view = bank.view()
        bank.put(["b"], states([5.0]))
        bank.put(["b", "a"], states([6.0, 7.0]))
        assert bank.view() is view
        assert view["theta"].tolist() == [[7.0] * 3, [6.0] * 3], "a view taken before shows the new state"
        assert_holds(bank, {"a": 7, "b": 6})

    @pytest.mark.parametrize("together", [1, 2], ids=["one", "two"])
    def test_newcomers(self, together: int) -> None:
        bank = make_bank()
        bank.put(["a"], states([1.0]))
        assert len(bank.view()["theta"]) == 1
        users = ["b", "c"][:together]
        bank.put(users, states([2.0] * together))
        assert_holds(bank, {"a": 1, **dict.fromkeys(users, 2)})

    def test_removals(self) -> None:
        bank = make_bank()
        bank.put(["a", "b", "c"], states([1.0, 2.0, 3.0]))
        for gone, left in (("c", {"a": 1, "b": 2}), ("a", {"b": 2}), ("b", {})):
            assert len(bank.view()["count"]) == len(left) + 1
            bank.remove(gone)
            assert_holds(bank, left)

    def test_a_user_added_after_a_removal(self) -> None:
        """The number of users is the same, but no row is where the old view has it."""
        bank = make_bank()
        bank.put(["a", "b"], states([1.0, 2.0]))
        bank.view()
        bank.remove("a")
        bank.put(["c"], states([3.0]))
        assert_holds(bank, {"b": 2, "c": 3})

    def test_growth(self) -> None:
        """Rows move to larger tensors; the view must show writes to the new ones."""
        bank = make_bank()
        expected = {f"user {number}": number for number in range(FIRST_CAPACITY)}
        bank.put(list(expected), states([float(value) for value in expected.values()]))
        assert bank.capacity == FIRST_CAPACITY
        before = bank.view()
        bank.put(["new"], states([1000.0]))
        assert bank.capacity == 2 * FIRST_CAPACITY
        assert_holds(bank, {**expected, "new": 1000})
        bank.put(["user 0"], states([2000.0]))
        assert_holds(bank, {**expected, "new": 1000, "user 0": 2000})
        assert before["count"][0] == 0


def test_putting_one_or_many_users_is_the_same() -> None:
    """In every field, also for existing users and another dtype."""
    users = ["a", "b", "c", "a", "d", "b"]
    generator = torch.Generator().manual_seed(0)
    many = {
        name: torch.randn(len(users), *shape, generator=generator, dtype=torch.float64)
        for name, shape in FIELDS.items()
    }
    alone, together = make_bank(), make_bank()
    for place, user in enumerate(users):
        alone.put([user], {name: value[place : place + 1] for name, value in many.items()})
    for half in (slice(0, 3), slice(3, 6)):
        values = {name: value[half] for name, value in many.items()}
        together.put(users[half], values)
    assert alone.users == together.users == ["a", "b", "c", "d"]
    for name, value in alone.view().items():
        assert torch.equal(value, together.view()[name])
        assert value.dtype == torch.float32
        assert torch.equal(value, many[name][[3, 5, 2, 4]].float()), "the last state of each user"


def test_a_row_that_was_put_is_a_copy() -> None:
    bank = make_bank()
    given = states([1.0])
    bank.put(["a"], given)
    for value in given.values():
        value += 1
    assert_holds(bank, {"a": 1})


def test_a_bank_of_numpy_arrays_holds_the_same() -> None:
    """Users added alone and together, removed, and more than the initial capacity."""
    tensors, arrays = make_bank(), UserBank(FIELDS, torch.float32, torch.device("cpu"), as_numpy=True)
    crowd = [f"user {number}" for number in range(FIRST_CAPACITY)]
    told = [(["a"], [1.0]), (["b", "a"], [2.0, 3.0]), ([], []), (crowd, [4.0] * len(crowd)), (["b"], [5.0])]
    for users, values in told:
        tensors.put(users, states(values))
        arrays.put(users, {name: value.numpy() for name, value in states(values).items()})
    for bank in (tensors, arrays):
        bank.remove("user 0")
    assert arrays.users == tensors.users
    for name, expected in tensors.view().items():
        found = arrays.view()[name]
        assert isinstance(found, np.ndarray)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, expected.numpy())
        np.testing.assert_array_equal(arrays.state("b")[name], tensors.state("b")[name].numpy())
