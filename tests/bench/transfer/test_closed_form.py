"""Batched closed forms of one vector per target and sources, against a solver on the union of samples."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from metaban.bench.transfer.closed_form import PooledLosses
from metaban.models.transfer.task_modeling import TransferSettings, draw_subsets, model_transfer


class World:
    """Sources of a few samples each."""

    def __init__(self, sources: int, inputs: int, seed: int, *, train: int = 12, spread: float = 0.5) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        target = self.normal(inputs)
        self.x = self.normal(sources, 15, inputs)
        vectors = target + spread * self.normal(sources, inputs)
        self.y = (self.x @ vectors.unsqueeze(-1)).squeeze(-1) + 0.3 * self.normal(sources, 15)
        self.own = [(x := self.normal(size, inputs), x @ target + 0.3 * self.normal(size)) for size in (train, 20, 31)]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def losses(self, parts: int = 4) -> PooledLosses:
        (x, y), judged, last = self.own
        moment = (self.x.mT @ self.y.unsqueeze(-1)).squeeze(-1)
        return PooledLosses(self.x.mT @ self.x, moment, x.T @ x, x.T @ y, judged, last, parts=parts)

    def union(self, members: list[bool]) -> tuple[Tensor, Tensor]:
        kept = torch.tensor(members)
        x, y = self.own[0]
        return torch.cat([x, self.x[kept].flatten(0, 1)]), torch.cat([y, self.y[kept].flatten()])


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 1_000))
def test_vectors_are_least_squares_on_the_union(sources: int, inputs: int, seed: int) -> None:
    world = World(sources, inputs, seed)
    members = torch.rand(7, sources, generator=world.generator) < 0.5
    members[0] = False
    losses = world.losses()
    found = losses.vectors(members)
    for row, vector, value, parts in zip(
        members.tolist(), found, losses.validation(members), losses.held_out(members), strict=True
    ):
        x, y = world.union(row)
        expected = torch.linalg.lstsq(x, y.unsqueeze(1)).solution.squeeze(1)
        torch.testing.assert_close(vector, expected, atol=1e-6, rtol=1e-6)
        judged, last = world.own[1:]
        torch.testing.assert_close(value, (judged[0] @ expected - judged[1]).square().mean(), atol=1e-5, rtol=1e-5)
        squares = (last[0] @ expected - last[1]).square()
        pieces = torch.stack([part.mean() for part in squares.tensor_split(4)])
        torch.testing.assert_close(parts, pieces, atol=1e-5, rtol=1e-5)


def test_constant_inputs_get_weight_zero() -> None:
    world = World(3, 4, 6)
    world.x[..., 2] = 0.0
    world.own[0][0][:, 2] = 0.0
    vectors = world.losses().vectors(torch.tensor([[True, False, True], [False, False, False]]))
    assert bool((vectors[:, 2].abs() < 1e-6).all())


def test_chunks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(6, 3, 7)
    members = draw_subsets(6, 2, 11, world.generator)
    whole = world.losses().validation(members)
    monkeypatch.setattr("metaban.bench.transfer.closed_form.SOLVED_MAX", 20)
    torch.testing.assert_close(world.losses().validation(members), whole)


def test_related_sources_are_chosen() -> None:
    """Theorem 2.2, where both kinds are far apart."""
    world = World(12, 40, 8, train=20, spread=0.0)
    away = world.normal(8, 40)
    world.y[4:] += 2 * (world.x[4:] @ away.unsqueeze(-1)).squeeze(-1)
    world.x = world.x.repeat(1, 4, 1)
    world.y = world.y.repeat(1, 4)
    found = model_transfer(world.losses(), TransferSettings(subset_size=3, early_stop=False), seed=1)
    assert found.chosen.tolist() == [True] * 4 + [False] * 8
    assert found.applies


def test_missing_validation_samples_raise_an_error() -> None:
    world = World(3, 2, 9)
    world.own[2] = (torch.zeros(0, 2), torch.zeros(0))
    with pytest.raises(ValueError, match="no validation or held-out samples"):
        world.losses()


def test_parts_are_never_empty() -> None:
    world = World(3, 2, 9)
    assert world.losses(parts=100).held_out(torch.zeros(1, 3, dtype=torch.bool)).shape == (1, 31)
