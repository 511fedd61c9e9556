"""The states of all users of the pool, one array for each field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import torch

from metaban.models.numerics.arrays import Array, Arrays, cast, library_of, on_device, zeros

#: Rows of an empty bank.
FIRST_CAPACITY = 64


@final
class UserBank:
    """Users in rows, learner fields in columns.

    Rows are contiguous, so that the whole pool is a view. Capacity doubles when it is exhausted, so that each row is
    copied about once. Removing a user moves the last row into the gap.
    """

    def __init__(
        self,
        fields: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
        *,
        as_numpy: bool = False,
    ) -> None:
        """Holds tensors, or with `as_numpy` (CPU only) numpy arrays; input and output are of the same type."""
        nothing = torch.empty(0, dtype=dtype, device=device)
        self._like: Array = nothing.numpy() if as_numpy else nothing
        self._columns = {name: zeros((FIRST_CAPACITY, *shape), self._like) for name, shape in fields.items()}
        self._capacity = FIRST_CAPACITY
        self._view: Arrays | None = None
        self._rows: dict[str, int] = {}
        self._users: list[str] = []

    def __len__(self) -> int:
        return len(self._users)

    def __contains__(self, user: str) -> bool:
        return user in self._rows

    @property
    def users(self) -> Sequence[str]:
        """User ids in the order of their rows."""
        return self._users

    @property
    def capacity(self) -> int:
        """Number of rows allocated."""
        return self._capacity

    def row(self, user: str) -> int | None:
        """The row of a user; valid until a user is removed."""
        return self._rows.get(user)

    def put(self, users: Sequence[str], states: Arrays) -> None:
        """Write users' states, each field [B, …]; new users get the next rows."""
        for name, column in self._columns.items():  # checked first: no row may be left unwritten
            if states[name].shape != (len(users), *column.shape[1:]):
                raise ValueError(f"{name} of {len(users)} users cannot have the shape {tuple(states[name].shape)}")
        fresh = [user for user in dict.fromkeys(users) if user not in self._rows]
        self._reserve(len(self._users) + len(fresh))
        for user in fresh:
            self._rows[user] = len(self._users)
            self._users.append(user)
        if fresh:
            self._view = None
        rows = [self._rows[user] for user in users]
        if len(rows) == 1:  # the usual case; a copy without an index is several times cheaper
            for name, column in self._columns.items():
                column[rows[0]] = states[name][0]
            return
        library = library_of(self._like)
        index = library.asarray(rows, dtype=library.int64, **on_device(self._like))
        for name, column in self._columns.items():
            column[index] = cast(states[name], column)

    def remove(self, user: str) -> None:
        """Drop a user."""
        row, last = self._rows.pop(user), len(self._users) - 1
        if row != last:
            for column in self._columns.values():
                column[row] = column[last]
            moved = self._users[last]
            self._users[row], self._rows[moved] = moved, row
        self._users.pop()
        self._view = None

    def view(self) -> Arrays:
        """Every field of every user, [P, …], without a copy."""
        if self._view is None:
            self._view = {name: column[: len(self._users)] for name, column in self._columns.items()}
        return self._view

    def state(self, user: str) -> Arrays:
        """One user's fields, without a copy."""
        row = self._rows[user]
        return {name: column[row] for name, column in self._columns.items()}

    def _reserve(self, rows: int) -> None:
        capacity = self.capacity
        while capacity < rows:
            capacity *= 2
        if capacity > self.capacity:
            used = len(self._users)
            self._columns = {name: _grown(column, capacity, used) for name, column in self._columns.items()}
            self._capacity, self._view = capacity, None


def _grown(column: Array, capacity: int, used: int) -> Array:
    larger = zeros((capacity, *column.shape[1:]), column)
    larger[:used] = column[:used]
    return larger
