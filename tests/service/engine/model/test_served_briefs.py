"""Briefs, the precomputed parts of users: valid for one state and epoch, kept for recently requested users."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from functools import cache

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from metaban.models.default.kinds import KINDS_MAX
from metaban.models.default.served_epoch import PosteriorEpoch
from metaban.models.numerics.arrays import Arrays
from metaban.models.presets import build_learner
from metaban.models.settings import named_settings
from metaban.service.engine.model import served_model as served_module
from metaban.service.engine.model.served_model import ServedModel
from metaban.service.engine.model.types import ArmScores, ScoreRequest
from metaban.store.users.records import UserState
from metaban.worker.epochs.derive_shared import derive_shared
from metaban.worker.learning.trainer import FitInput, Trainer
from tests.models.default_worlds import two_kinds
from tests.service.engine.model.served_models import adopt, ask, make_model, put_each, state
from tests.worker.workshop import CPU, INPUTS, make_sample


class TestBriefs:
    """A user is prepared once, and the result is not used for another state or epoch."""

    @pytest.fixture
    def model(self) -> ServedModel:
        return make_model(settings=named_settings("default", width=6, bins=2))

    def fresh(self, model: ServedModel, states: Sequence[UserState], request: ScoreRequest) -> np.ndarray:
        """The scores of a model without briefs."""
        other = make_model(settings=named_settings("default", width=6, bins=2))
        other.put(states)
        return other.score([request])[0].mean

    def test_new_state_is_prepared_again(self, model: ServedModel) -> None:
        before, after = state(model, "ada", 1), state(model, "ada", 4)
        model.put([before])
        first = model.score([ask("ada")])[0].mean
        assert np.array_equal(model.score([ask("ada")])[0].mean, first)
        model.put([after])
        second = model.score([ask("ada")])[0].mean
        assert not np.allclose(first, second)
        assert np.array_equal(second, self.fresh(model, [after], ask("ada")))

    def test_new_epoch_prepares_users_again(self, model: ServedModel) -> None:
        model.put([state(model, "ada", 3)])
        first = model.score([ask("ada")])[0].mean
        adopt(model, 1, kind_centres=np.ones((KINDS_MAX, *model.learner.fields["moment"])))
        assert not np.allclose(model.score([ask("ada")])[0].mean, first)

    def test_prepared_and_new_users_in_one_batch(self, model: ServedModel) -> None:
        model.put([state(model, "ada", 3), state(model, "bob", 2)])
        alone = [model.score([ask(user)])[0].mean for user in ("ada", "bob", "new")]
        model.put([state(model, "bob", 5)])
        bob = model.score([ask("bob")])[0].mean
        model.put([state(model, "bob", 6)])
        together = [scores.mean for scores in model.score([ask("ada"), ask("bob"), ask("new")])]
        assert np.allclose(together[0], alone[0], atol=1e-6)
        assert not np.allclose(together[1], bob)
        assert np.allclose(together[2], alone[2], atol=1e-6)


#: The default learner, small, and the users of the requests.
BRIEFED = named_settings("default", width=6, bins=2, memory_samples=4)
NAMES = ("ada", "bob", "cleo", "dan", "eve")


def make_briefed(*, pool: int = 10, guests: int = 10) -> ServedModel:
    return make_model(pool=pool, guests=guests, settings=BRIEFED)


@cache
def shared_of(number: int) -> dict[str, np.ndarray]:
    """The tensors of an epoch; from number 1 on they have kinds."""
    learner = build_learner(BRIEFED, INPUTS)
    shared = learner.initial_shared()
    if number:
        noted = np.full(learner.noted, 0.1 * number, dtype=np.float32)
        pasts = [[make_sample(100 * number + 7 * place + age) for age in range(6)] for place in range(5)]
        teachers = [
            FitInput(f"teacher {place}", 6, [replace(sample, phi=noted) for sample in past], None)
            for place, past in enumerate(pasts)
        ]
        shared = derive_shared(Trainer(learner, CPU), shared, teachers, 0, 512)
        shared |= two_kinds(shared)
    return {name: tensor.numpy() for name, tensor in shared.items()}


def serve(model: ServedModel, number: int, members: Sequence[str] = ()) -> None:
    assert model.adopt_epoch(number, 0, shared_of(number), members)


def watch_briefs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record how many users the epochs of all models prepare in each call."""
    counts: list[int] = []
    prepare = PosteriorEpoch.prepare_users

    def counted(epoch: PosteriorEpoch, own: Arrays) -> Arrays:
        counts.append(len(own["since"]))
        return prepare(epoch, own)

    monkeypatch.setattr(PosteriorEpoch, "prepare_users", counted)
    return counts


def answers(model: ServedModel, users: Iterable[str] = NAMES) -> list[ArmScores]:
    """The scores of each user in a request of its own."""
    return [model.score([ask(user, 2 + place, place)])[0] for place, user in enumerate(users)]


def assert_identical(found: Sequence[ArmScores], expected: Sequence[ArmScores]) -> None:
    """Bit for bit."""
    for one, other in zip(found, expected, strict=True):
        for each in fields(ArmScores):
            np.testing.assert_array_equal(getattr(one, each.name), getattr(other, each.name), err_msg=each.name)


def refresh_all(model: ServedModel, most: int) -> None:
    turns = 1
    while model.refresh(most):
        turns += 1
        assert turns <= 2 * len(NAMES), "it has to come to an end"


def put_newer(model: ServedModel) -> None:
    model.put([state(model, "bob", 6), state(model, "eve", 7)])
    model.put([state(model, "bob", 8)])


def change_epochs(model: ServedModel) -> None:
    serve(model, 1)
    serve(model, 2)


def put_and_change_epochs(model: ServedModel) -> None:
    put_newer(model)
    serve(model, 1, ["ada", "bob", "eve"])
    model.put([state(model, "ada", 9, epoch=1)])
    serve(model, 2, ["ada", "eve", "dan"])
    model.put([state(model, "dan", 9, epoch=2), state(model, "cleo", 4, epoch=2)])


def remove_some(model: ServedModel) -> None:
    put_newer(model)
    for user in ("ada", "eve", "nobody"):
        model.remove(user)
    model.put([state(model, "ada", 1, incarnation=1)])


def evict_guests(model: ServedModel) -> None:
    """There is room for two guests: `eve` is dropped, and `dan` returns with the same state."""
    put_each(model, [state(model, "new", 2), state(model, "dan", 4)])


class TestRefresh:
    """Preparing users ahead of requests saves work and changes no result."""

    @pytest.mark.parametrize("most", [1, 2, 64])
    @pytest.mark.parametrize(
        "change", [put_newer, change_epochs, put_and_change_epochs, remove_some, evict_guests], ids=lambda f: f.__name__
    )
    def test_scores_do_not_change(self, change: Callable[[ServedModel], None], most: int) -> None:
        found = []
        for refreshed in (True, False):
            model = make_briefed(pool=3, guests=2)
            put_each(model, [state(model, user, 1 + place) for place, user in enumerate(NAMES)])
            before = answers(model)
            change(model)
            if refreshed:
                assert model.refresh(0), "there is something to brief"
                refresh_all(model, most)
            found.append(answers(model))
        assert_identical(*found)
        assert any(not np.array_equal(one.mean, other.mean) for one, other in zip(before, found[0], strict=True))

    def test_remaining_recent_users_are_counted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = make_briefed()
        model.put([state(model, user) for user in NAMES])
        assert model.refresh(64) == 0, "no requests yet"
        answers(model, NAMES[:3])
        assert model.refresh(64) == 0, "these are prepared already"
        serve(model, 1)
        briefed = watch_briefs(monkeypatch)
        assert [model.refresh(most) for most in (0, 2, 2, 2)] == [3, 1, 0, 0]
        assert briefed == [2, 1]
        model.put([state(model, user, 2) for user in NAMES[2:]])
        assert model.refresh(0) == 1, "only one of the changed users was requested"

    def test_requests_use_the_prepared_briefs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = make_briefed()
        model.put([state(model, user) for user in NAMES])
        answers(model)
        serve(model, 1)
        model.put([state(model, "bob", 3, epoch=1)])
        refresh_all(model, 64)
        briefed = watch_briefs(monkeypatch)
        answers(model)
        assert briefed == []

    def test_earlier_request_prepares_its_user(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = make_briefed()
        model.put([state(model, user) for user in NAMES])
        answers(model)
        serve(model, 1)
        briefed = watch_briefs(monkeypatch)
        answers(model, ["cleo"])
        assert briefed == [1]
        assert model.refresh(64) == 0
        assert briefed == [1, 4]

    def test_most_recent_users_come_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = make_briefed()
        model.put([state(model, user) for user in NAMES])
        answers(model)
        serve(model, 1)
        model.refresh(2)
        briefed = watch_briefs(monkeypatch)
        answers(model, NAMES[-2:])
        assert briefed == []
        answers(model, NAMES[:-2])
        assert briefed == [1, 1, 1]

    def test_dropped_users_are_skipped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = make_briefed(pool=3, guests=2)
        put_each(model, [state(model, user, 2) for user in NAMES])
        answers(model)
        serve(model, 1, ["ada", "bob"])  # cleo is dropped from the pool
        model.remove("bob")
        model.put([state(model, "new")])  # dan, the least recently requested guest, is dropped
        briefed = watch_briefs(monkeypatch)
        assert sorted(model.users()) == ["ada", "eve", "new"]
        refresh_all(model, 1)
        assert briefed == [1, 1]
        fresh = make_briefed(pool=3, guests=2)
        serve(fresh, 1, ["ada", "bob"])
        put_each(fresh, [state(fresh, user, 2) for user in ("ada", "eve")])
        assert_identical(answers(model), answers(fresh))


class TestNoBriefIsUsedForAnotherStateOrEpoch:
    @settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @given(
        steps=st.lists(
            st.one_of(
                st.tuples(st.just("put"), st.sampled_from(NAMES), st.integers(1, 3)),
                st.tuples(st.just("ask"), st.sampled_from(NAMES), st.just(0)),
                st.tuples(st.just("remove"), st.sampled_from(NAMES), st.just(0)),
                st.tuples(st.just("epoch"), st.sampled_from(["all", "some"]), st.integers(0, 2)),
                st.tuples(st.just("refresh"), st.just(""), st.integers(1, 3)),
            ),
            min_size=5,
            max_size=25,
        )
    )
    def test_scores_equal_those_of_a_new_model_after_any_changes(self, steps: list[tuple[str, str, int]]) -> None:
        """A new model with the same states and epoch."""
        model, epoch = make_briefed(pool=2, guests=2), shared_of(0)
        news = dict.fromkeys(NAMES, 0)
        put_each(model, [state(model, user) for user in NAMES[:4]])
        answers(model)
        for number, (step, name, value) in enumerate(steps, start=1):
            if step == "put":
                news[name] += value
                model.put([state(model, name, 1 + news[name] % 5, incarnation=news[name] // 5)])
            elif step == "ask":
                answers(model, [name])
            elif step == "remove":
                model.remove(name)
            elif step == "epoch":
                epoch = shared_of(value)
                # Epoch numbers are unique; their content may repeat.
                assert model.adopt_epoch(number, 0, epoch, () if name == "all" else NAMES[::2])
            else:
                model.refresh(value)
        fresh = make_briefed(pool=len(NAMES))
        assert fresh.adopt_epoch(model.epoch_number, 0, epoch, ())
        for user in model.users():
            standing = model.holds(user)
            assert standing is not None
            fresh.put([state(fresh, user, standing.version, incarnation=standing.incarnation)])
        # The pools differ, and so do the group sizes.
        assert_identical(answers(model), answers(fresh))

    def test_not_used_for_a_newer_state_or_epoch(self) -> None:
        model = make_briefed()
        model.put([state(model, user, 2) for user in NAMES])
        answers(model)
        later = [state(model, user, 5) for user in NAMES[:3]]
        model.put(later)
        serve(model, 1)
        fresh = make_briefed()
        fresh.put([*later, *(state(fresh, user, 2) for user in NAMES[3:])])
        serve(fresh, 1)
        assert_identical(answers(model), answers(fresh))

    def test_unknown_user_is_scored_under_the_new_epoch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = make_briefed()
        briefed = watch_briefs(monkeypatch)
        said = []
        for number in range(3):
            if number:
                serve(model, number)
            [first, second] = answers(model, ["somebody", "someone else"])
            fresh = make_briefed()
            if number:
                serve(fresh, number)
            assert_identical([first, second], answers(fresh, ["somebody", "someone else"]))
            said.append(first.mean)
        assert briefed == [1] * 6, "once an epoch of each model, for unknown users"
        assert not np.allclose(said[0], said[1], atol=1e-3)
        assert not np.allclose(said[1], said[2], atol=1e-3)


class TestKeptBriefs:
    """Briefs of users without a state: a bounded number, the most recently requested."""

    @pytest.fixture
    def model(self, monkeypatch: pytest.MonkeyPatch) -> ServedModel:
        monkeypatch.setattr(served_module, "BRIEFS_MAX", 2)
        model = make_briefed()
        model.put([state(model, user) for user in NAMES])
        return model

    def test_number_is_bounded(self, model: ServedModel) -> None:
        answers(model)
        model.score([ask(user) for user in NAMES])
        serve(model, 1)
        assert model.refresh(0) == 2

    def test_least_recent_is_dropped_first(self, monkeypatch: pytest.MonkeyPatch, model: ServedModel) -> None:
        answers(model, ["ada", "bob", "cleo"])
        briefed = watch_briefs(monkeypatch)
        answers(model, ["bob", "cleo"])
        assert briefed == []
        answers(model, ["ada"])
        assert briefed == [1]

    def test_dropped_brief_is_not_prepared_ahead(self, model: ServedModel) -> None:
        answers(model, ["ada", "bob"])
        serve(model, 1)
        assert model.refresh(0) == 2
        answers(model, ["cleo"])
        assert model.refresh(0) == 1, "ada's went for cleo's"

    def test_requested_again_is_kept(self, monkeypatch: pytest.MonkeyPatch, model: ServedModel) -> None:
        answers(model, ["ada", "bob", "ada", "cleo"])
        briefed = watch_briefs(monkeypatch)
        answers(model, ["ada"])
        assert briefed == []

    def test_preparing_ahead_does_not_change_the_order(
        self, monkeypatch: pytest.MonkeyPatch, model: ServedModel
    ) -> None:
        answers(model, ["ada", "bob"])
        serve(model, 1)
        refresh_all(model, 64)
        answers(model, ["cleo"])
        briefed = watch_briefs(monkeypatch)
        answers(model, ["bob"])
        assert briefed == []
