"""Small populations with pasts and requests, for the default learner and the literal one alike."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from models.learner import Query, Scores, State, UserBatch
from models.posterior import PosteriorLearner
from models.prior import NO_GROUP
from models.settings import PosteriorSettings, named_settings
from models.slates import Slates
from tests.models.literal_posterior import (
    Array,
    LiteralPosterior,
    LiteralSample,
    LiteralSettings,
    LiteralShared,
    LiteralShown,
)
from tests.models.worlds import single

#: Settings that make inputs of three numbers wide ones.
WIDE: dict[str, Any] = {"head_inputs_max": 2, "head_directions": 2}
#: Most arms that a past request had.
OFFERED_MAX = 5


@dataclass
class Past:
    """What was observed of a user."""

    features: Tensor  # [s, d]
    rewards: Tensor  # [s]
    phi: Tensor  # [s, q]
    epochs: Tensor  # [s]


class Quiet(State):
    """A shared state that does not fill pages when a test fails."""

    def __repr__(self) -> str:
        return f"<{len(self)} tensors>"


@dataclass
class Scene:
    """Settings, shared state in float64 whose numbers float32 holds too, users and requests."""

    settings: PosteriorSettings
    inputs: int
    shared: State
    pool: list[Past]
    requests: list[tuple[Past, int, Tensor]]  # who asks, their row in the pool or −1, and among which arms [k, d]


def small(**changes: Any) -> PosteriorSettings:
    """The default learner at a size for tests."""
    tiny = {"members": 2, "width": 5, "bins": 3, "epoch_steps_max": 3, "replayed": 16, "memory_samples": 4}
    settings = named_settings("default", **{**tiny, **changes})
    assert isinstance(settings, PosteriorSettings)
    return settings


def generator_of(seed: int) -> torch.Generator:
    """A source of numbers, always the same."""
    return torch.Generator().manual_seed(seed)


def some_of(person: Past, rows: Tensor) -> Past:
    """These of somebody's samples, in this order."""
    return Past(person.features[rows], person.rewards[rows], person.phi[rows], person.epochs[rows])


def past(learner: PosteriorLearner, samples: int, generator: torch.Generator, taste: Tensor | None = None) -> Past:
    """Somebody with that many samples, whose rewards follow a taste [d] if they have one."""
    features = single(torch.randn(samples, learner.inputs_expected, generator=generator, dtype=torch.float64))
    rewards = torch.rand(samples, generator=generator, dtype=torch.float64)
    if taste is not None:
        rewards = torch.sigmoid(2 * features @ taste) * 0.9 + 0.1 * rewards
    noted = torch.rand(samples, learner.offered_from, generator=generator, dtype=torch.float64)
    epochs = torch.randint(4, (samples,), generator=generator).sort().values
    if learner.inputs.apart:
        count = torch.randint(1, OFFERED_MAX + 1, (samples, 1), generator=generator).to(torch.float64)
        others = torch.randn(features.shape, generator=generator, dtype=torch.float64) * (count - 1).sqrt()
        noted = torch.cat([noted, count, (features + others) / count], dim=1)
    return Past(features, single(rewards), single(noted), epochs)


def related(
    learner: PosteriorLearner, users: int, samples: int, generator: torch.Generator, ratio: Tensor
) -> list[Past]:
    """Users of requests whose arms have something in common: τ² = ratio [d], σ² = 1, and any arm may be chosen."""
    people = []
    for _ in range(users):
        person = past(learner, samples, generator)
        effect = torch.randn(person.features.shape, generator=generator, dtype=torch.float64) * ratio.sqrt()
        person.features += effect
        learner.offer(person.phi)[:, 1:] += effect
        people.append(person)
    return people


def sharing(learner: PosteriorLearner, shared: State, generator: torch.Generator) -> State:
    """The same state with something to take out of arms, in some columns much and in some nothing."""
    if not learner.inputs.apart:
        return shared
    levels = torch.tensor([0.0, 0.1, 1.0, 10.0, 1e6], dtype=torch.float64)
    level = levels[torch.randint(len(levels), (learner.inputs_expected,), generator=generator)]
    ratio = level * torch.rand(learner.inputs_expected, generator=generator, dtype=torch.float64)
    centre = torch.randn(learner.inputs_expected, generator=generator, dtype=torch.float64)
    return shared | {"common_ratio": ratio.to(learner.dtype), "common_centre": centre.to(learner.dtype)}


def batch_of(people: list[Past], dtype: torch.dtype = torch.float64, *, padding: int = 0) -> UserBatch:
    """Side by side, with a column even for nobody; what stands in the padding must not matter, so it is not zero."""
    counts = torch.tensor([person.rewards.shape[0] for person in people])
    longest = max(1, int(counts.max())) + padding

    def padded(values: list[Tensor], filling: float) -> Tensor:
        rows = torch.full((len(people), longest, *values[0].shape[1:]), filling, dtype=dtype)
        for row, value in zip(rows, values, strict=True):
            row[: value.shape[0]] = value.to(dtype)
        return rows

    return UserBatch(
        features=padded([person.features for person in people], 7.0),
        rewards=padded([person.rewards for person in people], -3.0),
        valid=torch.arange(longest) < counts.unsqueeze(-1),
        events=counts,
        draw=torch.zeros_like(counts),
        weight=torch.ones(len(people), dtype=dtype),
        phi=padded([person.phi for person in people], 5.0),
        epochs=padded([person.epochs for person in people], 9).to(torch.int64),
        starts=torch.zeros(len(people), 0, dtype=torch.float64),
    )


def fitted(learner: PosteriorLearner, shared: State, people: list[Past]) -> State:
    """Their states after a fit, [B, …]; [0, …] for nobody."""
    if not people:
        return {name: shared["mean"].new_zeros((0, *shape)) for name, shape in learner.fields.items()}
    newborn = {name: value.expand(len(people), *value.shape) for name, value in learner.newborn(shared).items()}
    return learner.fit(shared, batch_of(people, learner.dtype), newborn)


def kinds(learner: PosteriorLearner, users: int, samples: int, generator: torch.Generator) -> list[Past]:
    """Users of two opposite tastes, in turn."""
    taste = torch.randn(learner.inputs_expected, generator=generator, dtype=torch.float64)
    return [past(learner, samples, generator, taste if user % 2 else -taste) for user in range(users)]


def taught(learner: PosteriorLearner, teachers: list[Past], **changes: float) -> State:
    """Shared state of an epoch with groups; `changes` replaces single numbers of it. Users' own heads decide, unless
    changed: notes are random, so what they say of trust means nothing."""
    shared = learner.derive(learner.initial_shared(), [batch_of(teachers, learner.dtype)], 0, 512)
    changes = {"trust": 1.0, **changes}
    return shared | {name: torch.full_like(shared[name], value) for name, value in changes.items()}


def held(learner: PosteriorLearner, shared: State) -> State:
    """A shared state of a float64 learner as this learner holds it."""
    types = {name: value.dtype for name, value in learner.initial_shared().items()}
    return {name: value.to(types[name]) for name, value in shared.items()}


@st.composite
def scenes(draw: st.DrawFn, *, wide: bool = False) -> Scene:
    """Every shape and every part switched on or off; if `wide`, always with common parts to take out."""
    d = draw(st.integers(3, 6) if wide else st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    narrowed = wide or draw(st.booleans())
    settings = small(
        alpha=draw(st.sampled_from([0.0, 0.3, 2.0])),
        nu=draw(st.sampled_from([0.1, 1.0, 5.0])),
        members=draw(st.integers(1, 3)),
        depth=draw(st.integers(1, 3)),
        bins=draw(st.sampled_from([0, 2, 5])),
        trunk=draw(st.sampled_from([True, True, False])),
        embed=draw(st.booleans()),
        heads=draw(st.sampled_from([True, True, True, False])),
        groups=draw(st.booleans()),
        memory=draw(st.booleans()),
        apart=wide or draw(st.booleans()),
        memory_samples=draw(st.integers(1, 4)),
        memory_radius=draw(st.sampled_from([0.087, 1.0])),
        group_spread=draw(st.sampled_from([0.05, 0.15, 1.0])),
        seed=draw(st.integers(0, 2**31 - 1)),
        **({"head_inputs_max": 2, "head_directions": draw(st.integers(1, 2))} if narrowed else {}),
    )
    learner = PosteriorLearner(settings, d, torch.float64)
    if draw(st.sampled_from([True, True, False])):
        changes = {"gain": draw(st.sampled_from([0.0, 0.5, 3.0])), "since": draw(st.sampled_from([0.0, 2.0]))}
        changes["trust"] = draw(st.sampled_from([0.0, 0.4, 1.0]))
        changes |= {"guard": draw(st.sampled_from([0.0, 0.3, 1.0]))} if settings.groups else {}
        shared = taught(learner, kinds(learner, draw(st.integers(1, 9)), 6, generator), **changes)
    else:
        shared = learner.initial_shared()
    shared = sharing(learner, shared, generator)
    both = held(PosteriorLearner(settings, d), shared)  # numbers that both types hold
    shared = Quiet({name: value.to(torch.float64) for name, value in both.items()})
    pool = [past(learner, draw(st.integers(0, 7)), generator) for _ in range(draw(st.integers(0, 5)))]
    outsider, stranger = past(learner, draw(st.integers(1, 7)), generator), past(learner, 0, generator)
    askers = [*((person, row) for row, person in enumerate(pool)), (outsider, -1), (stranger, -1)]
    requests = []
    for asker, row in draw(st.lists(st.sampled_from(askers), min_size=1, max_size=3)):
        arms = single(torch.randn(draw(st.integers(1, 4)), d, generator=generator, dtype=torch.float64))
        if asker.features.shape[0] and draw(st.booleans()):
            arms[0] = asker.features[-1]  # an arm that the memory knows
        requests.append((asker, row, arms))
    return Scene(settings, d, shared, pool, requests)


def query_of(scene: Scene, learner: PosteriorLearner, shared: State) -> Query:
    """All requests in one query; somebody without samples is newborn."""
    newborn = learner.newborn(shared)
    states = [
        {name: value[0] for name, value in fitted(learner, shared, [asker]).items()}
        if asker.rewards.shape[0]
        else newborn
        for asker, _, _ in scene.requests
    ]
    return Query(
        arms=torch.cat([arms for _, _, arms in scene.requests]).to(learner.dtype),
        slates=Slates([arms.shape[0] for _, _, arms in scene.requests]),
        own={name: torch.stack([state[name] for state in states]) for name in newborn},
        own_row=torch.tensor([row for _, row, _ in scene.requests]),
        own_events=torch.tensor([asker.rewards.shape[0] for asker, _, _ in scene.requests]),
    )


def answered(scene: Scene, dtype: torch.dtype = torch.float64) -> Scores:
    """What the fast learner says."""
    learner = PosteriorLearner(scene.settings, scene.inputs, dtype)
    shared = held(learner, scene.shared)
    return learner.score(shared, fitted(learner, shared, scene.pool), query_of(scene, learner, shared))


def samples_of(person: Past) -> list[LiteralSample]:
    """A past as the literal learner takes it.

    Of what was noted, the trunk's prediction comes first and, for a learner that reads it, the offer last.
    """
    rows = zip(
        person.features.numpy(), person.phi.tolist(), person.rewards.tolist(), person.epochs.tolist(), strict=True
    )
    return [
        LiteralSample(LiteralShown(raw, noted[-(1 + raw.shape[0]) :]), noted[0], reward, epoch)
        for raw, noted, reward, epoch in rows
    ]


def groups_of(settings: PosteriorSettings, shared: State) -> tuple[Array, Array]:
    """Centres [Q, D] and weights [Q] out of what is stored: Σ⁻¹c/κ, and log weight − ½ cᵀΣ⁻¹c/κ."""
    pull, offset = shared["group_pull"].numpy(), shared["group_offset"].numpy()
    pull, offset = pull[offset > NO_GROUP], offset[offset > NO_GROUP]
    centres = settings.group_spread * pull @ shared["prior_covariance"].numpy()
    return centres, np.exp(offset + 0.5 * (centres * pull).sum(-1))


def literal_of(settings: PosteriorSettings, inputs: int, shared: State) -> LiteralPosterior:
    """The literal learner on the same shared numbers."""
    numbers = {name: value.to(torch.float64).numpy() for name, value in shared.items()}
    bins = numbers["edges"].shape[1] - 1 if "edges" in numbers else 0
    embedded = settings.embed * (numbers["prior_mean"].shape[0] - 1)
    widths = [inputs * (1 + bins) + embedded, *[settings.width] * settings.depth, 1]
    members: list[list[tuple[Array, Array]]] = [[] for _ in range(settings.members)]
    flat = iter(numbers["trunk"])
    for columns, rows in pairwise(widths):  # weights of all members, then their offsets
        weights = [np.array([next(flat) for _ in range(rows * columns)]).reshape(rows, columns) for _ in members]
        for layers, weight in zip(members, weights, strict=True):
            layers.append((weight, np.array([next(flat) for _ in range(rows)])))
    assert not list(flat)
    centres, voices = groups_of(settings, shared)
    return LiteralPosterior(
        LiteralSettings(**{each.name: getattr(settings, each.name) for each in fields(LiteralSettings)}),
        LiteralShared(
            mean=numbers["mean"],
            scale=numbers["scale"],
            edges=numbers.get("edges"),
            directions=numbers.get("directions"),
            common_ratio=numbers.get("common_ratio"),
            common_centre=numbers.get("common_centre"),
            trunk=members,
            prior_mean=numbers["prior_mean"],
            prior_covariance=numbers["prior_covariance"],
            noise=float(numbers["noise"]),
            centres=list(centres),
            voices=voices.tolist(),
            guard=float(numbers["guard"]),
            plain=numbers["plain_mean"],
            plain_covariance=numbers["plain_covariance"],
            plain_level_events=float(numbers["plain_level_events"]),
            trust=float(numbers["trust"]),
            gain=float(numbers["gain"]),
            reach=float(numbers["reach"]),
            since=float(numbers["since"]),
        ),
    )


def as_array(value: Tensor) -> Array:
    """In float64 numpy."""
    return value.to(torch.float64).numpy()


def shown_of(learner: PosteriorLearner, person: Past) -> list[Tensor]:
    """The numbers that say what somebody's arms looked like, to be changed in place: theirs, and the offers' means."""
    return [person.features, learner.offer(person.phi)[:, 1:]] if learner.inputs.apart else [person.features]
