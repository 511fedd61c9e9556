"""Preset `paper` against Algorithms 1 to 3 as printed, over random populations."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given

from metaban.models.metaban.paper import PaperLearner
from tests.models.properties import PROPERTY
from tests.models.worlds import (
    OUTSIDER,
    STRANGER,
    FastResult,
    Person,
    World,
    assert_close,
    batch_of,
    check_against_literal,
    compare,
    fitted_states,
    learner_settings,
    literal_of,
    person,
    play_fast,
    pool_of,
    query_of,
    rounded_to_float32,
    shared_of,
    small_world,
    stack,
    worlds,
)


@PROPERTY
@given(world=worlds())
def test_groups_means_and_bonuses_equal_the_printed_ones(world: World) -> None:
    check_against_literal(world)


@PROPERTY
@given(world=worlds())
def test_fitted_parameters_and_user_terms_equal_the_printed_ones(world: World) -> None:
    learner = PaperLearner(world.settings, world.inputs, torch.float64)
    shared = shared_of(world, learner)
    states = fitted_states(world, learner, shared)
    literal = literal_of(world, shared["theta0"])
    for name, state in states.items():
        assert {key: tuple(value.shape) for key, value in state.items()} == learner.fields
        assert_close(state["theta"], literal.users[name].fitted, 1e-8)
        assert_close(state["gradient"], literal.user_term(name), 1e-8)


@PROPERTY
@given(world=worlds())
def test_float32_agrees_with_float64(world: World) -> None:
    # Rounding is checked where numbers are near one: a deep network one or two units wide may magnify them.
    played = play_fast(world, torch.float32)
    literal = literal_of(world, played.shared["theta0"])
    assume(all(user.fitted.abs().max() < 5 for user in literal.users.values()))
    compare(world, played, literal)


# ---------------------------------------------------------------------- named cases


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("schedule", ["constant", "per-event"])
@pytest.mark.parametrize(
    ("asker", "users"),
    [("u1", 5), ("u0", 1), (STRANGER, 5), (STRANGER, 1), (STRANGER, 0), (OUTSIDER, 5), (OUTSIDER, 1), (OUTSIDER, 0)],
)
def test_any_asking_user(asker: str, users: int, schedule: str, dtype: torch.dtype) -> None:
    """In the pool, never seen, or known but outside the pool; in a large, a small and an empty pool."""
    world = small_world(users=users, asker=asker, rate_schedule=schedule, user_rate=0.02, meta_rate=0.02, gamma=0.1)
    played, arms = check_against_literal(world, dtype)
    assert len(arms) == 4
    if users == 0 or asker == "u0":
        assert played.scores.group_size.tolist() == [1] * 4


@pytest.mark.parametrize("asker", ["u1", STRANGER, OUTSIDER])
def test_a_single_arm(asker: str) -> None:
    _, arms = check_against_literal(small_world(asker=asker, arms=1))
    assert len(arms) == 1


def test_a_wide_threshold_puts_all_users_in_one_group() -> None:
    world = small_world(asker=OUTSIDER, user_rate=0.001, rate_schedule="constant", nu=1e6, gamma=0.999)
    played, arms = check_against_literal(world)
    assert all(arm.members == {*world.pool, OUTSIDER} for arm in arms)
    assert played.scores.group_size.tolist() == [5] * 4
    assert played.others.all()


def test_with_a_narrow_threshold_the_asking_user_is_alone() -> None:
    world = small_world(asker="u2", user_rate=0.05, nu=1.5, gamma=1e-9, width=30)
    _, arms = check_against_literal(world)
    assert all(arm.members == {"u2"} for arm in arms)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_asking_user_is_in_every_group_even_at_threshold_zero(dtype: torch.dtype) -> None:
    """Their distance to themselves is zero, however two products of the same numbers are rounded."""
    world = small_world(users=12, arms=6, width=40, depth=3, gamma=0.0, user_rate=0.05)
    world.requests = [(name, world.requests[0][1]) for name in world.pool]
    played = play_fast(world, dtype)
    assert (played.scores.group_size >= 1).all()
    if dtype == torch.float64:
        compare(world, played, literal_of(world, played.shared["theta0"]))


def test_the_asking_users_row_in_the_pool_is_ignored() -> None:
    """The asking user joins with the state in the query; their row in the pool is ignored."""
    world = small_world(users=5, asker="u2", gamma=0.1)
    played, _ = check_against_literal(world)
    stale = {name: value.clone() for name, value in played.pool.items()}
    for value in stale.values():
        value[2] = 100.0
    scores = played.learner.score(played.shared, stale, played.query)
    assert scores.mean.tolist() == played.scores.mean.tolist()
    assert scores.bonus.tolist() == played.scores.bonus.tolist()
    assert scores.group_size.tolist() == played.scores.group_size.tolist()


def test_batched_requests_equal_single_requests() -> None:
    world = small_world(users=6, gamma=0.1)
    generator = torch.Generator().manual_seed(5)
    world.requests = [
        (name, rounded_to_float32(torch.randn(count, 3, generator=generator, dtype=torch.float64)))
        for name, count in (("u3", 2), (STRANGER, 1), (OUTSIDER, 5), ("u0", 3))
    ]
    together, _ = check_against_literal(world)
    start = 0
    for request in world.requests:
        alone = play_fast(replace(world, requests=[request]), torch.float64)
        stop = start + request[1].shape[0]
        assert_close(together.scores.mean[start:stop], alone.scores.mean, 1e-12)
        assert_close(together.scores.bonus[start:stop], alone.scores.bonus, 1e-12)
        assert together.scores.group_size[start:stop].tolist() == alone.scores.group_size.tolist()
        start = stop


def test_scoring_in_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = small_world(users=5, arms=4, asker=OUTSIDER)
    world.requests += [("u3", world.requests[0][1] + 1), (STRANGER, world.requests[0][1] - 1)]
    whole = play_fast(world, torch.float64).scores
    monkeypatch.setattr("metaban.models.metaban.paper.ADAPTED_NUMBERS_MAX", 5 * 24)  # Five networks of 24 parameters.
    parts = play_fast(world, torch.float64).scores
    assert_close(parts.mean, whole.mean, 1e-12)
    assert_close(parts.bonus, whole.bonus, 1e-12)
    assert parts.group_size.tolist() == whole.group_size.tolist()


def test_the_order_of_the_pool_does_not_matter() -> None:
    world = small_world(users=7, asker="u4", gamma=0.1)
    straight = play_fast(world, torch.float64).scores
    mixed = play_fast(replace(world, pool=random.Random(3).sample(world.pool, 7)), torch.float64).scores
    assert_close(mixed.mean, straight.mean, 1e-12)
    assert mixed.group_size.tolist() == straight.group_size.tolist()


def test_the_width_of_the_padding_does_not_matter() -> None:
    world = small_world()
    learner = PaperLearner(world.settings, world.inputs, torch.float64)
    shared = learner.initial_shared()
    people = [world.people[name] for name in world.pool]
    initial_user = stack(learner.initial_user(shared), len(people))
    narrow = learner.fit(shared, batch_of(people, torch.float64), initial_user)
    wide = learner.fit(shared, batch_of(people, torch.float64, padding=9), initial_user)
    for name in learner.fields:
        assert_close(wide[name], narrow[name], 1e-12)


def test_fitting_without_samples_gives_the_initial_state() -> None:
    world = small_world()
    learner = PaperLearner(world.settings, world.inputs, torch.float64)
    shared = learner.initial_shared()
    initial_user = stack(learner.initial_user(shared), 2)
    new_users = [world.people[STRANGER]] * 2
    for padding in (0, 3):
        fitted = learner.fit(shared, batch_of(new_users, torch.float64, padding=padding), initial_user)
        for name in learner.fields:
            assert_close(fitted[name], initial_user[name], 0.0)


def test_events_in_sequence_follow_algorithm_1() -> None:
    """The whole loop: recommend, play the best arm, observe, update that user; each side keeps its own state."""
    dtype = torch.float64
    chosen = learner_settings(depth=3, gamma=0.3, user_rate=0.05, meta_rate=0.1, alpha=0.05)
    world = World(chosen, 2, {name: person(2, 0, torch.Generator()) for name in ("u0", "u1", "u2", STRANGER)}, [], [])
    world.pool = ["u0", "u1", "u2"]
    learner = PaperLearner(chosen, 2, dtype)
    shared = learner.initial_shared()
    literal = literal_of(world, shared["theta0"])
    states = {name: learner.initial_user(shared) for name in world.people}
    generator = torch.Generator().manual_seed(9)
    for round_ in range(9):
        asker = world.pool[round_ % 3]
        arms = torch.randn(3, 2, generator=generator, dtype=torch.float64)
        world.requests = [(asker, arms)]
        pool, query = pool_of(world, learner, shared, states), query_of(world, learner, states)
        scores = learner.score(shared, pool, query)
        others = learner.prepare_epoch(shared).groups(pool, query, query.arms)
        compare(world, FastResult(learner, shared, states, pool, query, scores, others), literal)
        best = int((scores.mean + scores.bonus).argmax())
        reward = float(arms[best].sum() > 0)
        literal.observe(asker, arms[best], reward)
        past = world.people[asker]
        world.people[asker] = Person(
            torch.cat([past.features, arms[best : best + 1]]),
            torch.cat([past.rewards, torch.tensor([reward], dtype=torch.float64)]),
            past.events + 1,
        )
        previous = {key: value.unsqueeze(0) for key, value in states[asker].items()}
        fitted = learner.fit(shared, batch_of([world.people[asker]], dtype), previous)
        states[asker] = {key: value[0] for key, value in fitted.items()}


@pytest.mark.parametrize("limit", [0.05, 0.5])
def test_the_loss_gradient_is_clipped_per_sample(limit: float) -> None:
    """Not in the paper: ∇L of s samples keeps its direction and has length at most s·clip_norm."""
    free = small_world(user_steps=1, l1=0.0, rate_schedule="constant", user_rate=0.1)
    loose = PaperLearner(free.settings, 3, torch.float64)
    tight = PaperLearner(replace(free.settings, clip_norm=limit), 3, torch.float64)
    shared = loose.initial_shared()
    people = [free.people[name] for name in free.pool]
    batch = batch_of(people, torch.float64)
    initial_user = stack(loose.initial_user(shared), len(people))
    step = (shared["theta0"] - loose.fit(shared, batch, initial_user)["theta"]) / 0.1
    fitted = tight.fit(shared, batch, initial_user)
    bounds = limit * torch.tensor([float(past.rewards.shape[0]) for past in people], dtype=torch.float64)
    expected = step * (bounds / step.norm(dim=1)).clamp_max(1.0).unsqueeze(1)
    # torch.renorm adds 1e-7 to the norm to avoid a division by zero.
    assert_close((shared["theta0"] - fitted["theta"]) / 0.1, expected, 1e-6)
    assert (fitted["gradient"].norm(dim=1) <= bounds * (1 + 1e-6)).all()
