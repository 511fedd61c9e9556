"""The served model: users held, states refused, and scores independent of the batch."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from metaban.models.default.kinds import KINDS_MAX, UNUSED
from metaban.models.policies import Slate
from metaban.models.settings import LearnerSettings, named_settings
from metaban.service.engine.model.types import ArmScores, Chosen, ScoreRequest, StateVersion
from metaban.store.users.records import UserState
from tests.service.engine.model.served_models import (
    WIDE,
    adopt,
    ask,
    everything,
    group_sizes,
    make_model,
    put_each,
    state,
    versions,
)
from tests.worker.workshop import INPUTS, small_default, small_paper

#: Scored in numpy where possible.
NUMPY = named_settings("default", width=5, bins=3, memory_samples=4)


class TestHolding:
    def test_empty_model(self) -> None:
        model = make_model()
        assert (len(model), model.users(), model.holds("a")) == (0, [], None)
        [scores] = model.score([ask("a")])
        assert scores.user_events == 0
        assert group_sizes(model, ask("a")) == [1, 1, 1]

    def test_users_of_the_pool_are_in_each_others_groups(self) -> None:
        model = make_model()
        model.put([state(model, "a", 3), state(model, "b", 2)])
        [scores] = model.score([ask("a")])
        assert scores.user_events == 3
        assert max(group_sizes(model, ask("a"))) == 2

    def test_guests_are_in_no_group(self) -> None:
        model = make_model(pool=2)
        put_each(model, [state(model, name, 2) for name in ("a", "b", "c", "d")])
        assert versions(model) == {"a": 2, "b": 2, "c": 2, "d": 2}
        assert model.wants("c")
        assert not model.wants("stranger")
        [guest, _, stranger] = model.score([ask("c"), ask("a"), ask("stranger")])
        assert guest.user_events == 2
        assert max(group_sizes(model, ask("c"))) <= 3
        assert max(group_sizes(model, ask("a"))) <= 2
        assert stranger.user_events == 0

    def test_guest_is_scored_with_its_own_state(self) -> None:
        pooled, full = make_model(), make_model(pool=1)
        pooled.put([state(pooled, "a", 4)])
        put_each(full, [state(full, "other", 1), state(full, "a", 4)])
        alone = make_model()
        alone.put([state(alone, "other", 1), state(alone, "a", 4)])
        [one], [other] = full.score([ask("a")]), alone.score([ask("a")])
        np.testing.assert_allclose(one.mean, other.mean, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(one.bonus, other.bonus, rtol=1e-5, atol=1e-6)
        assert group_sizes(full, ask("a")) == group_sizes(alone, ask("a"))

    def test_least_recent_guest_is_dropped_first(self) -> None:
        model = make_model(pool=1, guests=2)
        model.put([state(model, "pool")])
        model.put([state(model, "g1")])
        model.put([state(model, "g2")])
        model.score([ask("g1")])
        model.put([state(model, "g3")])
        assert set(model.users()) == {"pool", "g1", "g3"}
        assert "g2" not in model
        assert model.score([ask("g2")])[0].user_events == 0
        model.put([state(model, "g2", 2)])
        assert set(model.users()) == {"pool", "g2", "g3"}

    def test_loaded_state_is_used_for_a_user_not_held(self) -> None:
        model = make_model(pool=1, guests=1)
        put_each(model, [state(model, "pool"), state(model, "veteran", 9), state(model, "other")])
        assert model.score([ask("veteran")])[0].user_events == 0
        held = make_model(pool=1, guests=1)
        put_each(held, [state(held, "pool"), state(held, "veteran", 9)])
        request = ask("veteran")
        loaded = ScoreRequest(request.user_id, request.inputs, state(model, "veteran", 9))
        answer, expected = model.score([loaded])[0], held.score([request])[0]
        assert answer.user_events == 9
        np.testing.assert_allclose(answer.mean, expected.mean, rtol=1e-6)

    def test_loaded_state_of_a_later_epoch_is_not_used(self) -> None:
        model = make_model()
        later = state(model, "u", 3, epoch=1, incarnation=2)
        inputs = ask("u").inputs
        [scores] = model.score([ScoreRequest("u", inputs, later)])
        [stranger] = model.score([ScoreRequest("nobody", inputs)])
        np.testing.assert_array_equal(scores.mean, stranger.mean)
        assert (scores.user_events, scores.epoch, scores.incarnation) == (0, 0, 2)
        adopt(model, 1)
        [scores] = model.score([ScoreRequest("u", inputs, later)])
        assert (scores.user_events, scores.epoch, scores.incarnation) == (3, 1, 2)

    def test_removed_users_are_not_held(self) -> None:
        model = make_model(pool=2)
        put_each(model, [state(model, name) for name in ("a", "b", "guest")])
        for user in ("a", "guest", "nobody"):
            model.remove(user)
        assert versions(model) == {"b": 1}
        model.put([state(model, "a")])
        assert versions(model) == {"b": 1, "a": 1}

    def test_pool_limit_holds_for_one_large_put(self) -> None:
        model = make_model(pool=2)
        model.put([state(model, name, 2) for name in ("a", "b", "c", "d")])
        assert max(group_sizes(model, ask("a"))) == 2


class TestRefusals:
    @pytest.mark.parametrize("pool", [5, 1], ids=["pool", "guest"])
    def test_older_states_are_refused(self, pool: int) -> None:
        model = make_model(pool=pool)
        model.put([state(model, "first")])
        model.put([state(model, "a", 3, epoch=1, incarnation=1)])
        for older in ((2, 1, 1), (3, 0, 1), (9, 9, 0)):
            version, epoch, incarnation = older
            model.put([state(model, "a", version, epoch=epoch, incarnation=incarnation)])
            assert model.holds("a") == StateVersion(1, 3, 1)
        model.put([state(model, "a", 1, incarnation=2)])
        assert model.holds("a") == StateVersion(2, 1, 0)
        assert model.score([ask("a")])[0].user_events == 1

    @pytest.mark.parametrize("pool", [5, 1], ids=["pool", "guest"])
    def test_invalid_states_are_refused(self, pool: int) -> None:
        model = make_model(pool=pool)
        put_each(model, [state(model, "first"), state(model, "a", 2)])
        before = model.score([ask("a")])[0]
        good = state(model, "a", 3).tensors
        broken: list[dict[str, np.ndarray]] = [
            {**good, "head": np.full_like(good["head"], np.nan)},
            {**good, "moment": np.where(np.arange(good["moment"].size) == 1, np.inf, good["moment"])},
            {**good, "head": good["head"][:-1]},
            {name: array for name, array in good.items() if name != "gram"},
            {},
        ]
        for tensors in broken:
            model.put([UserState("a", 0, 3, 0, tensors), state(model, "neighbour", 1)])
            assert model.holds("a") == StateVersion(0, 2, 0)
            assert "neighbour" in model
        model.remove("neighbour")
        np.testing.assert_array_equal(model.score([ask("a")])[0].mean, before.mean)

    def test_non_finite_epoch_is_refused(self) -> None:
        model = make_model()
        model.put([state(model, "a", 2)])
        before = model.score([ask("a")])[0]
        adopt(model, 1, trunk=np.full(model.learner.initial_shared()["trunk"].shape, np.nan, dtype=np.float32))
        np.testing.assert_array_equal(model.score([ask("a")])[0].mean, before.mean)


class TestEpochs:
    def test_clusters_are_those_of_the_epoch(self) -> None:
        model = make_model()
        assert model.clusters == 1
        shares = np.full(KINDS_MAX, UNUSED)
        for number, clusters in ((1, 3), (2, 4)):
            shares[:clusters] = -1.0
            adopt(model, number, kind_log_shares=shares)
            assert model.clusters == clusters
        adopt(model, 3)
        assert model.clusters == 1

    @pytest.mark.parametrize("learner", [small_paper(), small_default()], ids=["paper", "default"])
    def test_an_epoch_that_does_not_fit_leaves_the_served_one_whole(self, learner: LearnerSettings) -> None:
        model = make_model(settings=learner)
        model.put([state(model, "a", 2)])
        adopt(model, 1)
        [before] = model.score([ask("a")])
        whole = {name: tensor.numpy() for name, tensor in model.learner.initial_shared().items()}
        for name, array in whole.items():
            missing = {other: value for other, value in whole.items() if other != name}
            longer = {**whole, name: np.append(array.reshape(-1), 0)}
            for tensors in (missing, longer):
                assert not model.adopt_epoch(2, 9, tensors, [])
        assert not model.adopt_epoch(2, 9, {**whole, "unknown": np.zeros(1)}, [])
        [after] = model.score([ask("a")])
        assert (after.epoch, model.epoch_events) == (1, 0)
        assert np.array_equal(after.mean, before.mean)

    def test_scores_use_the_scale_of_the_epoch(self) -> None:
        model = make_model()
        model.put([state(model, "a", 2)])
        before = model.score([ask("a")])[0]
        adopt(model, 4, scale=np.arange(1, INPUTS + 1, dtype=np.float32))
        after = model.score([ask("a")])[0]
        assert (before.epoch, after.epoch) == (0, 4)
        assert not np.allclose(before.mean, after.mean)

    def test_epoch_members_are_the_pool(self) -> None:
        model = make_model(pool=3)
        model.put([state(model, name) for name in ("a", "b", "c")])
        adopt(model, 1, ["b", "d", "e"])
        assert set(model.users()) == {"b"}
        assert model.wants("d")
        assert not model.wants("a")
        model.put([state(model, name) for name in ("d", "e", "a")])
        assert set(model.users()) == {"b", "d", "e", "a"}
        assert max(group_sizes(model, ask("b"))) <= 3, "a is a guest now"

    def test_pool_may_grow(self) -> None:
        model = make_model(pool=1)
        model.put([state(model, "a")])
        adopt(model, 1, ["a", "b"])
        model.put([state(model, "b")])
        assert max(group_sizes(model, ask("a"))) == 2

    def test_guest_that_becomes_a_member_leaves_the_guests(self) -> None:
        model = make_model(pool=1, guests=2)
        put_each(model, [state(model, name) for name in ("a", "b")])
        adopt(model, 1, ["b"])
        put_each(model, [state(model, "b", 2), state(model, "g1"), state(model, "g2")])
        assert model.holds("b") == StateVersion(0, 2, 0)
        adopt(model, 2, ["c"])
        assert set(model.users()) == {"g1", "g2"}

    def test_guest_that_becomes_a_member_joins_the_groups(self) -> None:
        model = make_model(pool=1)
        put_each(model, [state(model, name, 2) for name in ("a", "b")])
        adopt(model, 1, ["a", "b"])
        assert max(group_sizes(model, ask("a"))) == 2


@pytest.mark.parametrize(
    "settings",
    [
        small_default(),
        small_default(**WIDE),
        small_paper(),
        small_paper(gamma=0.99, nu=50.0),
        small_paper(preset="pooled"),
    ],
    ids=["default", "default, wide groups", "paper", "paper, wide groups", "pooled"],
)
def test_batch_scores_equal_single_scores(settings: LearnerSettings) -> None:
    model = make_model(pool=4, settings=settings)
    put_each(
        model, [state(model, name, 1 + place) for place, name in enumerate(("a", "b", "c", "d", "guest", "other"))]
    )
    requests = [
        ask("a", 1), ask("guest", 5, 1), ask("stranger", 2, 2), ask("a", 7, 3), ask("d", 3, 4), ask("stranger", 3, 5),
    ]  # fmt: skip
    together = model.choose([(request, everything) for request in requests])
    for request, chosen in zip(requests, together, strict=True):
        assert isinstance(chosen, Chosen)
        scores, [alone] = chosen.scores, model.score([request])
        assert scores.user_events == alone.user_events
        assert scores.mean.shape == (len(request.inputs),)
        assert chosen.group_sizes == group_sizes(model, request)
        np.testing.assert_allclose(scores.mean, alone.mean, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(scores.bonus, alone.bonus, rtol=1e-4, atol=1e-5)


def test_scoring_changes_nothing() -> None:
    model = make_model()
    model.put([state(model, name, 3) for name in ("a", "b")])
    first: Any = model.score([ask("a"), ask("x")])
    again: Any = model.score([ask("a"), ask("x")])
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one.mean, other.mean)
        np.testing.assert_array_equal(one.bonus, other.bonus)


SERVED = pytest.mark.parametrize(
    "settings", [small_paper(), small_paper(preset="pooled"), NUMPY], ids=lambda each: each.preset
)


@SERVED
def test_group_sizes_are_of_the_chosen_arms(settings: LearnerSettings) -> None:
    model = make_model(pool=4, settings=settings)
    put_each(model, [state(model, name, 1 + place) for place, name in enumerate("abcde")])
    requests = [ask("a", 4), ask("e", 6, 1), ask("b", 2, 2), ask("stranger", 5, 3)]
    slates = [Slate(rows, (1.0,) * len(rows)) for rows in ((3, 0), (5,), (), (2, 4, 1))]
    draws = [partial(_given, slate) for slate in slates]
    found = model.choose(list(zip(requests, draws, strict=True)))
    for request, slate, chosen in zip(requests, slates, found, strict=True):
        assert isinstance(chosen, Chosen)
        assert chosen.slate is slate
        sizes = group_sizes(model, request)
        assert chosen.group_sizes == [sizes[arm] for arm in slate.chosen]


def refuse(scores: ArmScores) -> Slate:
    raise LookupError(f"nothing to choose of {len(scores.mean)}")


@SERVED
def test_failed_draw_does_not_affect_other_requests(settings: LearnerSettings) -> None:
    model = make_model(pool=4, settings=settings)
    put_each(model, [state(model, name, 1 + place) for place, name in enumerate("abcde")])
    requests = [ask("a", 4), ask("e", 6, 1), ask("b", 2, 2), ask("stranger", 5, 3)]
    sizes = [group_sizes(model, request) for request in requests]
    for refused in range(len(requests)):
        draws = [refuse if place == refused else everything for place in range(len(requests))]
        found = model.choose(list(zip(requests, draws, strict=True)))
        assert isinstance(found.pop(refused), LookupError)
        others = [chosen.group_sizes for chosen in found if isinstance(chosen, Chosen)]
        assert others == sizes[:refused] + sizes[refused + 1 :]
    with pytest.raises(LookupError, match="nothing to choose of 3"):
        model.choose_one(ask("a"), refuse)


@SERVED
@pytest.mark.parametrize("count", [1, 2, 3])
def test_each_failed_draw_has_its_own_error(settings: LearnerSettings, count: int) -> None:
    model = make_model(pool=4, settings=settings)
    put_each(model, [state(model, name, 2) for name in "abc"])
    found = model.choose([(ask("a", 1 + arms), refuse) for arms in range(count)])
    assert [str(error) for error in found] == [f"nothing to choose of {1 + arms}" for arms in range(count)]


def _given(slate: Slate, scores: ArmScores) -> Slate:
    return slate
