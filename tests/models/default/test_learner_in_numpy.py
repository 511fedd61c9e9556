"""The default learner in numpy fits, prepares and scores as in torch, with the same dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from metaban.models.default.kinds import KINDS_MAX, UNUSED
from metaban.models.default.learner import PosteriorLearner
from metaban.models.learner import Scores, State
from metaban.models.numerics.arrays import as_arrays, numpy_kind
from metaban.models.numerics.slates import Slates
from tests.models.default_worlds import (
    WIDE,
    Scene,
    as_stored_by,
    batch_of,
    fitted,
    query_of,
    scenes,
    small,
)
from tests.models.properties import PROPERTY
from tests.models.scenes import PARTS, batch_in_numpy, query_in_numpy, scene_of

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
#: Fields of `Scores` per arm; draws are tested in test_posterior_draws.py.
SCORE_FIELDS = ("mean", "bonus", "group_size", "phi", "sigma")
BOTH = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])


def assert_same(found: Any, expected: torch.Tensor, tolerance: float, name: str = "") -> None:
    """A numpy array of the same dtype and shape, equal up to rounding."""
    assert isinstance(found, np.ndarray), name
    assert torch.from_numpy(found).dtype == expected.dtype, name
    assert found.shape == tuple(expected.shape), name
    np.testing.assert_allclose(found, expected.numpy(), rtol=tolerance, atol=tolerance, err_msg=name)


def all_same(found: Mapping[str, Any], expected: Mapping[str, torch.Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_same(found[name], value, tolerance, name)


def same_scores(found: Scores, expected: Scores, tolerance: float) -> None:
    assert_same(found.mean, expected.mean, tolerance, "mean")
    # A square root is steep near 0 and magnifies the rounding of its argument.
    assert_same(found.bonus**2, expected.bonus**2, tolerance, "bonus²")
    assert_same(found.sigma**2, expected.sigma**2, tolerance, "sigma²")
    assert_same(found.phi, expected.phi, tolerance, "phi")
    assert_same(found.group_size, expected.group_size, 0, "group_size")


def as_tensors(scores: Scores) -> Scores:
    return scores_of({name: torch.from_numpy(getattr(scores, name)) for name in SCORE_FIELDS})


def scores_of(judged: Mapping[str, Any]) -> Scores:
    """Scores with the group sizes."""
    known = {name: value for name, value in judged.items() if name != "group_size"}
    return Scores(**known, agreeing=judged["group_size"].__getitem__)


def compare(learner: PosteriorLearner, shared: State, scene: Scene) -> Scores:
    """Compare fits, prepared users and scores in numpy with those in torch; return the numpy scores."""
    tolerance = TOLERANCE[learner.dtype]
    people = [*scene.pool, *(asker for asker, _, _ in scene.requests)]
    batch = batch_of(people, learner.dtype, padding=1)
    all_same(learner.fit(as_arrays(shared), batch_in_numpy(batch), {}), learner.fit(shared, batch, {}), tolerance)
    pool, query = fitted(learner, shared, scene.pool), query_of(scene, learner, shared)
    epoch, in_numpy = learner.prepare_epoch(shared), learner.prepare_epoch(shared, as_numpy=True)
    expected, brief = epoch.prepare_users(query.own), in_numpy.prepare_users(as_arrays(query.own))
    all_same(brief, expected, tolerance)
    scores = in_numpy.score(as_arrays(pool), query_in_numpy(query, brief))
    same_scores(scores, epoch.score(pool, replace(query, own=expected)), tolerance)
    assert scores.mean.dtype == scores.bonus.dtype == scores.phi.dtype == numpy_kind(learner.dtype)
    assert scores.group_size.dtype == np.int64
    return scores


def compare_drawn(scene: Scene, dtype: torch.dtype) -> None:
    learner = scene.learner(dtype)
    compare(learner, as_stored_by(learner, scene.shared), scene)


@BOTH
@PROPERTY
@given(scene=scenes())
def test_any_scene(scene: Scene, dtype: torch.dtype) -> None:
    compare_drawn(scene, dtype)


@BOTH
@PROPERTY
@given(scene=scenes(wide=True))
def test_any_scene_with_wide_inputs(scene: Scene, dtype: torch.dtype) -> None:
    compare_drawn(scene, dtype)


@BOTH
@PARTS
class TestFixedScene:
    def test_equals_torch(self, changes: dict[str, Any], dtype: torch.dtype) -> None:
        learner = PosteriorLearner(small(nu=2.0, **changes), 3, dtype)
        scene = scene_of(learner)
        compare(learner, scene.shared, scene)

    def test_batched_requests_equal_single_requests(self, changes: dict[str, Any], dtype: torch.dtype) -> None:
        learner = PosteriorLearner(small(nu=2.0, **changes), 3, dtype)
        scene = scene_of(learner)
        epoch = learner.prepare_epoch(scene.shared, as_numpy=True)
        pool = as_arrays(fitted(learner, scene.shared, scene.pool))
        query = query_of(scene, learner, scene.shared)
        own = as_arrays(query.own)
        query = query_in_numpy(query, epoch.prepare_users(own))
        together = epoch.score(pool, query)
        end = 0
        for row, size in enumerate(query.slates.sizes):
            part, end = slice(end, end + size), end + size
            asker = slice(row, row + 1)
            alone = replace(
                query,
                arms=query.arms[part],
                slates=Slates([size]),
                own=epoch.prepare_users({name: value[asker] for name, value in own.items()}),
                own_row=query.own_row[asker],
                own_events=query.own_events[asker],
                arm_keys=query.arm_keys[part],
            )
            expected = as_tensors(epoch.score(pool, alone))
            found = scores_of({name: getattr(together, name)[part] for name in SCORE_FIELDS})
            same_scores(found, expected, TOLERANCE[dtype])
        assert end == together.mean.shape[0]


@BOTH
@pytest.mark.parametrize("changes", [{}, WIDE], ids=["narrow", "wide"])
def test_states_from_before_a_change_of_tastes(changes: dict[str, Any], dtype: torch.dtype) -> None:
    """Users without an event since the change have a recency weight."""
    learner = PosteriorLearner(small(**changes), 3, dtype)
    scene = scene_of(learner)
    before = {**scene.shared, "since": scene.shared["since"] - 1}
    own = dict(query_of(scene, learner, before).own)
    own["since"][0] += 1  # one user has an event since the change
    expected = learner.prepare_epoch(scene.shared).prepare_users(own)
    brief = learner.prepare_epoch(scene.shared, as_numpy=True).prepare_users(as_arrays(own))
    all_same(brief, expected, TOLERANCE[dtype])
    unfaded = learner.prepare_epoch(before, as_numpy=True).prepare_users(as_arrays(own))
    for name in ("head", "memory_table"):
        np.testing.assert_array_equal(brief[name][0], unfaded[name][0])
        assert not np.allclose(brief[name][1], unfaded[name][1], atol=1e-3)


@BOTH
@pytest.mark.parametrize("changes", [{}, WIDE], ids=["narrow", "wide"])
class TestNothingYet:
    def test_without_kinds(self, changes: dict[str, Any], dtype: torch.dtype) -> None:
        learner = PosteriorLearner(small(**changes), 3, dtype)
        scene = scene_of(learner, known=False)
        assert (scene.shared["kind_log_shares"][1:] == UNUSED).all()
        scores = compare(learner, scene.shared, scene)
        assert np.isfinite(scores.mean + scores.bonus).all()

    def test_an_empty_pool(self, changes: dict[str, Any], dtype: torch.dtype) -> None:
        learner = PosteriorLearner(small(nu=1e6, **changes), 3, dtype)
        crowded = scene_of(learner)
        assert (compare(learner, crowded.shared, crowded).group_size > 1).all(), "all users agree"
        empty = scene_of(learner, users=0)
        assert (compare(learner, empty.shared, empty).group_size == 1).all()


@BOTH
def test_unused_rows_of_kinds_have_no_effect(dtype: torch.dtype) -> None:
    """numpy removes them and torch keeps them: their stored numbers must not matter in either."""
    learner = PosteriorLearner(small(), 3, dtype)
    scene = scene_of(learner)
    centres, shares = scene.shared["kind_centres"], scene.shared["kind_log_shares"]
    used = shares > UNUSED / 2
    assert used.tolist() == [True, True, *[False] * (KINDS_MAX - 2)]
    before = compare(learner, scene.shared, scene)
    after = compare(learner, {**scene.shared, "kind_centres": torch.where(used[:, None], centres, 1e3)}, scene)
    np.testing.assert_array_equal(before.mean, after.mean)
    first_only = shares.clone()
    first_only[1:] = UNUSED
    fewer = compare(learner, {**scene.shared, "kind_log_shares": first_only}, scene)
    assert not np.allclose(before.mean, fewer.mean, atol=1e-3), "kinds have an effect"


def test_fitting_and_scoring_do_not_modify_their_arguments() -> None:
    """Arrays share the memory of the epoch and the bank, and some steps work in place."""
    learner = PosteriorLearner(small(**WIDE), 3)
    scene = scene_of(learner)
    query = query_of(scene, learner, scene.shared)
    epoch, own = learner.prepare_epoch(scene.shared, as_numpy=True), as_arrays(query.own)
    batch, pool = (
        batch_in_numpy(batch_of(scene.pool, learner.dtype)),
        as_arrays(fitted(learner, scene.shared, scene.pool)),
    )
    asked = query_in_numpy(query, epoch.prepare_users(own))
    given = [
        *as_arrays(scene.shared).values(),
        *own.values(),
        *pool.values(),
        *asked.own.values(),
        *(getattr(batch, each.name) for each in fields(batch)),
        *(array for layer in epoch.trunk.layers for array in layer),
        epoch.trunk.ramps.begin,
        epoch.trunk.ramps.least,
        epoch.trunk.ramps.most,
        asked.arms,
        asked.own_row,
    ]
    before = [array.copy() for array in given]
    learner.fit(as_arrays(scene.shared), batch, {})
    epoch.prepare_users(own)
    epoch.score(pool, asked)
    for array, copy in zip(given, before, strict=True):
        np.testing.assert_array_equal(array, copy)
