"""Fits of many users at once are the fits of each, and a user that breaks is put back without touching the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from models.learner import Query
from models.presets import build_learner
from models.settings import MetaBanSettings, named_settings
from models.slates import Slates
from store.codec import Sample
from tests.worker.workshop import CPU, INPUTS, make_sample, small
from worker import trainer as trainer_module
from worker.epochs import choose_teachers, derive_shared
from worker.trainer import Fitted, Pupil, Trainer

#: Finite as a stored event may be, yet no float32.
ABSURD_REWARD = 1e300


def make_trainer(settings: MetaBanSettings | None = None) -> Trainer:
    return Trainer(build_learner(settings or small(), INPUTS), CPU)


def pupil(name: str, samples: int, *, first: int = 0, reward: float | None = None) -> Pupil:
    return Pupil(name, samples, [make_sample(first + number, reward=reward) for number in range(samples)], None)


def people() -> list[Pupil]:
    """Users with pasts of different lengths."""
    return [pupil(f"user {place}", length, first=10 * place) for place, length in enumerate((1, 7, 3, 2, 12))]


def standardized(trainer: Trainer) -> dict[str, torch.Tensor]:
    shared = trainer.learner.initial_shared()
    return {**shared, "mean": torch.full((INPUTS,), 0.3), "scale": torch.full((INPUTS,), 0.7)}


def assert_close(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for name, array in one.items():
        np.testing.assert_allclose(array, other[name], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    "settings",
    [small(), small(draw="uniform", checkpoints=3), small(preset="pooled", recent_samples=4), small(depth=3)],
    ids=["paper", "uniform", "pooled", "deep"],
)
class TestTogetherOrAlone:
    def test_a_batch_equals_one_by_one(self, settings: MetaBanSettings) -> None:
        trainer = make_trainer(settings)
        shared = standardized(trainer)
        together = trainer.fit(shared, people())
        assert together.quarantined == ()
        for fitted, alone in zip(together.states, people(), strict=True):
            assert_close(fitted, trainer.fit(shared, [alone]).states[0])

    def test_padding_teaches_nothing(self, settings: MetaBanSettings) -> None:
        trainer = make_trainer(settings)
        shared = standardized(trainer)
        short = pupil("short", 2)
        beside_a_long_one = trainer.fit(shared, [pupil("long", 40, first=50), short]).states[1]
        assert_close(beside_a_long_one, trainer.fit(shared, [short]).states[0])

    def test_states_go_on_from_the_previous_ones(self, settings: MetaBanSettings) -> None:
        trainer = make_trainer(settings)
        shared = standardized(trainer)
        first = trainer.fit(shared, people()).states
        later = [
            Pupil(before.user_id, before.events + 1, [*before.samples, make_sample(99)], state)
            for before, state in zip(people(), first, strict=True)
        ]
        for fitted, alone in zip(trainer.fit(shared, later).states, later, strict=True):
            assert_close(fitted, trainer.fit(shared, [alone]).states[0])

    def test_states_have_the_fields_of_the_learner(self, settings: MetaBanSettings) -> None:
        trainer = make_trainer(settings)
        for state in trainer.fit(standardized(trainer), people()).states:
            assert {name: array.shape for name, array in state.items()} == trainer.learner.fields

    def test_users_without_samples_may_stand_beside_others(self, settings: MetaBanSettings) -> None:
        trainer = make_trainer(settings)
        shared = standardized(trainer)
        nobody, somebody = pupil("nobody", 0), pupil("somebody", 3)
        fitted = trainer.fit(shared, [nobody, somebody]).states
        assert_close(fitted[1], trainer.fit(shared, [somebody]).states[0])
        newborn = trainer.learner.newborn(shared)
        # Without samples there is no gradient to follow.
        np.testing.assert_allclose(fitted[0]["theta"], newborn["theta"].numpy(), atol=1e-6)
        assert_close(trainer.fit(shared, [nobody]).states[0], fitted[0])


def test_nobody_is_fitted_to_nothing() -> None:
    trainer = make_trainer()
    assert trainer.fit(trainer.learner.initial_shared(), []) == Fitted([], ())


def test_more_users_than_one_program_takes_are_fitted_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer()
    shared = standardized(trainer)
    whole = trainer.fit(shared, people())
    monkeypatch.setattr(trainer_module, "USERS_PER_FIT", 2)
    for one, other in zip(trainer.fit(shared, people()).states, whole.states, strict=True):
        assert_close(one, other)


class TestQuarantine:
    def test_a_learner_that_is_not_finite_is_put_back_to_the_prior(self) -> None:
        trainer = make_trainer()
        shared = standardized(trainer)
        fitted = trainer.fit(shared, [pupil("broken", 3, reward=ABSURD_REWARD)])
        assert fitted.quarantined == ("broken",)
        newborn = trainer.learner.newborn(shared)
        for name, array in fitted.states[0].items():
            np.testing.assert_array_equal(array, newborn[name].numpy(), err_msg=name)

    def test_the_others_do_not_notice(self) -> None:
        """Bit for bit: in a batch of the same shape, what a neighbour's numbers are has no effect."""
        trainer = make_trainer()
        shared = standardized(trainer)
        others = people()
        sound = trainer.fit(shared, [*others[:2], pupil("x", 4), *others[2:]])
        broken = trainer.fit(shared, [*others[:2], pupil("x", 4, reward=ABSURD_REWARD), *others[2:]])
        assert sound.quarantined == ()
        assert broken.quarantined == ("x",)
        for place in (0, 1, 3, 4, 5):
            for name, array in sound.states[place].items():
                np.testing.assert_array_equal(array, broken.states[place][name], err_msg=name)

    def test_a_user_can_come_back(self) -> None:
        trainer = make_trainer()
        shared = standardized(trainer)
        broken = trainer.fit(shared, [pupil("x", 2, reward=ABSURD_REWARD)]).states[0]
        sound = pupil("x", 3, first=7)
        again = trainer.fit(shared, [Pupil("x", 5, sound.samples, broken)])
        assert again.quarantined == ()
        assert_close(again.states[0], trainer.fit(shared, [sound]).states[0])

    def test_a_part_of_the_answer_names_its_own(self) -> None:
        trainer = make_trainer()
        pupils = [pupil("a", 1), pupil("b", 1, reward=ABSURD_REWARD), pupil("c", 1, reward=ABSURD_REWARD)]
        fitted = trainer.fit(standardized(trainer), pupils)
        assert fitted.part(0, 2, pupils[:2]).quarantined == ("b",)
        assert fitted.part(2, 3, pupils[2:]).quarantined == ("c",)
        assert fitted.part(2, 3, pupils[2:]).states == fitted.states[2:]


class TestDerivation:
    def test_moments_are_those_of_all_samples(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("worker.epochs.USERS_PER_BATCH", 2)
        trainer = make_trainer()
        teachers = [*people(), pupil("nobody", 0)]
        derived = derive_shared(trainer, trainer.learner.initial_shared(), teachers, 0, 25)
        rows = np.array([sample.features for teacher in teachers for sample in teacher.samples], dtype=np.float64)
        np.testing.assert_allclose(derived["mean"].numpy(), rows.mean(0), rtol=1e-6)
        np.testing.assert_allclose(derived["scale"].numpy(), rows.std(0), rtol=1e-6)

    def test_nobody_teaches_nothing(self) -> None:
        trainer = make_trainer()
        shared = trainer.learner.initial_shared()
        derived = derive_shared(trainer, shared, [pupil("nobody", 0)], 0, 25)
        assert all(torch.equal(derived[name], tensor) for name, tensor in shared.items())

    def test_teachers_do_not_depend_on_the_order_they_are_listed_in(self) -> None:
        names = [f"user {number}" for number in range(50)]
        chosen = choose_teachers(names, 10)
        assert len(chosen) == 10
        assert choose_teachers(names[::-1], 10) == chosen
        # A newcomer displaces one at most.
        assert len(set(choose_teachers([*names, "newcomer"], 10)) & set(chosen)) >= 9


#: Near the largest float32: finite, while sums and products of it are not.
NEAR_THE_LIMIT = 3e38
#: The default learner as it sees few inputs, and as it sees many.
NARROW: dict[str, Any] = {"width": 6, "bins": 2, "memory_samples": 4}
WIDE: dict[str, Any] = {**NARROW, "head_inputs_max": 2, "head_directions": 2}
WIDTHS = pytest.mark.parametrize("changes", [NARROW, WIDE], ids=["narrow", "wide"])


def default_trainer(changes: dict[str, Any]) -> Trainer:
    return Trainer(build_learner(named_settings("default", **changes), INPUTS), CPU)


def logged_sample(trainer: Trainer, number: int) -> Sample:
    """As it was logged, small numbers noted with it; of wide inputs also that two arms were on offer."""
    phi = np.random.default_rng(number).uniform(size=trainer.learner.noted).astype(np.float32)
    if trainer.learner.inputs.apart:
        phi[trainer.learner.offered_from] = 2
    return replace(make_sample(number), phi=phi)


def logged_pupil(trainer: Trainer, name: str, samples: int, *, first: int = 0) -> Pupil:
    return Pupil(name, samples, [logged_sample(trainer, first + number) for number in range(samples)], None)


def logged_people(trainer: Trainer) -> list[Pupil]:
    """Users with pasts of different lengths, one without any, one with more than the memory keeps."""
    lengths = (1, 7, 0, 3, 12)
    return [logged_pupil(trainer, f"user {place}", length, first=10 * place) for place, length in enumerate(lengths)]


def grouped(trainer: Trainer) -> dict[str, torch.Tensor]:
    """An epoch with groups, which count."""
    teachers = [logged_pupil(trainer, f"teacher {place}", 6, first=100 + 6 * place) for place in range(6)]
    shared = derive_shared(trainer, trainer.learner.initial_shared(), teachers, 0, 512)
    return shared | {"guard": torch.full_like(shared["guard"], 0.6)}


def overflowing(trainer: Trainer, samples: int, what: str) -> Pupil:
    """A user whose last sample is of an unusual arm, and near the limit or beyond it."""
    sound = logged_pupil(trainer, "broken", samples, first=60)
    last, noted = sound.samples[-1], sound.samples[-1].phi.copy()
    if what == "noted":
        noted[0] = NEAR_THE_LIMIT
    reward = {"reward": NEAR_THE_LIMIT, "absurd reward": ABSURD_REWARD}.get(what, last.reward)
    broken = replace(last, features=np.full(INPUTS, 5, dtype=np.float32), reward=reward, phi=noted)
    return replace(sound, samples=[*sound.samples[:-1], broken])


def assert_scores_are_finite(
    trainer: Trainer, shared: dict[str, torch.Tensor], states: list[dict[str, np.ndarray]]
) -> None:
    """Whoever asks, with all of them in the pool."""
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
class TestTheDefaultLearner:
    """It is fitted in numpy, which warns of numbers that leave their range and refuses matrices without an inverse."""

    def test_a_batch_equals_one_by_one(self, changes: dict[str, Any]) -> None:
        trainer = default_trainer(changes)
        shared, people = grouped(trainer), logged_people(trainer)
        together = trainer.fit(shared, people)
        assert together.quarantined == ()
        for fitted, alone in zip(together.states, people, strict=True):
            assert {name: array.shape for name, array in fitted.items()} == trainer.learner.fields
            assert all(array.dtype == np.float32 for array in fitted.values())
            assert_close(fitted, trainer.fit(shared, [alone]).states[0])

    def test_each_epoch_is_fitted_under_itself(self, changes: dict[str, Any]) -> None:
        """What is worked out of an epoch is kept for the next fit, unless that is under another."""
        trainer, another = default_trainer(changes), default_trainer(changes)
        first, second, people = trainer.learner.initial_shared(), grouped(trainer), logged_people(trainer)
        people.append(overflowing(trainer, 3, "noted"))  # a newborn of that epoch
        before = trainer.fit(first, people)
        after, expected = trainer.fit(second, people), another.fit(second, people)
        for earlier, one, other in zip(before.states, after.states, expected.states, strict=True):
            assert not np.allclose(earlier["head"], one["head"], atol=1e-3)
            for name, array in one.items():
                np.testing.assert_array_equal(array, other[name], err_msg=name)

    def test_whoever_has_no_samples_is_newborn(self, changes: dict[str, Any]) -> None:
        trainer = default_trainer(changes)
        shared = grouped(trainer)
        newborn = {name: tensor.numpy() for name, tensor in trainer.learner.newborn(shared).items()}
        assert_close(trainer.fit(shared, logged_people(trainer)).states[2], newborn)
        assert_close(trainer.fit(shared, [logged_pupil(trainer, "nobody", 0)]).states[0], newborn)

    @pytest.mark.parametrize("samples", [1, 5, 20], ids=["one", "some", "longest"])
    @pytest.mark.parametrize("what", ["reward", "absurd reward", "noted"])
    def test_who_overflows_is_put_back_alone(self, changes: dict[str, Any], what: str, samples: int) -> None:
        """Bit for bit: beside them, and in a batch without them, the others are the same."""
        trainer = default_trainer(changes)
        shared, people = grouped(trainer), logged_people(trainer)
        broken = overflowing(trainer, samples, what)
        fitted = trainer.fit(shared, [*people[:2], broken, *people[2:]])
        assert fitted.quarantined == ("broken",)
        newborn = trainer.learner.newborn(shared)
        for name, array in fitted.states[2].items():
            np.testing.assert_array_equal(array, newborn[name].numpy(), err_msg=name)
        others = [*fitted.states[:2], *fitted.states[3:]]
        sound = trainer.fit(shared, [*people[:2], logged_pupil(trainer, "sound", samples, first=60), *people[2:]])
        for expected in (trainer.fit(shared, people).states, [*sound.states[:2], *sound.states[3:]]):
            for one, other in zip(others, expected, strict=True):
                for name, array in one.items():
                    np.testing.assert_array_equal(array, other[name], err_msg=name)

    @pytest.mark.parametrize("reward", [1e12, 1e24, 1e37], ids=lambda reward: f"{reward:g}")
    def test_who_is_finite_and_absurd_is_put_back_alone(self, changes: dict[str, Any], reward: float) -> None:
        """Their numbers would overflow once arms are judged with them, and in the judgements of others too."""
        trainer = default_trainer(changes)
        shared, people = grouped(trainer), logged_people(trainer)
        sound = logged_pupil(trainer, "absurd", 5, first=60)
        absurd = replace(sound, samples=[*sound.samples[:-1], replace(sound.samples[-1], reward=reward)])
        fitted = trainer.fit(shared, [*people[:2], absurd, *people[2:]])
        assert fitted.quarantined == ("absurd",)
        newborn = trainer.learner.newborn(shared)
        for name, array in fitted.states[2].items():
            np.testing.assert_array_equal(array, newborn[name].numpy(), err_msg=name)
        others = [*fitted.states[:2], *fitted.states[3:]]
        for one, other in zip(others, trainer.fit(shared, people).states, strict=True):
            for name, array in one.items():
                np.testing.assert_array_equal(array, other[name], err_msg=name)
        assert_scores_are_finite(trainer, shared, fitted.states)

    def test_large_and_sensible_states_are_kept(self, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        """However large its numbers look, a learner that makes sense of arms is left alone."""
        trainer = default_trainer(changes)
        shared, people = grouped(trainer), logged_people(trainer)
        expected = trainer.fit(shared, people)
        monkeypatch.setattr(trainer_module, "LARGE_STATE", -1.0)  # everyone has to show it
        fitted = trainer.fit(shared, people)
        assert fitted.quarantined == ()
        for one, other in zip(fitted.states, expected.states, strict=True):
            for name, array in one.items():
                np.testing.assert_array_equal(array, other[name], err_msg=name)

    def test_everyone_may_overflow(self, changes: dict[str, Any]) -> None:
        trainer = default_trainer(changes)
        shared = grouped(trainer)
        broken = [replace(overflowing(trainer, 3, what), user_id=what) for what in ("reward", "noted")]
        fitted = trainer.fit(shared, broken)
        assert fitted.quarantined == ("reward", "noted")
        assert all(np.isfinite(array).all() for state in fitted.states for array in state.values())

    @pytest.mark.parametrize("sign", [1, -1])
    def test_absurd_features_are_cut_off(self, changes: dict[str, Any], sign: int) -> None:
        """What they exceed a usual input by teaches nothing, so nobody has to be put back."""
        trainer = default_trainer(changes)
        shared = grouped(trainer)
        shared |= {"mean": torch.full((INPUTS,), -sign * 1e38), "scale": torch.full((INPUTS,), 1e-3)}
        sound = logged_pupil(trainer, "x", 3)
        largest = np.full(INPUTS, sign * NEAR_THE_LIMIT, dtype=np.float32)
        absurd = replace(sound, samples=[*sound.samples[:-1], replace(sound.samples[-1], features=largest)])
        fitted = trainer.fit(shared, [*logged_people(trainer), absurd])
        assert fitted.quarantined == ()
        assert_close(fitted.states[-1], trainer.fit(shared, [absurd]).states[0])

    def test_an_absurd_reward_is_no_warning_to_a_derivation(self, changes: dict[str, Any]) -> None:
        """The meta-trainer looks at what was derived: it needs no numpy warning beside its own."""
        trainer = default_trainer(changes)
        teachers = [*logged_people(trainer), overflowing(trainer, 3, "absurd reward")]
        derive_shared(trainer, trainer.learner.initial_shared(), teachers, 0, 25)


def test_what_is_no_number_stays_with_whoever_it_belongs_to() -> None:
    """Infinity over infinity, of an offer of absurdly many arms: a matrix of such has no inverse."""
    trainer = default_trainer(WIDE)
    shared = grouped(trainer) | {"common_ratio": torch.full((INPUTS,), 10.0)}
    people, sound = logged_people(trainer), logged_pupil(trainer, "broken", 4, first=60)
    noted = sound.samples[-1].phi.copy()
    noted[trainer.learner.offered_from] = NEAR_THE_LIMIT
    broken = replace(sound, samples=[*sound.samples[:-1], replace(sound.samples[-1], phi=noted)])
    fitted = trainer.fit(shared, [broken, *people])
    assert fitted.quarantined == ("broken",)
    for one, other in zip(fitted.states[1:], trainer.fit(shared, people).states, strict=True):
        for name, array in one.items():
            np.testing.assert_array_equal(array, other[name], err_msg=name)
