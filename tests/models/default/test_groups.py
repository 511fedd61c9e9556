"""Kinds of users by EM, against loops over users and kinds, and on populations with known kinds."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from metaban.models.default.groups import (
    COUNTS,
    EVIDENCE_MARGIN,
    FROM_EVENTS,
    GROWTH,
    SPREAD,
    GroupState,
    Mixture,
    MixtureEM,
    derive_groups,
    mixture_due,
    random_responsibilities,
)
from metaban.models.default.prior import (
    NO_GROUP,
    Groups,
    Prior,
    Statistics,
    evidence_weights,
)

SHARE = torch.tensor(SPREAD, dtype=torch.float64)
NOISE = 0.2


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


def kinds(count: int, size: int = 4, seed: int = 0) -> Tensor:
    return 0.6 * torch.randn(count, size, generator=generator_of(seed), dtype=torch.float64)


def stored(prior: Prior, mixture: Mixture | None = None) -> GroupState:
    """The mixture stored by an earlier epoch, or an empty one."""
    groups = Groups.none(prior.mean.shape[0], SPREAD)
    if mixture is not None:
        groups = Groups.of(prior, mixture.centres, mixture.log_weight, SHARE)
    flag = torch.tensor(float(mixture is not None), dtype=torch.float64)
    guard = torch.ones_like(flag)
    return GroupState.stored(GroupState(groups, flag, guard).state())


def dense_log_probability(prior: Prior, users: Statistics, user: int, centre: Tensor) -> float:
    """log p(b | w ~ N(centre, κΣ)) of a user's statistics, b = Aw + noise of covariance σ²A, A of full rank."""
    gram = users.gram[user].numpy()
    mean = gram @ centre.numpy()
    covariance = gram @ (SPREAD * prior.covariance.numpy()) @ gram + float(prior.noise) * gram
    away = users.moment[user].numpy() - mean
    _, volume = np.linalg.slogdet(covariance)
    return float(-0.5 * (away @ np.linalg.solve(covariance, away) + volume))


def test_evidence_differs_between_kinds_as_the_dense_density() -> None:
    """Differences between kinds equal those of the dense density."""
    centres = kinds(3)
    users = crowd_of(centres, 5, 9, 1)
    prior = learned(users)
    mixture = Mixture(centres, torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log())
    found = MixtureEM(prior, users, SHARE, torch.ones(5, dtype=torch.float64)).log_joint(mixture)
    for user in range(5):
        expected = [
            dense_log_probability(prior, users, user, centre) + float(share)
            for centre, share in zip(centres, mixture.log_weight, strict=True)
        ]
        away = found[user] - torch.tensor(expected, dtype=torch.float64)
        torch.testing.assert_close(away, away[0].expand(3), rtol=1e-7, atol=1e-7)


def test_a_step_of_em_equals_loops() -> None:
    users = crowd_of(kinds(2), 6, 7, 2)
    prior, weights = learned(users), torch.tensor([1.0, 0.5, 1, 0, 1, 1], dtype=torch.float64)
    em = MixtureEM(prior, users, SHARE, weights)
    belief = random_responsibilities(2, 6, generator_of(3), prior.mean)
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
        torch.testing.assert_close(found.log_weight[beginning].exp(), shares)


def test_em_steps_raise_the_likelihood() -> None:
    users = crowd_of(kinds(3), 40, 12, 4)
    prior = learned(users)
    em = MixtureEM(prior, users, SHARE, torch.ones(40, dtype=torch.float64))
    mixture = em.m_step(random_responsibilities(3, 40, generator_of(5), prior.mean))
    before = em.log_posterior(mixture)
    for _ in range(30):
        mixture = em.m_step(em.log_joint(mixture).softmax(-1))
    assert (em.log_posterior(mixture) > before).all()


@pytest.mark.parametrize("count", [3, 4, 6])
def test_true_kinds_are_found(count: int) -> None:
    """The right number of kinds, near their centres, and every user in the right kind. With many kinds the search may
    fail at times."""
    centres = kinds(count, 6, seed=count)
    users = crowd_of(centres, 24 * count, 40, count)
    prior, ones = learned(users), torch.ones(24 * count, dtype=torch.float64)
    searches = (
        derive_groups(stored(prior), prior, prior, users, ones, spread=0.15, seek=True, total_events=events)
        for events in range(2_048, 2_048 + (count > 4) * 5 + 1)
    )
    state = next(state for state in searches if state.mixture > 0)
    there = state.rows.offset > NO_GROUP / 2
    assert int(there.sum()) == count
    found = state.rows
    near = torch.cdist(found.centres(prior)[there], centres)
    assert near.amin(0).max() < 0.15
    assert sorted(near.argmin(1).tolist()) == list(range(count))
    assert state.clusters() == count
    cluster = state.cluster_of(prior, users)
    assert (near.argmin(1)[cluster] == torch.arange(24 * count) % count).double().mean() > 0.95


@pytest.mark.parametrize("seed", range(4))
def test_without_kinds_none_are_found(seed: int) -> None:
    """Heads that are normal around one centre, or all equal: the groups are those of the mean shift."""
    for within in (0.3, 0.0):
        users = crowd_of(kinds(1, 5), 200, 30, seed, within)
        prior = learned(users)
        weights = torch.ones_like(users.events)
        state = derive_groups(
            stored(prior), prior, prior, users, weights, spread=0.15, seek=True, total_events=2_048 + seed
        )
        assert float(state.mixture) == 0
        assert float(state.rows.share) == 0.15
        assert int((state.rows.offset > NO_GROUP / 2).sum()) == 200
        assert state.clusters() == 1
        assert not state.cluster_of(prior, users).any()


def test_a_mixture_is_carried_over_to_newer_samples() -> None:
    """Centres follow the data; empty rows stay empty; without a mixture the mean shift is used."""
    centres = kinds(3, 5, seed=7)
    before, after = crowd_of(centres, 60, 20, 8), crowd_of(centres, 60, 60, 9)
    prior, later, ones = learned(before), learned(after), torch.ones(60, dtype=torch.float64)
    found = derive_groups(stored(prior), prior, prior, before, ones, spread=0.15, seek=True, total_events=2_048)
    state = derive_groups(found, prior, later, after, ones, spread=0.15, seek=False, total_events=2_100)
    assert float(found.mixture) == float(state.mixture) == 1
    assert int((state.rows.offset > NO_GROUP / 2).sum()) == 3
    assert torch.cdist(state.rows.centres(later)[:3], centres).amin(0).max() < 0.1
    without = derive_groups(stored(prior), prior, later, after, ones, spread=0.15, seek=False, total_events=2_100)
    assert float(without.mixture) == 0
    assert int((without.rows.offset > NO_GROUP / 2).sum()) == 60


def test_a_mixture_survives_being_stored() -> None:
    prior = learned(crowd_of(kinds(3, 5), 30, 9, 1))
    mixture = Mixture(kinds(3, 5), torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).log())
    state = stored(prior, mixture)
    again = Mixture.of(state.rows, prior)
    torch.testing.assert_close(again.centres[:3], mixture.centres)
    torch.testing.assert_close(again.log_weight[:3], mixture.log_weight)
    assert (again.log_weight[3:] <= NO_GROUP / 2).all()
    assert again.centres.shape[0] == max(COUNTS)


def test_users_without_weight_form_no_kind() -> None:
    """A third kind whose users have no weight is not found; the remaining two kinds are too few for a mixture."""
    users = crowd_of(kinds(3, 5, seed=3), 90, 40, 5)
    silent = (torch.arange(90) % 3 != 2).to(torch.float64)
    prior = learned(users)
    state = derive_groups(stored(prior), prior, prior, users, silent, spread=0.15, seek=True, total_events=2_048)
    assert float(state.mixture) == 0
    unweighted = derive_groups(
        stored(prior), prior, prior, users, torch.ones_like(silent), spread=0.15, seek=True, total_events=2_048
    )
    assert float(unweighted.mixture) == 1


def test_evidence_is_largest_at_the_true_number_of_kinds() -> None:
    """The true number of kinds has the largest evidence, clearly larger than two kinds."""
    users = crowd_of(kinds(3, 5, seed=2), 60, 30, 6)
    prior = learned(users)
    em = MixtureEM(prior, users, SHARE, evidence_weights(users))
    generator = generator_of(0)
    found = [em.fit(random_responsibilities(count, 60, generator, prior.mean)) for count in COUNTS]
    worth = torch.stack([em.log_evidence(mixture) for mixture in found])
    assert COUNTS[int(worth.argmax())] == 3
    assert worth[1] - worth[0] > EVIDENCE_MARGIN


def test_kinds_that_do_not_help_are_suspended() -> None:
    users = crowd_of(kinds(4, 5, seed=1), 60, 30, 3)
    prior, ones = learned(users), torch.ones(60, dtype=torch.float64)

    def sought(before: GroupState, guard: float, events: int) -> GroupState:
        before = replace(before, guard=torch.tensor(guard, dtype=torch.float64))
        return derive_groups(before, prior, prior, users, ones, spread=0.15, seek=True, total_events=events)

    state = sought(stored(prior), 0.0, 2_000)  # this guard belongs to other groups
    assert float(state.mixture) == 1
    assert float(sought(state, 0.9, 2_700).mixture) == 1
    dropped = sought(state, 0.1, 2_700)
    assert float(dropped.mixture) == -5_400
    assert float(dropped.rows.share) == 0.15
    carried = derive_groups(dropped, prior, prior, users, ones, spread=0.15, seek=False, total_events=2_800)
    assert float(carried.mixture) == -5_400
    assert float(carried.rows.share) == 0.15
    assert float(sought(dropped, 1.0, 5_000).mixture) == -5_400
    assert float(sought(dropped, 1.0, 5_400).mixture) == 1


def test_with_few_events_per_user_no_kinds_are_found() -> None:
    users = crowd_of(kinds(4, 5, seed=1), 60, 9, 3)
    prior = learned(users)
    state = derive_groups(
        stored(prior), prior, prior, users, torch.ones_like(users.events), spread=0.15, seek=True, total_events=2_048
    )
    assert float(state.mixture) == 0


def test_schedule_of_the_search_for_kinds() -> None:
    assert not mixture_due(FROM_EVENTS // 2, FROM_EVENTS - 1, refit=True)
    assert mixture_due(FROM_EVENTS - 1, FROM_EVENTS, refit=True)
    assert mixture_due(0, FROM_EVENTS, refit=False)
    assert mixture_due(4_000, int(4_000 * GROWTH) + 1, refit=False)
    due = [total for total in range(2_000, 10_000, 10) if mixture_due(total - 10, total, refit=False)]
    assert abs(len(due) - math.log(5) / math.log(GROWTH)) <= 1
    assert not mixture_due(5_000, 5_000, refit=False)
