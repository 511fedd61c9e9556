"""Algorithm 3, line 9: θ_t^u is drawn uniformly from the stored checkpoints θ̂."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from metaban.models.metaban.paper import PaperLearner
from tests.models.worlds import (
    STRANGER,
    FastResult,
    Person,
    assert_close,
    batch_of,
    compare,
    learner_settings,
    literal_of,
    person,
    pool_of,
    query_of,
    small_world,
    stack,
)


def uniform_learner(checkpoints: int) -> PaperLearner:
    """A learner that serves one of the last `checkpoints` θ̂."""
    chosen = learner_settings(draw="uniform", checkpoints=checkpoints, user_rate=0.1, gamma=0.3)
    return PaperLearner(chosen, 3, torch.float64)


@pytest.mark.parametrize("checkpoints", [1, 3, 8])
def test_the_served_parameters_are_one_of_the_last_checkpoints(checkpoints: int) -> None:
    """After every event the stored θ̂ equal the literal ones; Eq. 4 uses the served θ̂, Algorithm 2 the latest."""
    learner = uniform_learner(checkpoints)
    shared = learner.initial_shared()
    world = replace(small_world(users=3), settings=learner.settings)
    new_user = world.people[STRANGER]
    world.people = dict.fromkeys([*world.pool, STRANGER], new_user)
    literal = literal_of(world, shared["theta0"])
    literal.settings = replace(literal.settings, checkpoints=checkpoints)
    states = {name: learner.initial_user(shared) for name in world.people}
    generator = torch.Generator().manual_seed(2)
    hashes = random.Random(4)
    ages = set()
    for _ in range(5):
        for name in world.pool:
            x = torch.randn(1, 3, generator=generator, dtype=torch.float64)
            reward = torch.rand(1, generator=generator, dtype=torch.float64)
            past = world.people[name]
            now = Person(torch.cat([past.features, x]), torch.cat([past.rewards, reward]), past.events + 1)
            previous = {key: value.unsqueeze(0) for key, value in states[name].items()}
            batch = batch_of([now], torch.float64, draw=[hashes.getrandbits(62)])
            state = {key: value[0] for key, value in learner.fit(shared, batch, previous).items()}
            literal.observe(name, x[0], float(reward))
            user = literal.users[name]
            assert len(user.history) == min(checkpoints, now.events + 1)
            assert state["checkpoints"].shape == (checkpoints, learner.shape.parameters)
            assert_close(state["checkpoints"][checkpoints - len(user.history) :], torch.stack(user.history), 1e-9)
            assert_close(state["gradient"], literal.user_term(name), 1e-8)
            differences = (torch.stack(user.history) - state["theta"]).abs().amax(dim=1)
            (index,) = (differences < 1e-9).nonzero().flatten().tolist()
            user.served = user.history[index]
            ages.add(len(user.history) - index)
            world.people[name], states[name] = now, state
    assert len(ages) >= min(checkpoints, 3)
    pool, query = pool_of(world, learner, shared, states), query_of(world, learner, states)
    others = learner.prepare_epoch(shared).groups(pool, query, query.arms)
    scores = learner.score(shared, pool, query)
    assert len(compare(world, FastResult(learner, shared, states, pool, query, scores, others), literal)) == 4


def test_the_draw_depends_on_the_hash_alone() -> None:
    world = small_world(users=4)
    learner = uniform_learner(4)
    shared = learner.initial_shared()
    people = [world.people[name] for name in world.pool]
    state = stack(learner.initial_user(shared), 4)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        state = learner.fit(shared, batch_of([person(3, 2, generator) for _ in people], torch.float64), state)
    served = [
        learner.fit(shared, batch_of(people, torch.float64, draw=draw), state)["theta"].tolist()
        for draw in ([11, 12, 13, 2**62], [11, 12, 13, 2**62], [12, 13, 14, 2**62 + 1])
    ]
    assert served[0] == served[1]
    assert served[0] != served[2]


@pytest.mark.parametrize(("fits", "checkpoints"), [(1, 4), (2, 4), (6, 4), (9, 8)])
def test_every_kept_checkpoint_is_served_equally_often(fits: int, checkpoints: int) -> None:
    learner = uniform_learner(checkpoints)
    shared = learner.initial_shared()
    generator = torch.Generator().manual_seed(1)
    pasts = [person(3, count + 1, generator) for count in range(fits)]
    state = stack(learner.initial_user(shared), 1)
    for past in pasts[:-1]:
        state = learner.fit(shared, batch_of([past], torch.float64), state)
    draws = 4000
    hashes = random.Random(6)
    batch = batch_of([pasts[-1]] * draws, torch.float64, draw=[hashes.getrandbits(63) for _ in range(draws)])
    served = learner.fit(shared, batch, {name: value.expand(draws, *value.shape[1:]) for name, value in state.items()})
    kept = min(fits + 1, checkpoints)
    options = served["checkpoints"][0, checkpoints - kept :]
    counts = [int((served["theta"] == option).all(dim=1).sum()) for option in options]
    assert sum(counts) == draws
    expected = draws / kept
    statistic = sum((count - expected) ** 2 / expected for count in counts)
    # A larger value has probability below 1e-4 for up to seven degrees of freedom.
    assert statistic < 30
