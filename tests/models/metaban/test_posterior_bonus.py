"""The bonus `posterior` of presets `paper` and `pooled` against an autograd Hessian of each user's loss."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.func import hessian  # type: ignore[attr-defined]

from metaban.models.learner import Query, Scores, State
from metaban.models.metaban.paper import PaperLearner
from metaban.models.metaban.pooled import PooledLearner
from metaban.models.presets import build_learner
from metaban.models.settings import MetaBanSettings
from tests.models.literal import layers, network
from tests.models.worlds import (
    OUTSIDER,
    STRANGER,
    Person,
    World,
    assert_close,
    batch_of,
    fitted_states,
    play_fast,
    pool_of,
    query_of,
    shared_of,
    small_world,
    stack,
)

PRESETS = ("paper", "pooled")


def learner_of(world: World, preset: str, dtype: torch.dtype = torch.float64) -> PaperLearner | PooledLearner:
    built = build_learner(replace(world.settings, preset=preset), world.inputs, dtype)
    assert isinstance(built, PaperLearner | PooledLearner)
    return built


def played(world: World, preset: str, dtype: torch.dtype = torch.float64) -> tuple[Scores, dict[str, State], Query]:
    learner = learner_of(world, preset, dtype)
    shared = shared_of(world, learner)  # type: ignore[arg-type]
    states = fitted_states(world, learner, shared)  # type: ignore[arg-type]
    query = query_of(world, learner, states)  # type: ignore[arg-type]
    return learner.score(shared, pool_of(world, learner, shared, states), query), states, query  # type: ignore[arg-type]


def literal_deviation(settings: MetaBanSettings, past: Person, theta: Tensor, x: Tensor) -> float:
    """√(gᵀH⁻¹g) in the last layer: H of −log p of rewards and last layer, g of the output, both by autograd."""
    *_, last = layers(theta, x.numel(), settings.width, settings.depth)
    below = theta[: theta.numel() - settings.width]

    def f(weights: Tensor, arm: Tensor) -> Tensor:
        return network(arm, torch.cat([below, weights]), settings.width, settings.depth)

    def loss(weights: Tensor) -> Tensor:
        total = 0.5 * settings.width * weights.square().sum()
        for arm, reward in zip(past.features, past.rewards, strict=True):
            total = total + 0.5 * (f(weights, arm) - reward) ** 2 / settings.noise
        return total

    curvature = hessian(loss)(last[0])
    slope = torch.func.grad(lambda weights: f(weights, x))(last[0])  # type: ignore[attr-defined]
    return math.sqrt(float(slope @ torch.linalg.inv(curvature) @ slope))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("depth", [2, 4])
def test_it_is_the_deviation_of_the_asking_users_learner(preset: str, depth: int, dtype: torch.dtype) -> None:
    world = small_world(users=5, depth=depth, bonus="posterior", alpha=0.7, noise=0.05, user_rate=0.05, gamma=0.2)
    arms = world.requests[0][1]
    world.requests = [("u3", arms[:2]), (STRANGER, arms[:1]), (OUTSIDER, arms), ("u0", arms[1:])]
    scores, states, query = played(world, preset, dtype)
    assert scores.bonus.dtype == dtype
    row = 0
    for name, offered in world.requests:
        theta = states[name]["theta"].to(torch.float64)
        for arm in offered:
            found = 0.7 * literal_deviation(world.settings, world.people[name], theta, arm)
            assert_close(scores.bonus[row].item(), found, 1e-9 if dtype == torch.float64 else 1e-5)
            row += 1
    assert row == scores.bonus.shape[0] == query.arms.shape[0]


@pytest.mark.parametrize("preset", PRESETS)
def test_nothing_else_changes(preset: str) -> None:
    """Without this bonus the published numbers are bit for bit the same; with it means and groups are."""
    world = small_world(users=5, asker=OUTSIDER, gamma=0.2)
    plain, states, _ = played(world, preset)
    unsure = replace(world, settings=replace(world.settings, bonus="posterior"))
    scores, more, _ = played(unsure, preset)
    assert "root" not in states[OUTSIDER]
    assert set(more[OUTSIDER]) == {*states[OUTSIDER], "root"}
    assert scores.mean.tolist() == plain.mean.tolist()
    assert scores.group_size.tolist() == plain.group_size.tolist()
    assert (scores.bonus != plain.bonus).all()
    for name, value in states[OUTSIDER].items():
        assert (more[OUTSIDER][name] == value).all()


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("padding", [1, 3])
def test_fitting_without_samples_gives_the_initial_state(preset: str, padding: int) -> None:
    world = small_world(bonus="posterior")
    learner = learner_of(world, preset)
    shared = learner.initial_shared()
    initial_user = stack(learner.initial_user(shared), 2)
    batch = batch_of([world.people[STRANGER]] * 2, torch.float64, padding=padding)
    fitted = learner.fit(shared, batch, initial_user)
    assert {name: tuple(value.shape[1:]) for name, value in fitted.items()} == learner.fields
    assert (fitted["root"] == initial_user["root"]).all()


@pytest.mark.parametrize("preset", PRESETS)
def test_an_arm_seen_often_has_a_small_bonus(preset: str) -> None:
    world = small_world(asker=OUTSIDER, bonus="posterior", width=20)
    often = world.requests[0][1][:1]
    bonuses = []
    for count in (0, 1, 10, 100):
        world.people[OUTSIDER] = Person(often.expand(count, -1), torch.full((count,), 0.5, dtype=torch.float64), count)
        bonuses.append(float(played(world, preset)[0].bonus[0]))
    assert bonuses == sorted(bonuses, reverse=True)
    assert bonuses[-1] < bonuses[0] / 5


def test_with_drawn_checkpoints_it_uses_the_served_one() -> None:
    world = small_world(asker=OUTSIDER, bonus="posterior", draw="uniform", checkpoints=3, user_rate=0.3)
    learner = PaperLearner(world.settings, 3, torch.float64)
    shared = learner.initial_shared()
    past = world.people[OUTSIDER]
    state = stack(learner.initial_user(shared), 1)
    served = []
    for draw in (0, 2, 1):
        state = dict(learner.fit(shared, batch_of([past], torch.float64, draw=[draw]), state))
        served.append(state["theta"][0])
        one = {name: value[0] for name, value in state.items()}
        arm = world.requests[0][1][0]
        query = query_of(world, learner, {STRANGER: one, OUTSIDER: one})
        pool = {name: value[:0] for name, value in state.items()}
        bonus = learner.score(shared, pool, query).bonus[0].item()
        assert_close(bonus, world.settings.alpha * literal_deviation(world.settings, past, served[-1], arm), 1e-9)
    assert (served[0] != served[1]).any()


def test_a_user_who_overflows_does_not_affect_others() -> None:
    world = small_world(users=3, bonus="posterior")
    world.people["u1"].features[0, 0] = torch.inf
    states = play_fast(world, torch.float64).states
    assert states["u0"]["root"].isfinite().all()
    assert not states["u1"]["root"].isfinite().all()
