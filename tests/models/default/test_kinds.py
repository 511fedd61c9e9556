"""Kinds of users by EM, against loops over users and kinds, and on populations with known kinds."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from torch import Tensor

from metaban.models.default.kinds import (
    COUNTS,
    FOLDS,
    FROM_EVENTS,
    GROWTH,
    KINDS_MAX,
    SPREAD,
    UNUSED,
    USERS_MAX,
    Kinds,
    MixtureEM,
    continued_kinds,
    found_kinds,
    held_out_gains,
    random_responsibilities,
    search_due,
)
from metaban.models.default.prior import Prior, Statistics
from tests.models.default.crowds import Crowd
from tests.models.literal_default import Array

NOISE = 0.2

#: κ where it is not the one of derived kinds.
WIDER = 0.15


def generator_of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def crowd_of(centres: Tensor, users: int, samples: int, seed: int, within: float = 0.0) -> Statistics:
    """Users of kinds with these centres [K, D], one kind after the other; rewards are linear plus noise."""
    generator, size = generator_of(seed), centres.shape[1]
    h = torch.randn(users, samples, size, generator=generator, dtype=torch.float64)
    h[..., 0] = 1
    heads = centres[torch.arange(users) % len(centres)]
    heads = heads + within * torch.randn(users, size, generator=generator, dtype=torch.float64)
    noise = math.sqrt(NOISE) * torch.randn(users, samples, generator=generator, dtype=torch.float64)
    rewards = (h @ heads.unsqueeze(-1)).squeeze(-1) + noise
    return Statistics.of(h, rewards, torch.ones(users, samples, dtype=torch.float64))


def learned(users: Statistics) -> Prior:
    prior = Prior.initial(users.moment.shape[1])
    for _ in range(30):
        prior = prior.em_step(users)
    return prior


def kinds_at(centres: Tensor, shares: list[float], spread: float = SPREAD) -> Kinds:
    log_shares = torch.tensor(shares, dtype=torch.float64).log()
    return Kinds(centres, log_shares, torch.tensor(spread, dtype=torch.float64))


def kinds(count: int, size: int = 4, seed: int = 0) -> Tensor:
    return 0.6 * torch.randn(count, size, generator=generator_of(seed), dtype=torch.float64)


def learned_prior(users: Statistics, weights: Tensor) -> Prior:
    """The prior of users with these weights alone."""
    prior = Prior.initial(users.moment.shape[1])
    for _ in range(12):
        prior = prior.em_step(users, weights)
    return prior


def sought(prior: Prior, users: Statistics, seed: int = 0, weights: Tensor | None = None) -> Kinds:
    """The result of a search."""
    weights = torch.ones_like(users.events) if weights is None else weights
    return found_kinds(prior, users, weights, learned_prior, generator_of(seed))


def dense_log_probability(prior: Prior, users: Statistics, user: int, centre: Tensor, spread: float = SPREAD) -> float:
    """log p(b | w ~ N(centre, κΣ)) of a user's statistics, b = Aw + noise of covariance σ²A, A of full rank."""
    gram = users.gram[user].numpy()
    mean = gram @ centre.numpy()
    covariance = gram @ (spread * prior.covariance.numpy()) @ gram + float(prior.noise) * gram
    away = users.moment[user].numpy() - mean
    _, volume = np.linalg.slogdet(covariance)
    return float(-0.5 * (away @ np.linalg.solve(covariance, away) + volume))


def test_evidence_differs_between_kinds_as_the_dense_density() -> None:
    """Differences between kinds equal those of the dense density."""
    centres = kinds(3)
    users = crowd_of(centres, 5, 9, 1)
    prior = learned(users)
    mixture = kinds_at(centres, [0.5, 0.3, 0.2])
    found = MixtureEM(prior, users, torch.ones(5, dtype=torch.float64)).log_joint(mixture)
    for user in range(5):
        expected = [
            dense_log_probability(prior, users, user, centre) + float(share)
            for centre, share in zip(centres, mixture.log_shares, strict=True)
        ]
        away = found[user] - torch.tensor(expected, dtype=torch.float64)
        torch.testing.assert_close(away, away[0].expand(3), rtol=1e-7, atol=1e-7)


def test_a_step_of_em_equals_loops() -> None:
    users = crowd_of(kinds(2), 6, 7, 2)
    prior, weights = learned(users), torch.tensor([1.0, 0.5, 1, 0, 1, 1], dtype=torch.float64)
    em = MixtureEM(prior, users, weights)
    belief = random_responsibilities(2, generator_of(3), weights)
    assert belief.sum(-1).allclose(torch.ones(1, dtype=torch.float64))
    found = em.m_step(belief)
    for beginning in range(belief.shape[0]):
        masses = []
        for kind in range(2):
            gram, moment, mass = torch.zeros_like(users.gram[0]), torch.zeros_like(users.moment[0]), 1e-3
            for user in range(6):
                counts = float(weights[user] * belief[beginning, user, kind])
                gram, moment = gram + counts * users.gram[user], moment + counts * users.moment[user]
                mass += counts
            masses.append(mass)
            expected, _ = prior.posterior(gram, moment)
            torch.testing.assert_close(found.centres[beginning, kind], expected)
        shares = torch.tensor(masses, dtype=torch.float64) / sum(masses)
        torch.testing.assert_close(found.log_shares[beginning].exp(), shares)


def test_em_steps_raise_the_likelihood() -> None:
    users = crowd_of(kinds(3), 40, 12, 4)
    prior = learned(users)
    em = MixtureEM(prior, users, torch.ones(40, dtype=torch.float64))
    mixture = em.m_step(random_responsibilities(3, generator_of(5), torch.ones(40)))
    before = em.log_posterior(mixture)
    for _ in range(30):
        mixture = em.m_step(em.log_joint(mixture).softmax(-1))
    assert (em.log_posterior(mixture) > before).all()


@pytest.mark.parametrize("count", [3, 4, 6])
def test_true_kinds_are_found(count: int) -> None:
    """The right number of kinds, near their centres, and every user in the right kind."""
    centres = kinds(count, 6, seed=count)
    users = crowd_of(centres, 24 * count, 40, count)
    prior = learned(users)
    found = sought(prior, users)
    there = found.log_shares > UNUSED / 2
    assert int(there.sum()) == found.count() == count
    assert float(found.spread) == SPREAD
    near = torch.cdist(found.centres[there], centres)
    assert near.amin(0).max() < 0.15
    assert sorted(near.argmin(1).tolist()) == list(range(count))
    kind = found.of(prior, users)
    assert (near.argmin(1)[kind] == torch.arange(24 * count) % count).double().mean() > 0.95


def assert_none(found: Kinds, prior: Prior) -> None:
    """The only component is the prior."""
    assert found.count() == 1
    assert torch.equal(found.centres[0], prior.mean)
    assert float(found.spread) == 1
    assert float(found.log_shares[0]) == 0


@pytest.mark.parametrize("samples", [2, 9, 30])
@pytest.mark.parametrize("seed", range(4))
def test_without_kinds_none_are_found(seed: int, samples: int) -> None:
    """Heads that are normal around one centre, or all equal."""
    for within in (0.3, 0.0):
        users = crowd_of(kinds(1, 5), 200, samples, seed, within)
        prior = learned(users)
        found = sought(prior, users, seed)
        assert_none(found, prior)
        assert not found.of(prior, users).any()


def test_without_kinds_heads_are_those_under_the_prior() -> None:
    users = crowd_of(kinds(3, 5), 20, 9, 1)
    prior = learned(users)
    mean, covariance = prior.posterior(users.gram, users.moment)
    found = Kinds.none(prior).posteriors(prior, users.gram, users.moment)
    torch.testing.assert_close(found.head, mean)
    torch.testing.assert_close(found.covariance(), covariance)


def test_kinds_are_carried_over_to_newer_samples() -> None:
    """Centres follow the data and empty rows stay empty; without kinds there are none later."""
    centres = kinds(3, 5, seed=7)
    before, after = crowd_of(centres, 60, 20, 8), crowd_of(centres, 60, 60, 9)
    prior, later, ones = learned(before), learned(after), torch.ones(60, dtype=torch.float64)
    found = sought(prior, before)
    carried = continued_kinds(found, later, after, ones)
    assert found.count() == carried.count() == 3
    near = torch.cdist(carried.centres[:3], centres).amin(0)
    assert near.max() < 0.1
    assert (near < torch.cdist(found.centres[:3], centres).amin(0)).all(), "more samples tell more"
    assert_none(continued_kinds(Kinds.none(prior), later, after, ones), later)


def test_kinds_survive_being_stored() -> None:
    found = kinds_at(kinds(3, 5), [0.2, 0.3, 0.5]).padded()
    again = Kinds.stored(found.state())
    torch.testing.assert_close(again.centres[:3], kinds(3, 5))
    torch.testing.assert_close(again.log_shares[:3].exp(), torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64))
    assert (again.log_shares[3:] == UNUSED).all()
    assert again.centres.shape[0] == KINDS_MAX


def test_users_without_weight_form_no_kind() -> None:
    """A third kind whose users have no weight is not found."""
    users = crowd_of(kinds(3, 5, seed=3), 90, 40, 5)
    silent = (torch.arange(90) % 3 != 2).to(torch.float64)
    prior = learned(users)
    assert sought(prior, users, weights=silent).count() == 2
    assert sought(prior, users).count() == 3


def test_kinds_are_those_of_users_with_the_most_events() -> None:
    """One user more than kinds are derived from: the one with few events does not count."""
    users = crowd_of(kinds(3, 4, seed=2), USERS_MAX + 1, 12, 6)
    few = replace(users, events=users.events - 5 * (torch.arange(USERS_MAX + 1) == 7))
    others = few.rows(torch.arange(USERS_MAX + 1) != 7)
    prior = learned(users)
    found, expected = sought(prior, few), sought(prior, others)
    assert found.count() == 3
    assert torch.equal(found.centres, expected.centres)


def test_gains_are_those_of_users_who_were_held_out() -> None:
    """log p under kinds and the prior of the other folds, by dense densities; largest at the true number of kinds."""
    users = crowd_of(kinds(3, 3, seed=2), 30, 12, 6)
    weights = torch.ones_like(users.events)
    weights[4] = 0.5
    found = held_out_gains(users, weights, learned_prior, generator_of(1))
    generator, column = generator_of(1), 0
    folds = torch.randperm(30, generator=generator).tensor_split(FOLDS)
    for number, fold in enumerate(folds):
        others = torch.cat([each for place, each in enumerate(folds) if place != number])
        prior = learned_prior(users.rows(others), weights[others])
        em = MixtureEM(prior, users.rows(others), weights[others])
        for row, count in enumerate(COUNTS):
            fitted = em.fit(count, generator)
            shares = fitted.log_shares.exp().tolist()
            for place, user in enumerate(fold.tolist()):
                densities = [dense_log_probability(prior, users, user, centre) for centre in fitted.centres]
                mixed = math.log(sum(share * math.exp(each) for share, each in zip(shares, densities, strict=True)))
                expected = float(weights[user]) * (mixed - dense_log_probability(prior, users, user, prior.mean, 1.0))
                assert float(found[1 + row, column + place]) == pytest.approx(expected, abs=1e-7)
        column += 10
    assert not found[0].any()
    assert COUNTS[int(found.sum(-1).argmax()) - 1] == 3


def test_probabilities_of_kinds_follow_bayes_rule() -> None:
    crowd = Crowd(6, 5, 3, 6, noise=0.5)
    prior, shares = crowd.prior(), np.array([0.1, 0.2, 0.4, 0.3])
    centres = crowd.random.normal(size=(4, 3))
    users = crowd.statistics()
    found = kinds_at(torch.from_numpy(centres), shares.tolist(), WIDER).posteriors(prior, users.gram, users.moment)
    for user in range(6):
        evidence = np.array([explained(crowd, user, centre) for centre in centres]) * shares
        expected = evidence / evidence.sum()
        np.testing.assert_allclose(found.belief[user], expected, rtol=1e-7, atol=1e-12)
        rows, rewards = crowd.samples(user)
        within = WIDER * crowd.covariance
        gain = within @ rows.T @ np.linalg.inv(rows @ within @ rows.T + crowd.noise * np.eye(len(rewards)))
        heads = [centre + gain @ (rewards - rows @ centre) for centre in centres]
        head = sum(share * each for share, each in zip(expected, heads, strict=True))
        np.testing.assert_allclose(found.head[user], head, rtol=1e-7)
        apart = sum(share * np.outer(each - head, each - head) for share, each in zip(expected, heads, strict=True))
        np.testing.assert_allclose(
            found.covariance()[user], within - gain @ rows @ within + apart, rtol=1e-7, atol=1e-12
        )


def explained(crowd: Crowd, user: int, centre: Array) -> float:
    """Density of a user's rewards when their head is N(centre, κΣ)."""
    rows, rewards = crowd.samples(user)
    covariance = WIDER * rows @ crowd.covariance @ rows.T + crowd.noise * np.eye(len(rewards))
    return float(multivariate_normal.pdf(rewards, rows @ centre, covariance))


def test_without_events_probabilities_are_the_shares() -> None:
    prior, centres = Crowd(1, 1, 3).prior(), kinds(2, 3)
    nothing = Statistics.of(torch.zeros(2, 1, 3), torch.zeros(2, 1), torch.zeros(2, 1))
    found = kinds_at(centres, [0.3, 0.7]).posteriors(prior, nothing.gram, nothing.moment)
    shares = torch.tensor([0.3, 0.7], dtype=torch.float64)
    torch.testing.assert_close(found.belief, shares.expand(2, 2))
    torch.testing.assert_close(found.head, (shares @ centres).expand(2, 3))


def test_unused_rows_have_probability_zero() -> None:
    prior, users = Crowd(1, 1, 3).prior(), Crowd(4, 5, 3, 8).statistics()
    few = kinds_at(kinds(3, 3), [0.2, 0.3, 0.5])
    found, expected = (each.posteriors(prior, users.gram, users.moment) for each in (few.padded(), few))
    assert not found.belief[:, 3:].any()
    torch.testing.assert_close(found.belief[:, :3], expected.belief)
    torch.testing.assert_close(found.covariance(), expected.covariance())


def test_schedule_of_the_search_for_kinds() -> None:
    assert search_due(4_000, 4_001, refit=True)
    assert search_due(0, FROM_EVENTS, refit=False)
    assert search_due(4_000, int(4_000 * GROWTH) + 1, refit=False)
    due = [total for total in range(2_000, 10_000, 10) if search_due(total - 10, total, refit=False)]
    assert abs(len(due) - math.log(5) / math.log(GROWTH)) <= 1
    assert not search_due(5_000, 5_000, refit=False)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_few_users_are_no_kinds(count: int) -> None:
    """Nearly the same differences for each of few users are no evidence."""
    users = crowd_of(kinds(1, 4), count, 300, 2)
    users = users.rows(torch.zeros(count, dtype=torch.int64))  # all alike
    prior = learned(users)
    assert_none(sought(prior, users), prior)


def test_only_kinds_with_users_count() -> None:
    """Nine kinds of four users: no more than four are left, the largest first."""
    users = crowd_of(kinds(2, 4), 4, 30, 2)
    prior = learned(users)
    em = MixtureEM(prior, users, torch.ones(4, dtype=torch.float64))
    found = em.fit(9, generator_of(0)).padded().used()
    assert 1 <= found.count() <= 4
    shares = found.log_shares[: found.count()]
    assert (shares[:-1] >= shares[1:]).all()
    assert (found.log_shares[found.count() :] == UNUSED).all()
