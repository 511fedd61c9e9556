"""Small populations with samples and requests, for preset `paper` and its literal version.

`worlds()` draws random ones and `small_world()` returns a fixed one. `check_against_literal()` compares every arm's
group, mean, bonus and score with the printed algorithms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from metaban.models.learner import Query, Scores, State, UserBatch
from metaban.models.metaban.paper import PaperLearner
from metaban.models.numerics.normalizer import LARGEST_DEVIATION
from metaban.models.numerics.slates import Slates
from metaban.models.settings import MetaBanSettings, named_settings
from tests.models.literal import LiteralArm, LiteralMetaBan, LiteralSettings

#: Far above any gradient in these tests: the algorithms as printed do not clip.
NO_CLIPPING = 1e9
#: A distance this close to the threshold may fall on either side.
TIE = {torch.float64: 1e-12, torch.float32: 1e-5}
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}

#: Pool users are named u0, u1, …; asking users outside the pool have these names.
STRANGER, OUTSIDER = "stranger", "outsider"


@dataclass
class Person:
    """A user's samples that are still kept, and the number of all their events."""

    features: Tensor  # [s, d]
    rewards: Tensor  # [s]
    events: int
    weight: float = 1.0


@dataclass
class World:
    """Settings, users and requests, from which the fast and the literal learner are built."""

    settings: MetaBanSettings
    inputs: int
    people: dict[str, Person]
    pool: list[str]
    requests: list[tuple[str, Tensor]]  # asking user, and arms [k, d]
    mean: Tensor | None = None
    scale: Tensor | None = None


def learner_settings(**changes: Any) -> MetaBanSettings:
    """Preset `paper` at a size for tests, by default without clipping and input scaling."""
    defaults = {
        "width": 6,
        "user_steps": 2,
        "meta_steps": 2,
        "clip_norm": NO_CLIPPING,
        "standardize": False,
        "input_norm": 0.0,
    }
    return named_settings("paper", **{**defaults, **changes})


def person(d: int, samples: int, generator: torch.Generator, *, forgotten: int = 0, weight: float = 1.0) -> Person:
    """A user with this many kept samples, and some more events that the log no longer holds."""
    features = torch.randn(samples, d, generator=generator, dtype=torch.float64)
    rewards = torch.rand(samples, generator=generator, dtype=torch.float64)
    return Person(
        rounded_to_float32(features), rounded_to_float32(rewards), samples + (forgotten if samples else 0), weight
    )


def rounded_to_float32(values: Tensor) -> Tensor:
    """The same numbers rounded to float32."""
    return values.to(torch.float32).to(torch.float64)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Every shape: zero to eight users, up to three requests, ragged samples, narrow and wide groups."""
    d, m, depth = draw(st.integers(1, 6)), draw(st.integers(1, 9)), draw(st.integers(2, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    samples = st.integers(0, 5)
    weights = st.sampled_from([1.0, 1.0, 0.0, 0.5, 2.0])
    forgotten = st.sampled_from([0, 0, 7])
    pool = [f"u{index}" for index in range(draw(st.integers(0, 8)))]
    people = {
        name: person(d, draw(samples), generator, forgotten=draw(forgotten), weight=draw(weights)) for name in pool
    }
    people[STRANGER] = person(d, 0, generator)
    people[OUTSIDER] = person(d, draw(st.integers(1, 5)), generator, weight=draw(weights))
    askers = draw(st.lists(st.sampled_from([*pool, STRANGER, OUTSIDER]), min_size=1, max_size=3, unique=True))
    requests = [
        (asker, rounded_to_float32(torch.randn(draw(st.integers(1, 6)), d, generator=generator, dtype=torch.float64)))
        for asker in askers
    ]
    schedule = draw(st.sampled_from(["constant", "per-event"]))
    largest = 0.02 if schedule == "constant" else 0.2
    standardized = draw(st.booleans())
    chosen = learner_settings(
        width=m,
        depth=depth,
        user_steps=draw(st.integers(1, 3)),
        meta_steps=draw(st.integers(1, 3)),
        user_rate=draw(st.floats(1e-3, largest)),
        meta_rate=draw(st.floats(1e-3, largest)),
        rate_schedule=schedule,
        l1=draw(st.sampled_from([0.0, 0.001, 0.3])),
        nu=draw(st.sampled_from([1.5, 5.0, 1e6])),
        gamma=draw(st.sampled_from([1e-9, 0.02, 0.1, 0.4, 0.999])),
        alpha=draw(st.sampled_from([0.0, 0.1, 1.0])),
        beta2=draw(st.floats(0, 2)),
        z1=draw(st.floats(0, 1)),
        xi1=draw(st.floats(0, 2)),
        epsilon1=draw(st.floats(0, 1)),
        delta=draw(st.sampled_from([0.01, 0.1, 0.9])),
        # Small enough for a logarithm below 0 too, never exactly 0, where its square root has no derivative.
        log_constant=draw(st.sampled_from([7e-4, 1.0, 3.0])),
        standardize=standardized,
        input_norm=draw(st.sampled_from([0.0, 0.0, 1.0, 2.24])),
        seed=draw(st.integers(0, 2**31)),
    )
    world = World(chosen, d, people, pool, requests)
    if standardized:
        world.mean = rounded_to_float32(torch.randn(d, generator=generator, dtype=torch.float64))
        world.scale = rounded_to_float32(torch.rand(d, generator=generator, dtype=torch.float64) + 0.5)
    return world


def literal_of(world: World, theta0: Tensor) -> LiteralMetaBan:
    """The printed algorithms after the samples of the world's users."""
    names = set(LiteralSettings.__dataclass_fields__) & set(MetaBanSettings.__dataclass_fields__) - {"checkpoints"}
    shared = {name: getattr(world.settings, name) for name in names}
    mean, scale = world.mean, world.scale

    def prepare(x: Tensor) -> Tensor:
        if mean is not None and scale is not None:
            x = ((x - mean) / scale).clamp(-LARGEST_DEVIATION, LARGEST_DEVIATION)
        return x / x.norm() * world.settings.input_norm if world.settings.input_norm else x

    literal = LiteralMetaBan(LiteralSettings(inputs=world.inputs, **shared), theta0.to(torch.float64), prepare=prepare)
    for name, past in world.people.items():
        user = literal.user(name)
        user.observations = [(x, float(r)) for x, r in zip(past.features, past.rewards, strict=True)]
        user.events, user.weight = past.events, past.weight
        if past.events:
            literal.train(name)
    return literal


def batch_of(people: list[Person], dtype: torch.dtype, *, draw: list[int] | None = None, padding: int = 0) -> UserBatch:
    """A padded batch of these users; the padding is not zero because it must have no effect."""
    d = people[0].features.shape[1]
    longest = max(past.rewards.shape[0] for past in people) + padding
    features = torch.full((len(people), longest, d), 7.0, dtype=dtype)
    rewards = torch.full((len(people), longest), -3.0, dtype=dtype)
    valid = torch.zeros((len(people), longest), dtype=torch.bool)
    for index, past in enumerate(people):
        count = past.rewards.shape[0]
        features[index, :count] = past.features.to(dtype)
        rewards[index, :count] = past.rewards.to(dtype)
        valid[index, :count] = True
    return UserBatch(
        features=features,
        rewards=rewards,
        valid=valid,
        events=torch.tensor([past.events for past in people]),
        draw=torch.tensor(draw or [0] * len(people)),
        weight=torch.tensor([past.weight for past in people], dtype=dtype),
        phi=features.new_zeros((*features.shape[:2], 0)),
        epochs=torch.zeros(features.shape[:2], dtype=torch.int64),
        starts=torch.zeros(len(people), 0, dtype=torch.float64),
        arm_keys=torch.zeros(features.shape[:2], dtype=torch.int64),
        places=torch.zeros(features.shape[:2], dtype=torch.int64),
    )


def stack(state: State, count: int) -> State:
    """One user's state, repeated."""
    return {name: value.expand(count, *value.shape).clone() for name, value in state.items()}


def shared_of(world: World, learner: PaperLearner) -> State:
    """Shared state with the world's normaliser."""
    shared = learner.initial_shared()
    if world.mean is not None and world.scale is not None:
        shared |= {"mean": world.mean.to(learner.dtype), "scale": world.scale.to(learner.dtype)}
    return shared


def fitted_states(world: World, learner: PaperLearner, shared: State) -> dict[str, State]:
    """All users' states by `fit`, in one batch; the new user is initial_user."""
    names = list(world.people)
    batch = batch_of(list(world.people.values()), learner.dtype)
    fitted = learner.fit(shared, batch, stack(learner.initial_user(shared), len(names)))
    states = {name: {key: value[index] for key, value in fitted.items()} for index, name in enumerate(names)}
    states[STRANGER] = learner.initial_user(shared)
    return states


def pool_of(world: World, learner: PaperLearner, shared: State, states: dict[str, State]) -> State:
    """The pool's states, stacked; [0, …] for an empty pool."""
    empty = learner.initial_user(shared)
    return {
        key: torch.stack([states[name][key] for name in world.pool])
        if world.pool
        else value.new_zeros((0, *value.shape))
        for key, value in empty.items()
    }


def query_of(world: World, learner: PaperLearner, states: dict[str, State]) -> Query:
    """All requests in one query."""
    askers = [asker for asker, _ in world.requests]
    return Query(
        arms=torch.cat([arms for _, arms in world.requests]).to(learner.dtype),
        slates=Slates([arms.shape[0] for _, arms in world.requests]),
        own={key: torch.stack([states[name][key] for name in askers]) for key in states[STRANGER]},
        own_row=torch.tensor([world.pool.index(name) if name in world.pool else -1 for name in askers]),
        own_events=torch.tensor([world.people[name].events for name in askers]),
    )


@dataclass
class FastResult:
    """The fast learner on a world, with its states and scores."""

    learner: PaperLearner
    shared: State
    states: dict[str, State]
    pool: State
    query: Query
    scores: Scores
    others: Tensor  # bool [N, P]: other members of an arm's group


def play_fast(world: World, dtype: torch.dtype) -> FastResult:
    """Fit all users and score every request with the fast learner."""
    learner = PaperLearner(world.settings, world.inputs, dtype)
    shared = shared_of(world, learner)
    states = fitted_states(world, learner, shared)
    pool = pool_of(world, learner, shared, states)
    query = query_of(world, learner, states)
    scores, epoch = learner.score(shared, pool, query), learner.prepare_epoch(shared)
    others = epoch.groups(pool, query, epoch.inputs(query.arms))
    return FastResult(learner, shared, states, pool, query, scores, others)


def assert_close(actual: Tensor | float, expected: Tensor | float, tolerance: float) -> None:
    """Check equality with a tolerance that is absolute below one and relative above."""
    torch.testing.assert_close(
        torch.as_tensor(actual, dtype=torch.float64),
        torch.as_tensor(expected, dtype=torch.float64),
        rtol=tolerance,
        atol=tolerance,
    )


def compare(world: World, played: FastResult, literal: LiteralMetaBan) -> list[LiteralArm]:
    """Compare every arm's group, mean, bonus and score with the literal ones; arms with a tie are skipped."""
    dtype = played.learner.dtype
    threshold = (world.settings.nu - 1) / world.settings.nu * world.settings.gamma
    scores = played.scores
    assert scores.mean.dtype == scores.bonus.dtype == dtype
    assert scores.group_size.dtype == torch.int64
    row = 0
    judged = []
    for asker, arms in world.requests:
        for arm in literal.recommend(asker, list(arms), world.pool):
            others = {name: distance for name, distance in arm.distances.items() if name != asker}
            tied = {name for name, distance in others.items() if abs(distance - threshold) <= TIE[dtype]}
            members = {name for name, inside in zip(world.pool, played.others[row].tolist(), strict=True) if inside}
            assert asker not in members
            assert members | {asker} | tied == arm.members | tied
            if not tied:
                assert scores.group_size[row].item() == len(arm.members)
                assert_close(scores.mean[row].item(), arm.mean, TOLERANCE[dtype])
                assert_close(scores.bonus[row].item(), arm.bonus, TOLERANCE[dtype])
                assert_close((scores.mean + scores.bonus)[row].item(), arm.score, TOLERANCE[dtype])
                judged.append(arm)
            row += 1
    assert row == scores.mean.shape[0] == scores.bonus.shape[0]
    return judged


def small_world(seed: int = 0, *, users: int = 4, asker: str = "u0", arms: int = 4, **changes: Any) -> World:
    """A fixed world for the named cases."""
    generator = torch.Generator().manual_seed(seed)
    people = {f"u{index}": person(3, 1 + index % 4, generator) for index in range(users)}
    pool = list(people)
    people[STRANGER] = person(3, 0, generator)
    people[OUTSIDER] = person(3, 3, generator)
    requests = [(asker, rounded_to_float32(torch.randn(arms, 3, generator=generator, dtype=torch.float64)))]
    return World(learner_settings(**changes), 3, people, pool, requests)


def check_against_literal(world: World, dtype: torch.dtype = torch.float64) -> tuple[FastResult, list[LiteralArm]]:
    """Score a world with both learners, compare every arm, and return both sides."""
    played = play_fast(world, dtype)
    literal = literal_of(world, played.shared["theta0"])
    return played, compare(world, played, literal)
