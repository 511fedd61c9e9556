"""Small populations with samples and requests, for the default learner and its literal version."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from metaban.models.default.arms import FACTORS, UNUSED_KEY
from metaban.models.default.kinds import SPREAD, UNUSED, Kinds, MixtureEM
from metaban.models.default.learner import PosteriorLearner
from metaban.models.default.notes import Notes
from metaban.models.default.places import LEAST_LOOK, MOST_LOOK, PLACES
from metaban.models.default.prior import Statistics, prior_from_state
from metaban.models.default.shared_state import SharedState
from metaban.models.features import InputParts
from metaban.models.learner import NO_ARM_KEY, Query, Scores, State, UserBatch
from metaban.models.numerics.slates import Slates
from metaban.models.settings import PosteriorSettings, named_settings
from tests.models.literal_default import (
    Array,
    LiteralKnown,
    LiteralPosterior,
    LiteralSample,
    LiteralSettings,
    LiteralShared,
    LiteralShown,
)
from tests.models.worlds import rounded_to_float32

#: Settings under which three inputs count as wide.
WIDE: dict[str, Any] = {"head_inputs_max": 2, "head_directions": 2}
#: Largest slate of a past request.
OFFERED_MAX = 5
#: Key of an arm that no user has been shown.
NEW_ARM = 10**9


def _nothing() -> Tensor:
    return torch.zeros(0, dtype=torch.int64)


@dataclass
class UserHistory:
    """Samples of a user; unless said, of arms without ids, at the first place."""

    features: Tensor  # [s, d]
    rewards: Tensor  # [s]
    phi: Tensor  # [s, q]
    epochs: Tensor  # [s]
    arm_keys: Tensor = field(default_factory=_nothing)  # [s]
    places: Tensor = field(default_factory=_nothing)  # [s]

    def __post_init__(self) -> None:
        if not self.arm_keys.shape[0]:
            self.arm_keys = torch.full(self.rewards.shape, NO_ARM_KEY)
        if not self.places.shape[0]:
            self.places = torch.zeros(self.rewards.shape, dtype=torch.int64)


class QuietState(State):
    """A shared state with a short repr for failure messages."""

    def __repr__(self) -> str:
        return f"<{len(self)} tensors>"


@dataclass
class Scene:
    """Settings, float64 shared state (exact in float32), users and requests."""

    settings: PosteriorSettings
    inputs: int | InputParts
    shared: State
    pool: list[UserHistory]
    requests: list[tuple[UserHistory, int, Tensor]]  # asking user, their row in the pool or −1, and arms [k, d]
    arm_keys: list[Tensor] | None = None  # keys [k] of the arms of each request; None when they have no ids

    def learner(self, dtype: torch.dtype) -> PosteriorLearner:
        """The fast learner."""
        return PosteriorLearner(self.settings, self.inputs, dtype)

    def keys_of(self, request: int) -> list[int] | None:
        """Keys of the arms of one request."""
        return None if self.arm_keys is None else self.arm_keys[request].tolist()


def small(**changes: Any) -> PosteriorSettings:
    """The default learner at a size for tests."""
    tiny = {"members": 2, "width": 5, "bins": 3, "epoch_steps_max": 3, "replayed": 16, "memory_samples": 4}
    settings = named_settings("default", **{**tiny, **changes})
    assert isinstance(settings, PosteriorSettings)
    return settings


def generator_of(seed: int) -> torch.Generator:
    """A generator with a fixed seed."""
    return torch.Generator().manual_seed(seed)


def selected_samples(person: UserHistory, rows: Tensor) -> UserHistory:
    """These samples of a user, in this order."""
    return UserHistory(**{each.name: getattr(person, each.name)[rows] for each in fields(person)})


def random_history(
    learner: PosteriorLearner,
    samples: int,
    generator: torch.Generator,
    taste: Tensor | None = None,
    *,
    catalogue: int = 0,
) -> UserHistory:
    """A user with this many samples, whose rewards follow a taste [d] if given.

    With a catalogue of so many arms most samples have an arm's id, and all have a place.
    """
    features = rounded_to_float32(torch.randn(samples, learner.input_size, generator=generator, dtype=torch.float64))
    rewards = torch.rand(samples, generator=generator, dtype=torch.float64)
    if taste is not None:
        rewards = torch.sigmoid(2 * features @ taste) * 0.9 + 0.1 * rewards
    noted = torch.rand(samples, Notes.COUNT, generator=generator, dtype=torch.float64)
    epochs = torch.randint(4, (samples,), generator=generator).sort().values
    if learner.inputs.removes_common:
        count = torch.randint(1, OFFERED_MAX + 1, (samples, 1), generator=generator).to(torch.float64)
        others = torch.randn(features.shape, generator=generator, dtype=torch.float64) * (count - 1).sqrt()
        noted = torch.cat([noted, count, (features + others) / count], dim=1)
    history = UserHistory(features, rounded_to_float32(rewards), rounded_to_float32(noted), epochs)
    if catalogue:
        history.arm_keys = torch.randint(1 + catalogue, (samples,), generator=generator)
        history.places = torch.randint(PLACES + 2, (samples,), generator=generator)
    return history


def with_known_arms(shared: State, generator: torch.Generator, catalogue: int) -> State:
    """The same state with posteriors of every second arm of a catalogue, all places and all wide inputs."""
    keys = torch.arange(1, 1 + catalogue, 2)
    known, unused = keys.shape[0], 2

    def random(*shape: int) -> Tensor:
        return rounded_to_float32(torch.rand(*shape, generator=generator, dtype=torch.float64))

    looks = rounded_to_float32(0.4 + random(PLACES))
    looks[0] = 1
    assert LEAST_LOOK < looks.min() < looks.max() < MOST_LOOK
    return shared | {
        "arm_keys": torch.cat([keys, torch.full((unused,), UNUSED_KEY)]),
        "arm_effects": random(known + unused) - 0.5,
        "arm_variances": 0.1 * random(known + unused),
        "arm_factors": random(known + unused, FACTORS) - 0.5,
        "arm_effect_spread": torch.tensor(0.07, dtype=torch.float64),
        "arm_looks": looks,
        "arm_wide": random(*shared["arm_wide"].shape) - 0.5,
        "arm_wide_factors": random(*shared["arm_wide_factors"].shape) - 0.5,
    }


def users_of_related_slates(
    learner: PosteriorLearner, users: int, samples: int, generator: torch.Generator, ratio: Tensor
) -> list[UserHistory]:
    """Users of requests whose arms have a common part: τ² = ratio [d], σ² = 1; the chosen arm is random."""
    people = []
    for _ in range(users):
        person = random_history(learner, samples, generator)
        effect = torch.randn(person.features.shape, generator=generator, dtype=torch.float64) * ratio.sqrt()
        person.features += effect
        Notes(person.phi).slate[:, 1:] += effect
        people.append(person)
    return people


def with_common_part(learner: PosteriorLearner, shared: State, generator: torch.Generator) -> State:
    """The same state with a common part to remove: large in some columns, none in others."""
    if not learner.inputs.removes_common:
        return shared
    levels = torch.tensor([0.0, 0.1, 1.0, 10.0, 1e6], dtype=torch.float64)
    level = levels[torch.randint(len(levels), (learner.input_size,), generator=generator)]
    ratio = level * torch.rand(learner.input_size, generator=generator, dtype=torch.float64)
    centre = torch.randn(learner.input_size, generator=generator, dtype=torch.float64)
    return shared | {"common_ratio": ratio.to(learner.dtype), "common_centre": centre.to(learner.dtype)}


def batch_of(people: list[UserHistory], dtype: torch.dtype = torch.float64, *, padding: int = 0) -> UserBatch:
    """A padded batch with at least one column; the padding is not zero because it must have no effect."""
    counts = torch.tensor([person.rewards.shape[0] for person in people])
    longest = max(1, int(counts.max())) + padding

    def padded(values: list[Tensor], filling: float, kind: torch.dtype = dtype) -> Tensor:
        rows = torch.full((len(people), longest, *values[0].shape[1:]), filling, dtype=kind)
        for row, value in zip(rows, values, strict=True):
            row[: value.shape[0]] = value.to(kind)
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
        arm_keys=padded([person.arm_keys for person in people], 1, torch.int64),
        places=padded([person.places for person in people], 3, torch.int64),
    )


def fitted(learner: PosteriorLearner, shared: State, people: list[UserHistory]) -> State:
    """States after a fit, [B, …]; [0, …] without users."""
    if not people:
        return {name: shared["mean"].new_zeros((0, *shape)) for name, shape in learner.fields.items()}
    initial_user = {
        name: value.expand(len(people), *value.shape) for name, value in learner.initial_user(shared).items()
    }
    return learner.fit(shared, batch_of(people, learner.dtype), initial_user)


def kinds(
    learner: PosteriorLearner, users: int, samples: int, generator: torch.Generator, *, catalogue: int = 0
) -> list[UserHistory]:
    """Users of two opposite tastes, alternating."""
    taste = torch.randn(learner.input_size, generator=generator, dtype=torch.float64)
    return [
        random_history(learner, samples, generator, taste if user % 2 else -taste, catalogue=catalogue)
        for user in range(users)
    ]


def epoch_with_kinds(learner: PosteriorLearner, teachers: list[UserHistory], **changes: float) -> State:
    """Shared state of an epoch with two kinds of users, or less evident ones; `changes` replaces single numbers."""
    batch = batch_of(teachers, learner.dtype)
    shared = learner.derive(learner.initial_shared(), [batch], 0, 512)
    if learner.settings.kinds:
        samples = learner.head_samples(SharedState.stored(shared), batch)
        shared |= kinds_of(shared, samples.statistics())
    return shared | {name: torch.full_like(shared[name], value) for name, value in changes.items()}


def kinds_of(shared: State, users: Statistics) -> State:
    """Two kinds of these users, whatever the evidence for them."""
    prior = prior_from_state(shared)
    em = MixtureEM(prior, users, torch.ones_like(users.events))
    return em.fit(2, torch.Generator().manual_seed(0)).padded().state()


def two_kinds(shared: State) -> State:
    """Kinds of users one deviation on either side of the prior's mean."""
    prior = prior_from_state(shared)
    away = prior.covariance.diagonal().sqrt()
    centres = torch.stack([prior.mean + away, prior.mean - away])
    log_shares = torch.tensor([0.4, 0.6], dtype=prior.mean.dtype).log()
    return Kinds(centres, log_shares, torch.full_like(prior.noise, SPREAD)).padded().state()


def with_prior_mean(shared: State, mean: Tensor) -> State:
    """Without kinds, under a prior with another mean."""
    changed = shared | {"prior_mean": mean}
    return changed | Kinds.none(prior_from_state(changed)).state()


def as_stored_by(learner: PosteriorLearner, shared: State) -> State:
    """A float64 shared state as this learner holds it."""
    types = {name: value.dtype for name, value in learner.initial_shared().items()}
    return {name: value.to(types[name]) for name, value in shared.items()}


@st.composite
def scenes(draw: st.DrawFn, *, wide: bool = False) -> Scene:
    """Every shape, every part on or off; with `wide`, always with common parts to remove."""
    d = draw(st.integers(3, 6) if wide else st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    narrowed = wide or draw(st.booleans())
    # Up to two inputs of the arm are few enough for heads, whatever the context adds.
    arm_inputs = d if wide else draw(st.integers(1, d))
    context = draw(st.integers(0, d - arm_inputs))
    parts = InputParts(d, arm_inputs, context, hashed=not wide and draw(st.booleans()))
    settings = small(
        alpha=draw(st.sampled_from([0.0, 0.3, 2.0])),
        nu=draw(st.sampled_from([0.1, 1.0, 5.0])),
        members=draw(st.integers(1, 3)),
        depth=draw(st.integers(1, 3)),
        bins=draw(st.sampled_from([0, 2, 5])),
        trunk=draw(st.sampled_from([True, True, False])),
        heads=draw(st.sampled_from([True, True, True, False])),
        kinds=draw(st.booleans()),
        memory=draw(st.booleans()),
        arms=draw(st.sampled_from([True, True, True, False])),
        apart=wide or draw(st.booleans()),
        memory_samples=draw(st.integers(1, 4)),
        memory_radius=draw(st.sampled_from([0.087, 1.0])),
        seed=draw(st.integers(0, 2**31 - 1)),
        **({"head_inputs_max": 2, "head_directions": draw(st.integers(1, 2))} if narrowed else {}),
    )
    learner = PosteriorLearner(settings, parts, torch.float64)
    catalogue = draw(st.sampled_from([0, 1, 6]))  # none: arms have no ids
    if draw(st.sampled_from([True, True, False])):
        changes = {"gain": draw(st.sampled_from([0.0, 0.5, 3.0])), "since": draw(st.sampled_from([0.0, 2.0]))}
        changes |= {"kind_spread": draw(st.sampled_from([0.02, 0.15, 1.0]))} if settings.kinds else {}
        teachers = kinds(learner, draw(st.integers(1, 9)), 6, generator, catalogue=catalogue)
        shared = epoch_with_kinds(learner, teachers, **changes)
    else:
        shared = learner.initial_shared()
    shared = with_common_part(learner, shared, generator)
    if settings.arms and draw(st.booleans()):
        shared = with_known_arms(shared, generator, catalogue)
    both = as_stored_by(PosteriorLearner(settings, parts), shared)  # exact in both dtypes
    shared = QuietState(
        {name: value.to(torch.float64) if value.is_floating_point() else value for name, value in both.items()}
    )
    pool = [
        random_history(learner, draw(st.integers(0, 7)), generator, catalogue=catalogue)
        for _ in range(draw(st.integers(0, 5)))
    ]
    outsider, stranger = (
        random_history(learner, draw(st.integers(1, 7)), generator, catalogue=catalogue),
        random_history(learner, 0, generator),
    )
    askers = [*((person, row) for row, person in enumerate(pool)), (outsider, -1), (stranger, -1)]
    requests, arm_keys = [], []
    for asker, row in draw(st.lists(st.sampled_from(askers), min_size=1, max_size=3)):
        arms = rounded_to_float32(torch.randn(draw(st.integers(1, 4)), d, generator=generator, dtype=torch.float64))
        if asker.features.shape[0] and draw(st.booleans()):
            arms[0] = asker.features[-1]  # an arm in the memory
        requests.append((asker, row, arms))
        numbers = st.sampled_from([*range(1 + catalogue), NEW_ARM])
        arm_keys.append(torch.tensor(draw(st.lists(numbers, min_size=len(arms), max_size=len(arms)))))
    return Scene(settings, parts, shared, pool, requests, arm_keys if catalogue else None)


def query_of(scene: Scene, learner: PosteriorLearner, shared: State) -> Query:
    """All requests in one query; a user without samples is initial_user."""
    initial_user = learner.initial_user(shared)
    states = [
        {name: value[0] for name, value in fitted(learner, shared, [asker]).items()}
        if asker.rewards.shape[0]
        else initial_user
        for asker, _, _ in scene.requests
    ]
    return Query(
        arms=torch.cat([arms for _, _, arms in scene.requests]).to(learner.dtype),
        slates=Slates([arms.shape[0] for _, _, arms in scene.requests]),
        own={name: torch.stack([state[name] for state in states]) for name in initial_user},
        own_row=torch.tensor([row for _, row, _ in scene.requests]),
        own_events=torch.tensor([asker.rewards.shape[0] for asker, _, _ in scene.requests]),
        arm_keys=None if scene.arm_keys is None else torch.cat(scene.arm_keys),
    )


def fast_scores(scene: Scene, dtype: torch.dtype = torch.float64) -> Scores:
    """Scores of the fast learner."""
    learner = scene.learner(dtype)
    shared = as_stored_by(learner, scene.shared)
    return learner.score(shared, fitted(learner, shared, scene.pool), query_of(scene, learner, shared))


def samples_of(person: UserHistory) -> list[LiteralSample]:
    """Samples in the form of the literal learner.

    The notes start with the trunk's prediction and, for wide inputs, end with the slate.
    """
    rows = zip(
        person.features.numpy(),
        person.phi.tolist(),
        person.rewards.tolist(),
        person.epochs.tolist(),
        person.arm_keys.tolist(),
        person.places.tolist(),
        strict=True,
    )
    return [
        LiteralSample(LiteralShown(raw, noted[-(1 + raw.shape[0]) :], key), noted[0], reward, epoch, place)
        for raw, noted, reward, epoch, key, place in rows
    ]


def arms_of(shared: State) -> dict[int, LiteralKnown]:
    """The arms of an epoch, by key."""
    columns = (shared[f"arm_{name}"].tolist() for name in ("keys", "effects", "variances", "factors"))
    rows = zip(*columns, strict=True)
    return {key: LiteralKnown(effect, variance, q) for key, effect, variance, q in rows if key != UNUSED_KEY}


def chosen_directions(shared: State, inputs: int) -> Array | None:
    """What heads see of so many inputs, as a matrix; None for all of them."""
    if "head_columns" in shared:
        return np.eye(inputs)[:, shared["head_columns"].numpy()]
    return as_array(shared["directions"]) if "directions" in shared else None


def made_factors(learner: PosteriorLearner, shared: State) -> dict[int, list[float]]:
    """V by the columns of the arm that it multiplies."""
    made = shared["arm_wide_factors"].to(torch.float64).tolist()
    columns = shared["wide_factors"][0, : len(made)].tolist() if made else []
    return {column: row for column, row in zip(columns, made, strict=True) if column < learner.parts.arm}


def literal_of(learner: PosteriorLearner, shared: State) -> LiteralPosterior:
    """The literal learner with the same shared numbers."""
    settings, inputs = learner.settings, learner.input_size
    head_inputs = inputs if inputs <= settings.head_inputs_max else learner.parts.arm
    narrowed = head_inputs > settings.head_inputs_max and not learner.parts.hashed
    # Where a context makes inputs too many for heads, there is no trunk.
    trunk = settings.trunk and (inputs <= settings.head_inputs_max or narrowed)
    numbers = {name: value.to(torch.float64).numpy() for name, value in shared.items()}
    bins = numbers["edges"].shape[1] - 1 if "edges" in numbers else 0
    widths = [inputs * (1 + bins), *[settings.width] * settings.depth, 1]
    members: list[list[tuple[Array, Array]]] = [[] for _ in range(settings.members)]
    flat = iter(numbers["trunk"])
    for columns, rows in pairwise(widths):  # weights of all members, then their biases
        weights = [np.array([next(flat) for _ in range(rows * columns)]).reshape(rows, columns) for _ in members]
        for layers, weight in zip(members, weights, strict=True):
            layers.append((weight, np.array([next(flat) for _ in range(rows)])))
    assert not list(flat)
    used = shared["kind_log_shares"] > UNUSED / 2
    read = LiteralSettings(**{each.name: getattr(settings, each.name) for each in fields(LiteralSettings)})
    return LiteralPosterior(
        replace(read, trunk=trunk),
        LiteralShared(
            mean=numbers["mean"],
            scale=numbers["scale"],
            edges=numbers.get("edges"),
            head_inputs=head_inputs,
            directions=chosen_directions(shared, head_inputs),
            common_ratio=numbers.get("common_ratio"),
            common_centre=numbers.get("common_centre"),
            trunk=members,
            prior_mean=numbers["prior_mean"],
            prior_covariance=numbers["prior_covariance"],
            noise=float(numbers["noise"]),
            centres=list(numbers["kind_centres"][used]),
            shares=np.exp(numbers["kind_log_shares"][used]).tolist(),
            spread=float(numbers["kind_spread"]),
            gain=float(numbers["gain"]),
            reach=float(numbers["reach"]),
            since=float(numbers["since"]),
            arms=arms_of(shared),
            unknown=LiteralKnown(0.0, float(numbers["arm_effect_spread"]), [0.0] * FACTORS),
            looks=numbers["arm_looks"].tolist(),
            wide=dict(
                zip(zip(*shared["wide_factors"].tolist(), strict=True), numbers["arm_wide"].tolist(), strict=True)
            )
            if "wide_factors" in shared
            else {},
            made=made_factors(learner, shared),
        ),
    )


def as_array(value: Tensor) -> Array:
    """In float64 numpy."""
    return value.to(torch.float64).numpy()


def past_arm_views(learner: PosteriorLearner, person: UserHistory) -> list[Tensor]:
    """Views of a user's past arms, to be changed in place: the arms and the means of their slates."""
    return [person.features, Notes(person.phi).slate[:, 1:]] if learner.inputs.removes_common else [person.features]
