"""Who teaches, against loops over users, dense likelihoods and crowds in which it is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from torch import Tensor

from models.learner import UserBatch
from models.posterior import PosteriorLearner
from models.prior import NO_GROUP, UNSEEN_SPREAD, UNSEEN_USERS, Prior, Statistics, find_groups, matched
from models.teachers import (
    FROM_EVENTS,
    GROWTH,
    KINDS,
    LEAST_GAIN,
    LEAST_REWARDS,
    LEAST_USERS,
    USERS_MAX,
    Kinds,
    SilenceLosses,
    cluster,
    kinds_anew,
    kinds_state,
    measured_kinds,
    stored_kinds,
)
from models.teaching import Teaching
from models.upkeep import Samples
from models.warm_start_training import LEAST_SOURCES, teaching
from tests.models.posterior_worlds import small
from tests.models.test_prior import SHARE, Crowd

DIMENSION = 4


def learned(crowd: Crowd) -> tuple[Prior, Statistics]:
    """The prior that everybody of a crowd teaches, and what is known of them."""
    users, prior = crowd.statistics(), Prior.initial(DIMENSION)
    for _ in range(20):
        prior = prior.improved(users)
    return prior, users


def with_contrary(count: int, *, seed: int = 0, honest: int = 120) -> Crowd:
    """Users alike, but for the last ones, who want the opposite."""
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
    )


class TestWeights:
    def test_whoever_does_not_teach_might_not_be_there(self) -> None:
        prior, users = learned(Crowd(12, 6, DIMENSION))
        weights = torch.ones(12, dtype=torch.float64)
        weights[[2, 7]] = 0
        rest = torch.nonzero(weights).squeeze(-1)
        ours, theirs = prior.improved(users, weights), prior.improved(users.rows(rest))
        for name in ("mean", "covariance", "noise"):
            torch.testing.assert_close(getattr(ours, name), getattr(theirs, name))
        share = torch.tensor(SHARE, dtype=torch.float64)
        found = find_groups(prior, users, share, 3, weights)
        expected = find_groups(prior, users.rows(rest), share, 3)
        torch.testing.assert_close(found.centres(prior)[rest], expected.centres(prior))
        torch.testing.assert_close(found.offset[rest], expected.offset)
        assert (found.offset[[2, 7]] <= NO_GROUP / 2).all()

    def test_twice_the_weight_is_the_same_user_twice(self) -> None:
        prior, users = learned(Crowd(5, 6, DIMENSION))
        twice = prior.improved(users, torch.tensor([1.0, 2.0, 1.0, 1.0, 1.0], dtype=torch.float64))
        expected = prior.improved(users.rows(torch.tensor([0, 1, 1, 2, 3, 4])))
        torch.testing.assert_close(twice.covariance, expected.covariance)
        torch.testing.assert_close(twice.noise, expected.noise)

    def test_moments_by_loops(self) -> None:
        random = np.random.default_rng(1)
        mean, noise = random.normal(size=(5, 3)) + 10, 0.3
        covariance = np.stack([np.cov(random.normal(size=(3, 9))) for _ in range(5)])
        weights = random.random((2, 5))
        tensors = (torch.from_numpy(each) for each in (weights, mean, covariance, np.array(noise)))
        centres, spreads = matched(*tensors)
        for row in range(2):
            centre = sum(w * m for w, m in zip(weights[row], mean, strict=True)) / weights[row].sum()
            total = UNSEEN_USERS * UNSEEN_SPREAD * noise * np.eye(3)
            for w, m, c in zip(weights[row], mean, covariance, strict=True):
                total = total + w * (c + np.outer(m - centre, m - centre))
            np.testing.assert_allclose(centres[row], centre)
            np.testing.assert_allclose(spreads[row], total / (weights[row].sum() + UNSEEN_USERS), rtol=1e-9)

    def test_samples_of_whoever_does_not_teach_are_not_replayed(self) -> None:
        batches = [past_of(torch.rand(size, 2), torch.rand(size), 6) for size in (3, 2)]
        samples = Samples.of(batches, torch.tensor(0.0)).taught(batches, torch.tensor([0.0, 0.5]))
        assert samples.weights.tolist() == [0, 0, 0, 0.5, 0.5]


class TestLosses:
    def test_against_the_density_of_rewards(self) -> None:
        """A loop over sets and users: the prior by loops, and all rewards of a user as one normal vector."""
        crowd = Crowd(12, 5, 3)
        users, prior = crowd.statistics(), Prior.initial(3)
        kind = torch.arange(12) % KINDS
        losses = SilenceLosses(prior.posterior(users.gram, users.moment), prior.noise, users, kind, 1)
        members = torch.zeros(2, KINDS - 1, dtype=torch.bool)
        members[1, [0, 4]] = True  # of the others 0, 2, 3, 4, …: kinds 0 and 5
        found = losses.held_out(members)
        assert losses.pupils.tolist() == [1, 9]
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
    def test_clusters_that_lie_apart(self) -> None:
        random = torch.Generator().manual_seed(0)
        truth = torch.arange(60) % 3
        points = 10.0 * torch.eye(3)[truth] + torch.randn(60, 3, generator=random)
        found = cluster(points.double(), torch.ones(60, dtype=torch.float64), 3, random)
        assert len({(int(a), int(b)) for a, b in zip(truth, found, strict=True)}) == 3

    @pytest.mark.parametrize("seed", range(3))
    def test_a_contrary_quarter_is_silenced(self, seed: int) -> None:
        prior, users = learned(with_contrary(40, seed=seed))
        kinds = measured_kinds(prior, users, seed)
        weights = kinds.weights_of(users)
        assert weights[:120].mean() > 0.95
        assert weights[120:].mean() < 0.05
        assert kinds.gain[0] > LEAST_GAIN
        assert kinds.told_apart

    @pytest.mark.parametrize("seed", range(3))
    def test_nobody_is_silenced_among_friends(self, seed: int) -> None:
        prior, users = learned(with_contrary(0, seed=seed))
        kinds = measured_kinds(prior, users, seed)
        assert not kinds.any_silent
        assert kinds.told_apart

    @pytest.mark.parametrize("seed", range(3))
    def test_whoever_likes_more_of_everything_is_no_bad_teacher(self, seed: int) -> None:
        """Another level makes the prior wider, so that silence would save the others something; tastes are the same."""
        crowd = with_contrary(0, seed=seed, honest=160)
        crowd.heads[120:, 0] += 3.0
        crowd.reward()
        prior, users = learned(crowd)
        assert not measured_kinds(prior, users, seed).any_silent

    @pytest.mark.parametrize("seed", range(3))
    def test_liars_are_silenced_and_not_those_who_differ_otherwise(self, seed: int) -> None:
        crowd = with_contrary(40, seed=seed)
        crowd.heads[90:120, 0] += 3.0
        crowd.reward()
        prior, users = learned(crowd)
        weights = measured_kinds(prior, users, seed).weights_of(users)
        assert weights[:120].mean() > 0.95
        assert weights[120:].mean() < 0.05

    @pytest.mark.parametrize("seed", range(5))
    def test_nobody_is_silenced_where_tastes_spread(self, seed: int) -> None:
        """One population, most of whose differences lie in one direction: each side of it contradicts the other."""
        crowd = with_contrary(0, seed=seed, honest=160)
        crowd.heads = crowd.random.normal(size=crowd.heads.shape) * np.array([0.1, 1.0, 0.1, 0.1])
        crowd.reward()
        prior, users = learned(crowd)
        assert not measured_kinds(prior, users, seed).any_silent

    @pytest.mark.parametrize("seed", range(3))
    def test_who_sends_most_rewards_is_not_the_many(self, seed: int) -> None:
        """Liars are few, but nine in ten of the most active users."""
        crowd = with_contrary(USERS_MAX - 30, seed=seed, honest=4 * USERS_MAX)
        crowd.counts[: 4 * USERS_MAX - 30] = 4
        prior, users = learned(crowd)
        order = torch.randperm(len(crowd.counts), generator=torch.Generator().manual_seed(seed))
        weights = measured_kinds(prior, users.rows(order), seed).weights_of(users)
        assert weights[: 4 * USERS_MAX].mean() > 0.95
        assert weights[4 * USERS_MAX :].mean() < 0.05

    def test_nobody_is_silenced_where_there_are_no_many(self) -> None:
        """Everybody is unlike everybody else: whoever is silent saves the others something."""
        crowd = Crowd(160, 60, 12)
        crowd.heads = crowd.random.normal(size=crowd.heads.shape) * np.where(np.arange(160) % 2, 3.0, 1.0)[:, None]
        crowd.counts[:] = 60
        crowd.reward()
        users, prior = crowd.statistics(), Prior.initial(12)
        for _ in range(5):
            prior = prior.improved(users)
        assert (measured_kinds(prior, users, 0).weights_of(users)).mean() > 0.5

    def test_numbers_that_cannot_be_compared(self) -> None:
        prior, users = learned(with_contrary(40))
        broken = Statistics(users.gram * torch.nan, users.moment, users.squares, users.events)
        assert not measured_kinds(prior, broken, 0).told_apart

    def test_few_users_are_of_one_kind(self) -> None:
        prior, users = learned(with_contrary(10, honest=LEAST_USERS - 11))
        kinds = measured_kinds(prior, users, 0)
        assert not kinds.told_apart
        assert kinds.weights_of(users).eq(1).all()
        busy = users.rows(torch.arange(10).repeat(LEAST_USERS))
        quiet = Statistics(busy.gram, busy.moment, busy.squares, busy.events.clamp_max(LEAST_REWARDS - 1))
        assert not measured_kinds(prior, quiet, 0).told_apart, "too few rewards of each"

    def test_measured_when_inputs_change_and_as_events_grow(self) -> None:
        prior, users = learned(with_contrary(40))
        before = Kinds.one(prior)

        def measured(events: int, total: int, *, guard: float = 0.0, refit: bool = False) -> bool:
            trusted = torch.tensor(guard, dtype=torch.float64)
            kinds = kinds_anew(before, users, trusted, events, total, refit=refit, seed=0)
            assert kinds.told_apart == kinds.any_silent == (kinds is not before)
            return kinds.told_apart

        later = int(4 * FROM_EVENTS * GROWTH) + 1
        assert measured(4 * FROM_EVENTS, later)
        assert not measured(later, later)
        assert not measured(4 * FROM_EVENTS, later, guard=0.9), "groups tell users apart: nobody would be silent"
        assert measured(later, later, guard=0.9, refit=True), "kinds of other inputs say nothing"
        assert not measured(FROM_EVENTS // 2, FROM_EVENTS - 1)

    def test_an_epoch_keeps_them(self) -> None:
        prior, users = learned(with_contrary(40))
        kinds = measured_kinds(prior, users, 0)
        again = stored_kinds(kinds_state(kinds))
        torch.testing.assert_close(again.kind_of(users), kinds.kind_of(users))
        assert kinds.kind_of(users).unique().numel() > 1
        torch.testing.assert_close(again.weights, kinds.weights)

    def test_new_users_do_not_learn_from_the_silenced(self) -> None:
        prior, users = learned(with_contrary(40))
        shared = kinds_state(measured_kinds(prior, users, 0))
        assert teaching(shared, users).tolist() == [True] * 120 + [False] * 40
        few = users.rows(torch.cat([torch.arange(LEAST_SOURCES - 1), torch.arange(120, 160)]))
        assert teaching(shared, few).all(), "too few would be left"


def believers(contrary: int) -> UserBatch:
    """Users who like the first input, and some, the last of 120, who say the opposite."""
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
    )


class TestLearner:
    def test_bad_teachers_have_no_part_in_what_is_shared(self) -> None:
        """Unless groups tell users apart, or it is not wanted: then all is as if nobody had looked."""
        batch = believers(36)

        def prior_of(guard: float, *, since: int = 1_000, **changes: bool) -> Tensor:
            learner = PosteriorLearner(small(groups=False, trunk=False, memory=False, **changes), 2)
            shared = learner.initial_shared() | {"guard": torch.tensor(guard, dtype=torch.float64)}
            derived = learner.derive(shared, [batch], since, 120 * 16)
            assert all(bool(tensor.isfinite().all()) for tensor in derived.values())
            return derived["prior_covariance"][:2, :2]  # of the level, and of the first input

        careful, everybody = prior_of(0.0), prior_of(0.0, teaching=False)
        assert careful.trace() < 0.1 * everybody.trace(), "a prior that need not allow for the opposite"
        torch.testing.assert_close(prior_of(1.0), everybody)
        # 1,400 events before no doubling is due, but a look at who teaches; 1,800 before, neither.
        assert prior_of(0.0, since=1_400).trace() < 0.5 * prior_of(0.0, since=1_800).trace()

    def test_says_who_teaches_once_kinds_are_told_apart(self) -> None:
        learner = PosteriorLearner(small(), 2)
        shared = learner.initial_shared()
        batch = past_of(torch.rand(4, 2), torch.rand(4), learner.noted)
        assert learner.teaching(shared) is None
        assert learner.kinds(shared, batch).tolist() == [0]
        one = Kinds.one(Prior.initial(learner.head_size))
        centres = one.centres.clone()
        centres[0] = 100.0
        weights = torch.tensor([1.0, 0.0, *[1.0] * (KINDS - 2)], dtype=torch.float64)
        gain = torch.tensor([0.5, 0.1], dtype=torch.float64)
        shared |= kinds_state(Kinds(centres, weights, one.prior, gain))
        assert learner.kinds(shared, batch).tolist() == [1]
        told = learner.teaching(shared)
        assert isinstance(told, Teaching)
        assert (told.kinds, told.gain, told.gain_error, told.in_use) == (KINDS, 0.5, 0.1, True)
        torch.testing.assert_close(told.weights, weights)
        grouped = learner.teaching(shared | {"guard": torch.tensor(0.9, dtype=torch.float64)})
        assert grouped is not None
        assert not grouped.in_use, "groups tell users apart, and everybody teaches"
