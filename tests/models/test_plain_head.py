"""Everybody's plain head: what it is fitted to, and when it decides instead of users' own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from models.learner import State, UserBatch
from models.plain_head import HALF_BELIEVED_CONSTANT, HALF_BELIEVED_EVENTS, PlainHead
from models.posterior import PosteriorLearner
from models.prior import Prior, Statistics
from models.upkeep import (
    ALONE,
    PLAIN,
    PLAIN_ALONE_TOLD,
    PLAIN_UNTIL_EVENTS,
    PLAIN_UNTIL_TOLD,
    TOGETHER,
    TRUST_AHEAD,
)
from tests.models.posterior_worlds import WIDE, Scene, answered, batch_of, generator_of, kinds, small, taught
from tests.models.worlds import close


def population(learner: PosteriorLearner) -> UserBatch:
    """Twelve users of two kinds with 20 events each."""
    return batch_of(kinds(learner, 12, 20, generator_of(10)), padding=3)


def derived(learner: PosteriorLearner, batch: UserBatch) -> State:
    return learner.derive(learner.initial_shared(), [batch], 0, 512)


def test_it_is_a_regression_with_users_levels_on_everybodys_rows() -> None:
    """Without products and trunk; by generalised least squares, from the dense covariance of each user's rewards."""
    learner = PosteriorLearner(small(), 3, torch.float64)
    batch = population(learner)
    shared = derived(learner, batch)
    assert learner.inputs.products
    rows = learner.batch_heads(shared, batch)[..., :4]  # [12, n, 4], the constant and the inputs
    level, noise = shared["prior_covariance"][0, 0], shared["noise"]
    gram = torch.tensor([HALF_BELIEVED_CONSTANT, *[HALF_BELIEVED_EVENTS] * 3], dtype=torch.float64).diag()
    moment = torch.zeros(4, dtype=torch.float64)
    for user in range(12):
        x, r = rows[user][batch.valid[user]], batch.rewards[user][batch.valid[user]]
        weight = torch.linalg.inv(torch.eye(len(r), dtype=torch.float64) + level / noise)
        gram, moment = gram + x.T @ weight @ x, moment + x.T @ weight @ r
    close(shared["plain_mean"][:4], torch.linalg.solve(gram, moment), 1e-9)
    assert shared["plain_mean"].shape[0] > 4
    assert not shared["plain_mean"][4:].any()
    close(shared["plain_covariance"][:4, :4], noise * torch.linalg.inv(gram), 1e-12)
    assert not shared["plain_covariance"][4:].any()
    assert not shared["plain_covariance"][:, 4:].any()


def a_crowd(levels: float, users: int = 40) -> tuple[Statistics, Tensor]:
    """Users with one taste and levels that far apart, and the taste."""
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
        prior = prior.improved(users)
    return prior


def test_users_count_as_far_as_they_teach() -> None:
    (users, _), trust = a_crowd(0.1, 6), torch.ones(()).double()
    prior = Prior.initial(5)
    silent = PlainHead.fitted(users, torch.tensor([1.0, 1, 0, 1, 0, 1]).double(), 3, prior, trust)
    without = PlainHead.fitted(users.rows(torch.tensor([0, 1, 3, 5])), torch.ones(4).double(), 3, prior, trust)
    close(silent.mean, without.mean, 1e-12)


def test_what_users_like_in_general_does_not_blur_what_they_like() -> None:
    """However far apart their levels are, the same taste is found, and each user's level."""
    near, far = (a_crowd(levels) for levels in (0.0, 5.0))
    found = []
    for users, taste in (near, far):
        head = PlainHead.fitted(users, torch.ones(40).double(), 3, learned(users), torch.zeros(()).double())
        assert (head.mean[1:3] * taste[1:3] > 0).all()
        found.append(head)
    close(found[0].mean[1:], found[1].mean[1:], 2e-3)
    assert found[1].level_events < 0.1 < found[0].level_events
    foreseen = found[1].of_users(far[0].gram, far[0].moment)[:, 0]
    level = (far[0].moment[:, 0] - far[0].gram[:, 0, 1:] @ found[1].mean[1:]) / far[0].events
    close(foreseen, level, 0.05)
    assert (found[0].of_users(near[0].gram, near[0].moment)[:, 0] - found[0].mean[0]).abs().max() < 0.05


def test_of_nobody_s_rewards_the_level_is_everybodys() -> None:
    users, _ = a_crowd(1.0)
    head = PlainHead.fitted(users, torch.ones(40).double(), 3, learned(users), torch.ones(()).double())
    new = head.of_users(torch.zeros(1, 5, 5).double(), torch.zeros(1, 5).double())
    close(new[0], head.mean, 1e-12)


def trusted(plain: float, alone: float, together: float) -> Tensor:
    """Trust in the heads of users whose newest quarter was foreseen with these errors; what was before misleads."""
    learner = PosteriorLearner(small(), 3, torch.float64)
    batch = population(learner)
    for note, error in ((PLAIN, plain), (ALONE, alone), (TOGETHER, together)):
        batch.phi[..., note] = batch.rewards + error
    batch.phi[:, :15, PLAIN] += 5.0 if plain < min(alone, together) else 0.0
    batch.phi[:, :15, ALONE : TOGETHER + 1] += 5.0 if plain > min(alone, together) else 0.0
    return derived(learner, batch)["trust"]


def test_users_heads_are_trusted_as_far_as_they_foresaw_better() -> None:
    assert trusted(0.0, 0.5, 0.5) < 0.01
    assert trusted(0.5, 0.0, 0.5) > 0.99  # the better of both kinds stands for them
    assert trusted(0.5, 0.5, 0.0) > 0.99
    close(trusted(0.3, 0.3, 0.4), torch.tensor(TRUST_AHEAD).double().sigmoid(), 1e-9)  # no evidence either way


@pytest.mark.parametrize("trust", [0.0, 0.01, 1.0])
def test_who_is_not_trusted_is_judged_for_like_everybody(trust: float) -> None:
    """Users of opposite tastes are told the same without trust, and with it are not."""
    learner = PosteriorLearner(small(memory=False), 3, torch.float64)
    people = kinds(learner, 2, 40, generator_of(4))
    shared = taught(learner, people, trust=trust)
    arms = torch.randn(5, 3, generator=generator_of(5), dtype=torch.float64)
    one, other = (answered(Scene(learner.settings, 3, shared, [], [(person, -1, arms)])) for person in people)
    # Up to their levels, which move all arms alike.
    ranked, otherwise = one.mean - one.mean.mean(), other.mean - other.mean.mean()
    assert torch.allclose(ranked, otherwise, atol=1e-9) == (trust == 0)
    # What is not known of arms is what is not known of users, unless nobody is trusted at all.
    assert torch.allclose(one.bonus, other.bonus, atol=1e-9) == (trust == 0)


def test_before_any_event_users_own_heads_decide() -> None:
    assert PosteriorLearner(small(), 3).initial_shared()["trust"] == 1


def test_of_wide_inputs_it_waits_for_events() -> None:
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


def test_its_reign_ends() -> None:
    """However much it foresees: users' heads learn little from arms that it alone chose."""
    learner = PosteriorLearner(small(), 3, torch.float64)
    batch = population(learner)
    batch.phi[..., PLAIN], batch.phi[..., ALONE : TOGETHER + 1] = batch.rewards, batch.rewards.unsqueeze(-1) + 0.5
    before, after = (
        learner.derive(learner.initial_shared(), [batch], 0, PLAIN_UNTIL_EVENTS + more)["trust"] for more in (-1, 0)
    )
    assert before < 0.01
    assert after == 1


def test_where_rewards_are_rare_its_reign_ends_when_they_told_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of events, and of samples that are left of them."""
    learner = PosteriorLearner(small(), 3, torch.float64)
    batch = population(learner)
    batch.phi[..., PLAIN], batch.phi[..., ALONE : TOGETHER + 1] = batch.rewards, batch.rewards.unsqueeze(-1) + 0.5
    monkeypatch.setattr("models.upkeep.RARE_TELLING", 4.0)
    alone, until = PLAIN_ALONE_TOLD / telling_of(batch), PLAIN_UNTIL_TOLD / telling_of(batch)
    found = [
        float(learner.derive(learner.initial_shared(), [batch], 0, round(events))["trust"])
        for events in (0.99 * alone, 1.01 * alone, 0.99 * until, 1.01 * until)
    ]
    assert found[0] == 0
    assert 0 < found[1] == found[2] < 0.01
    assert found[3] == 1


@pytest.mark.parametrize(("share", "alone"), [(1.001, True), (0.999, False)])
def test_where_rewards_are_rare_it_decides_alone_at_first(
    share: float, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much users' heads foresee."""
    learner = PosteriorLearner(small(), 3, torch.float64)
    batch = population(learner)
    batch.phi[..., ALONE : TOGETHER + 1], batch.phi[..., PLAIN] = batch.rewards.unsqueeze(-1), batch.rewards + 0.5
    monkeypatch.setattr("models.upkeep.RARE_TELLING", share * telling_of(batch))
    trust = derived(learner, batch)["trust"]
    assert (trust == 0) == alone
    assert alone or trust > 0.99


def test_of_wide_inputs_it_never_decides_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.upkeep.RARE_TELLING", 4.0)
    for changes, alone in (({}, True), (WIDE, False)):
        learner = PosteriorLearner(small(**changes), 3, torch.float64)
        assert (derived(learner, population(learner))["trust"] == 0) == alone


def test_it_can_be_left_out() -> None:
    learner = PosteriorLearner(small(plain=False), 3, torch.float64)
    shared = derived(learner, population(learner))
    assert shared["trust"] == 1
    assert not shared["plain_mean"].any()
