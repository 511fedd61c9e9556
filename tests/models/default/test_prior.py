"""Posteriors and EM against textbook formulas, dense likelihoods and known truth."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal

from metaban.models.default.prior import (
    FIRST_NOISE,
    LEAST_NOISE,
    UNSEEN_SPREAD,
    UNSEEN_USERS,
    Prior,
    Statistics,
    log_marginal,
)
from metaban.models.numerics.arrays import inverse
from tests.models.default.crowds import Crowd, prior_of


def log_densities(crowd: Crowd, prior: Prior) -> list[float]:
    """log p(rewards) of each user, as one dense normal vector."""
    mean, covariance, noise = prior.mean.numpy(), prior.covariance.numpy(), float(prior.noise)
    found = []
    for user in range(len(crowd.counts)):
        rows, rewards = crowd.samples(user)
        spread = rows @ covariance @ rows.T + noise * np.eye(len(rewards))
        found.append(float(multivariate_normal.logpdf(rewards, rows @ mean, spread)))
    return found


def objective(crowd: Crowd, prior: Prior, unseen: float) -> float:
    """The objective that a step of EM raises: the likelihood with one event of spread FIRST_NOISE and UNSEEN_USERS
    users whose coefficients have variance `unseen`."""
    noise, covariance = float(prior.noise), prior.covariance.numpy()
    event = -0.5 * np.log(noise) - 0.5 * FIRST_NOISE / noise
    users = -0.5 * UNSEEN_USERS * (np.linalg.slogdet(covariance)[1] + unseen * np.trace(np.linalg.inv(covariance)))
    return sum(log_densities(crowd, prior)) + event + users


# ---------------------------------------------------------------------- statistics and posteriors


def test_statistics_are_sums_over_samples() -> None:
    crowd = Crowd(5, 6, 3)
    found = crowd.statistics()
    for user in range(5):
        rows, rewards = crowd.samples(user)
        np.testing.assert_allclose(found.gram[user], sum(np.outer(h, h) for h in rows))
        np.testing.assert_allclose(found.moment[user], sum(h * r for h, r in zip(rows, rewards, strict=True)))
        assert float(found.squares[user]) == pytest.approx(sum(r * r for r in rewards))
        assert int(found.events[user]) == len(rewards)


def test_statistics_of_batches_are_those_of_all() -> None:
    crowd = Crowd(7, 6, 3)
    whole = crowd.statistics()
    first, second = torch.tensor([4, 0, 2]), torch.tensor([1, 3, 5, 6])
    joined = Statistics.joined([whole.rows(first), whole.rows(second)])
    for name in ("gram", "moment", "squares", "events"):
        assert torch.equal(getattr(joined, name), getattr(whole, name)[torch.cat([first, second])])


@pytest.mark.parametrize("dimension", [1, 4])
def test_the_posterior_equals_the_textbook_formula(dimension: int) -> None:
    """The normal distribution of (w, r), conditioned on r."""
    crowd = Crowd(6, 8, dimension)
    found = crowd.statistics()
    mean, covariance = crowd.prior().posterior(found.gram, found.moment)
    for user in range(6):
        rows, rewards = crowd.samples(user)
        among = rows @ crowd.covariance @ rows.T + crowd.noise * np.eye(len(rewards))
        gain = crowd.covariance @ rows.T @ np.linalg.inv(among)
        np.testing.assert_allclose(mean[user], crowd.mean + gain @ (rewards - rows @ crowd.mean), rtol=1e-9)
        np.testing.assert_allclose(covariance[user], crowd.covariance - gain @ rows @ crowd.covariance, atol=1e-10)


def test_mean_heads_equal_the_posterior_means() -> None:
    """Also beside a user with out-of-range numbers, who has no mean."""
    crowd = Crowd(5, 8, 4)
    prior, found = crowd.prior(), crowd.statistics()
    expected, _ = prior.posterior(found.gram, found.moment)
    torch.testing.assert_close(prior.posterior_mean(found.gram, found.moment), expected)
    found.gram[2] = -1e9 * torch.eye(4)
    others = torch.tensor([0, 1, 3, 4])
    mean = prior.posterior_mean(found.gram, found.moment)
    torch.testing.assert_close(mean[others], expected[others])
    assert mean[2].isnan().all()
    assert prior.posterior(found.gram, found.moment)[0][2].isnan().all()


def test_without_samples_the_posterior_is_the_prior() -> None:
    prior = Crowd(1, 1, 3).prior()
    mean, covariance = prior.posterior(torch.zeros(2, 3, 3).double(), torch.zeros(2, 3).double())
    torch.testing.assert_close(mean, prior.mean.expand(2, -1))
    torch.testing.assert_close(covariance, prior.covariance.expand(2, -1, -1))


def test_inverse() -> None:
    root = torch.randn(4, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    matrices = root @ root.mT + torch.eye(5)
    np.testing.assert_allclose(inverse(matrices), np.linalg.inv(matrices.numpy()), rtol=1e-8)


def test_log_marginal_equals_the_dense_density() -> None:
    crowd = Crowd(5, 12, 3)
    prior = crowd.prior()
    found = log_marginal(prior.mean, prior.precision, prior.noise, crowd.statistics())
    np.testing.assert_allclose(found, log_densities(crowd, prior), atol=1e-8)


def test_log_marginals_of_stacked_priors_equal_single_ones() -> None:
    crowd = Crowd(5, 12, 3)
    users, noise, priors = crowd.statistics(), crowd.prior().noise, [Crowd(1, 1, 3, seed).prior() for seed in range(3)]
    together = log_marginal(
        torch.stack([each.mean for each in priors]), torch.stack([each.precision for each in priors]), noise, users
    )
    for row, each in zip(together, priors, strict=True):
        torch.testing.assert_close(row, log_marginal(each.mean, each.precision, noise, users))


# ---------------------------------------------------------------------- EM


@pytest.mark.parametrize("seed", range(4))
def test_a_step_of_em_never_lowers_its_objective(seed: int) -> None:
    """The variance of unseen coefficients follows σ²; for the value a step used, the objective does not fall."""
    crowd = Crowd(12, 5, 3, seed)
    found, prior = crowd.statistics(), Prior.initial(3)
    for _ in range(25):
        after = prior.em_step(found)
        unseen = UNSEEN_SPREAD * float(after.noise)
        assert objective(crowd, after, unseen) >= objective(crowd, prior, unseen) - 1e-9
        prior = after


def test_em_converges_to_the_maximum_of_its_objective() -> None:
    crowd = Crowd(12, 5, 2, 1)
    found, prior = crowd.statistics(), Prior.initial(2)
    for _ in range(4_000):
        prior = prior.em_step(found)
    unseen = UNSEEN_SPREAD * float(prior.noise)
    top = objective(crowd, prior, unseen)
    mean, covariance, noise = prior.mean.numpy(), prior.covariance.numpy(), float(prior.noise)
    shape = np.array([[0.3, 0.1], [0.1, -0.2]])
    for step in (1e-3, -1e-3):
        for other in (
            prior_of(mean + step * np.array([1.0, 0.0]), covariance, noise),
            prior_of(mean + step * np.array([0.0, 1.0]), covariance, noise),
            prior_of(mean, covariance * (1 + step), noise),
            prior_of(mean, covariance + step * shape, noise),
            prior_of(mean, covariance, noise * (1 + 10 * step)),
        ):
            assert objective(crowd, other, unseen) < top


def test_em_recovers_the_true_prior() -> None:
    crowd = Crowd(3_000, 12, 3, 2, noise=0.25)
    found, prior = crowd.statistics(), Prior.initial(3)
    for _ in range(40):
        prior = prior.em_step(found)
    # Four standard errors of a mean, and about as many of a variance, of 3,000 users.
    np.testing.assert_allclose(prior.mean, crowd.mean, atol=4 * np.sqrt(crowd.covariance.max() / 3_000))
    np.testing.assert_allclose(prior.covariance, crowd.covariance, atol=6 * crowd.covariance.max() / np.sqrt(3_000))
    assert float(prior.noise) == pytest.approx(0.25, rel=0.05)
    np.testing.assert_allclose(prior.precision, np.linalg.inv(prior.covariance.numpy()), rtol=1e-6)


def test_coefficients_without_evidence_stay_narrow() -> None:
    crowd = Crowd(50, 6, 3, 3)
    crowd.inputs[..., 2] = 0
    crowd.reward()
    found, prior = crowd.statistics(), Prior.initial(3)
    for _ in range(2_000):
        prior = prior.em_step(found)
    assert float(prior.covariance[2, 2]) == pytest.approx(UNSEEN_SPREAD * float(prior.noise), rel=1e-3)
    assert float(prior.covariance[0, 0]) > 10 * float(prior.covariance[2, 2])


def test_noise_has_a_floor() -> None:
    found = Statistics.of(torch.ones(1, 10**6, 1), torch.zeros(1, 10**6), torch.ones(1, 10**6))
    prior = Prior.initial(1)
    for _ in range(5):
        prior = prior.em_step(found)
    assert float(prior.noise) == LEAST_NOISE
