"""The part `heads`: its reference against the textbook formula, and a small run."""

from __future__ import annotations

import pytest
import torch
from rich.console import Console

from metaban.bench.bayes import heads as bayes_heads
from metaban.bench.bayes.heads import LIMIT, analytic, analytic_kinds, measure_heads
from metaban.bench.bayes.plan import BayesPlan
from metaban.models.default.kinds import HeadPosteriors, Kinds
from metaban.models.default.prior import Prior, Statistics

D = 4


def drawn(*size: int, seed: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def some_prior() -> Prior:
    spread = drawn(D, D, seed=1)
    return Prior.of(drawn(D, seed=2), spread @ spread.T + torch.eye(D), torch.tensor(0.3, dtype=torch.float64))


def test_the_reference_is_the_textbook_posterior() -> None:
    """Σ − ΣHᵀ(HΣHᵀ + σ²I)⁻¹HΣ and its mean, one user at a time."""
    prior, h, rewards = some_prior(), drawn(3, 6, D, seed=3), drawn(3, 6, seed=4)
    weights = torch.ones(3, 6, dtype=torch.float64)
    weights[1, 2:] = 0
    mean, covariance = analytic(prior, h, rewards, weights)
    for user, count in ((0, 6), (1, 2), (2, 6)):
        x = h[user, :count]
        gain = prior.covariance @ x.T @ torch.linalg.inv(x @ prior.covariance @ x.T + prior.noise * torch.eye(count))
        torch.testing.assert_close(mean[user], prior.mean + gain @ (rewards[user, :count] - x @ prior.mean))
        torch.testing.assert_close(covariance[user], prior.covariance - gain @ x @ prior.covariance)


def test_the_reference_of_kinds_equals_the_learner() -> None:
    prior, h, rewards = some_prior(), drawn(3, 6, D, seed=3), drawn(3, 6, seed=4)
    weights = torch.ones(3, 6, dtype=torch.float64)
    weights[1, 2:] = 0
    kinds = Kinds(drawn(5, D, seed=5), drawn(5, seed=6), torch.tensor(0.2, dtype=torch.float64))
    mean, covariance = analytic_kinds(prior, kinds, h, rewards, weights)
    users = Statistics.of(h, rewards, weights)
    found = kinds.posteriors(prior, users.gram, users.moment)
    torch.testing.assert_close(mean, found.head)
    torch.testing.assert_close(covariance, found.covariance())


def test_the_claims_hold_in_a_small_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bayes_heads, "QUICK_ROUNDS", 260)
    monkeypatch.setattr(bayes_heads, "QUICK_EVENTS", 300)
    results, bars = measure_heads(BayesPlan(seeds=(50,)), True, Console(quiet=True))
    assert len(bars) == 5
    assert all(bar.holds and bar.limit == LIMIT and bar.name.endswith("quick") for bar in bars)
    assert results["largest_deviation"]["largest head"] > 0.1
    drift = results["largest_deviation_over_checkpoints"]
    assert drift["rank-one updates in float64, all kept"] < drift["rank-one updates in float32, all kept"]


def test_a_wrong_head_breaks_the_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bayes_heads, "QUICK_ROUNDS", 30)
    monkeypatch.setattr(bayes_heads, "QUICK_EVENTS", 30)
    right = Kinds.posteriors

    def without_rewards(self: Kinds, prior: Prior, gram: torch.Tensor, moment: torch.Tensor) -> HeadPosteriors:
        return right(self, prior, gram, 0 * moment)

    monkeypatch.setattr(Kinds, "posteriors", without_rewards)
    _, bars = measure_heads(BayesPlan(seeds=(50,)), True, Console(quiet=True))
    assert not any(bar.holds for bar in bars if "covariance" not in bar.name)
