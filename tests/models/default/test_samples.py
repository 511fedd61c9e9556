"""Samples of all users as one table: weights, places, and what their notes are evidence for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from metaban.models.default.learner import PosteriorLearner
from metaban.models.default.places import PLACES
from metaban.models.default.samples import STALE_WEIGHT, Samples, first_place_rewards, sample_weights
from metaban.models.default.shared_state import SharedState
from metaban.models.learner import UserBatch
from tests.models.default_worlds import small
from tests.models.worlds import assert_close


def batch_of(counts: list[int], epochs: list[list[int]]) -> UserBatch:
    """Users with samples of these epochs; features number the samples, padding is −1."""
    users, longest = len(counts), len(epochs[0])
    valid = torch.arange(longest) < torch.tensor(counts).unsqueeze(-1)
    number = torch.arange(users * longest, dtype=torch.float64).view(users, longest)
    return UserBatch(
        features=torch.where(valid, number, -1.0).unsqueeze(-1),
        rewards=torch.where(valid, number / 10, -1.0),
        valid=valid,
        events=torch.tensor(counts),
        draw=torch.zeros(users, dtype=torch.int64),
        weight=torch.ones(users, dtype=torch.float64),
        phi=number.unsqueeze(-1) + torch.arange(4) / 10,
        epochs=torch.tensor(epochs),
        starts=torch.zeros(users, 0, dtype=torch.float64),
        arm_keys=torch.zeros(users, longest, dtype=torch.int64),
        places=torch.zeros(users, longest, dtype=torch.int64),
    )


TWO = [batch_of([2, 4], [[0, 3, 9, 9], [1, 2, 3, 4]]), batch_of([1], [[5, 9]])]


def since_of(epoch: float) -> Tensor:
    return torch.tensor(epoch, dtype=torch.float64)


def shared_of(epoch: float, looks: list[float] | None = None) -> SharedState:
    """A state of which samples are weighted: the last change of tastes, and e_k of the first places (all 1)."""
    seen = torch.ones(PLACES, dtype=torch.float64)
    seen[: len(looks or [])] = torch.tensor(looks or [], dtype=torch.float64)
    initial = SharedState.stored(PosteriorLearner(small(), 1, torch.float64).initial_shared())
    return replace(initial, since=since_of(epoch), effects=replace(initial.effects, looks=seen))


def test_padding_has_no_weight_and_samples_before_a_change_little() -> None:
    assert sample_weights(TWO[0], shared_of(0)).tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    expected = torch.tensor([[STALE_WEIGHT, 1, 0, 0], [STALE_WEIGHT, STALE_WEIGHT, 1, 1]], dtype=torch.float64)
    torch.testing.assert_close(sample_weights(TWO[0], shared_of(3)), expected, rtol=1e-7, atol=0)


def test_samples_of_all_batches_stay_together() -> None:
    samples = Samples.of(TWO, shared_of(3))
    real = samples.weights > 0
    assert int(real.sum()) == 7
    assert samples.features[real].flatten().tolist() == [0, 1, 4, 5, 6, 7, 0]
    torch.testing.assert_close(samples.rewards[real], samples.features[real].flatten() / 10)
    torch.testing.assert_close(samples.notes.trunk[real], samples.features[real].flatten())
    assert samples.epochs[real].tolist() == [0, 3, 1, 2, 3, 4, 5]


def test_a_reward_is_that_of_the_first_place_and_counts_by_how_often_its_place_is_looked_at() -> None:
    """r/e_k, which has 1/e_k² times the noise variance; places after the last e_k have that one."""
    looks = [1.0, 0.5, *[0.8] * (PLACES - 3), 0.25]
    places = torch.tensor([[1, 0, 0, 0], [2, PLACES - 1, PLACES, 10 * PLACES]])
    batch = replace(TWO[0], places=places)
    each = torch.tensor([[0.5, 1, 1, 1], [0.8, 0.25, 0.25, 0.25]], dtype=torch.float64)
    shared = shared_of(3, looks)
    assert torch.equal(first_place_rewards(batch, shared), batch.rewards / each)
    assert_close(sample_weights(batch, shared), sample_weights(batch, shared_of(3)) * each**2, 1e-12)
    samples = Samples.of([batch, TWO[1]], shared)
    assert samples.looks.tolist() == [*each.flatten().tolist(), 1, 1]
    assert torch.equal(samples.rewards[:8], first_place_rewards(batch, shared).flatten())
    assert torch.equal(samples.weights[:8], sample_weights(batch, shared).flatten())


@pytest.mark.parametrize("since", [0, 3, 100])
def test_rows_are_drawn_in_proportion_to_their_weight(since: int) -> None:
    samples = Samples.of(TWO, shared_of(since))
    shares = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    drawn = samples.rows_at(shares).bincount(minlength=10) / 10_000
    torch.testing.assert_close(drawn.double(), samples.weights / samples.weights.sum(), rtol=0, atol=2e-4)


def test_padding_is_never_drawn() -> None:
    """Not even at the ends, where rounding could select it, nor when padding comes first."""
    samples = Samples.of([batch_of([0, 1], [[0, 0], [0, 0]])], shared_of(0))
    assert samples.rows_at(torch.zeros(1, dtype=torch.float64)).tolist() == [2]
    samples = Samples.of(TWO, shared_of(3))
    shares = torch.tensor([0.0, 2**-53, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert (samples.weights[samples.rows_at(shares)] > 0).all()
    assert samples.rows_at(shares)[0] == 0
    assert samples.rows_at(shares.view(2, 2)).shape == (2, 2)


def test_spread_rows_are_evenly_spaced() -> None:
    samples = Samples.of([batch_of([100], [[0] * 120])], shared_of(0))
    rows = samples.evenly_spread(20)
    assert rows.tolist() == list(range(2, 100, 5))
    assert samples.evenly_spread(10_000).unique().tolist() == list(range(100))
