"""Draws of arm values: joint over the arms of a request, reproducible, and the same in numpy and torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from metaban.models.default.arms import ArmEffects
from metaban.models.default.learner import PosteriorLearner
from metaban.models.default.notes import Notes
from metaban.models.learner import Query
from metaban.models.numerics.arrays import as_arrays
from metaban.models.numerics.slates import Slates
from metaban.models.posterior_draws import Draws, covariance_root, draws_seed, independent_draws
from metaban.models.presets import build_learner
from metaban.models.settings import named_settings
from tests.models.default_worlds import WIDE, Scene, fitted, query_of, small
from tests.models.scenes import PARTS, query_in_numpy, scene_of

MANY = 20_000
SEEDS = (11, 22, 33, 44)


def drawn(learner: PosteriorLearner, scene: Scene, count: int) -> tuple[np.ndarray, Any, Query]:
    """Draws [N, M] of a scene in numpy, their scores, and the query."""
    epoch = learner.prepare_epoch(scene.shared, as_numpy=True)
    asked = query_of(scene, learner, scene.shared)
    brief = epoch.prepare_draws(epoch.prepare_users(as_arrays(asked.own)))
    query = replace(query_in_numpy(asked, brief), draws=Draws(count, SEEDS))
    scores = epoch.score(as_arrays(fitted(learner, scene.shared, scene.pool)), query)
    assert scores.draws is not None
    return scores.draws, scores, query


def dense_covariances(learner: PosteriorLearner, scene: Scene) -> list[np.ndarray]:
    """Covariance [k, k] of the arm values of each request, arm by arm: hᵀPh′, plus the memory's remaining variance on
    the diagonal."""
    epoch = learner.prepare_epoch(scene.shared)
    query = query_of(scene, learner, scene.shared)
    own, start, found = epoch.prepare_users(query.own), 0, []
    scores = learner.score(scene.shared, fitted(learner, scene.shared, scene.pool), query)
    for row, size in enumerate(query.slates.sizes):
        part = slice(start, start + size)
        z = learner.inputs.standardized(scene.shared, query.arms[part], Notes(scores.phi[part]).slate)
        _, _, factors = ArmEffects.stored(scene.shared).of(query.arm_keys[part])
        terms = learner.inputs.factor_inputs(scene.shared, learner.inputs.wide_inputs(scene.shared, z))
        factors = factors + terms @ scene.shared["arm_wide_factors"]
        h = learner.inputs.head_inputs(scene.shared, z, scores.phi[part, 0], factors).double().numpy()
        covariance = own["covariance"][row].double().numpy()
        each = np.array([[float(one @ covariance @ other) for other in h] for one in h])
        np.fill_diagonal(each, scores.sigma[part].double().numpy() ** 2)
        found.append(each)
        start += size
    return found


@PARTS
def test_draws_have_the_covariance_of_a_dense_posterior(changes: dict[str, Any]) -> None:
    learner = PosteriorLearner(small(nu=2.0, **changes), 3, torch.float64)
    scene = scene_of(learner)
    draws, scores, query = drawn(learner, scene, MANY)
    if not learner.settings.heads:
        assert (draws == scores.mean[:, None]).all(), "a network without heads has no variance"
        return
    start = 0
    for size, covariance in zip(query.slates.sizes, dense_covariances(learner, scene), strict=True):
        part = draws[start : start + size]
        deviation = np.sqrt(np.diag(covariance))
        # Six standard errors of a mean, and of a product of two normal numbers.
        assert np.abs(part.mean(1) - scores.mean[start : start + size]).max() < (6 * deviation / MANY**0.5).max()
        apart = np.atleast_2d(np.cov(part)) - covariance
        assert np.abs(apart / np.outer(deviation, deviation)).max() < 6 * (2 / MANY) ** 0.5
        np.testing.assert_allclose(deviation, scores.sigma[start : start + size], rtol=1e-6)
        start += size


def test_a_common_intercept_cancels() -> None:
    """An unknown intercept moves every draw by a lot, and no difference between arms."""
    learner = PosteriorLearner(small(memory=False, kinds=False), 3, torch.float64)
    scene = replace(scene_of(learner), arm_keys=None)  # an arm's effect is its own
    before, _, query = drawn(learner, scene, 500)
    covariance, size = torch.zeros_like(scene.shared["prior_covariance"]), query.slates.sizes[0]
    covariance[0, 0] = 1e4

    def draws_with(extra: torch.Tensor) -> np.ndarray:
        epoch = learner.prepare_epoch(scene.shared, as_numpy=True)
        asked = query_of(scene, learner, scene.shared)
        brief = dict(epoch.prepare_users(as_arrays(asked.own)))
        brief["covariance"] = 1e-12 * brief["covariance"] + extra.numpy()
        posed = replace(query_in_numpy(asked, epoch.prepare_draws(brief)), draws=Draws(500, SEEDS))
        found: np.ndarray = epoch.score(as_arrays(fitted(learner, scene.shared, [])), posed).draws
        return found

    draws = draws_with(covariance)
    assert draws[:size].std(1).min() > 50
    differences = draws[1:size] - draws[0]
    assert differences.std(1).max() < 1e-3
    assert (before[1:size] - before[0]).std(1).min() > 1e-2, "parts that arms do not share do not cancel"


@PARTS
def test_numpy_draws_equal_torch_draws(changes: dict[str, Any]) -> None:
    learner = PosteriorLearner(small(nu=2.0, **changes), 3, torch.float64)
    scene = scene_of(learner)
    found, _, query = drawn(learner, scene, 16)
    asked = replace(query_of(scene, learner, scene.shared), draws=query.draws)
    expected = learner.score(scene.shared, fitted(learner, scene.shared, scene.pool), asked).draws
    assert isinstance(found, np.ndarray)
    assert isinstance(expected, torch.Tensor)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("changes", [{}, WIDE], ids=["narrow", "wide"])
def test_batched_requests_get_the_draws_of_single_requests(changes: dict[str, Any]) -> None:
    """Also beside a request with more draws: theirs are the first of these."""
    learner = PosteriorLearner(small(**changes), 3, torch.float64)
    scene = scene_of(learner)
    together, _, query = drawn(learner, scene, 24)
    epoch, pool = learner.prepare_epoch(scene.shared, as_numpy=True), fitted(learner, scene.shared, scene.pool)
    end = 0
    for row, size in enumerate(query.slates.sizes):
        part, end, asker = slice(end, end + size), end + size, slice(row, row + 1)
        alone = Query(
            arms=query.arms[part],
            slates=Slates([size]),
            own={name: value[asker] for name, value in query.own.items()},
            own_row=query.own_row[asker],
            own_events=query.own_events[asker],
            arm_keys=query.arm_keys[part],
            draws=Draws(16, SEEDS[row : row + 1]),
        )
        scores = epoch.score(as_arrays(pool), alone)
        np.testing.assert_allclose(scores.draws, together[part, :16], rtol=1e-9, atol=1e-9)
    assert end == len(together)


def test_draws_do_not_change_scores() -> None:
    learner = PosteriorLearner(small(), 3)
    scene = scene_of(learner)
    _, scores, query = drawn(learner, scene, 8)
    epoch, pool = learner.prepare_epoch(scene.shared, as_numpy=True), fitted(learner, scene.shared, scene.pool)
    plain = epoch.score(as_arrays(pool), replace(query, draws=None))
    assert plain.draws is None
    for name in ("mean", "bonus", "group_size", "phi", "sigma"):
        np.testing.assert_array_equal(getattr(plain, name), getattr(scores, name))


@pytest.mark.parametrize("preset", ["paper", "pooled"])
def test_without_a_posterior_arms_are_drawn_independently(preset: str) -> None:
    learner = build_learner(named_settings(preset, width=8), 3)
    shared = learner.initial_shared()
    initial_user = {name: value.unsqueeze(0) for name, value in learner.initial_user(shared).items()}
    query = Query(
        arms=torch.tensor([[0.1, 0.2, 0.3], [0.5, -1.0, 0.0]]),
        slates=Slates([2]),
        own=initial_user,
        own_row=torch.tensor([-1]),
        own_events=torch.tensor([0]),
        draws=Draws(MANY, [5]),
    )
    scores = learner.score(shared, {name: value[:0] for name, value in initial_user.items()}, query)
    assert scores.draws is not None
    assert scores.draws.shape == (2, MANY)
    close = 6 / MANY**0.5
    for draws, mean, sigma in zip(scores.draws, scores.mean, scores.sigma, strict=True):
        assert abs(draws.mean() - mean) <= close * sigma + 1e-6
        assert abs(draws.std() - sigma) <= close * sigma + 1e-6
    if preset == "pooled":
        assert (scores.sigma > 0).all()
        assert abs(np.corrcoef(scores.draws.numpy())[0, 1]) < close


class TestRoots:
    def test_of_covariances(self) -> None:
        generator = np.random.default_rng(3)
        half = generator.standard_normal((4, 6, 6)) * np.array([1e-4, 1e-2, 1.0, 1e2, 1.0, 0.0])[:, None]
        covariance = half @ half.mT
        for given in (covariance, torch.from_numpy(covariance)):
            found = covariance_root(given)
            assert type(found) is type(given)
            np.testing.assert_allclose(found @ found.mT, covariance, rtol=1e-4, atol=1e-12)

    def test_of_a_covariance_with_rounding_errors(self) -> None:
        """In float32, two perfectly correlated coefficients may have a correlation above one."""
        covariance = np.array([[[1.0, 1.0 + 3e-7], [1.0 + 3e-7, 1.0]], [[4.0, 0.0], [0.0, 9.0]]], dtype=np.float32)
        for given in (covariance, torch.from_numpy(covariance)):
            found = np.asarray(covariance_root(given))
            assert found.dtype == np.float32
            np.testing.assert_allclose(found @ found.mT, covariance, atol=1e-5)

    def test_of_an_invalid_covariance_is_that_of_its_diagonal(self) -> None:
        covariance = np.array([[[1.0, 5.0], [5.0, 4.0]], [[4.0, 1.0], [1.0, 9.0]]])
        for given in (covariance, torch.from_numpy(covariance)):
            found = np.asarray(covariance_root(given))
            np.testing.assert_allclose(found[0], [[1.0, 0.0], [0.0, 2.0]])
            np.testing.assert_allclose(found[1] @ found[1].mT, covariance[1], rtol=1e-5)


def test_seeds_depend_on_the_decision_id() -> None:
    seeds = [draws_seed(seed, name) for seed in (0, 1, 10) for name in ("", "a", "b", "0:a", "é")]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert draws_seed(0, "a") == draws_seed(0, "a")
    mean, deviation, slates = np.zeros(3), np.ones(3), Slates([3])
    one, again, other = (independent_draws(mean, deviation, slates, Draws(9, [seed])) for seed in (7, 7, 8))
    np.testing.assert_array_equal(one, again)
    assert not np.isclose(one, other).any()
