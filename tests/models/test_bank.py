"""The bank is a dictionary of users that happens to be tensors."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.bank import FIRST_CAPACITY, UserBank

FIELDS: dict[str, tuple[int, ...]] = {"theta": (3,), "count": (), "past": (2, 2)}


def make_bank() -> UserBank:
    return UserBank(FIELDS, torch.float32, torch.device("cpu"))


def states(values: Sequence[float]) -> dict[str, torch.Tensor]:
    """States that are filled with a number each."""
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
        assert bank.events(user) == value
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
            bank.put(users, states([float(each) for each in values]), values)
            expected |= dict(zip(users, values, strict=True))
        else:
            for user in users:
                if user in expected:
                    bank.remove(user)
                    del expected[user]
        assert_holds(bank, expected)


def test_nobody_may_be_put() -> None:
    bank = make_bank()
    bank.put([], states([]), [])
    assert len(bank) == 0
    assert bank.capacity == FIRST_CAPACITY


def test_it_grows_and_keeps_everyone() -> None:
    bank = make_bank()
    count = 3 * FIRST_CAPACITY + 1
    for number in range(count):
        bank.put([f"user {number}"], states([float(number)]), [number])
    assert_holds(bank, {f"user {number}": number for number in range(count)})
    assert bank.capacity == 4 * FIRST_CAPACITY


def test_one_put_larger_than_twice_the_capacity() -> None:
    bank = make_bank()
    users = [f"user {number}" for number in range(5 * FIRST_CAPACITY)]
    values = list(range(len(users)))
    bank.put(users, states([float(value) for value in values]), values)
    assert_holds(bank, dict(zip(users, values, strict=True)))


def test_states_of_another_precision_are_taken() -> None:
    bank = make_bank()
    bank.put(["a"], {name: tensor.double() for name, tensor in states([2.0]).items()}, [2])
    assert_holds(bank, {"a": 2})


def test_a_put_that_fails_leaves_the_bank_as_it_was() -> None:
    bank = make_bank()
    bank.put(["a"], states([1.0]), [1])
    incomplete = {name: tensor for name, tensor in states([5.0, 5.0]).items() if name != "count"}
    with pytest.raises(KeyError):
        bank.put(["a", "b"], incomplete, [5, 5])
    with pytest.raises(ValueError, match="theta of 2 users"):
        bank.put(["a", "b"], {**states([5.0, 5.0]), "theta": torch.zeros(2, 4)}, [5, 5])
    assert_holds(bank, {"a": 1})


def test_who_is_not_there() -> None:
    bank = make_bank()
    assert bank.row("nobody") is None
    assert "nobody" not in bank
    with pytest.raises(KeyError):
        bank.remove("nobody")
    assert bank.view()["theta"].shape == (0, 3)
