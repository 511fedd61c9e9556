"""Posteriors, EM and groups against textbook formulas, dense likelihoods and known truth."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from torch import Tensor

from metaban.models.default.prior import (
    FIRST_NOISE,
    HALF_WEIGHT_EVENTS,
    LEAST_NOISE,
    NO_GROUP,
    UNSEEN_SPREAD,
    UNSEEN_USERS,
    Groups,
    Prior,
    Statistics,
    find_groups,
    log_marginal,
)
from metaban.models.numerics.arrays import inverse
from tests.models.default.crowds import SHARE, Crowd, prior_of
from tests.models.literal_default import Array


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


# ---------------------------------------------------------------------- groups


def kinds(users: int = 20, samples: int = 15, seed: int = 4) -> Crowd:
    """Two kinds of users, far apart, alternating."""
    crowd = Crowd(users, samples, 3, seed, noise=0.05)
    centre = np.array([1.0, -0.8, 0.5])
    crowd.heads = np.array([centre if user % 2 else -centre for user in range(users)])
    crowd.heads += 0.05 * crowd.random.normal(size=crowd.heads.shape)
    crowd.counts[:] = samples
    crowd.reward()
    return crowd


def learned(crowd: Crowd) -> Prior:
    prior = Prior.initial(crowd.inputs.shape[2])
    for _ in range(12):
        prior = prior.em_step(crowd.statistics())
    return prior


def test_users_of_two_kinds_get_two_centres() -> None:
    crowd = kinds()
    prior = learned(crowd)
    centres = find_groups(prior, crowd.statistics(), SHARE, 4).centres(prior).numpy()
    even, odd = centres[::2], centres[1::2]
    between = np.linalg.norm(even.mean(0) - odd.mean(0))
    assert between == pytest.approx(2 * np.linalg.norm([1.0, -0.8, 0.5]), rel=0.1)
    for kind, truth in ((even, crowd.heads[::2].mean(0)), (odd, crowd.heads[1::2].mean(0))):
        assert np.linalg.norm(kind - kind.mean(0), axis=1).max() < 0.05 * between
        np.testing.assert_allclose(kind.mean(0), truth, atol=0.1)


def test_mean_shifts_equal_the_loop() -> None:
    """A centre is the posterior of its user's samples and all other users' samples, weighted by how well those users'
    centres explain this user's rewards."""
    crowd = Crowd(5, 4, 2, 5, noise=0.3)
    prior, share = crowd.prior(), 0.4
    found = find_groups(prior, crowd.statistics(), share, 3)

    def pooled(weights: Array) -> Array:
        precision, natural = np.linalg.inv(crowd.covariance), np.linalg.inv(crowd.covariance) @ crowd.mean
        for user, weight in enumerate(weights):
            rows, rewards = crowd.samples(user)
            precision = precision + weight * rows.T @ rows / crowd.noise
            natural = natural + weight * rows.T @ rewards / crowd.noise
        return np.linalg.solve(precision, natural)

    centres = [pooled(np.eye(5)[user]) for user in range(5)]
    for _ in range(3):
        shifted = []
        for user in range(5):
            weights = np.array([0.0 if other == user else explained(crowd, user, centres[other], share)
                                * crowd.counts[other] / (crowd.counts[other] + HALF_WEIGHT_EVENTS)
                                for other in range(5)])  # fmt: skip
            weights = weights / weights.sum()
            weights[user] = 1.0
            shifted.append(pooled(weights))
        centres = shifted
    np.testing.assert_allclose(found.centres(prior), np.array(centres), rtol=1e-7)
    evidence_weights = crowd.counts / (crowd.counts + HALF_WEIGHT_EVENTS)
    expected = Groups.of(prior, torch.from_numpy(np.array(centres)), torch.from_numpy(np.log(evidence_weights)), share)
    torch.testing.assert_close(found.offset, expected.offset)


def explained(crowd: Crowd, user: int, centre: Array, share: float) -> float:
    """Density of a user's rewards when their head is N(centre, κΣ)."""
    rows, rewards = crowd.samples(user)
    covariance = share * rows @ crowd.covariance @ rows.T + crowd.noise * np.eye(len(rewards))
    return float(multivariate_normal.pdf(rewards, rows @ centre, covariance))


def believed(groups: Groups, prior: Prior, found: Statistics) -> tuple[Tensor, Tensor]:
    """HeadPosteriors and mean heads of users with these statistics."""
    covariance = inverse(found.gram / prior.noise + prior.precision / groups.share)
    belief = groups.responsibilities(covariance, found.moment / prior.noise)
    return belief, groups.head(covariance, found.moment / prior.noise, belief)


def test_group_probabilities_follow_bayes_rule() -> None:
    crowd = Crowd(6, 5, 3, 6, noise=0.5)
    prior, evidence_weights = crowd.prior(), np.array([0.2, 0.5, 0.9, 0.7])
    centres = crowd.random.normal(size=(4, 3))
    groups = Groups.of(prior, torch.from_numpy(centres), torch.from_numpy(np.log(evidence_weights)), SHARE)
    np.testing.assert_allclose(groups.centres(prior), centres, rtol=1e-9)
    belief, heads = believed(groups, prior, crowd.statistics())
    for user in range(6):
        evidence = np.array([explained(crowd, user, centre, SHARE) for centre in centres]) * evidence_weights
        expected = evidence / evidence.sum()
        np.testing.assert_allclose(belief[user], expected, rtol=1e-7, atol=1e-12)
        rows, rewards = crowd.samples(user)
        within = SHARE * crowd.covariance
        gain = within @ rows.T @ np.linalg.inv(rows @ within @ rows.T + crowd.noise * np.eye(len(rewards)))
        head = sum(
            share * (centre + gain @ (rewards - rows @ centre)) for share, centre in zip(expected, centres, strict=True)
        )
        np.testing.assert_allclose(heads[user], head, rtol=1e-7)


def test_without_events_group_probabilities_are_the_weights() -> None:
    crowd = kinds()
    prior = learned(crowd)
    groups = find_groups(prior, crowd.statistics(), SHARE, 4)
    nothing = Statistics.of(torch.zeros(2, 1, 3), torch.zeros(2, 1), torch.zeros(2, 1))
    evidence_weights = crowd.counts / (crowd.counts + HALF_WEIGHT_EVENTS)
    belief, heads = believed(groups, prior, nothing)
    np.testing.assert_allclose(belief, np.tile(evidence_weights / evidence_weights.sum(), (2, 1)), rtol=1e-7)
    expected = (evidence_weights / evidence_weights.sum()) @ groups.centres(prior).numpy()
    np.testing.assert_allclose(heads, np.tile(expected, (2, 1)), atol=1e-9)


def test_events_assign_a_user_to_their_kind() -> None:
    crowd, newcomer = kinds(), kinds(users=2, seed=7)
    prior = learned(crowd)
    groups = find_groups(prior, crowd.statistics(), SHARE, 4)
    belief, heads = believed(groups, prior, newcomer.statistics())
    assert float(belief[0, ::2].sum()) > 0.999
    assert float(belief[1, 1::2].sum()) > 0.999
    np.testing.assert_allclose(heads, newcomer.heads, atol=0.2)


def test_empty_group_rows_have_probability_zero() -> None:
    prior = Crowd(1, 1, 3).prior()
    centres = torch.randn(3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    groups = Groups.of(prior, centres, torch.zeros(3, dtype=torch.float64), SHARE)
    padded = Groups(
        torch.cat([groups.pull, torch.zeros(2, 3)]), torch.cat([groups.offset, torch.full((2,), NO_GROUP)]), SHARE
    )
    found = Crowd(4, 5, 3, 8).statistics()
    belief, _ = believed(padded, prior, found)
    assert not belief[:, 3:].any()
    torch.testing.assert_close(belief[:, :3], believed(groups, prior, found)[0])
    assert padded.any()
    assert not Groups(torch.zeros(2, 3), torch.full((2,), NO_GROUP), SHARE).any()


def test_a_single_user_is_their_own_centre() -> None:
    crowd = Crowd(1, 4, 3, 9)
    prior, found = crowd.prior(), crowd.statistics()
    mean, _ = prior.posterior(found.gram, found.moment)
    torch.testing.assert_close(find_groups(prior, found, SHARE, 4).centres(prior), mean)
