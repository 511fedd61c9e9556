"""Preset `pooled` against a looped version with autograd: one request, one step, one sample at a time."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from metaban.models.learner import Query, State, UserBatch
from metaban.models.metaban.pooled import PooledLearner
from metaban.models.numerics.bias_free_net import Shape, weights
from metaban.models.numerics.slates import Slates
from metaban.models.settings import named_settings
from tests.models.worlds import stack

INPUTS = 3
SETTINGS = named_settings(
    "pooled", width=7, meta_steps=4, user_steps=3, recent_samples=5, step_samples=6, gamma=0.3, seed=3
)


def network(shape: Shape, theta: Tensor, x: Tensor) -> Tensor:
    """Eq. 9 for one network and one input."""
    *inner, last = weights(shape, theta)
    for matrix in inner:
        x = torch.relu(matrix @ x)
    return (last @ x).squeeze()


def random_batch(users: int, samples: int, seed: int) -> UserBatch:
    """Users with between 1 and `samples` samples each."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(1, samples + 1, (users,), generator=generator)
    return UserBatch(
        features=torch.randn(users, samples, INPUTS, generator=generator, dtype=torch.float64),
        rewards=torch.rand(users, samples, generator=generator, dtype=torch.float64),
        valid=torch.arange(samples) < counts.unsqueeze(-1),
        events=counts,
        draw=torch.zeros(users, dtype=torch.int64),
        weight=torch.ones(users, dtype=torch.float64),
        phi=torch.zeros(users, samples, 0, dtype=torch.float64),
        epochs=torch.zeros(users, samples, dtype=torch.int64),
        starts=torch.zeros(users, 0, dtype=torch.float64),
        arm_keys=torch.zeros(users, samples, dtype=torch.int64),
        places=torch.zeros(users, samples, dtype=torch.int64),
    )


def fitted(learner: PooledLearner, shared: State, batch: UserBatch) -> State:
    return learner.fit(shared, batch, stack(learner.initial_user(shared), batch.events.shape[0]))


def looped_theta(learner: PooledLearner, shared: State, samples: list[tuple[Tensor, Tensor]]) -> Tensor:
    """J₂ steps from the shared Θ, each on `step_samples` of the pooled samples, spread by the golden ratio."""
    settings, golden = learner.settings, (math.sqrt(5) - 1) / 2
    theta = shared["theta"].clone()
    for step in range(settings.meta_steps):
        theta.requires_grad_()
        loss = torch.zeros((), dtype=theta.dtype)
        for number in range(settings.step_samples):
            if samples:
                place = ((step * settings.step_samples + number) * golden) % 1.0
                features, reward = samples[int(place * len(samples))]
                error = network(learner.shape, theta, learner.prepare_epoch(shared).inputs(features)) - reward
                loss = loss + error.square() / 2 / settings.step_samples
        if samples:
            (gradient,) = torch.autograd.grad(loss, theta)
            theta = (theta - settings.meta_rate * gradient).detach()
    return theta.detach()


@pytest.mark.parametrize("seed", range(8))
def test_scores_equal_the_looped_version(seed: int) -> None:
    learner = PooledLearner(SETTINGS, INPUTS, torch.float64)
    shared = learner.initial_shared()
    batch = random_batch(6, 8, seed)
    shared = learner.derive(shared, [batch], 0, 16)  # a normaliser and a trained Θ
    states = fitted(learner, shared, batch)
    pool = {name: value[:5] for name, value in states.items()}
    initial_user = learner.initial_user(shared)
    # Three asking users: one in the pool, one with events outside it, one without events.
    own_rows = [2, 5, None]
    own = {
        name: torch.stack([initial_user[name] if row is None else states[name][row] for row in own_rows])
        for name in states
    }
    counts = [3, 1, 2]
    arms = torch.randn(6, INPUTS, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 100))
    query = Query(
        arms=arms,
        slates=Slates(counts),
        own=own,
        own_row=torch.tensor([2, -1, -1]),
        own_events=torch.tensor([3, 4, 0]),
    )
    scores, epoch = learner.score(shared, pool, query), learner.prepare_epoch(shared)

    start = 0
    for request, (row, count) in enumerate(zip(own_rows, counts, strict=True)):
        slate = arms[start : start + count]
        members = set()
        for arm in slate:
            x = epoch.inputs(arm)
            mine = network(learner.shape, own["theta"][request], x)
            for user in range(5):
                if user != row and abs(network(learner.shape, pool["theta"][user], x) - mine) <= epoch.threshold:
                    members.add(user)
        samples = [
            (pool["recent_features"][user, slot], pool["recent_rewards"][user, slot])
            for user in sorted(members)
            for slot in range(int(pool["samples"][user]))
        ]
        samples += [
            (own["recent_features"][request, slot], own["recent_rewards"][request, slot])
            for slot in range(int(own["samples"][request]))
        ]
        theta = looped_theta(learner, shared, samples).requires_grad_()
        for place, arm in enumerate(slate):
            output = network(learner.shape, theta, epoch.inputs(arm))
            (gradient,) = torch.autograd.grad(output, theta)
            index = start + place
            assert scores.mean[index].item() == pytest.approx(output.item(), abs=1e-8)
            assert scores.bonus[index].item() == pytest.approx(
                learner.settings.alpha * gradient.norm().item(), abs=1e-8
            )
            assert scores.group_size[index].item() == len(members) + 1
        start += count


def test_a_user_keeps_the_newest_samples_in_order() -> None:
    learner = PooledLearner(SETTINGS, INPUTS, torch.float64)
    shared = learner.initial_shared()
    batch = random_batch(4, 9, seed=1)
    states = fitted(learner, shared, batch)
    for user, count in enumerate(batch.events.tolist()):
        kept = min(count, SETTINGS.recent_samples)
        assert states["samples"][user] == kept
        assert torch.equal(states["recent_features"][user, :kept], batch.features[user, count - kept : count])
        assert torch.equal(states["recent_rewards"][user, :kept], batch.rewards[user, count - kept : count])
        assert not states["recent_features"][user, kept:].any()


def test_an_epoch_trains_the_meta_learner_on_all_users() -> None:
    learner = PooledLearner(SETTINGS, INPUTS, torch.float64)
    shared = learner.initial_shared()
    batch = random_batch(20, 8, seed=2)

    def loss(state: State) -> float:
        errors = [
            (network(learner.shape, state["theta"], learner.prepare_epoch(state).inputs(x)) - r).square().item()
            for row, (features, rewards) in enumerate(zip(batch.features, batch.rewards, strict=True))
            for x, r in zip(features[: batch.events[row]], rewards[: batch.events[row]], strict=True)
        ]
        return sum(errors) / len(errors)

    before = learner.derive(shared, [batch], 0, 16)
    after = before
    for _ in range(30):
        after = learner.derive(after, [batch], 16, 20)
    assert loss(after) < loss(before) < loss(shared | {"mean": before["mean"], "scale": before["scale"]})
    assert torch.equal(after["mean"], before["mean"])  # the normaliser is unchanged between doublings
