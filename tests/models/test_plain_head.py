"""Everybody's plain head: what it is fitted to, and when it decides instead of users' own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from models.learner import State, UserBatch
from models.plain_head import HALF_BELIEVED_CONSTANT, HALF_BELIEVED_EVENTS, PlainHead
from models.posterior import PosteriorLearner
from models.prior import Statistics
from models.upkeep import ALONE, PLAIN, TOGETHER, TRUST_AHEAD
from tests.models.posterior_worlds import WIDE, Scene, answered, batch_of, generator_of, kinds, small, taught
from tests.models.worlds import close


def population(learner: PosteriorLearner) -> UserBatch:
    """Twelve users of two kinds with 20 events each."""
    return batch_of(kinds(learner, 12, 20, generator_of(10)), padding=3)


def derived(learner: PosteriorLearner, batch: UserBatch) -> State:
    return learner.derive(learner.initial_shared(), [batch], 0, 512)


def test_it_is_a_regression_on_everybodys_rows_without_products_and_trunk() -> None:
    learner = PosteriorLearner(small(), 3, torch.float64)
    batch = population(learner)
    shared = derived(learner, batch)
    assert learner.inputs.products
    rows = learner.batch_heads(shared, batch)[batch.valid][:, :4]  # [n, 4], the constant and the inputs
    penalty = torch.tensor([HALF_BELIEVED_CONSTANT, *[HALF_BELIEVED_EVENTS] * 3], dtype=torch.float64).sqrt().diag()
    rewards = torch.cat([batch.rewards[batch.valid], torch.zeros(4, dtype=torch.float64)])
    stacked = torch.cat([rows, penalty])  # the penalty as four rows that earned nothing
    close(shared["plain_mean"][:4], torch.linalg.lstsq(stacked, rewards.unsqueeze(-1)).solution[:, 0], 1e-9)
    assert shared["plain_mean"].shape[0] > 4
    assert not shared["plain_mean"][4:].any()


def test_users_count_as_far_as_they_teach() -> None:
    generator, trust = generator_of(3), torch.ones(()).double()
    h = torch.randn(6, 9, 5, generator=generator, dtype=torch.float64)
    rewards = torch.rand(6, 9, generator=generator, dtype=torch.float64)
    users = Statistics.of(h, rewards, torch.ones(6, 9))
    silent = PlainHead.fitted(users, torch.tensor([1.0, 1, 0, 1, 0, 1]).double(), 3, trust)
    without = PlainHead.fitted(users.rows(torch.tensor([0, 1, 3, 5])), torch.ones(4).double(), 3, trust)
    close(silent.mean, without.mean, 1e-12)


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


@pytest.mark.parametrize("trust", [0.0, 1.0])
def test_who_is_not_trusted_is_judged_for_like_everybody(trust: float) -> None:
    """Users of opposite tastes are told the same without trust, and with it are not."""
    learner = PosteriorLearner(small(memory=False), 3, torch.float64)
    people = kinds(learner, 2, 40, generator_of(4))
    shared = taught(learner, people, trust=trust)
    arms = torch.randn(5, 3, generator=generator_of(5), dtype=torch.float64)
    one, other = (answered(Scene(learner.settings, 3, shared, [], [(person, -1, arms)])) for person in people)
    assert torch.allclose(one.mean, other.mean, atol=1e-9) == (trust == 0)
    assert not torch.allclose(one.bonus, other.bonus, atol=1e-9)  # what is not known of users is their own in any case


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


def test_it_can_be_left_out() -> None:
    learner = PosteriorLearner(small(plain=False), 3, torch.float64)
    shared = derived(learner, population(learner))
    assert shared["trust"] == 1
    assert not shared["plain_mean"].any()
