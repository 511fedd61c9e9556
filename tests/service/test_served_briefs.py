"""What is worked out of users before they ask: never of another state or epoch, and for those asked about lately."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.presets import build_learner
from models.settings import named_settings
from service import served as served_module
from service.scoring import ArmScores, ScoreRequest
from service.served import ServedModel
from store.users import UserState
from tests.service.serving import adopt, ask, make_model, put_each, state
from tests.worker.workshop import CPU, INPUTS, make_sample
from worker.epochs import derive_shared
from worker.trainer import Pupil, Trainer


class TestBriefs:
    """What is known of a user is worked out once, and never used for another state or epoch."""

    @pytest.fixture
    def model(self) -> ServedModel:
        return make_model(settings=named_settings("default", width=6, bins=2))

    def fresh(self, model: ServedModel, states: Sequence[UserState], request: ScoreRequest) -> np.ndarray:
        """What a model that never briefed anyone says."""
        other = make_model(settings=named_settings("default", width=6, bins=2))
        other.put(states)
        return other.score([request])[0].mean

    def test_a_new_state_is_briefed_anew(self, model: ServedModel) -> None:
        before, after = state(model, "ada", 1), state(model, "ada", 4)
        model.put([before])
        first = model.score([ask("ada")])[0].mean
        assert np.array_equal(model.score([ask("ada")])[0].mean, first)
        model.put([after])
        second = model.score([ask("ada")])[0].mean
        assert not np.allclose(first, second)
        assert np.array_equal(second, self.fresh(model, [after], ask("ada")))

    def test_a_new_epoch_is_briefed_anew(self, model: ServedModel) -> None:
        model.put([state(model, "ada", 3)])
        first = model.score([ask("ada")])[0].mean
        adopt(model, 1, prior_mean=np.ones(model.learner.fields["moment"]))
        assert not np.allclose(model.score([ask("ada")])[0].mean, first)

    def test_the_briefed_and_the_new_in_one_batch(self, model: ServedModel) -> None:
        model.put([state(model, "ada", 3), state(model, "bob", 2)])
        alone = [model.score([ask(user)])[0].mean for user in ("ada", "bob", "new")]
        model.put([state(model, "bob", 5)])
        bob = model.score([ask("bob")])[0].mean
        model.put([state(model, "bob", 6)])
        together = [scores.mean for scores in model.score([ask("ada"), ask("bob"), ask("new")])]
        assert np.allclose(together[0], alone[0], atol=1e-6)
        assert not np.allclose(together[1], bob)
        assert np.allclose(together[2], alone[2], atol=1e-6)


#: The default learner, small; and who is asked about.
BRIEFED = named_settings("default", width=6, bins=2, memory_samples=4)
NAMES = ("ada", "bob", "cleo", "dan", "eve")


def make_briefed(*, pool: int = 10, guests: int = 10) -> ServedModel:
    return make_model(pool=pool, guests=guests, settings=BRIEFED)


@cache
def shared_of(number: int) -> dict[str, np.ndarray]:
    """What an epoch of that number says; from 1 on there are groups, which count."""
    learner = build_learner(BRIEFED, INPUTS)
    shared = learner.initial_shared()
    if number:
        noted = np.full(learner.noted, 0.1 * number, dtype=np.float32)
        pasts = [[make_sample(100 * number + 7 * place + age) for age in range(6)] for place in range(5)]
        teachers = [
            Pupil(f"teacher {place}", 6, [replace(sample, phi=noted) for sample in past], None)
            for place, past in enumerate(pasts)
        ]
        shared = derive_shared(Trainer(learner, CPU), shared, teachers, 0, 512)
        shared["guard"] = torch.full_like(shared["guard"], 0.6)
    return {name: tensor.numpy() for name, tensor in shared.items()}


def serve(model: ServedModel, number: int, members: Sequence[str] = ()) -> None:
    assert model.adopt_epoch(number, 0, shared_of(number), members)


def watch_briefs(model: ServedModel) -> list[int]:
    """How many users the learner briefs at a time, from now on."""
    counts: list[int] = []
    brief = model.learner.brief

    def counted(outline: Any, own: Any) -> Any:
        counts.append(len(own["since"]))
        return brief(outline, own)

    model.learner.brief = counted  # type: ignore[method-assign]
    return counts


def answers(model: ServedModel, users: Iterable[str] = NAMES) -> list[ArmScores]:
    """What is said to each of them alone."""
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
    """Of the two guests that there is room for, `eve` has to leave; `dan` comes back as they were."""
    put_each(model, [state(model, "new", 2), state(model, "dan", 4)])


class TestRefresh:
    """Briefing ahead of requests spares them work, and is seen in nothing else."""

    @pytest.mark.parametrize("most", [1, 2, 64])
    @pytest.mark.parametrize(
        "change", [put_newer, change_epochs, put_and_change_epochs, remove_some, evict_guests], ids=lambda f: f.__name__
    )
    def test_scores_are_those_without_it(self, change: Callable[[ServedModel], None], most: int) -> None:
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

    def test_it_counts_down_those_asked_about_before(self) -> None:
        model = make_briefed()
        model.put([state(model, user) for user in NAMES])
        assert model.refresh(64) == 0, "nobody was asked about"
        answers(model, NAMES[:3])
        assert model.refresh(64) == 0, "and these have just been briefed"
        serve(model, 1)
        briefed = watch_briefs(model)
        assert [model.refresh(most) for most in (0, 2, 2, 2)] == [3, 1, 0, 0]
        assert briefed == [2, 1]
        model.put([state(model, user, 2) for user in NAMES[2:]])
        assert model.refresh(0) == 1, "of those with news only one was ever asked about"

    def test_requests_find_the_briefs_made(self) -> None:
        model = make_briefed()
        model.put([state(model, user) for user in NAMES])
        answers(model)
        serve(model, 1)
        model.put([state(model, "bob", 3, epoch=1)])
        refresh_all(model, 64)
        briefed = watch_briefs(model)
        answers(model)
        assert briefed == []

    def test_a_request_that_comes_first_does_the_work_itself(self) -> None:
        model = make_briefed()
        model.put([state(model, user) for user in NAMES])
        answers(model)
        serve(model, 1)
        briefed = watch_briefs(model)
        answers(model, ["cleo"])
        assert briefed == [1]
        assert model.refresh(64) == 0
        assert briefed == [1, 4]

    def test_who_was_asked_about_last_comes_first(self) -> None:
        model = make_briefed()
        model.put([state(model, user) for user in NAMES])
        answers(model)
        serve(model, 1)
        model.refresh(2)
        briefed = watch_briefs(model)
        answers(model, NAMES[-2:])
        assert briefed == []
        answers(model, NAMES[:-2])
        assert briefed == [1, 1, 1]

    def test_users_who_left_meanwhile_are_passed_over(self) -> None:
        model = make_briefed(pool=3, guests=2)
        put_each(model, [state(model, user, 2) for user in NAMES])
        answers(model)
        serve(model, 1, ["ada", "bob"])  # cleo is dropped from the pool
        model.remove("bob")
        model.put([state(model, "new")])  # dan leaves as the guest asked about longest ago
        briefed = watch_briefs(model)
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
    def test_whatever_happens_a_fresh_model_would_say_the_same(self, steps: list[tuple[str, str, int]]) -> None:
        """Told the states held and the epoch only, without a past."""
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
                # No two epochs have one number, though they may say the same.
                assert model.adopt_epoch(number, 0, epoch, () if name == "all" else NAMES[::2])
            else:
                model.refresh(value)
        fresh = make_briefed(pool=len(NAMES))
        assert fresh.adopt_epoch(model.epoch_number, 0, epoch, ())
        for user in model.users():
            standing = model.holds(user)
            assert standing is not None
            fresh.put([state(fresh, user, standing.version, incarnation=standing.incarnation)])
        # Who is in the pool differs, and with it how many agree.
        assert_identical(answers(model), answers(fresh))

    def test_neither_for_a_newer_state_nor_a_later_epoch(self) -> None:
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

    def test_a_stranger_is_seen_through_the_epoch(self) -> None:
        model = make_briefed()
        briefed = watch_briefs(model)
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
        assert briefed == [1, 1, 1], "once an epoch, for whoever is not known"
        assert not np.allclose(said[0], said[1], atol=1e-3)
        assert not np.allclose(said[1], said[2], atol=1e-3)


class TestKeptBriefs:
    """A bounded number, those asked about lately."""

    @pytest.fixture
    def model(self, monkeypatch: pytest.MonkeyPatch) -> ServedModel:
        monkeypatch.setattr(served_module, "BRIEFS_MAX", 2)
        model = make_briefed()
        model.put([state(model, user) for user in NAMES])
        return model

    def test_are_bounded(self, model: ServedModel) -> None:
        answers(model)
        model.score([ask(user) for user in NAMES])
        serve(model, 1)
        assert model.refresh(0) == 2

    def test_the_first_asked_about_goes_first(self, model: ServedModel) -> None:
        answers(model, ["ada", "bob", "cleo"])
        briefed = watch_briefs(model)
        answers(model, ["bob", "cleo"])
        assert briefed == []
        answers(model, ["ada"])
        assert briefed == [1]

    def test_whose_brief_went_is_not_briefed_ahead(self, model: ServedModel) -> None:
        answers(model, ["ada", "bob"])
        serve(model, 1)
        assert model.refresh(0) == 2
        answers(model, ["cleo"])
        assert model.refresh(0) == 1, "ada's went for cleo's"

    def test_who_is_asked_about_again_stays(self, model: ServedModel) -> None:
        answers(model, ["ada", "bob", "ada", "cleo"])
        briefed = watch_briefs(model)
        answers(model, ["ada"])
        assert briefed == []

    def test_briefing_ahead_does_not_change_who_goes_first(self, model: ServedModel) -> None:
        answers(model, ["ada", "bob"])
        serve(model, 1)
        refresh_all(model, 64)
        answers(model, ["cleo"])
        briefed = watch_briefs(model)
        answers(model, ["bob"])
        assert briefed == []
