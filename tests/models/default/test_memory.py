"""The memory against exact Gaussian process regression and loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from metaban.models.default.memory import GAINS, combine_terms, kernel, memory_table, replay_errors, residual_terms

RADIUS = 0.087


def rows_of(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def near(x: Tensor, kept: Tensor, radius: float) -> Tensor:
    """The kernel on arms as they are."""
    table = memory_table(kept, torch.ones_like(kept[..., 0]), radius)
    found: Tensor = kernel(with_constant(x).double(), table, radius)
    return found


def with_constant(x: Tensor) -> Tensor:
    """[1, x], the first head inputs."""
    return torch.cat([torch.ones_like(x[..., :1]), x], -1)


def looped_kernel(one: Tensor, other: Tensor, radius: float) -> float:
    """exp(−½·(rms difference / radius)²)."""
    rms = math.sqrt(sum((a - b) ** 2 for a, b in zip(one.tolist(), other.tolist(), strict=True)) / one.shape[0])
    return math.exp(-0.5 * (rms / radius) ** 2)


@pytest.mark.parametrize("columns", [1, 4])
@pytest.mark.parametrize("radius", [RADIUS, 1.0])
def test_the_kernel_equals_the_loop(columns: int, radius: float) -> None:
    x, kept = rows_of(2, 3, columns), rows_of(2, 5, columns, seed=1)
    kept[0, 0] = x[0, 0] + 0.05
    found = near(x, kept, radius)
    assert found.shape == (2, 3, 5)
    for batch in range(2):
        for row in range(3):
            for place in range(5):
                expected = looped_kernel(x[batch, row], kept[batch, place], radius)
                assert found[batch, row, place].item() == pytest.approx(expected, abs=1e-12)


def test_the_same_arm_is_the_same_in_float32() -> None:
    """Also far from 0, where products of coordinates would cancel."""
    x = (rows_of(1, 6, 12) + 9).to(torch.float32)
    similarity = near(x, x, RADIUS)[0]
    assert (similarity.diagonal() - 1).abs().max() < 1e-9
    assert (similarity - torch.eye(6)).abs().max() < 1e-3


def test_samples_count_by_weight() -> None:
    """Also with weight zero."""
    arms = rows_of(2, 3, 4)
    weights = torch.tensor([[1.0, 0.05, 0.0], [0.0, 1.0, 0.5]], dtype=torch.float64)
    weighted = kernel(with_constant(arms), memory_table(arms + 0.01, weights, RADIUS), RADIUS)
    torch.testing.assert_close(weighted, near(arms, arms + 0.01, RADIUS) * weights.unsqueeze(1))


@pytest.mark.parametrize("gain", [0.05, 1.0, 3.0])
def test_recall_is_gaussian_process_regression_on_repeated_arms(gain: float) -> None:
    """Arms identical or far apart: k(x, X)(K + I/g)⁻¹e, and the remaining variance in units of the noise variance."""
    arms = 10 * rows_of(4, 3)
    kept = arms[torch.tensor([0, 1, 0, 2, 0, 1])]
    residuals = rows_of(6, seed=1)
    among = near(kept, kept, RADIUS).numpy()
    alike = near(arms, kept, RADIUS)
    believed = torch.tensor(gain, dtype=torch.float64)
    correction, left = combine_terms(alike, residual_terms(residuals, believed), believed)
    solved = np.linalg.inv(gain * among + np.eye(6))
    for arm in range(4):
        k = gain * alike[arm].numpy()
        assert correction[arm].item() == pytest.approx(k @ solved @ residuals.numpy(), abs=1e-9)
        assert left[arm].item() == pytest.approx(gain - k @ solved @ k, abs=1e-9)
    assert correction[3] == pytest.approx(0)  # never seen: nothing is known
    assert left[3] == pytest.approx(gain)


def test_without_gain_nothing_is_recalled() -> None:
    correction, left = combine_terms(
        torch.ones(2, 3).double(), residual_terms(torch.ones(3), torch.tensor(0.0)), torch.tensor(0.0)
    )
    assert not correction.any()
    assert not left.any()


def looped_prequential_errors(x: Tensor, residuals: Tensor, counts: list[int], radius: float) -> list[float]:
    """One gain, one user, one sample at a time, using only that user's earlier samples."""
    errors = []
    for gain in GAINS:
        total = 0.0
        for user, count in enumerate(counts):
            for now in range(count):
                told = seen = 0.0
                for before in range(now):
                    similarity = looped_kernel(x[user, now], x[user, before], radius)
                    told += similarity * residuals[user, before].item()
                    seen += similarity
                total += (residuals[user, now].item() - gain * told / (1 + gain * seen)) ** 2
        errors.append(total)
    return errors


def seen_again(seed: int = 2) -> tuple[Tensor, Tensor, list[int], Tensor]:
    """Users who see few arms again and again; the padding holds numbers that must have no effect."""
    counts = [7, 1, 4, 0, 6]
    arms, generator = rows_of(3, 2, seed=seed), torch.Generator().manual_seed(seed)
    x = arms[torch.randint(3, (5, 7), generator=generator)] + 0.02 * rows_of(5, 7, 2, seed=seed + 1)
    return x, rows_of(5, 7, seed=seed + 2), counts, torch.arange(7) < torch.tensor(counts).unsqueeze(-1)


def test_prequential_errors_equal_the_loop() -> None:
    x, residuals, counts, valid = seen_again()
    errors = replay_errors(with_constant(x), residuals, valid, RADIUS)
    assert errors.dtype == torch.float64
    np.testing.assert_allclose(errors, looped_prequential_errors(x, residuals, counts, RADIUS), rtol=1e-10)
    assert errors.unique().numel() == len(GAINS)  # the memory changed predictions


def test_prequential_errors_use_only_earlier_samples() -> None:
    """A user's last reward changes the error on itself, and no earlier error."""
    x, residuals, _, valid = seen_again()
    x, residuals, valid = x[:1], residuals[:1], valid[:1]
    earlier = valid.clone()
    earlier[0, -1] = False
    for last in (0.0, 100.0):
        changed = residuals.clone()
        changed[0, -1] = last
        similarity = near(x[:, -1:], x[:, :-1], RADIUS)[0]
        for gain, whole, before in zip(
            GAINS,
            replay_errors(with_constant(x), changed, valid, RADIUS),
            replay_errors(with_constant(x), residuals, earlier, RADIUS),
            strict=True,
        ):
            believed = torch.tensor(gain, dtype=torch.float64)
            recalled, _ = combine_terms(similarity, residual_terms(residuals[0, :-1], believed), believed)
            assert (whole - before).item() == pytest.approx(((last - recalled) ** 2).item(), rel=1e-9, abs=1e-9)


def test_a_gain_helps_where_rewards_repeat() -> None:
    x = rows_of(60, 4, 3).repeat(1, 5, 1)
    earned = rows_of(60, 4, seed=1).repeat(1, 5)
    valid = torch.ones(60, 20, dtype=torch.bool)
    same = replay_errors(with_constant(x), earned, valid, RADIUS)
    assert int(same.argmin()) == len(GAINS) - 1
    chance = replay_errors(with_constant(x), rows_of(60, 20, seed=2), valid, RADIUS)
    assert int(chance.argmin()) <= 1


def test_chunks_of_users_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x, residuals, _, valid = seen_again()
    whole = replay_errors(with_constant(x), residuals, valid, RADIUS)
    for numbers in (1, 2 * 7 * 7):  # one user at a time, and two
        monkeypatch.setattr("metaban.models.default.memory.KERNEL_NUMBERS_MAX", numbers)
        torch.testing.assert_close(replay_errors(with_constant(x), residuals, valid, RADIUS), whole, rtol=1e-10, atol=0)
