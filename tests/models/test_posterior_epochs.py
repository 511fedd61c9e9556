"""The default learner's epochs: what they are derived from, when, what they are judged by, and what they withstand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from models.learner import Query, State, UserBatch
from models.posterior import PosteriorLearner
from models.settings import PosteriorSettings
from models.slates import Slates
from models.upkeep import ALONE, EMBEDDED, TOGETHER
from tests.models.posterior_worlds import (
    WIDE,
    Past,
    batch_of,
    fitted,
    generator_of,
    groups_of,
    kinds,
    past,
    shown_of,
    small,
    some_of,
)
from tests.models.worlds import close, single

BOTH = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
WIDTHS = pytest.mark.parametrize("changes", [{}, WIDE], ids=["narrow", "wide"])


def test_the_schedule_of_epochs() -> None:
    learner = PosteriorLearner(small(epoch_events=64, epoch_growth=0.03), 3)
    assert not learner.epoch_due(0, 15)
    assert learner.epoch_due(0, 16)  # the first, and every doubling after it
    assert learner.refit_due(0, 16)
    assert not learner.epoch_due(16, 31)
    assert learner.epoch_due(16, 32)
    assert not learner.refit_due(16, 31)
    assert not learner.epoch_due(256, 319)
    assert learner.epoch_due(256, 320)  # 64 events later, though 512 is far
    assert not learner.refit_due(256, 320)
    assert learner.refit_due(500, 512)
    assert not learner.epoch_due(10_000, 10_300)
    assert learner.epoch_due(10_000, 10_310)  # 3% of all there were


@WIDTHS
def test_deriving_twice_gives_the_same(changes: dict[str, int]) -> None:
    learner = PosteriorLearner(small(**changes), 3)
    shared, batch = learner.initial_shared(), batch_of(kinds(learner, 12, 8, generator_of(5)), torch.float32)
    before = {name: value.clone() for name, value in shared.items()}
    for epoch_events, total in ((0, 512), (300, 364)):
        first = learner.derive(shared, [batch], epoch_events, total)
        torch.rand(3)  # no hidden draw from the process's own generator
        second = learner.derive(shared, [batch], epoch_events, total)
        assert set(first) == set(before)
        for name in first:
            assert torch.equal(first[name], second[name])
            assert first[name].shape == before[name].shape
            assert first[name].dtype == before[name].dtype
            assert torch.equal(shared[name], before[name])


@pytest.mark.parametrize("seed", [-1, 2**31, 2**32, 2**63])
def test_any_seed_of_the_settings_will_do(seed: int) -> None:
    learner = PosteriorLearner(small(seed=seed), 3)
    batch = batch_of(kinds(learner, 3, 4, generator_of(5)), torch.float32)
    assert learner.derive(learner.initial_shared(), [batch], 0, 16)["trunk"].isfinite().all()


def test_an_epoch_of_nobody_changes_only_its_number() -> None:
    learner = PosteriorLearner(small(), 3)
    shared = learner.initial_shared()
    derived = learner.derive(shared, [], 0, 512)
    assert derived["epoch"] == shared["epoch"] + 1
    assert all(torch.equal(derived[name], shared[name]) for name in shared if name != "epoch")


@WIDTHS
def test_users_in_one_batch_or_in_several_teach_the_same(changes: dict[str, int]) -> None:
    learner = PosteriorLearner(small(**changes), 3, torch.float64)
    teachers = kinds(learner, 12, 8, generator_of(6))
    # An epoch after the first, whose standardisation draws outliers in batch by batch.
    shared = learner.derive(learner.initial_shared(), [batch_of(teachers)], 0, 16)
    whole = learner.derive(shared, [batch_of(teachers)], 300, 364)
    parts = learner.derive(shared, [batch_of(teachers[:5]), batch_of(teachers[5:], padding=2)], 300, 364)
    for name in whole:
        close(parts[name], whole[name], 1e-8)


def test_heads_see_what_was_noted_at_the_decision() -> None:
    """The prior comes from noted predictions: with other notes it is another, with another trunk it is the same."""
    learner = PosteriorLearner(small(), 3, torch.float64)
    teachers = kinds(learner, 12, 8, generator_of(9))
    shared, batch = learner.initial_shared(), batch_of(teachers)
    # Without a step's effect on it, the trunk would be the same anyway: a large rate makes it another.
    wild = PosteriorLearner(small(trunk_rate=1.0), 3, torch.float64)
    one, other = learner.derive(shared, [batch], 0, 512), wild.derive(shared, [batch], 0, 512)
    assert not torch.allclose(one["trunk"], other["trunk"])
    for name in ("prior_mean", "prior_covariance", "noise", "group_pull", "group_offset", "guard", "gain"):
        assert torch.equal(one[name], other[name])
    noted = learner.derive(shared, [replace(batch, phi=batch.phi.flip(1))], 0, 512)
    assert not torch.allclose(one["prior_mean"], noted["prior_mean"])


def test_the_trunk_is_told_who_asked_at_the_decision() -> None:
    """With others asking it learns something else; what heads learn is not touched by it."""
    learner = PosteriorLearner(small(), 3, torch.float64)
    shared, batch = learner.initial_shared(), batch_of(kinds(learner, 12, 8, generator_of(9)))
    others = batch.phi.clone()
    others[..., EMBEDDED:] = 1 - others[..., EMBEDDED:]
    one, other = (learner.derive(shared, [replace(batch, phi=phi)], 0, 512) for phi in (batch.phi, others))
    assert not torch.allclose(one["trunk"], other["trunk"])
    for name in ("prior_mean", "prior_covariance", "noise", "group_pull", "guard", "gain"):
        assert torch.equal(one[name], other[name])


def test_the_trunk_learns_what_kinds_of_users_want() -> None:
    """Rewards that depend on who asks and on the arm together, which the arm alone does not tell."""
    learner = PosteriorLearner(
        small(width=32, epoch_steps_max=400, replayed=64, trunk_rate=0.01, heads=False, products_max=0), 1
    )
    generator = generator_of(14)
    features = torch.randn(40, 20, 1, generator=generator)
    kind = torch.where(torch.arange(40) % 2 == 0, 1.0, -1.0)
    batch = batch_of([past(learner, 20, generator)] * 40, torch.float32)
    batch = replace(batch, features=features, rewards=(features[..., 0] * kind.unsqueeze(-1) > 0).float())
    batch.phi[...] = 0.0
    batch.phi[..., EMBEDDED + 1] = kind.unsqueeze(-1)  # after predictions, the coefficients of the constant and of x
    shared = learner.derive(learner.initial_shared(), [batch], 0, 2_000)
    assert learner.noted == EMBEDDED + 2
    own = {name: torch.stack([value, value]) for name, value in learner.newborn(shared).items()}
    deviation = shared["prior_covariance"][1, 1].sqrt().float()
    own["head"][:, 1] = shared["prior_mean"][1].float() + deviation * torch.tensor([1.0, -1.0])
    query = Query(
        arms=torch.tensor([[1.0], [-1.0], [1.0], [-1.0]]),
        slates=Slates([2, 2]),
        own=own,
        own_row=torch.tensor([-1, -1]),
        own_events=torch.tensor([20, 20]),
    )
    likes = learner.score(shared, fitted(learner, shared, []), query).mean
    close(likes, torch.tensor([1.0, 0.0, 0.0, 1.0]), 0.2)


def foreseen(alone: float, together: float) -> Tensor:
    """The guard of users whose rewards were foreseen with these errors."""
    learner = PosteriorLearner(small(), 3, torch.float64)
    batch = batch_of(kinds(learner, 12, 20, generator_of(10)))
    batch.phi[..., ALONE] = batch.rewards + alone
    batch.phi[..., TOGETHER] = batch.rewards - together
    return learner.derive(learner.initial_shared(), [batch], 0, 512)["guard"]


def test_groups_are_believed_as_far_as_they_foresaw_better() -> None:
    assert foreseen(0.5, 0.0) > 0.99
    assert foreseen(0.0, 0.5) < 0.01
    close(foreseen(0.3, 0.3), 0.5, 1e-9)
    assert 0.5 < foreseen(0.03, 0.029) < 0.99


def test_only_the_newer_half_of_what_groups_foresaw_counts() -> None:
    learner = PosteriorLearner(small(), 3, torch.float64)
    batch = batch_of(kinds(learner, 12, 20, generator_of(10)), padding=7)
    batch.phi[..., ALONE : TOGETHER + 1] = batch.rewards.unsqueeze(-1)
    batch.phi[:, :10, TOGETHER] += 5.0  # when there was little to go by
    batch.phi[:, 10:, ALONE] += 0.5
    assert learner.derive(learner.initial_shared(), [batch], 0, 512)["guard"] > 0.99


def test_groups_wait_for_events() -> None:
    learner = PosteriorLearner(small(), 3)
    batch = batch_of(kinds(learner, 12, 8, generator_of(5)), torch.float32)
    early = learner.derive(learner.initial_shared(), [batch], 0, 255)
    assert not groups_of(learner.settings, early)[1].size
    assert early["guard"] == 0
    found = learner.derive(learner.initial_shared(), [batch], 0, 256)
    assert groups_of(learner.settings, found)[1].size == 12
    without = PosteriorLearner(small(groups=False), 3)
    never = without.derive(without.initial_shared(), [batch], 0, 256)
    assert not groups_of(without.settings, never)[1].size


def test_the_loudest_users_are_the_centres() -> None:
    """With more users than centres, those with the most samples."""
    learner = PosteriorLearner(small(), 2)
    generator = generator_of(11)
    batch = batch_of([past(learner, 1 + (user < 256), generator) for user in range(300)], torch.float32)
    _, voices = groups_of(learner.settings, learner.derive(learner.initial_shared(), [batch], 600, 610))
    np.testing.assert_allclose(voices, [2 / 7] * 256)


def disappointed() -> tuple[PosteriorLearner, State, UserBatch]:
    """An epoch 9 whose latest two epochs earned much less than was foreseen."""
    learner = PosteriorLearner(small(), 3, torch.float64)
    people = kinds(learner, 16, 40, generator_of(15))
    shared = learner.initial_shared() | {"epoch": torch.tensor(9.0, dtype=torch.float64)}
    batch = batch_of(people)
    batch.epochs[:] = torch.arange(40) // 4  # epochs 0 to 9
    batch.phi[..., ALONE : TOGETHER + 1] = batch.rewards.unsqueeze(-1)
    batch.rewards[:, 32:] = 0.0
    return learner, shared, batch


def test_after_a_change_of_tastes_older_samples_fade() -> None:
    learner, shared, batch = disappointed()
    derived = learner.derive(shared, [batch], 640, 660)
    assert derived["epoch"] == 10
    assert derived["since"] == 10  # all that was decided before it was seen
    expected = learner.derive(shared | {"since": derived["since"]}, [batch], 640, 660)
    for name in ("prior_mean", "prior_covariance", "noise", "guard", "trunk"):
        assert torch.equal(derived[name], expected[name])  # the prior starts anew here, as it did there
    calm = replace(batch, rewards=batch.phi[..., ALONE].clone())
    assert learner.derive(shared, [calm], 640, 660)["since"] == 0
    states = learner.fit(derived, batch, {})
    assert states["since"].tolist() == [10.0] * 16
    close(states["gram"][:, 0, 0], torch.full((16,), 40 * 0.05), 1e-6)  # Σ weight, as h starts with 1


@pytest.mark.parametrize("place", ["before", "after"])
def test_whoever_was_fitted_before_a_change_counts_as_if_fitted_after(place: str) -> None:
    """Their samples fade with everybody's if they are from before it, and do not if they are from after it."""
    learner, shared, batch = disappointed()
    derived = learner.derive(shared, [batch], 640, 660)
    rows = slice(0, 32) if place == "before" else slice(32, 40)
    person = Past(batch.features[0, rows], batch.rewards[0, rows], batch.phi[0, rows], batch.epochs[0, rows])
    arms = torch.cat([person.features[-2:], person.features[-2:] + 1])
    found = []
    for state in (
        fitted(learner, derived | {"since": 0 * derived["since"]}, [person]),
        fitted(learner, derived, [person]),
    ):
        query = Query(arms, Slates([4]), state, torch.tensor([-1]), torch.tensor([8]))
        # Who asks is told by the head as it was fitted, which is not in question here.
        query = replace(query, own={**query.own, "head": derived["prior_mean"].unsqueeze(0)})
        found.append(learner.score(derived, fitted(learner, derived, []), query))
    close(found[0].mean, found[1].mean, 1e-8)
    close(found[0].bonus, found[1].bonus, 1e-8)


def repeating(repeats: bool) -> State:
    """An epoch of users who see few arms again and again, whose rewards belong to the arm or to chance."""
    generator = generator_of(12)
    learner = PosteriorLearner(small(trunk=False), 8, torch.float64)
    people = []
    for _ in range(20):
        arms = single(torch.randn(10, 8, generator=generator, dtype=torch.float64))
        earned = (torch.rand(10, generator=generator) < 0.5).to(torch.float64)
        chosen = torch.randint(10, (40,), generator=generator)
        rewards = earned[chosen] if repeats else (torch.rand(40, generator=generator) < 0.5).to(torch.float64)
        notes = torch.zeros(40, learner.noted, dtype=torch.float64)
        people.append(Past(arms[chosen], rewards, notes, torch.zeros(40, dtype=torch.int64)))
    return learner.derive(learner.initial_shared(), [batch_of(people)], 0, 512)


def test_the_memory_is_believed_where_arms_earn_the_same_again() -> None:
    assert repeating(repeats=True)["gain"] >= 1.0
    assert repeating(repeats=False)["gain"] <= 0.05


def test_a_single_arm_seen_twice_is_no_evidence_about_the_memory() -> None:
    learner = PosteriorLearner(small(trunk=False), 3, torch.float64)
    people = [some_of(past(learner, 4, generator_of(16)), torch.tensor([0, 1, 2, 2]))]
    shared = learner.initial_shared()
    assert learner.derive(shared, [batch_of(people)], 0, 16)["gain"] == shared["gain"]


# ---------------------------------------------------------------------- extremes


def extreme(name: str, learner: PosteriorLearner) -> list[Past]:
    """Populations that break careless arithmetic."""
    generator = generator_of(13)
    people = kinds(learner, 6, 8, generator)
    for person in people:
        for values in shown_of(learner, person):
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
        return [some_of(people[0], torch.tensor([0]))]
    if name == "one arm over and over":
        return [some_of(person, torch.zeros(500, dtype=torch.int64)) for person in people]
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
def test_extremes_stay_finite(name: str, chosen: PosteriorSettings, dtype: torch.dtype) -> None:
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
