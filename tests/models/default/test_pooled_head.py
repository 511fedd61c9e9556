"""The pooled head: how it is fitted, and when it decides instead of users' own heads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from metaban.models.default.evidence import (
    POOLED_ALONE_INFORMATION,
    POOLED_UNTIL_EVENTS,
    POOLED_UNTIL_INFORMATION,
    TRUST_LEAD,
)
from metaban.models.default.learner import PosteriorLearner
from metaban.models.default.notes import Notes
from metaban.models.default.pooled_head import RIDGE_CONSTANT_EVENTS, RIDGE_EVENTS, PooledHead
from metaban.models.default.prior import Prior, Statistics
from metaban.models.default.shared_state import SharedState
from metaban.models.learner import State, UserBatch
from tests.models.default_worlds import WIDE, Scene, batch_of, fast_scores, generator_of, grouped_epoch, kinds, small
from tests.models.worlds import assert_close


def population(learner: PosteriorLearner) -> UserBatch:
    """Twelve users of two kinds with 20 events each."""
    return batch_of(kinds(learner, 12, 20, generator_of(10)), padding=3)


def derived(learner: PosteriorLearner, batch: UserBatch) -> State:
    return learner.derive(learner.initial_shared(), [batch], 0, 512)


def test_it_is_a_mixed_regression_on_all_rows() -> None:
    """Without products and trunk, it is generalised least squares with the dense covariance of each user's rewards."""
    learner = PosteriorLearner(small(), 3, torch.float64)
    batch = population(learner)
    shared = derived(learner, batch)
    assert learner.inputs.products
    rows = learner.head_samples(SharedState.stored(shared), batch).inputs[
        ..., :4
    ]  # [12, n, 4], the constant and the inputs
    level, noise = shared["prior_covariance"][0, 0], shared["noise"]
    gram = torch.tensor([RIDGE_CONSTANT_EVENTS, *[RIDGE_EVENTS] * 3], dtype=torch.float64).diag()
    moment = torch.zeros(4, dtype=torch.float64)
    for user in range(12):
        x, r = rows[user][batch.valid[user]], batch.rewards[user][batch.valid[user]]
        weight = torch.linalg.inv(torch.eye(len(r), dtype=torch.float64) + level / noise)
        gram, moment = gram + x.T @ weight @ x, moment + x.T @ weight @ r
    assert_close(shared["plain_mean"][:4], torch.linalg.solve(gram, moment), 1e-9)
    assert shared["plain_mean"].shape[0] > 4
    assert not shared["plain_mean"][4:].any()
    assert_close(shared["plain_covariance"][:4, :4], noise * torch.linalg.inv(gram), 1e-12)
    assert not shared["plain_covariance"][4:].any()
    assert not shared["plain_covariance"][:, 4:].any()


def crowd_of_one_taste(levels: float, users: int = 40) -> tuple[Statistics, Tensor]:
    """Users with one taste and spread levels, and the taste."""
    generator = generator_of(3)
    h = torch.randn(users, 20, 5, generator=generator, dtype=torch.float64)
    h[..., 0] = 1
    taste = torch.tensor([0.3, 0.1, -0.2, 0.0, 0.0], dtype=torch.float64)
    noise = 0.05 * torch.randn(users, 20, generator=generator, dtype=torch.float64)
    rewards = h @ taste + levels * torch.randn(users, 1, generator=generator, dtype=torch.float64) + noise
    return Statistics.of(h, rewards, torch.ones(users, 20)), taste


def learned(users: Statistics) -> Prior:
    prior = Prior.initial(5)
    for _ in range(30):
        prior = prior.em_step(users)
    return prior


def test_users_count_by_weight() -> None:
    (users, _), trust = crowd_of_one_taste(0.1, 6), torch.ones(()).double()
    prior = Prior.initial(5)
    silent = PooledHead.fitted(users, torch.tensor([1.0, 1, 0, 1, 0, 1]).double(), 3, prior, trust)
    without = PooledHead.fitted(users.rows(torch.tensor([0, 1, 3, 5])), torch.ones(4).double(), 3, prior, trust)
    assert_close(silent.mean, without.mean, 1e-12)


def test_user_levels_do_not_bias_the_taste() -> None:
    """However far apart the users' levels are, the same taste is found, and each user's level."""
    near, far = (crowd_of_one_taste(levels) for levels in (0.0, 5.0))
    found = []
    for users, taste in (near, far):
        head = PooledHead.fitted(users, torch.ones(40).double(), 3, learned(users), torch.zeros(()).double())
        assert (head.mean[1:3] * taste[1:3] > 0).all()
        found.append(head)
    assert_close(found[0].mean[1:], found[1].mean[1:], 2e-3)
    assert found[1].level_events < 0.1 < found[0].level_events
    levels = found[1].with_user_levels(far[0].gram, far[0].moment)[:, 0]
    level = (far[0].moment[:, 0] - far[0].gram[:, 0, 1:] @ found[1].mean[1:]) / far[0].events
    assert_close(levels, level, 0.05)
    assert (found[0].with_user_levels(near[0].gram, near[0].moment)[:, 0] - found[0].mean[0]).abs().max() < 0.05


def test_without_rewards_the_level_is_the_common_one() -> None:
    users, _ = crowd_of_one_taste(1.0)
    head = PooledHead.fitted(users, torch.ones(40).double(), 3, learned(users), torch.ones(()).double())
    new = head.with_user_levels(torch.zeros(1, 5, 5).double(), torch.zeros(1, 5).double())
    assert_close(new[0], head.mean, 1e-12)


def trusted(plain: float, alone: float, together: float) -> Tensor:
    """Trust in users' heads whose newest quarter was predicted with these errors; earlier errors are misleading."""
    learner = PosteriorLearner(small(), 3, torch.float64)
    batch = population(learner)
    notes = Notes(batch.phi)
    for note, error in ((notes.pooled, plain), (notes.alone, alone), (notes.together, together)):
        note[:] = batch.rewards + error
    notes.pooled[:, :15] += 5.0 if plain < min(alone, together) else 0.0
    notes.predictions[:, :15, 2:] += 5.0 if plain > min(alone, together) else 0.0
    return derived(learner, batch)["trust"]


def test_user_heads_are_trusted_as_far_as_they_predict_better() -> None:
    assert trusted(0.0, 0.5, 0.5) < 0.01
    assert trusted(0.5, 0.0, 0.5) > 0.99  # the better of both kinds of heads counts
    assert trusted(0.5, 0.5, 0.0) > 0.99
    assert_close(trusted(0.3, 0.3, 0.4), torch.tensor(TRUST_LEAD).double().sigmoid(), 1e-9)  # no evidence either way


@pytest.mark.parametrize("trust", [0.0, 0.01, 1.0])
def test_without_trust_all_users_are_ranked_alike(trust: float) -> None:
    """Users of opposite tastes get the same ranking without trust, and different ones with it."""
    learner = PosteriorLearner(small(memory=False), 3, torch.float64)
    people = kinds(learner, 2, 40, generator_of(4))
    shared = grouped_epoch(learner, people, trust=trust)
    arms = torch.randn(5, 3, generator=generator_of(5), dtype=torch.float64)
    one, other = (fast_scores(Scene(learner.settings, 3, shared, [], [(person, -1, arms)])) for person in people)
    # Up to the users' levels, which move all arms alike.
    ranked, otherwise = one.mean - one.mean.mean(), other.mean - other.mean.mean()
    assert torch.allclose(ranked, otherwise, atol=1e-9) == (trust == 0)
    # The uncertainty is that of the users' heads, unless trust is zero.
    assert torch.allclose(one.bonus, other.bonus, atol=1e-9) == (trust == 0)


def test_before_any_event_user_heads_decide() -> None:
    assert PosteriorLearner(small(), 3).initial_shared()["trust"] == 1


def test_with_wide_inputs_it_needs_a_minimum_of_events() -> None:
    learner = PosteriorLearner(small(**WIDE), 3, torch.float64)
    assert learner.inputs.narrowed
    batch = population(learner)
    early, later = (learner.derive(learner.initial_shared(), [batch], 0, events) for events in (255, 256))
    assert early["trust"] == 1
    assert not early["plain_mean"].any()
    assert later["plain_mean"].any()


def telling_of(batch: UserBatch) -> float:
    away = (batch.rewards[batch.valid] - batch.rewards[batch.valid].mean()).abs()
    return float(away.sum() ** 2 / (away**2).sum() / len(away))


def test_it_decides_alone_for_a_limited_time() -> None:
    """However well it predicts: users' heads learn little from arms that it alone chose."""
    learner = PosteriorLearner(small(), 3, torch.float64)
    batch = population(learner)
    notes = Notes(batch.phi)
    notes.pooled[:], notes.predictions[..., 2:] = batch.rewards, batch.rewards.unsqueeze(-1) + 0.5
    before, after = (
        learner.derive(learner.initial_shared(), [batch], 0, POOLED_UNTIL_EVENTS + more)["trust"] for more in (-1, 0)
    )
    assert before < 0.01
    assert after == 1


def test_with_rare_rewards_it_stops_deciding_alone_after_enough_information(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regardless of the number of events and of the samples kept."""
    learner = PosteriorLearner(small(), 3, torch.float64)
    batch = population(learner)
    notes = Notes(batch.phi)
    notes.pooled[:], notes.predictions[..., 2:] = batch.rewards, batch.rewards.unsqueeze(-1) + 0.5
    monkeypatch.setattr("metaban.models.default.evidence.RARE_INFORMATION", 4.0)
    alone, until = POOLED_ALONE_INFORMATION / telling_of(batch), POOLED_UNTIL_INFORMATION / telling_of(batch)
    found = [
        float(learner.derive(learner.initial_shared(), [batch], 0, round(events))["trust"])
        for events in (0.99 * alone, 1.01 * alone, 0.99 * until, 1.01 * until)
    ]
    assert found[0] == 0
    assert 0 < found[1] == found[2] < 0.01
    assert found[3] == 1


@pytest.mark.parametrize(("share", "alone"), [(1.001, True), (0.999, False)])
def test_with_rare_rewards_it_decides_alone_at_first(
    share: float, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However well users' heads predict."""
    learner = PosteriorLearner(small(), 3, torch.float64)
    batch = population(learner)
    notes = Notes(batch.phi)
    notes.predictions[..., 2:], notes.pooled[:] = batch.rewards.unsqueeze(-1), batch.rewards + 0.5
    monkeypatch.setattr("metaban.models.default.evidence.RARE_INFORMATION", share * telling_of(batch))
    trust = derived(learner, batch)["trust"]
    assert (trust == 0) == alone
    assert alone or trust > 0.99


def test_with_wide_inputs_it_never_decides_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metaban.models.default.evidence.RARE_INFORMATION", 4.0)
    for changes, alone in (({}, True), (WIDE, False)):
        learner = PosteriorLearner(small(**changes), 3, torch.float64)
        assert (derived(learner, population(learner))["trust"] == 0) == alone


def test_it_can_be_disabled() -> None:
    learner = PosteriorLearner(small(plain=False), 3, torch.float64)
    shared = derived(learner, population(learner))
    assert shared["trust"] == 1
    assert not shared["plain_mean"].any()
