"""Contributions against central differences of the learners' means; members against group sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor

from metaban.models.default.contributions import through_layers
from metaban.models.default.learner import PosteriorLearner
from metaban.models.default.scoring import trunk_prediction
from metaban.models.default.trunk import Trunk
from metaban.models.explaining import Agreement, Contributions, through_unit
from metaban.models.learner import Learner, Query, Scores
from metaban.models.metaban.paper import MetaBanLearner, PaperLearner
from metaban.models.metaban.pooled import PooledLearner
from metaban.models.numerics.arrays import Arrays, as_arrays
from metaban.models.numerics.slates import Slates
from metaban.models.settings import named_settings
from tests.models.default_worlds import (
    WIDE,
    Scene,
    fitted,
    generator_of,
    grouped_epoch,
    kinds,
    query_of,
    scenes,
    small,
    with_common_part,
)
from tests.models.properties import PROPERTY
from tests.models.worlds import World, pool_of, worlds
from tests.models.worlds import fitted_states as paper_states
from tests.models.worlds import query_of as paper_query
from tests.models.worlds import shared_of as paper_shared

#: Of a central difference in float64; its own error is of order STEP².
STEP, TOLERANCE = 1e-6, 1e-6


class ExplainedRequest:
    """One request to a learner with its pool, and the scores."""

    def __init__(self, learner: Learner, shared: Any, pool: Arrays, query: Query) -> None:
        self.learner, self.pool = learner, pool
        self.outline = learner.prepare_epoch(shared)
        self.query = replace(query, own=learner.prepare_users(self.outline, dict(query.own)))

    def scores(self, arms: Tensor | None = None) -> Scores:
        query = self.query if arms is None else replace(self.query, arms=arms)
        return self.learner.score_prepared(self.outline, self.pool, query)

    def explained(self, rows: list[int], arms: Tensor | None = None) -> tuple[Agreement, Contributions]:
        query = self.query if arms is None else replace(self.query, arms=arms)
        places = torch.tensor(rows)
        agreement = self.learner.agreement(self.outline, self.pool, query, places)
        return agreement, self.learner.contributions(self.outline, self.pool, query, places, agreement)

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


def check_contributions(asked: ExplainedRequest, *, keep_mean: bool = False) -> None:
    """Each column's contribution is its value times the derivative of the learner's mean.

    With `keep_mean` another arm moves the other way, so that the mean of the slate stays the same.
    """
    arms = asked.query.arms
    count, inputs = arms.shape
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
        largest = 1 + float((slopes * arms[row]).abs().max())
        torch.testing.assert_close(parts.columns[0], slopes * arms[row], rtol=0, atol=TOLERANCE * largest)


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

    @PROPERTY
    @given(scenes(wide=True))
    def test_gradients_of_wide_inputs(self, scene: Scene) -> None:
        for asked in requests_of(scene):
            check_contributions(asked, keep_mean=True)

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
        head = asked.query.own["heads"][0, :, -1]
        torch.testing.assert_close(parts.columns, asked.query.arms[:2] * head[1:4])
        torch.testing.assert_close(parts.intercept, head[:1].expand(2))
        torch.testing.assert_close(parts.rest(asked.scores().mean[:2]), torch.zeros(2, dtype=torch.float64))

    def test_the_memory_is_the_difference_to_a_learner_without_one(self) -> None:
        chosen = {"memory_samples": 4, "memory_radius": 1.0}
        learner = PosteriorLearner(small(**chosen), 3, torch.float64)
        shared = grouped_epoch(learner, kinds(learner, 6, 6, generator_of(1)), gain=3.0)
        asked = one_request(learner, shared, seed=5)
        without = PosteriorLearner(small(memory=False, **chosen), 3, torch.float64)
        forgetful = one_request(without, shared, seed=5)
        _, parts = asked.explained([0, 1, 2])
        assert parts.memory.abs().max() > 1e-3
        torch.testing.assert_close(parts.memory, asked.scores().mean - forgetful.scores().mean)
        assert (forgetful.explained([0, 1, 2])[1].memory == 0).all()

    @pytest.mark.parametrize("changes", [{}, {"bins": 0}, {"heads": False}, {"trunk": False}, WIDE], ids=str)
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    def test_numpy_equals_torch(self, changes: dict[str, Any], dtype: torch.dtype) -> None:
        learner = PosteriorLearner(small(**changes), 3, dtype)
        shared = with_common_part(
            learner, grouped_epoch(learner, kinds(learner, 6, 6, generator_of(1))), generator_of(2)
        )
        asked = one_request(learner, shared, seed=5)
        rows = [2, 0]
        agreement, parts = asked.explained(rows)
        outline, query = learner.prepare_epoch(shared, as_numpy=True), asked.query
        plain = replace(
            query,
            arms=query.arms.numpy(),
            own={name: value.numpy() for name, value in query.own.items()},
            own_row=query.own_row.numpy(),
        )
        pool, places = as_arrays(asked.pool), np.array(rows)
        agreed = learner.agreement(outline, pool, plain, places)
        found = learner.contributions(outline, pool, plain, places, agreed)
        close = {"rtol": 1e-8 if dtype == torch.float64 else 1e-3, "atol": 1e-8 if dtype == torch.float64 else 1e-4}
        for name in ("prediction", "threshold", "predictions"):
            np.testing.assert_allclose(getattr(agreed, name), getattr(agreement, name).numpy(), **close)
        assert (agreed.members == agreement.members.numpy()).all()
        assert agreed.group_size.tolist() == learner.score_prepared(outline, pool, plain).group_size[places].tolist()
        for name in ("columns", "intercept", "memory"):
            value = getattr(found, name)
            assert value.dtype == np.float64
            np.testing.assert_allclose(value, getattr(parts, name).numpy(), **close)


def one_request(learner: PosteriorLearner, shared: Any, *, seed: int) -> ExplainedRequest:
    """Three arms in a pool of six; the asking user has seen the first arm."""
    people = kinds(learner, 6, 5, generator_of(seed))
    arms = torch.cat([people[2].features[-1:], people[3].features[:2] * 0.7])
    scene = Scene(learner.settings, learner.input_size, shared, people, [(people[2], 2, arms)])
    return ExplainedRequest(learner, shared, fitted(learner, shared, people), query_of(scene, learner, shared))


class TestPaper:
    @PROPERTY
    @given(worlds())
    def test_gradients_and_groups(self, world: World) -> None:
        for asked in requests_in(world):
            check_group_sizes(asked)
            check_contributions(asked)

    @pytest.mark.parametrize("preset", ["paper", "pooled"])
    @pytest.mark.parametrize("changes", [{}, {"depth": 4}, {"input_norm": 0.0}, {"standardize": False}], ids=str)
    def test_both_presets(self, preset: str, changes: dict[str, Any]) -> None:
        asked = neural_request(preset, **changes)
        check_group_sizes(asked)
        check_contributions(asked)

    def test_contributions_of_a_bias_free_network_sum_to_its_output(self) -> None:
        asked = neural_request("paper", input_norm=0.0, standardize=False)
        _, parts = asked.explained([0, 1])
        rest = parts.rest(asked.scores().mean[:2])
        torch.testing.assert_close(rest, torch.zeros_like(rest))

    @pytest.mark.parametrize("preset", ["paper", "pooled"])
    def test_in_chunks(self, preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = neural_request(preset)
        _, whole = asked.explained([0, 1, 2, 3])
        monkeypatch.setattr("metaban.models.metaban.paper.ADAPTED_NUMBERS_MAX", asked.learner.shape.parameters)
        _, parts = asked.explained([0, 1, 2, 3])
        torch.testing.assert_close(parts.columns, whole.columns)

    def test_an_input_of_zeros(self) -> None:
        asked = neural_request("paper", standardize=False)
        nothing = torch.zeros_like(asked.query.arms)
        _, parts = asked.explained([0], nothing)
        assert (parts.columns == 0).all()


def neural_request(preset: str, **changes: Any) -> ExplainedRequest:
    """Four arms; the asking user is in a pool of five, some of whom agree."""
    generator = torch.Generator().manual_seed(2)
    tiny = {"width": 7, "user_steps": 3, "meta_steps": 3, "gamma": 0.6, "recent_samples": 5, "step_samples": 6}
    chosen = named_settings(preset, **{**tiny, **changes})
    learner: MetaBanLearner = (PaperLearner if preset == "paper" else PooledLearner)(chosen, 3, torch.float64)
    shared = learner.initial_shared()
    if "mean" in shared:
        shared |= {"mean": torch.tensor([0.3, -0.2, 1.0]).double(), "scale": torch.tensor([0.5, 2.0, 1.5]).double()}
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
    torch.testing.assert_close(through_layers(turned, x.detach(), offset.flatten()), x.grad)
    torch.testing.assert_close(
        trunk_prediction(turned, x.detach(), offset.flatten()), hidden.detach().sum(0).squeeze(-1)
    )


def test_through_unit_of_huge_and_tiny_numbers() -> None:
    x = torch.tensor([[3e200, 4e200], [3e-200, 4e-200], [0.0, 0.0]], dtype=torch.float64)
    gradient = torch.tensor([[1.0, 0.0]] * 3, dtype=torch.float64)
    found = through_unit(gradient, x) * x
    torch.testing.assert_close(found[:2], torch.tensor([[0.384, -0.384]] * 2, dtype=torch.float64))
    assert (found[2] == 0).all()
