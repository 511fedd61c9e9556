"""The default learner's epochs: schedule, derivation, kinds and memory, extreme data."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from metaban.models.default.arms import UNUSED_KEY
from metaban.models.default.kinds import FROM_EVENTS
from metaban.models.default.learner import PosteriorLearner
from metaban.models.default.notes import Notes
from metaban.models.default.shared_state import SharedState
from metaban.models.learner import Query, State, UserBatch
from metaban.models.numerics.slates import Slates
from metaban.models.settings import PosteriorSettings
from tests.models.default_worlds import (
    WIDE,
    UserHistory,
    batch_of,
    fitted,
    generator_of,
    kinds,
    past_arm_views,
    random_history,
    selected_samples,
    small,
)
from tests.models.worlds import assert_close, rounded_to_float32

BOTH = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
WIDTHS = pytest.mark.parametrize("changes", [{}, WIDE], ids=["narrow", "wide"])
IDS = pytest.mark.parametrize("catalogue", [0, 5], ids=["no ids", "ids"])


def test_the_schedule_of_epochs() -> None:
    learner = PosteriorLearner(small(epoch_events=64, epoch_growth=0.03), 3)
    assert not learner.epoch_due(0, 15)
    assert learner.epoch_due(0, 16)  # the first, and every doubling after it
    assert learner.refit_due(0, 16)
    assert not learner.epoch_due(16, 31)
    assert learner.epoch_due(16, 32)
    assert not learner.refit_due(16, 31)
    assert not learner.epoch_due(256, 319)
    assert learner.epoch_due(256, 320)  # 64 events later, although 512 is far away
    assert not learner.refit_due(256, 320)
    assert learner.refit_due(500, 512)
    assert not learner.epoch_due(10_000, 10_300)
    assert learner.epoch_due(10_000, 10_310)  # 3 % of all earlier events


@IDS
@WIDTHS
def test_deriving_twice_gives_the_same(changes: dict[str, int], catalogue: int) -> None:
    learner = PosteriorLearner(small(**changes), 3)
    people = kinds(learner, 12, 8, generator_of(5), catalogue=catalogue)
    shared, batch = learner.initial_shared(), batch_of(people, torch.float32)
    before = {name: value.clone() for name, value in shared.items()}
    for epoch_events, total in ((0, 512), (300, 364), (1_000, 1_024)):
        first = learner.derive(shared, [batch], epoch_events, total)
        torch.rand(3)  # no hidden draw from the global generator
        second = learner.derive(shared, [batch], epoch_events, total)
        assert set(first) == set(before)
        for name in first:
            assert torch.equal(first[name], second[name])
            if name in learner.growing:  # a row for each sample: arms are counted only on the device
                assert first[name].shape == (*first["arm_keys"].shape, *before[name].shape[1:])
            else:
                assert first[name].shape == before[name].shape
            assert first[name].dtype == before[name].dtype
            assert torch.equal(shared[name], before[name])


@pytest.mark.parametrize("seed", [-1, 2**31, 2**32, 2**63])
def test_any_seed_works(seed: int) -> None:
    learner = PosteriorLearner(small(seed=seed), 3)
    batch = batch_of(kinds(learner, 3, 4, generator_of(5)), torch.float32)
    assert learner.derive(learner.initial_shared(), [batch], 0, 16)["trunk"].isfinite().all()


def test_an_epoch_without_users_changes_only_its_number() -> None:
    learner = PosteriorLearner(small(), 3)
    shared = learner.initial_shared()
    derived = learner.derive(shared, [], 0, 512)
    assert derived["epoch"] == shared["epoch"] + 1
    assert all(torch.equal(derived[name], shared[name]) for name in shared if name != "epoch")


@IDS
@WIDTHS
def test_one_batch_or_several_give_the_same_epoch(changes: dict[str, int], catalogue: int) -> None:
    learner = PosteriorLearner(small(**changes), 3, torch.float64)
    teachers = kinds(learner, 12, 8, generator_of(6), catalogue=catalogue)
    # An epoch after the first, whose normaliser pulls in outliers batch by batch.
    shared = learner.derive(learner.initial_shared(), [batch_of(teachers)], 0, 16)
    whole = learner.derive(shared, [batch_of(teachers)], 300, 364)
    parts = learner.derive(shared, [batch_of(teachers[:5]), batch_of(teachers[5:], padding=2)], 300, 364)
    assert int((whole["arm_keys"] != UNUSED_KEY).sum()) == catalogue
    for name in whole:
        if name in learner.growing:  # padding adds unused rows
            assert_close(parts[name][:catalogue], whole[name][:catalogue], 1e-8)
            assert (parts["arm_keys"][catalogue:] == UNUSED_KEY).all()
        else:
            assert_close(parts[name], whole[name], 1e-8)


def test_an_arm_switched_off_is_forgotten() -> None:
    """Arms may be switched off while users exist: then nothing of them is left in targets that scores do not add."""
    people = kinds(PosteriorLearner(small(**WIDE), 3), 12, 8, generator_of(6), catalogue=5)
    batch = batch_of(people)
    for changes in ({"arms": False}, {"heads": False}):
        learner = PosteriorLearner(small(**WIDE), 3, torch.float64)
        shared = learner.derive(learner.initial_shared(), [batch], 0, 512)
        assert shared["arm_effects"].any()
        assert shared["arm_wide"].any()
        assert (shared["arm_looks"] != 1).any()
        without = PosteriorLearner(small(**WIDE, **changes), 3, torch.float64)
        derived = without.derive(shared, [batch], 512, 600)
        for name, value in without.initial_shared().items():
            if name.startswith("arm_"):
                assert torch.equal(derived[name], value), name
        assert torch.equal(without.head_samples(SharedState.stored(derived), batch).targets, batch.rewards)


def test_heads_use_the_predictions_noted_at_the_decision() -> None:
    """The prior depends on the noted predictions and not on the current trunk."""
    learner = PosteriorLearner(small(), 3, torch.float64)
    teachers = kinds(learner, 12, 8, generator_of(9))
    shared, batch = learner.initial_shared(), batch_of(teachers)
    # A large rate, so that the trunk does change.
    wild = PosteriorLearner(small(trunk_rate=1.0), 3, torch.float64)
    one, other = learner.derive(shared, [batch], 0, 512), wild.derive(shared, [batch], 0, 512)
    assert not torch.allclose(one["trunk"], other["trunk"])
    for name in ("prior_mean", "prior_covariance", "noise", "kind_centres", "kind_log_shares", "gain"):
        assert torch.equal(one[name], other[name])
    noted = learner.derive(shared, [replace(batch, phi=batch.phi.flip(1))], 0, 512)
    assert not torch.allclose(one["prior_mean"], noted["prior_mean"])


def test_kinds_need_a_minimum_of_events() -> None:
    """They are found from the minimum on, unless they are switched off."""
    for events, changes, found in (
        (FROM_EVENTS - 1, {}, False), (FROM_EVENTS, {}, True), (FROM_EVENTS, {"kinds": False}, False)
    ):  # fmt: skip
        learner = PosteriorLearner(small(**changes), 3, torch.float64)
        generator = generator_of(5)
        tastes = 4 * torch.eye(3, dtype=torch.float64)
        people = [random_history(learner, 40, generator, tastes[user % 3]) for user in range(90)]
        derived = learner.derive(learner.initial_shared(), [batch_of(people)], 0, events)
        assert (learner.clusters(derived) > 1) == found
        assert torch.equal(derived["kind_centres"][0], derived["prior_mean"]) != found
        assert (derived["kind_spread"] == 1) != found


def after_low_rewards(**changes: object) -> tuple[PosteriorLearner, State, UserBatch]:
    """An epoch 9 after two epochs with much lower rewards than predicted."""
    learner = PosteriorLearner(small(**changes), 3, torch.float64)
    people = kinds(learner, 16, 40, generator_of(15))
    shared = learner.initial_shared() | {"epoch": torch.tensor(9.0, dtype=torch.float64)}
    batch = batch_of(people)
    batch.epochs[:] = torch.arange(40) // 4  # epochs 0 to 9
    Notes(batch.phi).mean[:] = batch.rewards
    batch.rewards[:, 32:] = 0.0
    return learner, shared, batch


def test_after_a_change_of_tastes_older_samples_lose_weight() -> None:
    learner, shared, batch = after_low_rewards()
    derived = learner.derive(shared, [batch], 640, 660)
    assert derived["epoch"] == 10
    assert derived["since"] == 10  # every decision before the change was detected
    expected = learner.derive(shared | {"since": derived["since"]}, [batch], 640, 660)
    for name in ("prior_mean", "prior_covariance", "noise", "kind_centres", "trunk"):
        assert torch.equal(derived[name], expected[name])  # the prior starts again at this epoch
    calm = replace(batch, rewards=Notes(batch.phi).mean.clone())
    assert learner.derive(shared, [calm], 640, 660)["since"] == 0
    states = learner.fit(derived, batch, {})
    assert states["since"].tolist() == [10.0] * 16
    assert_close(states["gram"][:, 0], torch.full((16,), 40 * 0.05), 1e-6)  # Σ weight, since h starts with 1


@pytest.mark.parametrize("place", ["before", "after"])
def test_users_fitted_before_a_change_count_as_if_fitted_after(place: str) -> None:
    """Their samples get less weight if they are from before the change, and full weight if from after it.

    The memory's residuals stay those of the head as it was fitted.
    """
    learner, shared, batch = after_low_rewards(memory=False)
    derived = learner.derive(shared, [batch], 640, 660)
    rows = slice(0, 32) if place == "before" else slice(32, 40)
    person = UserHistory(batch.features[0, rows], batch.rewards[0, rows], batch.phi[0, rows], batch.epochs[0, rows])
    arms = torch.cat([person.features[-2:], person.features[-2:] + 1])
    found = []
    for state in (
        fitted(learner, derived | {"since": 0 * derived["since"]}, [person]),
        fitted(learner, derived, [person]),
    ):
        query = Query(arms, Slates([4]), state, torch.tensor([-1]), torch.tensor([8]))
        found.append(learner.score(derived, fitted(learner, derived, []), query))
    assert_close(found[0].mean, found[1].mean, 1e-8)
    assert_close(found[0].bonus, found[1].bonus, 1e-8)


def repeating(repeats: bool) -> State:
    """An epoch of users who see few arms again and again; rewards belong to the arm or are random."""
    generator = generator_of(12)
    learner = PosteriorLearner(small(trunk=False), 8, torch.float64)
    people = []
    for _ in range(20):
        arms = rounded_to_float32(torch.randn(10, 8, generator=generator, dtype=torch.float64))
        earned = (torch.rand(10, generator=generator) < 0.5).to(torch.float64)
        chosen = torch.randint(10, (40,), generator=generator)
        rewards = earned[chosen] if repeats else (torch.rand(40, generator=generator) < 0.5).to(torch.float64)
        notes = torch.zeros(40, learner.noted, dtype=torch.float64)
        people.append(UserHistory(arms[chosen], rewards, notes, torch.zeros(40, dtype=torch.int64)))
    return learner.derive(learner.initial_shared(), [batch_of(people)], 0, 512)


def test_the_memory_gets_weight_where_rewards_repeat() -> None:
    assert repeating(repeats=True)["gain"] >= 1.0
    assert repeating(repeats=False)["gain"] <= 0.05


def test_one_repeated_arm_is_no_evidence_for_the_memory() -> None:
    learner = PosteriorLearner(small(trunk=False), 3, torch.float64)
    people = [selected_samples(random_history(learner, 4, generator_of(16)), torch.tensor([0, 1, 2, 2]))]
    shared = learner.initial_shared()
    assert learner.derive(shared, [batch_of(people)], 0, 16)["gain"] == shared["gain"]


# ---------------------------------------------------------------------- extremes


def extreme(name: str, learner: PosteriorLearner) -> list[UserHistory]:
    """Populations that break careless arithmetic."""
    generator = generator_of(13)
    people = kinds(learner, 6, 8, generator)
    for person in people:
        for values in past_arm_views(learner, person):
            if name == "huge":
                values[:, 0] *= 1e30
            elif name == "one absurd value":
                values[0, 0] = 1e30
            elif name == "tiny":
                values[:, 0] *= 1e-30
            elif name == "constant column":
                values[:, 0] = 5.0
            elif name == "all columns constant":
                values[:] = 1e6
            elif name == "equal columns":
                values[:] = values[:, :1].clone()
        if name == "all zero rewards":
            person.rewards[:] = 0.0
        elif name == "all one rewards":
            person.rewards[:] = 1.0
        elif name == "exact rewards":
            person.rewards[:] = person.features[:, 0].clamp(-1, 1) / 2 + 0.5
    if name == "one user":
        return people[:1]
    if name == "one sample":
        return [selected_samples(people[0], torch.tensor([0]))]
    if name == "one arm over and over":
        return [selected_samples(person, torch.zeros(500, dtype=torch.int64)) for person in people]
    return people


EXTREMES = [
    "huge", "one absurd value", "tiny", "constant column", "all columns constant", "all zero rewards",
    "all one rewards", "equal columns", "exact rewards", "one user", "one sample", "one arm over and over",
]  # fmt: skip


@BOTH
@pytest.mark.parametrize(
    "chosen", [small(), small(**WIDE), small(apart=False, **WIDE)], ids=["all", "narrowed", "not apart"]
)
@pytest.mark.parametrize("name", EXTREMES)
def test_extreme_populations_stay_finite(name: str, chosen: PosteriorSettings, dtype: torch.dtype) -> None:
    learner = PosteriorLearner(chosen, 3, dtype)
    people = extreme(name, learner)
    shared, batch, epoch_events = learner.initial_shared(), batch_of(people, dtype), 0
    for total in (16, 300, 340, 600, 2_000, 9_000):
        shared = learner.derive(shared, [batch], epoch_events, total)
        epoch_events = total
        assert all(value.isfinite().all() for value in shared.values())
    states = fitted(learner, shared, people)
    assert all(value.isfinite().all() for value in states.values())
    arms = torch.cat([people[0].features[:3], torch.tensor([[1e30, -1e30, 0.0], [0.0, 0.0, 0.0]])]).to(dtype)
    query = Query(
        arms=arms,
        slates=Slates([arms.shape[0]]),
        own={name: value[:1] for name, value in states.items()},
        own_row=torch.tensor([0]),
        own_events=torch.tensor([8]),
    )
    scores = learner.score(shared, states, query)
    for value in (scores.mean, scores.bonus, scores.phi):
        assert value.isfinite().all()
    assert (scores.bonus >= 0).all()
    if name == "all zero rewards":
        assert (scores.mean[:3].abs() < 0.05).all()
    if name == "all one rewards":
        assert ((scores.mean[:3] - 1).abs() < 0.05).all()
