"""Contributions against central differences of means, blocks against means, members against group sizes."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor

from metaban.models.default.arms import FACTORS
from metaban.models.default.common_part import slate_summary
from metaban.models.default.learner import PosteriorLearner
from metaban.models.default.notes import Notes
from metaban.models.default.served_trunk import ServedTrunk
from metaban.models.default.trunk import Trunk
from metaban.models.explaining import Agreement, Contributions
from metaban.models.features import InputParts
from metaban.models.learner import Learner, Query, Scores, arm_key
from metaban.models.metaban.paper import MetaBanLearner, PaperLearner
from metaban.models.metaban.pooled import PooledLearner
from metaban.models.numerics.arrays import Arrays, as_arrays
from metaban.models.numerics.bias_free_net import forward
from metaban.models.numerics.slates import Slates
from metaban.models.settings import named_settings
from tests.models.default_worlds import (
    WIDE,
    Scene,
    batch_of,
    epoch_with_kinds,
    fitted,
    generator_of,
    kinds,
    query_of,
    random_history,
    scenes,
    small,
    with_prior_mean,
)
from tests.models.properties import PROPERTY
from tests.models.worlds import World, pool_of, worlds
from tests.models.worlds import fitted_states as paper_states
from tests.models.worlds import query_of as paper_query
from tests.models.worlds import shared_of as paper_shared

#: Of a central difference in float64; its own error is of order STEP².
STEP, TOLERANCE = 1e-6, 1e-6

#: Settings and sizes of `catalogue_request`. In `context`, two of five inputs describe the arm: heads see those.
WORLDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "context": {**WIDE, "inputs": 5, "arm_inputs": 2},
    "few-with-context": {"inputs": 5, "arm_inputs": 2, "products_max": 0},
    "hashed": {**WIDE, "inputs": 7, "arm_inputs": 4, "hashed": 1},
    "wide": WIDE,
    "linear": {"trunk": False, "products_max": 0},
    "no-codes": {"bins": 0},
    "no-heads": {"heads": False},
    "no-arms": {"arms": False},
    "no-kinds": {"kinds": False},
}


class ExplainedRequest:
    """One request to a learner with its pool, and the scores."""

    def __init__(self, learner: Learner, shared: Any, pool: Arrays, query: Query) -> None:
        self.learner, self.pool, self.shared = learner, pool, shared
        self.epoch = learner.prepare_epoch(shared)
        self.query = replace(query, own=self.epoch.prepare_users(dict(query.own)))

    def scores(self, arms: Tensor | None = None) -> Scores:
        query = self.query if arms is None else replace(self.query, arms=arms)
        return self.epoch.score(self.pool, query)

    def explained(self, rows: list[int], arms: Tensor | None = None) -> tuple[Agreement, Contributions]:
        query = self.query if arms is None else replace(self.query, arms=arms)
        places = torch.tensor(rows)
        agreement = self.epoch.agreement(self.pool, query, places)
        return agreement, self.epoch.contributions(self.pool, query, places, agreement)

    def steady_mean(self, row: int, arms: Tensor) -> float:
        """An arm's mean without the memory's correction."""
        _, parts = self.explained([row], arms)
        return float(self.scores(arms).mean[row] - parts.memory[0])


def each_alone(learner: Learner, shared: Any, pool: Arrays, query: Query) -> list[ExplainedRequest]:
    """The requests of a query one by one."""
    found, end = [], 0
    for place, size in enumerate(query.slates.sizes):
        part, end = slice(end, end + size), end + size
        alone = replace(
            query,
            arms=query.arms[part],
            arm_keys=None if query.arm_keys is None else query.arm_keys[part],
            slates=Slates([size]),
            own={name: value[place : place + 1] for name, value in query.own.items()},
            own_row=query.own_row[place : place + 1],
            own_events=query.own_events[place : place + 1],
        )
        found.append(ExplainedRequest(learner, shared, pool, alone))
    return found


def requests_of(scene: Scene) -> list[ExplainedRequest]:
    learner = scene.learner(torch.float64)
    pool = fitted(learner, scene.shared, scene.pool)
    return each_alone(learner, scene.shared, pool, query_of(scene, learner, scene.shared))


def requests_in(world: World) -> list[ExplainedRequest]:
    learner = PaperLearner(world.settings, world.inputs, torch.float64)
    shared = paper_shared(world, learner)
    states = paper_states(world, learner, shared)
    return each_alone(learner, shared, pool_of(world, learner, shared, states), paper_query(world, learner, states))


def check_blocks(asked: ExplainedRequest) -> None:
    """Blocks add up to the means."""
    mean = asked.scores().mean
    _, parts = asked.explained([*range(mean.shape[0])])
    torch.testing.assert_close(parts.blocks(), mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(parts.rest(mean), parts.shared + parts.user - parts.intercept - parts.columns.sum(-1))


def check_contributions(asked: ExplainedRequest, *, keep_mean: bool = False) -> None:
    """Each column's contribution is the derivative of the learner's mean times the distance to the column's mean.

    With `keep_mean` another arm moves the other way, so that the mean of the slate stays the same.
    """
    arms, learner = asked.query.arms, asked.learner
    count, inputs = arms.shape
    distance = arms
    if isinstance(learner, PosteriorLearner):
        slate = slate_summary(arms, asked.query.slates)
        distance = learner.inputs.standardized(asked.shared, arms, slate) * asked.shared["scale"]
    for row in range(count):
        if keep_mean and count == 1:
            continue
        _, parts = asked.explained([row])
        slopes = torch.zeros(inputs, dtype=torch.float64)
        for column in range(inputs):
            step = torch.zeros_like(arms)
            step[row, column] = STEP
            if keep_mean:
                step[(row + 1) % count, column] = -STEP
            slopes[column] = (asked.steady_mean(row, arms + step) - asked.steady_mean(row, arms - step)) / (2 * STEP)
        expected = slopes * distance[row]
        largest = 1 + float(expected.abs().max())
        torch.testing.assert_close(parts.columns[0], expected, rtol=0, atol=TOLERANCE * largest)


def check_group_sizes(asked: ExplainedRequest) -> None:
    """Sizes equal those of the scores for any selection of arms; members are the users within the threshold."""
    scores = asked.scores()
    count = asked.query.arms.shape[0]
    whole, _ = asked.explained([*range(count)])
    near = (whole.predictions - whole.prediction[:, None]).abs() <= whole.threshold[:, None]
    if (row := int(asked.query.own_row[0])) >= 0:
        near[:, row] = False
    if isinstance(asked.learner, PooledLearner):
        near = near.any(0).expand_as(near)  # the group of a request: of any of its arms
    if isinstance(asked.learner, PosteriorLearner) and not asked.learner.settings.heads:
        near = torch.zeros_like(near)  # a trunk alone has no users
    for rows in ([*range(count)], [count - 1], [count - 1, 0]):
        agreement, _ = asked.explained(rows)
        assert agreement.group_size.tolist() == scores.group_size[rows].tolist()
        assert (agreement.members == near[rows]).all()


class TestDefault:
    @PROPERTY
    @given(scenes())
    def test_gradients(self, scene: Scene) -> None:
        for asked in requests_of(scene):
            check_contributions(asked, keep_mean=asked.learner.inputs.removes_common)
            check_blocks(asked)

    @PROPERTY
    @given(scenes(wide=True))
    def test_gradients_of_wide_inputs(self, scene: Scene) -> None:
        for asked in requests_of(scene):
            check_contributions(asked, keep_mean=True)
            check_blocks(asked)

    @PROPERTY
    @given(scenes())
    def test_groups(self, scene: Scene) -> None:
        for asked in requests_of(scene):
            check_group_sizes(asked)

    def test_contributions_of_a_linear_head_are_its_terms(self) -> None:
        """Without trunk, products, memory and standardisation, a mean is w₀ + Σ w_j x_j."""
        learner = PosteriorLearner(small(trunk=False, products_max=0, memory=False), 3, torch.float64)
        shared = learner.initial_shared()
        asked = one_request(learner, shared, seed=3)
        _, parts = asked.explained([0, 1])
        head = asked.query.own["head"][0]
        torch.testing.assert_close(parts.columns, asked.query.arms[:2] * head[1:4])
        torch.testing.assert_close(parts.intercept, head[:1].expand(2))
        torch.testing.assert_close(parts.rest(asked.scores().mean[:2]), torch.zeros(2, dtype=torch.float64))

    @pytest.mark.parametrize("epochs", [0, 1, 3])
    @pytest.mark.parametrize("ids", [True, False], ids=["ids", "no-ids"])
    @pytest.mark.parametrize("world", WORLDS)
    def test_blocks_and_gradients_of_a_catalogue(self, world: str, ids: bool, epochs: int) -> None:
        asked = catalogue_request(world, ids=ids, epochs=epochs, gain=1.0)
        check_blocks(asked)
        check_contributions(asked, keep_mean=asked.learner.inputs.removes_common)
        _, parts = asked.explained([0, 1, 2, 3])
        learns_arms = ids and epochs and world not in ("no-heads", "no-arms")
        assert bool((parts.arm != 0).any()) == bool(learns_arms)
        assert bool((parts.taste != 0).any()) == bool(learns_arms and epochs == 3), "factors begin with 1,024 events"

    def test_blocks_are_those_of_the_definition(self) -> None:
        """shared = w₀ᵀh₀ + βᵀz, arm = b, taste = pᵀq, for a learner without a trunk."""
        asked = catalogue_request("context", ids=True, epochs=3)
        inputs, shared, query = asked.learner.inputs, asked.shared, asked.query
        z = inputs.standardized(shared, query.arms, query.arms[:, :0])
        h = inputs.head_inputs(shared, z, torch.zeros(4, dtype=torch.float64))
        known = asked.epoch.arms.look_up(query.arm_keys)
        effects, factors = known.effects, known.factors
        wide = inputs.wide_inputs(shared, z) @ shared["arm_wide"]
        assert wide.abs().max() > 1e-3
        _, parts = asked.explained([0, 1, 2, 3])
        newborn = shared["kind_log_shares"].exp() @ shared["kind_centres"]
        torch.testing.assert_close(parts.shared, h @ newborn + wide)
        torch.testing.assert_close(parts.user, h @ (query.own["head"][0] - newborn))
        torch.testing.assert_close(parts.arm, effects)
        torch.testing.assert_close(parts.taste, factors @ query.own["head"][0, -FACTORS:])

    @pytest.mark.parametrize("world", WORLDS)
    def test_a_user_without_rewards_adds_nothing(self, world: str) -> None:
        asked = catalogue_request(world, ids=True, epochs=3, new_user=True)
        check_blocks(asked)
        _, parts = asked.explained([0, 1, 2, 3])
        torch.testing.assert_close(parts.user, torch.zeros_like(parts.user))
        assert (parts.memory == 0).all()
        # What is shared is the same for a user with rewards.
        _, known = catalogue_request(world, ids=True, epochs=3).explained([0, 1, 2, 3])
        torch.testing.assert_close(parts.shared, known.shared)
        # Without heads, users differ in nothing.
        assert bool((known.user.abs() > 1e-6).all()) == (world != "no-heads")

    def test_the_effect_of_an_arm(self) -> None:
        """The first arm earns 0.8 more than its inputs say, from every user."""
        asked = catalogue_request("linear", ids=True, epochs=3, bonus=0.8)
        _, parts = asked.explained([0, 1, 2, 3])
        assert parts.arm[0] > 0.3
        assert parts.arm[1:].max() < 0.2
        for other in (parts.taste, parts.memory, parts.user):
            assert other[0].abs() < parts.arm[0]

    @pytest.mark.parametrize("world", WORLDS)
    def test_a_constant_column_contributes_nothing(self, world: str) -> None:
        asked = catalogue_request(world, ids=True, epochs=3, constant=1972.0)
        _, parts = asked.explained([0, 1, 2, 3])
        assert (asked.query.arms[:, 1] == 1972).all()
        assert parts.columns[:, 1].abs().max() < 1e-9
        assert parts.columns[:, 0].abs().max() > 1e-6

    def test_a_column_with_a_large_mean(self) -> None:
        """A year moves the mean by how far it is from the average year; the intercept is no counterweight."""
        learner = PosteriorLearner(small(trunk=False, products_max=0), 3, torch.float64)
        shared = learner.initial_shared()
        shared |= {"mean": torch.tensor([1990.0, 0, 0]).double(), "scale": torch.tensor([10.0, 1, 1]).double()}
        mean = torch.zeros_like(shared["prior_mean"])
        mean[:2] = torch.tensor([0.2, 0.1])
        shared = with_prior_mean(shared, mean)
        state = {name: value.unsqueeze(0) for name, value in learner.initial_user(shared).items()}
        arms = torch.tensor([[1972.0, 0, 0], [1990.0, 0, 0]]).double()
        query = Query(arms, Slates([2]), state, torch.tensor([-1]), torch.tensor([0]))
        asked = ExplainedRequest(learner, shared, fitted(learner, shared, []), query)
        _, parts = asked.explained([0, 1])
        torch.testing.assert_close(parts.columns[:, 0], torch.tensor([-0.18, 0.0]).double())
        torch.testing.assert_close(parts.intercept, torch.tensor([0.2, 0.2]).double())
        torch.testing.assert_close(parts.rest(asked.scores().mean), torch.zeros(2).double())

    def test_an_input_beyond_ten_deviations_counts_as_ten(self) -> None:
        learner = PosteriorLearner(small(trunk=False, products_max=0, memory=False), 3, torch.float64)
        shared = learner.initial_shared()
        mean = torch.zeros_like(shared["prior_mean"])
        mean[1] = 0.1
        shared = with_prior_mean(shared, mean)
        asked = one_request(learner, shared, seed=3)
        far = asked.query.arms.clone()
        far[0, 0] = 1e6
        _, parts = asked.explained([0], far)
        torch.testing.assert_close(parts.columns[0, 0], 10 * asked.query.own["head"][0, 1])

    def test_looks_of_places(self) -> None:
        asked = catalogue_request("plain", ids=True, epochs=3)
        looks = asked.epoch.looks(torch.tensor([0, 1, 15, 99]))
        assert looks.tolist() == asked.shared["arm_looks"][[0, 1, 15, 15]].tolist()
        assert looks[0] == 1
        assert 0 < looks[1] < 1, "rewards at the second place are half of those at the first"

    def test_the_memory_is_the_difference_to_a_learner_without_one(self) -> None:
        chosen = {"memory_samples": 4, "memory_radius": 1.0}
        learner = PosteriorLearner(small(**chosen), 3, torch.float64)
        shared = epoch_with_kinds(learner, kinds(learner, 6, 6, generator_of(1)), gain=3.0)
        asked = one_request(learner, shared, seed=5)
        without = PosteriorLearner(small(memory=False, **chosen), 3, torch.float64)
        forgetful = one_request(without, shared, seed=5)
        _, parts = asked.explained([0, 1, 2])
        assert parts.memory.abs().max() > 1e-3
        torch.testing.assert_close(parts.memory, asked.scores().mean - forgetful.scores().mean)
        assert (forgetful.explained([0, 1, 2])[1].memory == 0).all()

    @pytest.mark.parametrize("world", WORLDS)
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    def test_numpy_equals_torch(self, world: str, dtype: torch.dtype) -> None:
        asked = catalogue_request(world, ids=True, epochs=3, dtype=dtype)
        learner, shared, rows = asked.learner, asked.shared, [2, 0]
        agreement, parts = asked.explained(rows)
        epoch, query = learner.prepare_epoch(shared, as_numpy=True), asked.query
        plain = replace(
            query,
            arms=query.arms.numpy(),
            own={name: value.numpy() for name, value in query.own.items()},
            own_row=query.own_row.numpy(),
            arm_keys=query.arm_keys.numpy(),
        )
        pool, places = as_arrays(asked.pool), np.array(rows)
        agreed = epoch.agreement(pool, plain, places)
        found = epoch.contributions(pool, plain, places, agreed)
        close = {"rtol": 1e-8 if dtype == torch.float64 else 1e-3, "atol": 1e-8 if dtype == torch.float64 else 1e-4}
        for name in ("prediction", "threshold", "predictions"):
            np.testing.assert_allclose(getattr(agreed, name), getattr(agreement, name).numpy(), **close)
        assert (agreed.members == agreement.members.numpy()).all()
        assert agreed.group_size.tolist() == epoch.score(pool, plain).group_size[places].tolist()
        for name in (each.name for each in fields(Contributions)):
            value = getattr(found, name)
            assert value.dtype == np.float64
            np.testing.assert_allclose(value, getattr(parts, name).numpy(), **close)


def one_request(learner: PosteriorLearner, shared: Any, *, seed: int) -> ExplainedRequest:
    """Three arms in a pool of six; the asking user has seen the first arm."""
    people = kinds(learner, 6, 5, generator_of(seed))
    arms = torch.cat([people[2].features[-1:], people[3].features[:2] * 0.7])
    scene = Scene(learner.settings, learner.input_size, shared, people, [(people[2], 2, arms)])
    return ExplainedRequest(learner, shared, fitted(learner, shared, people), query_of(scene, learner, shared))


def catalogue_request(
    name: str,
    *,
    ids: bool,
    epochs: int,
    dtype: torch.dtype = torch.float64,
    bonus: float = 0.0,
    constant: float | None = None,
    new_user: bool = False,
    **changes: float,
) -> ExplainedRequest:
    """Four arms of a catalogue of 24, after so many epochs of twelve users with two kinds of tastes for its arms.

    The first arm earns `bonus` more. Rewards at the second place are half of those at the first. Column 1 may be
    constant; `changes` replaces single numbers of the shared state.
    """
    world, generator, items, samples = dict(WORLDS[name]), generator_of(7), 24, 48
    inputs, arm_inputs = world.pop("inputs", 3), world.pop("arm_inputs", None)
    described = inputs if arm_inputs is None else arm_inputs  # the rest is the context
    parts = InputParts(inputs, described, inputs - described, hashed=bool(world.pop("hashed", 0)))
    learner = PosteriorLearner(small(**world), parts, dtype)
    catalogue = torch.randn(items, inputs, generator=generator, dtype=torch.float64)
    keys = torch.tensor([arm_key(f"arm {number}") for number in range(items)])
    opinions = torch.randn(items, generator=generator, dtype=torch.float64)
    people, shown, places = [], [], torch.arange(samples) % 2
    for user in range(12):
        person, arms = (
            random_history(learner, samples, generator),
            torch.randint(items, (samples,), generator=generator),
        )
        person.features[:, :described] = catalogue[arms, :described]
        if constant is not None:
            person.features[:, 1] = constant
        likes = 0.2 * opinions[arms] * (1 if user % 2 else -1)
        earned = 0.3 + 0.1 * person.features[:, 0] + 0.1 * person.features[:, -1] + likes + bonus * (arms == 0)
        noise = 0.3 * torch.randn(samples, generator=generator, dtype=torch.float64)
        person.rewards = earned * torch.where(places == 0, 1.0, 0.5) + noise
        if learner.inputs.removes_common:
            Notes(person.phi).slate[:, 1:] = person.features
        people.append(person)
        shown.append(arms)
    chosen = torch.stack(shown)
    batch = replace(
        batch_of(people, dtype),
        arm_keys=keys[chosen] if ids else torch.zeros_like(chosen),
        places=places.expand(chosen.shape),
    )
    shared, events = learner.initial_shared(), [0, 512, 1024, 2048]
    for before, after in pairwise(events[: epochs + 1]):
        shared = learner.derive(shared, [batch], before, after)
    shared |= {name: torch.full_like(shared[name], value) for name, value in changes.items()}
    initial = {name: value.expand(12, *value.shape) for name, value in learner.initial_user(shared).items()}
    pool = learner.fit(shared, batch, initial)
    # Not quite the arms of the samples: codes have their kinks there.
    arms = catalogue[:4] + 0.01 * torch.randn(4, inputs, generator=generator, dtype=torch.float64)
    if constant is not None:
        arms[:, 1] = constant
    query = Query(
        arms=arms.to(dtype),
        slates=Slates([4]),
        own={name: (initial if new_user else pool)[name][3:4] for name in pool},
        own_row=torch.tensor([-1 if new_user else 3]),
        own_events=torch.tensor([0 if new_user else samples]),
        arm_keys=keys[:4] if ids else None,
    )
    return ExplainedRequest(learner, shared, pool, query)


class TestPaper:
    @PROPERTY
    @given(worlds())
    def test_gradients_and_groups(self, world: World) -> None:
        for asked in requests_in(world):
            check_group_sizes(asked)
            check_terms(asked)

    @pytest.mark.parametrize("preset", ["paper", "pooled"])
    @pytest.mark.parametrize("changes", [{}, {"depth": 4}, {"input_norm": 0.0}, {"standardize": False}], ids=str)
    def test_both_presets(self, preset: str, changes: dict[str, Any]) -> None:
        asked = neural_request(preset, **changes)
        check_group_sizes(asked)
        check_terms(asked)
        _, parts = asked.explained([0, 1, 2, 3])
        assert (parts.user != 0).any()
        theta, x = asked.shared["theta0" if preset == "paper" else "theta"], asked.query.arms
        shared = forward(asked.learner.shape, theta[None], asked.epoch.inputs(x)[None])[0]
        torch.testing.assert_close(parts.shared, shared)
        assert asked.epoch.looks(torch.tensor([0, 5])).tolist() == [1, 1]

    @pytest.mark.parametrize("preset", ["paper", "pooled"])
    def test_gradients_of_inputs_that_are_not_scaled(self, preset: str) -> None:
        check_contributions(neural_request(preset, input_norm=0.0, standardize=False))

    @pytest.mark.parametrize("preset", ["paper", "pooled"])
    def test_a_column_at_its_mean_contributes_nothing(self, preset: str) -> None:
        asked = neural_request(preset)
        arms = asked.query.arms.clone()
        arms[:, 1] = asked.shared["mean"][1]
        _, parts = asked.explained([0, 1, 2, 3], arms)
        assert (parts.columns[:, 1] == 0).all()
        assert (parts.columns[:, 0] != 0).all()

    @pytest.mark.parametrize("preset", ["paper", "pooled"])
    def test_in_chunks(self, preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = neural_request(preset)
        _, whole = asked.explained([0, 1, 2, 3])
        monkeypatch.setattr("metaban.models.metaban.served_epoch.ADAPTED_NUMBERS_MAX", asked.learner.shape.parameters)
        _, parts = asked.explained([0, 1, 2, 3])
        torch.testing.assert_close(parts.columns, whole.columns)

    def test_an_input_of_zeros(self) -> None:
        asked = neural_request("paper", standardize=False)
        nothing = torch.zeros_like(asked.query.arms)
        _, parts = asked.explained([0], nothing)
        assert (parts.columns == 0).all()


def check_terms(asked: ExplainedRequest) -> None:
    """Blocks add up to the means, and so do columns: derivatives of the network times its inputs."""
    check_blocks(asked)
    learner, count = asked.learner, asked.query.arms.shape[0]
    assert isinstance(learner, MetaBanLearner)
    agreement, parts = asked.explained([*range(count)])
    torch.testing.assert_close(parts.rest(asked.scores().mean), torch.zeros(count, dtype=torch.float64))
    x = asked.epoch.inputs(asked.query.arms).requires_grad_()
    theta = asked.epoch.adapted(asked.pool, asked.query, agreement.members)
    forward(learner.shape, theta, x.unsqueeze(1)).sum().backward()
    torch.testing.assert_close(parts.columns, x.grad * x.detach())


def neural_request(preset: str, **changes: Any) -> ExplainedRequest:
    """Four arms; the asking user is in a pool of five, some of whom agree."""
    generator = torch.Generator().manual_seed(2)
    tiny = {"width": 7, "user_steps": 3, "meta_steps": 3, "gamma": 0.6, "recent_samples": 5, "step_samples": 6}
    chosen = named_settings(preset, **{**tiny, **changes})
    learner: MetaBanLearner = (PaperLearner if preset == "paper" else PooledLearner)(chosen, 3, torch.float64)
    shared = learner.initial_shared()
    if "mean" in shared:
        shared |= {"mean": torch.tensor([0.3, -0.2, 1.0]).double(), "scale": torch.tensor([0.5, 2.0, 1.5]).double()}
    if preset == "pooled":
        shared["theta"] = shared["theta0"] + 0.1
    initial_user = learner.initial_user(shared)
    pool = {name: value.expand(5, *value.shape).clone() for name, value in initial_user.items()}
    pool["theta"] += 0.2 * torch.randn(pool["theta"].shape, generator=generator, dtype=torch.float64)
    pool["samples"] += torch.arange(5)
    for name in pool.keys() & {"gradient", "recent_features", "recent_rewards"}:
        pool[name] = torch.randn(pool[name].shape, generator=generator, dtype=torch.float64)
    query = Query(
        arms=torch.randn(4, 3, generator=generator, dtype=torch.float64),
        slates=Slates([4]),
        own={name: value[1:2] for name, value in pool.items()},
        own_row=torch.tensor([1]),
        own_events=torch.tensor([3]),
    )
    asked = ExplainedRequest(learner, shared, pool, query)
    sizes = asked.scores().group_size
    assert int(sizes.max()) > 1, "some users agree"
    return asked


def test_gradients_through_a_trunk_equal_autograd() -> None:
    trunk = Trunk(4, 6, 3, 2)
    flat = trunk.initial(generator_of(0), torch.float64)
    x = torch.randn(5, 4, generator=generator_of(1), dtype=torch.float64, requires_grad=True)
    (first, offset), *rest = trunk.layers(flat)
    hidden = x @ first.mT + offset.unsqueeze(1)  # [2, 5, 6]
    for weight, each in rest:
        hidden = hidden.relu() @ weight.mT + each.unsqueeze(1)
    hidden.sum().backward()
    *between, (last, level) = rest
    turned = [(first.flatten(0, 1).mT, offset.flatten())]
    turned += [*((weight.mT, each.flatten()) for weight, each in between), (last.flatten(), level.sum())]
    torch.testing.assert_close(ServedTrunk(turned, None).gradient(x.detach()), x.grad)
    torch.testing.assert_close(ServedTrunk(turned, None).predict(x.detach()), hidden.detach().sum(0).squeeze(-1))
