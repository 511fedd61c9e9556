"""Influence of users on shared state, against loops, dense likelihoods and populations with a known answer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import multivariate_normal
from torch import Tensor

from metaban.models.default.influence import (
    FIRST_LEAN,
    FROM_EVENTS,
    GROWTH,
    KINDS,
    LEAST_GAIN,
    LEAST_REWARDS,
    LEAST_USERS,
    POPULATION_STEPS,
    SUBSET_STEPS,
    USERS_MAX,
    ExclusionLosses,
    Kinds,
    cluster,
    contradiction,
    derive_kinds,
    kinds_from_state,
    kinds_state,
    measure_kinds,
    smaller_population,
)
from metaban.models.default.learner import PosteriorLearner
from metaban.models.default.places import PLACES
from metaban.models.default.prior import (
    NO_GROUP,
    UNSEEN_SPREAD,
    UNSEEN_USERS,
    Prior,
    Statistics,
    find_groups,
    moment_matched,
)
from metaban.models.default.samples import Samples
from metaban.models.fusion.warm_start_training import LEAST_SOURCES, influential_sources
from metaban.models.learner import Influence, UserBatch
from tests.models.default.crowds import SHARE, Crowd
from tests.models.default_worlds import small

DIMENSION = 4


def learned(crowd: Crowd) -> tuple[Prior, Statistics]:
    """The prior fitted to all users of a crowd, and their statistics."""
    users, prior = crowd.statistics(), Prior.initial(DIMENSION)
    for _ in range(20):
        prior = prior.em_step(users)
    return prior, users


def crowd_with_opposites(count: int, *, seed: int = 0, honest: int = 120) -> Crowd:
    """Users with one taste, except the last ones, who have the opposite taste."""
    crowd = Crowd(honest + count, 24, DIMENSION, seed)
    crowd.mean = np.array([0.5, 1.0, -1.0, 0.5])
    crowd.heads = crowd.mean + 0.2 * crowd.random.normal(size=crowd.heads.shape)
    crowd.heads[honest:] *= -1
    crowd.inputs[..., 0] = 1.0
    crowd.counts[:] = 24
    crowd.reward()
    return crowd


def past_of(features: Tensor, rewards: Tensor, noted: int) -> UserBatch:
    """One user's samples."""
    count = len(rewards)
    return UserBatch(
        features=features.unsqueeze(0),
        rewards=rewards.unsqueeze(0),
        valid=torch.ones(1, count, dtype=torch.bool),
        events=torch.tensor([count]),
        draw=torch.tensor([0]),
        weight=torch.ones(1),
        phi=torch.zeros(1, count, noted),
        epochs=torch.zeros(1, count, dtype=torch.int64),
        starts=torch.zeros(1, 0),
        arm_keys=torch.zeros(1, count, dtype=torch.int64),
        places=torch.zeros(1, count, dtype=torch.int64),
    )


class TestWeights:
    def test_zero_weight_equals_leaving_the_user_out(self) -> None:
        prior, users = learned(Crowd(12, 6, DIMENSION))
        weights = torch.ones(12, dtype=torch.float64)
        weights[[2, 7]] = 0
        rest = torch.nonzero(weights).squeeze(-1)
        ours, theirs = prior.em_step(users, weights), prior.em_step(users.rows(rest))
        for name in ("mean", "covariance", "noise"):
            torch.testing.assert_close(getattr(ours, name), getattr(theirs, name))
        share = torch.tensor(SHARE, dtype=torch.float64)
        found = find_groups(prior, users, share, 3, weights)
        expected = find_groups(prior, users.rows(rest), share, 3)
        torch.testing.assert_close(found.centres(prior)[rest], expected.centres(prior))
        torch.testing.assert_close(found.offset[rest], expected.offset)
        assert (found.offset[[2, 7]] <= NO_GROUP / 2).all()

    def test_weight_two_equals_the_user_twice(self) -> None:
        prior, users = learned(Crowd(5, 6, DIMENSION))
        twice = prior.em_step(users, torch.tensor([1.0, 2.0, 1.0, 1.0, 1.0], dtype=torch.float64))
        expected = prior.em_step(users.rows(torch.tensor([0, 1, 1, 2, 3, 4])))
        torch.testing.assert_close(twice.covariance, expected.covariance)
        torch.testing.assert_close(twice.noise, expected.noise)

    def test_weighted_moments_equal_loops(self) -> None:
        random = np.random.default_rng(1)
        mean, noise = random.normal(size=(5, 3)) + 10, 0.3
        covariance = np.stack([np.cov(random.normal(size=(3, 9))) for _ in range(5)])
        weights = random.random((2, 5))
        tensors = (torch.from_numpy(each) for each in (weights, mean, covariance, np.array(noise)))
        centres, spreads = moment_matched(*tensors)
        for row in range(2):
            centre = sum(w * m for w, m in zip(weights[row], mean, strict=True)) / weights[row].sum()
            total = UNSEEN_USERS * UNSEEN_SPREAD * noise * np.eye(3)
            for w, m, c in zip(weights[row], mean, covariance, strict=True):
                total = total + w * (c + np.outer(m - centre, m - centre))
            np.testing.assert_allclose(centres[row], centre)
            np.testing.assert_allclose(spreads[row], total / (weights[row].sum() + UNSEEN_USERS), rtol=1e-9)

    def test_samples_of_users_without_influence_are_not_replayed(self) -> None:
        batches = [past_of(torch.rand(size, 2), torch.rand(size), 6) for size in (3, 2)]
        shared = {"since": torch.tensor(0.0), "arm_looks": torch.ones(PLACES)}
        samples = Samples.of(batches, shared).weighted_by_user(batches, torch.tensor([0.0, 0.5]))
        assert samples.weights.tolist() == [0, 0, 0, 0.5, 0.5]


class TestLosses:
    def test_losses_equal_the_dense_density(self) -> None:
        """Loop over sets and users: the prior by loops, and all rewards of a user as one normal vector."""
        crowd = Crowd(12, 5, 3)
        users, prior = crowd.statistics(), Prior.initial(3)
        kind = torch.arange(12) % KINDS
        losses = ExclusionLosses(prior.posterior(users.gram, users.moment), prior.noise, users, kind, 1)
        members = torch.zeros(2, KINDS - 1, dtype=torch.bool)
        members[1, [0, 4]] = True  # kinds of the others (0, 2, 3, 4, …): 0 and 5
        found = losses.held_out(members)
        assert losses.target_rows.tolist() == [1, 9]
        means, covariances = (each.numpy() for each in prior.posterior(users.gram, users.moment))
        noise = float(prior.noise)
        for row, silent in enumerate(([], [0, 5])):
            teach = [user for user in range(12) if user % KINDS not in silent]
            centre = np.mean([means[user] for user in teach], axis=0)
            total = UNSEEN_USERS * UNSEEN_SPREAD * noise * np.eye(3)
            for user in teach:
                total = total + covariances[user] + np.outer(means[user] - centre, means[user] - centre)
            spread = total / (len(teach) + UNSEEN_USERS)
            for place, user in enumerate((1, 9)):
                h, r = crowd.samples(user)
                dense = multivariate_normal(h @ centre, h @ spread @ h.T + noise * np.eye(len(r)))
                assert float(found[row, place]) == pytest.approx(-dense.logpdf(r), rel=1e-9)
        torch.testing.assert_close(losses.validation(members), found.mean(-1))


class TestKinds:
    def test_separate_clusters_are_found(self) -> None:
        random = torch.Generator().manual_seed(0)
        truth = torch.arange(60) % 3
        points = 10.0 * torch.eye(3)[truth] + torch.randn(60, 3, generator=random)
        found = cluster(points.double(), torch.ones(60, dtype=torch.float64), 3, random)
        assert len({(int(a), int(b)) for a, b in zip(truth, found, strict=True)}) == 3

    @pytest.mark.parametrize("seed", range(3))
    def test_a_quarter_with_the_opposite_taste_gets_no_influence(self, seed: int) -> None:
        prior, users = learned(crowd_with_opposites(40, seed=seed))
        kinds = measure_kinds(prior, users, seed)
        weights = kinds.weights_of(users)
        assert weights[:120].mean() > 0.95
        assert weights[120:].mean() < 0.05
        assert kinds.gain[0] > LEAST_GAIN
        assert kinds.separated

    @pytest.mark.parametrize("seed", range(3))
    def test_similar_users_all_keep_influence(self, seed: int) -> None:
        prior, users = learned(crowd_with_opposites(0, seed=seed))
        kinds = measure_kinds(prior, users, seed)
        assert not kinds.any_excluded
        assert kinds.separated

    @pytest.mark.parametrize("seed", range(3))
    def test_a_higher_level_of_rewards_keeps_influence(self, seed: int) -> None:
        """A different level widens the prior, so leaving these users out would help the others a little; their taste is
        the same."""
        crowd = crowd_with_opposites(0, seed=seed, honest=160)
        crowd.heads[120:, 0] += 3.0
        crowd.reward()
        prior, users = learned(crowd)
        assert not measure_kinds(prior, users, seed).any_excluded

    @pytest.mark.parametrize("seed", range(3))
    def test_only_liars_lose_influence(self, seed: int) -> None:
        crowd = crowd_with_opposites(40, seed=seed)
        crowd.heads[90:120, 0] += 3.0
        crowd.reward()
        prior, users = learned(crowd)
        weights = measure_kinds(prior, users, seed).weights_of(users)
        assert weights[:120].mean() > 0.95
        assert weights[120:].mean() < 0.05

    @pytest.mark.parametrize("seed", range(5))
    def test_a_wide_spread_of_tastes_keeps_influence(self, seed: int) -> None:
        """One population that differs mostly along one direction: each side contradicts the other."""
        crowd = crowd_with_opposites(0, seed=seed, honest=160)
        crowd.heads = crowd.random.normal(size=crowd.heads.shape) * np.array([0.1, 1.0, 0.1, 0.1])
        crowd.reward()
        prior, users = learned(crowd)
        assert not measure_kinds(prior, users, seed).any_excluded

    @pytest.mark.parametrize("seed", range(3))
    def test_majority_is_counted_by_users_not_by_rewards(self, seed: int) -> None:
        """Liars are a minority of users, but nine in ten of the most active ones."""
        crowd = crowd_with_opposites(USERS_MAX - 30, seed=seed, honest=4 * USERS_MAX)
        crowd.counts[: 4 * USERS_MAX - 30] = 4
        prior, users = learned(crowd)
        order = torch.randperm(len(crowd.counts), generator=torch.Generator().manual_seed(seed))
        weights = measure_kinds(prior, users.rows(order), seed).weights_of(users)
        assert weights[: 4 * USERS_MAX].mean() > 0.95
        assert weights[4 * USERS_MAX :].mean() < 0.05

    def test_without_a_majority_all_keep_influence(self) -> None:
        """All users differ from each other: leaving any one out helps the others a little."""
        crowd = Crowd(160, 60, 12)
        crowd.heads = crowd.random.normal(size=crowd.heads.shape) * np.where(np.arange(160) % 2, 3.0, 1.0)[:, None]
        crowd.counts[:] = 60
        crowd.reward()
        users, prior = crowd.statistics(), Prior.initial(12)
        for _ in range(5):
            prior = prior.em_step(users)
        assert (measure_kinds(prior, users, 0).weights_of(users)).mean() > 0.5

    def test_non_finite_losses(self) -> None:
        prior, users = learned(crowd_with_opposites(40))
        broken = Statistics(users.gram * torch.nan, users.moment, users.squares, users.events)
        assert not measure_kinds(prior, broken, 0).separated

    def test_few_users_form_one_cluster(self) -> None:
        prior, users = learned(crowd_with_opposites(10, honest=LEAST_USERS - 11))
        kinds = measure_kinds(prior, users, 0)
        assert not kinds.separated
        assert kinds.weights_of(users).eq(1).all()
        busy = users.rows(torch.arange(10).repeat(LEAST_USERS))
        quiet = Statistics(busy.gram, busy.moment, busy.squares, busy.events.clamp_max(LEAST_REWARDS - 1))
        assert not measure_kinds(prior, quiet, 0).separated, "too few rewards per user"

    def test_schedule_of_the_measurement(self) -> None:
        prior, users = learned(crowd_with_opposites(40))
        before = Kinds.one(prior)

        def measured(events: int, total: int, *, guard: float = 0.0, refit: bool = False) -> bool:
            trusted = torch.tensor(guard, dtype=torch.float64)
            kinds = derive_kinds(before, users, trusted, events, total, refit=refit, seed=0)
            assert kinds.separated == kinds.any_excluded == (kinds is not before)
            return kinds.separated

        later = int(4 * FROM_EVENTS * GROWTH) + 1
        assert measured(4 * FROM_EVENTS, later)
        assert not measured(later, later)
        assert not measured(4 * FROM_EVENTS, later, guard=0.9), "groups separate users: all would keep influence"
        assert measured(later, later, guard=0.9, refit=True), "kinds found with other inputs are not used"
        assert not measured(FROM_EVENTS // 2, FROM_EVENTS - 1)

    def test_an_epoch_keeps_the_weights(self) -> None:
        prior, users = learned(crowd_with_opposites(40))
        kinds = measure_kinds(prior, users, 0)
        again = kinds_from_state(kinds_state(kinds))
        torch.testing.assert_close(again.kind_of(users), kinds.kind_of(users))
        assert kinds.kind_of(users).unique().numel() > 1
        torch.testing.assert_close(again.weights, kinds.weights)

    def test_an_epoch_keeps_the_prior_of_all_users(self) -> None:
        prior, users = learned(crowd_with_opposites(40))
        again = kinds_from_state(kinds_state(measure_kinds(prior, users, 0))).prior
        torch.testing.assert_close(again.mean, prior.mean)
        torch.testing.assert_close(again.precision, prior.precision)
        torch.testing.assert_close(again.covariance, prior.covariance)
        torch.testing.assert_close(again.noise, prior.noise)
        # A user without rewards has the prior as their posterior.
        nothing = torch.zeros_like(users.gram[0]), torch.zeros_like(users.moment[0])
        torch.testing.assert_close(again.covariance, again.posterior(*nothing)[1])

    def test_warm_starts_ignore_users_without_influence(self) -> None:
        prior, users = learned(crowd_with_opposites(40))
        shared = kinds_state(measure_kinds(prior, users, 0))
        assert influential_sources(shared, users).tolist() == [True] * 120 + [False] * 40
        few = users.rows(torch.cat([torch.arange(LEAST_SOURCES - 1), torch.arange(120, 160)]))
        assert influential_sources(shared, few).all(), "too few users would be left"


def opposed_population(contrary: int) -> UserBatch:
    """Users who like the first input; the last of 120 have the opposite taste."""
    random = torch.Generator().manual_seed(3)
    features = torch.randn(120, 16, 2, generator=random)
    rewards = (0.3 + 0.2 * features[..., 0] + 0.05 * torch.randn(120, 16, generator=random)).clamp(0, 1)
    rewards[120 - contrary :] = 1 - rewards[120 - contrary :]
    ones = torch.ones(120)
    return UserBatch(
        features=features,
        rewards=rewards,
        valid=torch.ones(120, 16, dtype=torch.bool),
        events=16 * ones.long(),
        draw=0 * ones.long(),
        weight=ones,
        phi=torch.zeros(120, 16, PosteriorLearner(small(), 2).noted),
        epochs=torch.zeros(120, 16, dtype=torch.int64),
        starts=torch.zeros(120, 0),
        arm_keys=torch.zeros(120, 16, dtype=torch.int64),
        places=torch.zeros(120, 16, dtype=torch.int64),
    )


class TestLearner:
    def test_users_without_influence_do_not_change_shared_state(self) -> None:
        """Unless groups separate the users, or the setting is off (the default): then the epoch is as without influence
        weights."""
        batch = opposed_population(36)

        def prior_of(guard: float, *, since: int = 1_000, teaching: bool = True) -> Tensor:
            learner = PosteriorLearner(small(groups=False, trunk=False, memory=False, teaching=teaching), 2)
            shared = learner.initial_shared() | {"guard": torch.tensor(guard, dtype=torch.float64)}
            derived = learner.derive(shared, [batch], since, 120 * 16)
            assert all(bool(tensor.isfinite().all()) for tensor in derived.values())
            return derived["prior_covariance"][:2, :2]  # coefficients of the level and of the first input

        careful, unweighted = prior_of(0.0), prior_of(0.0, teaching=False)
        assert careful.trace() < 0.1 * unweighted.trace(), "the prior need not cover the opposite taste"
        torch.testing.assert_close(prior_of(1.0), unweighted)
        # With 1,400 events before, no doubling is due, but influence is measured; with 1,800, neither.
        assert prior_of(0.0, since=1_400).trace() < 0.5 * prior_of(0.0, since=1_800).trace()

    def test_influence_is_reported_once_kinds_are_found(self) -> None:
        learner = PosteriorLearner(small(teaching=True), 2)
        shared = learner.initial_shared()
        batch = past_of(torch.rand(4, 2), torch.rand(4), learner.noted)
        assert learner.influence(shared) is None
        assert learner.kinds(shared, batch).tolist() == [0]
        one = Kinds.one(Prior.initial(learner.head_size))
        centres = one.centres.clone()
        centres[0] = 100.0
        weights = torch.tensor([1.0, 0.0, *[1.0] * (KINDS - 2)], dtype=torch.float64)
        gain = torch.tensor([0.5, 0.1], dtype=torch.float64)
        shared |= kinds_state(Kinds(centres, weights, one.prior, gain))
        assert learner.kinds(shared, batch).tolist() == [1]
        told = learner.influence(shared)
        assert isinstance(told, Influence)
        assert (told.kinds, told.gain, told.gain_error, told.in_use) == (KINDS, 0.5, 0.1, True)
        torch.testing.assert_close(told.weights, weights)
        grouped = learner.influence(shared | {"guard": torch.tensor(0.9, dtype=torch.float64)})
        assert grouped is not None
        assert not grouped.in_use, "groups separate users, and all keep influence"

    def test_influence_is_not_measured_unless_asked_for(self) -> None:
        batch = opposed_population(36)
        for settings, measured in ((small(), False), (small(teaching=True), True)):
            learner = PosteriorLearner(settings, 2)
            derived = learner.derive(learner.initial_shared(), [batch], 1_000, 120 * 16)
            assert (learner.influence(derived) is not None) == measured
        # Switched off again, nothing of it stays.
        learner = PosteriorLearner(small(), 2)
        assert learner.influence(learner.derive(derived, [batch], 1_920, 1_984)) is None


# ---------------------------------------------------------------------- two populations


Matrix = NDArray[np.float64]

CROWD_DIMENSION = 3
USERS = 30
MINORITY = 7


def crowd_of_two(*, turned: float, level: float = 0.0, seed: int = 0) -> Crowd:
    """Users with one taste; the last MINORITY have that taste times `turned` and a level higher by `level`."""
    crowd = Crowd(USERS, 16, CROWD_DIMENSION, seed)
    crowd.heads = np.array([0.4, 1.0, -0.7]) + 0.3 * crowd.random.normal(size=crowd.heads.shape)
    crowd.heads[-MINORITY:, 1:] *= turned
    crowd.heads[-MINORITY:, 0] += level
    crowd.inputs[..., 0] = 1.0
    crowd.counts = crowd.random.integers(6, 17, size=USERS)
    crowd.reward()
    return crowd


def fitted_prior(users: Statistics) -> Prior:
    prior = Prior.initial(CROWD_DIMENSION)
    for _ in range(20):
        prior = prior.em_step(users)
    return prior


def loud(users: Statistics) -> Tensor:
    return users.events / (users.events + 5)


class TestPopulations:
    @pytest.mark.parametrize("turned", [-1.0, 0.6])
    def test_against_loops(self, turned: float) -> None:
        """EM user by user and population by population, from the density of all rewards of a user."""
        crowd = crowd_of_two(turned=turned)
        users = crowd.statistics()
        prior = fitted_prior(users)
        points, evidence_weight = prior.posterior_mean(users.gram, users.moment), loud(users)
        found = smaller_population(prior, users, points, evidence_weight)
        noise, weight = float(prior.noise), evidence_weight.numpy()
        apart = points.numpy() - weight @ points.numpy() / weight.sum()
        spread = sum(w * np.outer(a, a) for w, a in zip(weight, apart, strict=True))
        side = apart @ np.linalg.eigh(spread)[1][:, -1]
        side /= np.sqrt((weight * side**2).sum() / weight.sum())
        beliefs = [1 / (1 + np.exp(-FIRST_LEAN * side)), 1 / (1 + np.exp(FIRST_LEAN * side))]
        priors: list[tuple[Matrix, Matrix]] = [(prior.mean.numpy(), prior.covariance.numpy())] * 2
        for _ in range(POPULATION_STEPS):
            priors = [fitted(crowd, belief, *before, noise) for belief, before in zip(beliefs, priors, strict=True)]
            joint = np.array(
                [
                    [belief.mean() * density(crowd, user, *each, noise) for user in range(USERS)]
                    for belief, each in zip(beliefs, priors, strict=True)
                ]
            )
            beliefs = list(joint / joint.sum(0))
        expected = min(beliefs, key=lambda belief: float(belief.sum()))
        np.testing.assert_allclose(found, expected, atol=1e-6)

    @pytest.mark.parametrize("seed", range(3))
    def test_users_with_the_opposite_taste_are_separated(self, seed: int) -> None:
        users = crowd_of_two(turned=-1.0, seed=seed).statistics()
        prior = fitted_prior(users)
        belief = smaller_population(prior, users, prior.posterior_mean(users.gram, users.moment), loud(users))
        assert (belief[-MINORITY:] > 0.9).all()
        assert (belief[:-MINORITY] > 0.5).sum() <= 2, "some users have few samples"

    def test_identical_users(self) -> None:
        users = crowd_of_two(turned=1.0).statistics().rows(torch.zeros(USERS, dtype=torch.int64))
        prior = fitted_prior(users)
        belief = smaller_population(prior, users, prior.posterior_mean(users.gram, users.moment), loud(users))
        torch.testing.assert_close(belief, torch.full_like(belief, 0.5), atol=0.01, rtol=0)


class TestContradiction:
    def test_against_loops_over_samples(self) -> None:
        crowd = crowd_of_two(turned=0.3, level=1.0)
        users = crowd.statistics()
        prior = fitted_prior(users)
        some = torch.arange(USERS) >= USERS - MINORITY
        alone = prior
        for _ in range(SUBSET_STEPS):
            alone = alone.em_step(users, some.double())
        rises = []
        for user in range(USERS):
            h, r = crowd.samples(user)
            said = h[:, 1:] @ alone.mean[1:].numpy()
            rises.append(np.mean([(s - said.mean()) * (reward - r.mean()) for s, reward in zip(said, r, strict=True)]))
        expected = -np.mean(rises) / (np.std(rises, ddof=1) / np.sqrt(USERS))
        assert float(contradiction(prior, users, some)) == pytest.approx(expected)

    @pytest.mark.parametrize("seed", range(3))
    def test_opposite_taste_contradicts_and_another_level_does_not(self, seed: int) -> None:
        some = torch.arange(USERS) >= USERS - MINORITY
        opposite = crowd_of_two(turned=-1.0, seed=seed).statistics()
        assert contradiction(fitted_prior(opposite), opposite, some) > 1
        eager = crowd_of_two(turned=1.0, level=5.0, seed=seed).statistics()
        assert contradiction(fitted_prior(eager), eager, some) < -4

    @pytest.mark.parametrize("seed", range(5))
    def test_two_sides_of_one_wide_population_do_not_contradict(self, seed: int) -> None:
        """One kind of users, split along the direction of largest difference: both sides have opposite tastes."""
        crowd = Crowd(USERS, 16, CROWD_DIMENSION, seed)
        crowd.heads = crowd.random.normal(size=crowd.heads.shape) * np.array([0.1, 1.0, 0.1])
        crowd.inputs[..., 0] = 1.0
        crowd.counts[:] = 16
        crowd.reward()
        users = crowd.statistics()
        assert contradiction(fitted_prior(users), users, torch.from_numpy(crowd.heads[:, 1] > 0.3)) < 2


def fitted(crowd: Crowd, belief: Matrix, mean: Matrix, covariance: Matrix, noise: float) -> tuple[Matrix, Matrix]:
    """Mean and covariance of a population from the moments of its users' posteriors, one by one."""
    posteriors = []
    for user in range(USERS):
        h, r = crowd.samples(user)
        spread = np.linalg.inv(h.T @ h / noise + np.linalg.inv(covariance))
        posteriors.append((spread @ (h.T @ r / noise + np.linalg.solve(covariance, mean)), spread))
    centre = sum(b * m for b, (m, _) in zip(belief, posteriors, strict=True)) / belief.sum()
    total = UNSEEN_USERS * UNSEEN_SPREAD * noise * np.eye(CROWD_DIMENSION)
    for b, (m, spread) in zip(belief, posteriors, strict=True):
        total = total + b * (spread + np.outer(m - centre, m - centre))
    return centre, total / (belief.sum() + UNSEEN_USERS)


def density(crowd: Crowd, user: int, mean: Matrix, covariance: Matrix, noise: float) -> float:
    """Density of all rewards of a user, as one normal vector."""
    h, r = crowd.samples(user)
    return float(multivariate_normal(h @ mean, h @ covariance @ h.T + noise * np.eye(len(r))).pdf(r))
