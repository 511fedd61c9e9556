"""Trainer: a batch gives the same fits as single users, and a broken user is reset without effect on the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from metaban.models.default.notes import Notes
from metaban.models.learner import Query
from metaban.models.numerics.slates import Slates
from metaban.models.presets import build_learner
from metaban.models.settings import MetaBanSettings, named_settings
from metaban.store.codec import Sample
from metaban.worker.epochs import derive_shared as epochs_module
from metaban.worker.epochs.derive_shared import choose_by_hash, derive_shared
from metaban.worker.learning import trainer as trainer_module
from metaban.worker.learning.trainer import FitInput, FitResult, Trainer
from tests.models.default_worlds import two_kinds
from tests.worker.workshop import CPU, INPUTS, make_sample, small_default, small_paper

#: Finite as a float64 of a stored event, but beyond float32.
ABSURD_REWARD = 1e300


def make_trainer(settings: MetaBanSettings | None = None) -> Trainer:
    return Trainer(build_learner(settings or small_paper(), INPUTS), CPU)


def fit_input(name: str, samples: int, *, first: int = 0, reward: float | None = None) -> FitInput:
    return FitInput(name, samples, [make_sample(first + number, reward=reward) for number in range(samples)], None)


def people() -> list[FitInput]:
    """Users with different numbers of samples."""
    return [fit_input(f"user {place}", length, first=10 * place) for place, length in enumerate((1, 7, 3, 2, 12))]


def standardized(trainer: Trainer) -> dict[str, torch.Tensor]:
    shared = trainer.learner.initial_shared()
    return {**shared, "mean": torch.full((INPUTS,), 0.3), "scale": torch.full((INPUTS,), 0.7)}


def assert_close(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for name, array in one.items():
        np.testing.assert_allclose(array, other[name], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    "settings",
    [
        small_paper(),
        small_paper(draw="uniform", checkpoints=3),
        small_paper(preset="pooled", recent_samples=4),
        small_paper(depth=3),
    ],
    ids=["paper", "uniform", "pooled", "deep"],
)
class TestBatches:
    def test_a_batch_equals_one_by_one(self, settings: MetaBanSettings) -> None:
        trainer = make_trainer(settings)
        shared = standardized(trainer)
        together = trainer.fit(shared, people())
        assert together.quarantined == ()
        for fitted, alone in zip(together.states, people(), strict=True):
            assert_close(fitted, trainer.fit(shared, [alone]).states[0])

    def test_padding_has_no_effect(self, settings: MetaBanSettings) -> None:
        trainer = make_trainer(settings)
        shared = standardized(trainer)
        short = fit_input("short", 2)
        beside_a_long_one = trainer.fit(shared, [fit_input("long", 40, first=50), short]).states[1]
        assert_close(beside_a_long_one, trainer.fit(shared, [short]).states[0])

    def test_fits_continue_from_the_previous_state(self, settings: MetaBanSettings) -> None:
        trainer = make_trainer(settings)
        shared = standardized(trainer)
        first = trainer.fit(shared, people()).states
        later = [
            FitInput(before.user_id, before.events + 1, [*before.samples, make_sample(99)], state)
            for before, state in zip(people(), first, strict=True)
        ]
        for fitted, alone in zip(trainer.fit(shared, later).states, later, strict=True):
            assert_close(fitted, trainer.fit(shared, [alone]).states[0])

    def test_states_have_the_fields_of_the_learner(self, settings: MetaBanSettings) -> None:
        trainer = make_trainer(settings)
        for state in trainer.fit(standardized(trainer), people()).states:
            assert {name: array.shape for name, array in state.items()} == trainer.learner.fields

    def test_users_without_samples_in_a_batch(self, settings: MetaBanSettings) -> None:
        trainer = make_trainer(settings)
        shared = standardized(trainer)
        without_samples, with_samples = fit_input("without_samples", 0), fit_input("with_samples", 3)
        fitted = trainer.fit(shared, [without_samples, with_samples]).states
        assert_close(fitted[1], trainer.fit(shared, [with_samples]).states[0])
        initial_user = trainer.learner.initial_user(shared)
        # Without samples there is no gradient to follow.
        np.testing.assert_allclose(fitted[0]["theta"], initial_user["theta"].numpy(), atol=1e-6)
        assert_close(trainer.fit(shared, [without_samples]).states[0], fitted[0])


def test_no_users_give_an_empty_result() -> None:
    trainer = make_trainer()
    assert trainer.fit(trainer.learner.initial_shared(), []) == FitResult([], ())


def test_more_users_than_one_batch_are_fitted_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer()
    shared = standardized(trainer)
    whole = trainer.fit(shared, people())
    monkeypatch.setattr(trainer_module, "USERS_PER_FIT", 2)
    for one, other in zip(trainer.fit(shared, people()).states, whole.states, strict=True):
        assert_close(one, other)


class TestQuarantine:
    def test_a_non_finite_learner_is_reset_to_the_prior(self) -> None:
        trainer = make_trainer()
        shared = standardized(trainer)
        fitted = trainer.fit(shared, [fit_input("broken", 3, reward=ABSURD_REWARD)])
        assert fitted.quarantined == ("broken",)
        initial_user = trainer.learner.initial_user(shared)
        for name, array in fitted.states[0].items():
            np.testing.assert_array_equal(array, initial_user[name].numpy(), err_msg=name)

    def test_other_users_are_not_affected(self) -> None:
        """Bit for bit: in a batch of the same shape, the numbers of another user have no effect."""
        trainer = make_trainer()
        shared = standardized(trainer)
        others = people()
        sound = trainer.fit(shared, [*others[:2], fit_input("x", 4), *others[2:]])
        broken = trainer.fit(shared, [*others[:2], fit_input("x", 4, reward=ABSURD_REWARD), *others[2:]])
        assert sound.quarantined == ()
        assert broken.quarantined == ("x",)
        for place in (0, 1, 3, 4, 5):
            for name, array in sound.states[place].items():
                np.testing.assert_array_equal(array, broken.states[place][name], err_msg=name)

    def test_a_reset_user_can_learn_again(self) -> None:
        trainer = make_trainer()
        shared = standardized(trainer)
        broken = trainer.fit(shared, [fit_input("x", 2, reward=ABSURD_REWARD)]).states[0]
        sound = fit_input("x", 3, first=7)
        again = trainer.fit(shared, [FitInput("x", 5, sound.samples, broken)])
        assert again.quarantined == ()
        assert_close(again.states[0], trainer.fit(shared, [sound]).states[0])

    def test_a_slice_of_the_result_names_only_its_users(self) -> None:
        trainer = make_trainer()
        fit_inputs = [
            fit_input("a", 1),
            fit_input("b", 1, reward=ABSURD_REWARD),
            fit_input("c", 1, reward=ABSURD_REWARD),
        ]
        fitted = trainer.fit(standardized(trainer), fit_inputs)
        assert fitted.part(0, 2, fit_inputs[:2]).quarantined == ("b",)
        assert fitted.part(2, 3, fit_inputs[2:]).quarantined == ("c",)
        assert fitted.part(2, 3, fit_inputs[2:]).states == fitted.states[2:]


class TestDerivation:
    def test_moments_equal_those_of_all_samples(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(epochs_module, "USERS_PER_BATCH", 2)
        trainer = make_trainer()
        teachers = [*people(), fit_input("without_samples", 0)]
        derived = derive_shared(trainer, trainer.learner.initial_shared(), teachers, 0, 25)
        rows = np.array([sample.features for teacher in teachers for sample in teacher.samples], dtype=np.float64)
        np.testing.assert_allclose(derived["mean"].numpy(), rows.mean(0), rtol=1e-6)
        np.testing.assert_allclose(derived["scale"].numpy(), rows.std(0), rtol=1e-6)

    def test_without_samples_the_shared_state_is_unchanged(self) -> None:
        trainer = make_trainer()
        shared = trainer.learner.initial_shared()
        derived = derive_shared(trainer, shared, [fit_input("without_samples", 0)], 0, 25)
        assert all(torch.equal(derived[name], tensor) for name, tensor in shared.items())

    def test_users_chosen_by_hash_do_not_depend_on_their_order(self) -> None:
        names = [f"user {number}" for number in range(50)]
        chosen = choose_by_hash(names, 10)
        assert len(chosen) == 10
        assert choose_by_hash(names[::-1], 10) == chosen
        # A new user replaces at most one.
        assert len(set(choose_by_hash([*names, "newcomer"], 10)) & set(chosen)) >= 9


#: Near the largest float32: finite, but its sums and products are not.
NEAR_THE_LIMIT = 3e38
#: The default learner with few inputs and with many.
NARROW: dict[str, Any] = {"width": 6, "bins": 2, "memory_samples": 4}
WIDE: dict[str, Any] = {**NARROW, "head_inputs_max": 2, "head_directions": 2}
WIDTHS = pytest.mark.parametrize("changes", [NARROW, WIDE], ids=["narrow", "wide"])


def default_trainer(changes: dict[str, Any]) -> Trainer:
    return Trainer(build_learner(named_settings("default", **changes), INPUTS), CPU)


def logged_sample(trainer: Trainer, number: int) -> Sample:
    """A sample with small notes; with wide inputs, the notes also say that the slate had two arms."""
    phi = np.random.default_rng(number).uniform(size=trainer.learner.noted).astype(np.float32)
    if trainer.learner.inputs.removes_common:
        phi[Notes.COUNT] = 2
    return replace(make_sample(number), phi=phi)


def logged_input(trainer: Trainer, name: str, samples: int, *, first: int = 0) -> FitInput:
    return FitInput(name, samples, [logged_sample(trainer, first + number) for number in range(samples)], None)


def logged_people(trainer: Trainer) -> list[FitInput]:
    """Users with different numbers of samples: one without any, one with more than the memory keeps."""
    lengths = (1, 7, 0, 3, 12)
    return [logged_input(trainer, f"user {place}", length, first=10 * place) for place, length in enumerate(lengths)]


def with_kinds(trainer: Trainer) -> dict[str, torch.Tensor]:
    """A shared state with two kinds of users."""
    teachers = [logged_input(trainer, f"teacher {place}", 6, first=100 + 6 * place) for place in range(6)]
    shared = derive_shared(trainer, trainer.learner.initial_shared(), teachers, 0, 512)
    return shared | two_kinds(shared)


def overflowing(trainer: Trainer, samples: int, what: str) -> FitInput:
    """A user whose last sample has an unusual arm and a value near or beyond the float32 limit."""
    sound = logged_input(trainer, "broken", samples, first=60)
    last, noted = sound.samples[-1], sound.samples[-1].phi.copy()
    if what == "noted":
        noted[0] = NEAR_THE_LIMIT
    reward = {"reward": NEAR_THE_LIMIT, "absurd reward": ABSURD_REWARD}.get(what, last.reward)
    broken = replace(last, features=np.full(INPUTS, 5, dtype=np.float32), reward=reward, phi=noted)
    return replace(sound, samples=[*sound.samples[:-1], broken])


def assert_scores_are_finite(
    trainer: Trainer, shared: dict[str, torch.Tensor], states: list[dict[str, np.ndarray]]
) -> None:
    """For every user, with all of them in the pool."""
    pool = {name: torch.from_numpy(np.stack([state[name] for state in states])) for name in trainer.learner.fields}
    arms = torch.from_numpy(np.stack([make_sample(900 + number).features for number in range(4 * len(states))]))
    query = Query(
        arms=arms,
        slates=Slates([4] * len(states)),
        own=pool,
        own_row=torch.arange(len(states)),
        own_events=torch.ones(len(states), dtype=torch.int64),
    )
    with torch.inference_mode():
        scores = trainer.learner.score(shared, pool, query)
    assert scores.mean.isfinite().all()
    assert scores.bonus.isfinite().all()
    assert scores.mean.abs().max() < 100


@WIDTHS
class TestDefaultLearner:
    """It is fitted in numpy, which warns of overflows and raises on singular matrices."""

    def test_a_batch_equals_one_by_one(self, changes: dict[str, Any]) -> None:
        trainer = default_trainer(changes)
        shared, people = with_kinds(trainer), logged_people(trainer)
        together = trainer.fit(shared, people)
        assert together.quarantined == ()
        for fitted, alone in zip(together.states, people, strict=True):
            assert {name: array.shape for name, array in fitted.items()} == trainer.learner.fields
            assert all(array.dtype == np.float32 for array in fitted.values())
            assert_close(fitted, trainer.fit(shared, [alone]).states[0])

    def test_each_epoch_is_fitted_under_itself(self, changes: dict[str, Any]) -> None:
        """The prior of an epoch is cached for fits under the same epoch only."""
        trainer, another = default_trainer(changes), default_trainer(changes)
        first, second, people = trainer.learner.initial_shared(), with_kinds(trainer), logged_people(trainer)
        people.append(overflowing(trainer, 3, "noted"))  # reset to that epoch's prior
        before = trainer.fit(first, people)
        after, expected = trainer.fit(second, people), another.fit(second, people)
        for earlier, one, other in zip(before.states, after.states, expected.states, strict=True):
            assert not np.allclose(earlier["head"], one["head"], atol=1e-3)
            for name, array in one.items():
                np.testing.assert_array_equal(array, other[name], err_msg=name)

    def test_a_user_without_samples_has_the_state_of_a_new_user(self, changes: dict[str, Any]) -> None:
        trainer = default_trainer(changes)
        shared = with_kinds(trainer)
        initial_user = {name: tensor.numpy() for name, tensor in trainer.learner.initial_user(shared).items()}
        assert_close(trainer.fit(shared, logged_people(trainer)).states[2], initial_user)
        assert_close(trainer.fit(shared, [logged_input(trainer, "without_samples", 0)]).states[0], initial_user)

    @pytest.mark.parametrize("samples", [1, 5, 20], ids=["one", "some", "longest"])
    @pytest.mark.parametrize("what", ["reward", "absurd reward", "noted"])
    def test_only_the_user_who_overflows_is_reset(self, changes: dict[str, Any], what: str, samples: int) -> None:
        """Bit for bit: the other users are the same with and without them in the batch."""
        trainer = default_trainer(changes)
        shared, people = with_kinds(trainer), logged_people(trainer)
        broken = overflowing(trainer, samples, what)
        fitted = trainer.fit(shared, [*people[:2], broken, *people[2:]])
        assert fitted.quarantined == ("broken",)
        initial_user = trainer.learner.initial_user(shared)
        for name, array in fitted.states[2].items():
            np.testing.assert_array_equal(array, initial_user[name].numpy(), err_msg=name)
        others = [*fitted.states[:2], *fitted.states[3:]]
        sound = trainer.fit(shared, [*people[:2], logged_input(trainer, "sound", samples, first=60), *people[2:]])
        for expected in (trainer.fit(shared, people).states, [*sound.states[:2], *sound.states[3:]]):
            for one, other in zip(others, expected, strict=True):
                for name, array in one.items():
                    np.testing.assert_array_equal(array, other[name], err_msg=name)

    @pytest.mark.parametrize("reward", [1e12, 1e24, 1e37], ids=lambda reward: f"{reward:g}")
    def test_finite_but_absurd_states_are_reset_alone(self, changes: dict[str, Any], reward: float) -> None:
        """Their numbers would overflow in scores, also in those of other users."""
        trainer = default_trainer(changes)
        shared, people = with_kinds(trainer), logged_people(trainer)
        sound = logged_input(trainer, "absurd", 5, first=60)
        absurd = replace(sound, samples=[*sound.samples[:-1], replace(sound.samples[-1], reward=reward)])
        fitted = trainer.fit(shared, [*people[:2], absurd, *people[2:]])
        assert fitted.quarantined == ("absurd",)
        initial_user = trainer.learner.initial_user(shared)
        for name, array in fitted.states[2].items():
            np.testing.assert_array_equal(array, initial_user[name].numpy(), err_msg=name)
        others = [*fitted.states[:2], *fitted.states[3:]]
        for one, other in zip(others, trainer.fit(shared, people).states, strict=True):
            for name, array in one.items():
                np.testing.assert_array_equal(array, other[name], err_msg=name)
        assert_scores_are_finite(trainer, shared, fitted.states)

    def test_large_valid_states_are_kept(self, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        """A state with large numbers and valid scores is kept."""
        trainer = default_trainer(changes)
        shared, people = with_kinds(trainer), logged_people(trainer)
        expected = trainer.fit(shared, people)
        monkeypatch.setattr(trainer_module, "LARGE_STATE", -1.0)  # each user is checked
        fitted = trainer.fit(shared, people)
        assert fitted.quarantined == ()
        for one, other in zip(fitted.states, expected.states, strict=True):
            for name, array in one.items():
                np.testing.assert_array_equal(array, other[name], err_msg=name)

    def test_all_users_may_overflow(self, changes: dict[str, Any]) -> None:
        trainer = default_trainer(changes)
        shared = with_kinds(trainer)
        broken = [replace(overflowing(trainer, 3, what), user_id=what) for what in ("reward", "noted")]
        fitted = trainer.fit(shared, broken)
        assert fitted.quarantined == ("reward", "noted")
        assert all(np.isfinite(array).all() for state in fitted.states for array in state.values())

    @pytest.mark.parametrize("sign", [1, -1])
    def test_absurd_features_are_clipped(self, changes: dict[str, Any], sign: int) -> None:
        """Inputs are clipped, so no user has to be reset."""
        trainer = default_trainer(changes)
        shared = with_kinds(trainer)
        shared |= {"mean": torch.full((INPUTS,), -sign * 1e38), "scale": torch.full((INPUTS,), 1e-3)}
        sound = logged_input(trainer, "x", 3)
        largest = np.full(INPUTS, sign * NEAR_THE_LIMIT, dtype=np.float32)
        absurd = replace(sound, samples=[*sound.samples[:-1], replace(sound.samples[-1], features=largest)])
        fitted = trainer.fit(shared, [*logged_people(trainer), absurd])
        assert fitted.quarantined == ()
        assert_close(fitted.states[-1], trainer.fit(shared, [absurd]).states[0])

    def test_an_absurd_reward_causes_no_warning_in_a_derivation(self, changes: dict[str, Any]) -> None:
        """The epoch trainer checks the derived state itself, so no numpy warning is needed."""
        trainer = default_trainer(changes)
        teachers = [*logged_people(trainer), overflowing(trainer, 3, "absurd reward")]
        derive_shared(trainer, trainer.learner.initial_shared(), teachers, 0, 25)


def test_nan_does_not_reach_other_users() -> None:
    """Notes of an absurdly large slate give infinity over infinity: the matrix is singular."""
    trainer = default_trainer(WIDE)
    shared = with_kinds(trainer) | {"common_ratio": torch.full((INPUTS,), 10.0)}
    people, sound = logged_people(trainer), logged_input(trainer, "broken", 4, first=60)
    noted = sound.samples[-1].phi.copy()
    noted[Notes.COUNT] = NEAR_THE_LIMIT
    broken = replace(sound, samples=[*sound.samples[:-1], replace(sound.samples[-1], phi=noted)])
    fitted = trainer.fit(shared, [broken, *people])
    assert fitted.quarantined == ("broken",)
    for one, other in zip(fitted.states[1:], trainer.fit(shared, people).states, strict=True):
        for name, array in one.items():
            np.testing.assert_array_equal(array, other[name], err_msg=name)


def test_samples_of_another_learner_are_left_out_of_an_epoch() -> None:
    """Those of one user must not keep all users from getting an epoch."""
    trainer = Trainer(build_learner(small_default(), INPUTS), CPU)
    noted = np.zeros(trainer.learner.noted, dtype=np.float32)
    own = [replace(make_sample(number), phi=noted) for number in range(3)]
    strange = [
        replace(make_sample(9), phi=noted[:-1]),
        replace(make_sample(9), phi=noted, features=np.zeros(INPUTS + 1, dtype=np.float32)),
    ]
    users = [FitInput("mixed", 5, [*strange, *own], None), FitInput("strange", 2, strange, None)]
    shared = trainer.learner.initial_shared()
    with pytest.raises(ValueError, match="reshape"):
        trainer.fit(shared, users)
    derived = derive_shared(trainer, shared, users, 0, 5)
    expected = derive_shared(trainer, shared, [FitInput("mixed", 5, own, None)], 0, 5)
    for name, tensor in expected.items():
        assert torch.equal(derived[name], tensor), name
