"""The default learner in numpy fits, briefs and judges as it does in torch, in the same types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from models.arrays import as_arrays, numpy_kind
from models.learner import Query, Scores, State, UserBatch
from models.posterior import PosteriorLearner
from models.prior import NO_GROUP
from models.slates import Slates
from tests.models.posterior_worlds import (
    WIDE,
    Scene,
    batch_of,
    fitted,
    generator_of,
    held,
    kinds,
    past,
    query_of,
    scenes,
    sharing,
    small,
    taught,
)
from tests.models.properties import PROPERTY
from tests.models.worlds import single

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
#: What scores have of every arm; draws are in test_drawing.py.
JUDGED = ("mean", "bonus", "group_size", "phi", "sigma")
BOTH = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
#: Everything at once, and each part left out.
PARTS = pytest.mark.parametrize(
    "changes",
    [
        {},
        {"groups": False},
        {"memory": False},
        {"heads": False},
        {"trunk": False},
        {"embed": False},
        {"bins": 0},
        {"products_max": 0},
        WIDE,
        {"apart": False, **WIDE},
    ],
    ids=lambda changes: next(iter(changes), "all"),
)


def same(found: Any, expected: torch.Tensor, tolerance: float, name: str = "") -> None:
    """Of numpy, of the same type and shape, and equal but for rounding."""
    assert isinstance(found, np.ndarray), name
    assert torch.from_numpy(found).dtype == expected.dtype, name
    assert found.shape == tuple(expected.shape), name
    np.testing.assert_allclose(found, expected.numpy(), rtol=tolerance, atol=tolerance, err_msg=name)


def all_same(found: Mapping[str, Any], expected: Mapping[str, torch.Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        same(found[name], value, tolerance, name)


def same_scores(found: Scores, expected: Scores, tolerance: float) -> None:
    same(found.mean, expected.mean, tolerance, "mean")
    # A root is steep near 0, where rounding of its square shows most.
    same(found.bonus**2, expected.bonus**2, tolerance, "bonus²")
    same(found.sigma**2, expected.sigma**2, tolerance, "sigma²")
    same(found.phi, expected.phi, tolerance, "phi")
    same(found.group_size, expected.group_size, 0, "group_size")


def as_tensors(scores: Scores) -> Scores:
    return scores_of({name: torch.from_numpy(getattr(scores, name)) for name in JUDGED})


def scores_of(judged: Mapping[str, Any]) -> Scores:
    """With the sizes of groups as they were found."""
    known = {name: value for name, value in judged.items() if name != "group_size"}
    return Scores(**known, agreeing=judged["group_size"].__getitem__)


def batch_in_numpy(batch: UserBatch) -> UserBatch:
    return UserBatch(**{each.name: getattr(batch, each.name).numpy() for each in fields(batch)})


def query_in_numpy(query: Query, own: Mapping[str, Any]) -> Query:
    return replace(
        query,
        arms=query.arms.numpy(),
        own=own,
        own_row=query.own_row.numpy(),
        own_events=query.own_events.numpy(),
    )


def compare(learner: PosteriorLearner, shared: State, scene: Scene) -> Scores:
    """Hold fits, briefs and scores in numpy to those in torch; what numpy scored."""
    tolerance = TOLERANCE[learner.dtype]
    people = [*scene.pool, *(asker for asker, _, _ in scene.requests)]
    batch = batch_of(people, learner.dtype, padding=1)
    all_same(learner.fit(as_arrays(shared), batch_in_numpy(batch), {}), learner.fit(shared, batch, {}), tolerance)
    pool, query = fitted(learner, shared, scene.pool), query_of(scene, learner, shared)
    outline, in_numpy = learner.outline(shared), learner.outline(shared, as_numpy=True)
    expected, brief = learner.brief(outline, query.own), learner.brief(in_numpy, as_arrays(query.own))
    all_same(brief, expected, tolerance)
    scores = learner.score_briefed(in_numpy, as_arrays(pool), query_in_numpy(query, brief))
    same_scores(scores, learner.score_briefed(outline, pool, replace(query, own=expected)), tolerance)
    assert scores.mean.dtype == scores.bonus.dtype == scores.phi.dtype == numpy_kind(learner.dtype)
    assert scores.group_size.dtype == np.int64
    return scores


def compare_drawn(scene: Scene, dtype: torch.dtype) -> None:
    learner = PosteriorLearner(scene.settings, scene.inputs, dtype)
    compare(learner, held(learner, scene.shared), scene)


@BOTH
@PROPERTY
@given(scene=scenes())
def test_any_scene(scene: Scene, dtype: torch.dtype) -> None:
    compare_drawn(scene, dtype)


@BOTH
@PROPERTY
@given(scene=scenes(wide=True))
def test_any_scene_of_wide_inputs(scene: Scene, dtype: torch.dtype) -> None:
    compare_drawn(scene, dtype)


def scene_of(learner: PosteriorLearner, *, users: int = 6, known: bool = True) -> Scene:
    """A fixed scene: users of two kinds, and requests of 4, 1, 5 and 3 arms by some of them, a guest and a stranger.

    Unless the users are `known`, the epoch is the first, which has found no groups.
    """
    generator = generator_of(5)
    shared = learner.initial_shared()
    if known:
        guard = {"guard": 0.6} if learner.settings.groups else {}
        shared = taught(learner, kinds(learner, 8, 6, generator), since=2.0, **guard)
    shared = sharing(learner, shared, generator)
    pool = kinds(learner, users, 5, generator)
    guest, stranger = past(learner, 3, generator), past(learner, 0, generator)
    askers = [(pool[1], 1) if pool else (guest, -1), (guest, -1), (pool[-1], users - 1) if pool else (guest, -1)]
    requests = []
    for (asker, row), arms in zip([*askers, (stranger, -1)], (4, 1, 5, 3), strict=True):
        shelf = single(torch.randn(arms, learner.inputs_expected, generator=generator, dtype=torch.float64))
        if asker.features.shape[0]:
            shelf[0] = asker.features[-1]  # an arm that the memory knows
        requests.append((asker, row, shelf))
    return Scene(learner.settings, learner.inputs_expected, shared, pool, requests)


@BOTH
@PARTS
class TestFixedScene:
    def test_equals_torch(self, changes: dict[str, Any], dtype: torch.dtype) -> None:
        learner = PosteriorLearner(small(nu=2.0, **changes), 3, dtype)
        scene = scene_of(learner)
        compare(learner, scene.shared, scene)

    def test_requests_at_once_are_judged_as_one_by_one(self, changes: dict[str, Any], dtype: torch.dtype) -> None:
        learner = PosteriorLearner(small(nu=2.0, **changes), 3, dtype)
        scene = scene_of(learner)
        outline = learner.outline(scene.shared, as_numpy=True)
        pool = as_arrays(fitted(learner, scene.shared, scene.pool))
        query = query_of(scene, learner, scene.shared)
        own = as_arrays(query.own)
        query = query_in_numpy(query, learner.brief(outline, own))
        together = learner.score_briefed(outline, pool, query)
        end = 0
        for row, size in enumerate(query.slates.sizes):
            part, end = slice(end, end + size), end + size
            asker = slice(row, row + 1)
            alone = replace(
                query,
                arms=query.arms[part],
                slates=Slates([size]),
                own=learner.brief(outline, {name: value[asker] for name, value in own.items()}),
                own_row=query.own_row[asker],
                own_events=query.own_events[asker],
            )
            expected = as_tensors(learner.score_briefed(outline, pool, alone))
            found = scores_of({name: getattr(together, name)[part] for name in JUDGED})
            same_scores(found, expected, TOLERANCE[dtype])
        assert end == together.mean.shape[0]


@BOTH
@pytest.mark.parametrize("changes", [{}, WIDE], ids=["narrow", "wide"])
def test_states_from_before_a_change_of_tastes(changes: dict[str, Any], dtype: torch.dtype) -> None:
    """They have faded, for those who had no event since."""
    learner = PosteriorLearner(small(**changes), 3, dtype)
    scene = scene_of(learner)
    before = {**scene.shared, "since": scene.shared["since"] - 1}
    own = dict(query_of(scene, learner, before).own)
    own["since"][0] += 1  # one of them did have an event
    expected = learner.brief(learner.outline(scene.shared), own)
    brief = learner.brief(learner.outline(scene.shared, as_numpy=True), as_arrays(own))
    all_same(brief, expected, TOLERANCE[dtype])
    unfaded = learner.brief(learner.outline(before, as_numpy=True), as_arrays(own))
    for name in ("heads", "kept_table"):
        np.testing.assert_array_equal(brief[name][0], unfaded[name][0])
        assert not np.allclose(brief[name][1], unfaded[name][1], atol=1e-3)


@BOTH
@pytest.mark.parametrize("changes", [{}, WIDE], ids=["narrow", "wide"])
class TestNothingYet:
    def test_no_groups_found(self, changes: dict[str, Any], dtype: torch.dtype) -> None:
        learner = PosteriorLearner(small(**changes), 3, dtype)
        scene = scene_of(learner, known=False)
        assert (scene.shared["group_offset"] == NO_GROUP).all()
        scores = compare(learner, scene.shared, scene)
        assert np.isfinite(scores.mean + scores.bonus).all()

    def test_a_pool_of_nobody(self, changes: dict[str, Any], dtype: torch.dtype) -> None:
        learner = PosteriorLearner(small(nu=1e6, **changes), 3, dtype)
        crowded = scene_of(learner)
        assert (compare(learner, crowded.shared, crowded).group_size > 1).all(), "everyone agrees with everyone"
        empty = scene_of(learner, users=0)
        assert (compare(learner, empty.shared, empty).group_size == 1).all()


@BOTH
def test_rows_without_a_group_say_nothing(dtype: torch.dtype) -> None:
    """In numpy they are cut off, in torch they stay: whatever is stored of them must not matter to either."""
    learner = PosteriorLearner(small(), 3, dtype)
    scene = scene_of(learner)
    pull, offset = scene.shared["group_pull"], scene.shared["group_offset"]
    groups = offset > NO_GROUP / 2
    assert 1 < groups.sum() < len(groups), "there are groups, and rows without one"
    before = compare(learner, scene.shared, scene)
    littered = {**scene.shared, "group_pull": torch.where(groups[:, None], pull, 1e3)}
    after = compare(learner, littered, scene)
    np.testing.assert_array_equal(before.mean, after.mean)
    first_only = offset.clone()
    first_only[1:] = NO_GROUP
    fewer = compare(learner, {**scene.shared, "group_offset": first_only}, scene)
    assert not np.allclose(before.mean, fewer.mean, atol=1e-3), "groups do say something"


def test_fitting_and_judging_leave_what_they_are_given_as_it_is() -> None:
    """Arrays share the memory of the epoch and of the bank, and some steps work in place."""
    learner = PosteriorLearner(small(**WIDE), 3)
    scene = scene_of(learner)
    query = query_of(scene, learner, scene.shared)
    outline, own = learner.outline(scene.shared, as_numpy=True), as_arrays(query.own)
    batch, pool = (
        batch_in_numpy(batch_of(scene.pool, learner.dtype)),
        as_arrays(fitted(learner, scene.shared, scene.pool)),
    )
    asked = query_in_numpy(query, learner.brief(outline, own))
    given = [
        *as_arrays(scene.shared).values(),
        *own.values(),
        *pool.values(),
        *asked.own.values(),
        *(getattr(batch, each.name) for each in fields(batch)),
        *(array for layer in outline["layers"] for array in layer),
        outline["asking"],
        outline["ramps"].begin,
        outline["ramps"].least,
        outline["ramps"].most,
        asked.arms,
        asked.own_row,
    ]
    before = [array.copy() for array in given]
    learner.fit(as_arrays(scene.shared), batch, {})
    learner.brief(outline, own)
    learner.score_briefed(outline, pool, asked)
    for array, copy in zip(given, before, strict=True):
        np.testing.assert_array_equal(array, copy)
