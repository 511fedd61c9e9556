"""The default learner against its literal version, and what it promises about samples, epochs and groups."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

import models.judging
from models.learner import Query, State
from models.posterior import PosteriorLearner
from models.settings import PosteriorSettings
from tests.models.posterior_worlds import (
    Past,
    Scene,
    answered,
    as_array,
    batch_of,
    fitted,
    groups_of,
    held,
    kinds,
    literal_of,
    past,
    query_of,
    samples_of,
    scenes,
    small,
    taught,
)
from tests.models.worlds import close, single

PROPERTY = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
#: A distance this near to where agreement ends may fall on either side of it.
TIE = {torch.float64: 1e-10, torch.float32: 1e-4}
BOTH = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])


def generator_of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def judge(scene: Scene, dtype: torch.dtype) -> None:
    """Hold every arm's mean, bonus, notes and agreeing users to the literal ones."""
    learner = PosteriorLearner(scene.settings, scene.inputs, dtype)
    shared = held(learner, scene.shared)
    pool, query = fitted(learner, shared, scene.pool), query_of(scene, learner, shared)
    scores = learner.score(shared, pool, query)
    assert scores.mean.dtype == scores.bonus.dtype == scores.phi.dtype == dtype
    assert scores.group_size.dtype == torch.int64
    # Each user of the pool alone shows whether they are one of those who agree.
    agreeing = []
    for row in range(len(scene.pool)):
        rows = torch.where(query.own_row == row, 0, -1)
        only = {name: value[row : row + 1] for name, value in pool.items()}
        agreeing.append(learner.score(shared, only, replace(query, own_row=rows)).group_size - 1)
    literal = literal_of(scene.settings, scene.inputs, scene.shared)
    heads = [literal.head(samples_of(person)) for person in scene.pool]
    index = 0
    for asker, own_row, arms in scene.requests:
        for raw in arms.numpy():
            arm = literal.score(raw, samples_of(asker), heads, own_row)
            close(scores.mean[index], arm.mean, TOLERANCE[dtype])
            # A root is steep near 0, where rounding of its square shows most.
            close(scores.bonus[index].double().square(), arm.bonus**2, TOLERANCE[dtype])
            close(scores.phi[index], torch.tensor(arm.noted, dtype=torch.float64), TOLERANCE[dtype])
            for row, (distance, reach) in arm.distances.items():
                if abs(distance - reach) > TIE[dtype]:
                    assert agreeing[row][index] == (distance <= reach)
            if own_row >= 0:
                assert agreeing[own_row][index] == 0
            assert scores.group_size[index] == 1 + sum(int(member[index]) for member in agreeing)
            index += 1
    assert index == scores.mean.shape[0]


@PROPERTY
@given(scene=scenes())
def test_scores_are_the_literal_ones(scene: Scene) -> None:
    judge(scene, torch.float64)


@PROPERTY
@given(scene=scenes())
def test_scores_in_float32_are_the_literal_ones(scene: Scene) -> None:
    judge(scene, torch.float32)


@BOTH
@pytest.mark.parametrize(
    "changes", [{}, {"groups": False}, {"memory_samples": 2}, {"embed": False}, {"head_inputs_max": 2}]
)
def test_fitted_users_are_the_literal_ones(changes: dict[str, int], dtype: torch.dtype) -> None:
    if "head_inputs_max" in changes:
        changes = {**changes, "head_directions": 2}
    learner = PosteriorLearner(small(**changes), 3, dtype)
    generator = generator_of(4)
    shared = taught(learner, kinds(learner, 8, 6, generator), **({"guard": 0.6} if learner.settings.groups else {}))
    people = [past(learner, count, generator) for count in (0, 1, 3, 4, 9)]
    states = fitted(learner, shared, people)
    assert {name: tuple(value.shape[1:]) for name, value in states.items()} == learner.fields
    assert all(value.dtype == dtype for value in states.values())
    literal = literal_of(learner.settings, 3, shared)
    for row, person in enumerate(people):
        samples = samples_of(person)
        gram, moment = literal.statistics(samples)
        np.testing.assert_allclose(as_array(states["gram"][row]), gram, rtol=1e-5, atol=TOLERANCE[dtype])
        np.testing.assert_allclose(as_array(states["moment"][row]), moment, rtol=1e-5, atol=TOLERANCE[dtype])
        np.testing.assert_allclose(as_array(states["head"][row]), literal.head(samples), atol=TOLERANCE[dtype])
        kept = literal.kept(samples)
        assert states["kept_valid"][row].tolist() == [1.0] * len(kept) + [0.0] * (
            learner.settings.memory_samples - len(kept)
        )
        for place, sample in enumerate(kept):
            expected = literal.h(sample.raw, sample.noted)
            np.testing.assert_allclose(as_array(states["kept_heads"][row, place]), expected, atol=TOLERANCE[dtype])
            close(states["kept_rewards"][row, place], sample.reward, TOLERANCE[dtype])


# ---------------------------------------------------------------------- requests


def scene_of(seed: int = 0, users: int = 6, **changes: object) -> Scene:
    """A fixed scene with groups, memory and agreement."""
    generator = generator_of(seed)
    learner = PosteriorLearner(small(**changes), 3, torch.float64)
    teachers = kinds(learner, 12, 8, generator)
    shared = taught(learner, teachers, gain=1.0, guard=0.7)
    pool = [past(learner, 1 + user % 4, generator) for user in range(users)]
    requests = []
    for asker, row in ((pool[2], 2), (past(learner, 0, generator), -1), (past(learner, 5, generator), -1)):
        arms = single(torch.randn(4, 3, generator=generator, dtype=torch.float64))
        arms[0] = asker.features[0] if asker.features.shape[0] else arms[0]
        requests.append((asker, row, arms))
    return Scene(learner.settings, 3, shared, pool, requests)


def test_requests_side_by_side_are_answered_as_if_alone() -> None:
    scene = scene_of()
    together, start = answered(scene), 0
    for request in scene.requests:
        alone = answered(replace(scene, requests=[request]))
        stop = start + request[2].shape[0]
        for name in ("mean", "bonus", "phi", "group_size"):
            close(getattr(together, name)[start:stop], getattr(alone, name), 1e-10)
        start = stop


def test_arms_in_another_order_have_the_same_scores() -> None:
    scene = scene_of()
    straight = answered(scene)
    order = torch.tensor([3, 1, 0, 2])
    mixed = answered(replace(scene, requests=[(asker, row, arms[order]) for asker, row, arms in scene.requests]))
    places = torch.cat([order + 4 * request for request in range(3)])
    for name in ("mean", "bonus", "phi", "group_size"):
        close(getattr(mixed, name), getattr(straight, name)[places], 1e-10)


def test_arms_of_requests_may_alternate() -> None:
    """Nothing says that the arms of a request stand side by side in a query."""
    scene = scene_of()
    learner = PosteriorLearner(scene.settings, 3, torch.float64)
    pool, query = fitted(learner, scene.shared, scene.pool), query_of(scene, learner, scene.shared)
    straight = learner.score(scene.shared, pool, query)
    order = torch.arange(12).view(3, 4).T.flatten()
    mixed = learner.score(scene.shared, pool, replace(query, arms=query.arms[order], request=query.request[order]))
    close(mixed.mean, straight.mean[order], 1e-10)
    close(mixed.bonus, straight.bonus[order], 1e-10)
    assert mixed.group_size.tolist() == straight.group_size[order].tolist()


def test_scoring_in_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = answered(scene_of())
    monkeypatch.setattr(models.judging, "KERNEL_NUMBERS_MAX", 5 * 4 * 3)  # Five arms of 4 samples of 3 numbers.
    parts = answered(scene_of())
    close(parts.mean, whole.mean, 1e-10)
    close(parts.bonus, whole.bonus, 1e-10)


def test_the_askers_row_in_the_pool_is_not_read() -> None:
    """They count as a member with the state the query brings, however old the row is."""
    scene = scene_of()
    learner = PosteriorLearner(scene.settings, 3, torch.float64)
    pool, query = fitted(learner, scene.shared, scene.pool), query_of(scene, learner, scene.shared)
    expected = learner.score(scene.shared, pool, query)
    stale = {name: value.clone() for name, value in pool.items()}
    for value in stale.values():
        value[2] = 100.0
    scores = learner.score(scene.shared, stale, query)
    first = query.request == 0  # the request of that user
    assert scores.group_size[first].tolist() == expected.group_size[first].tolist()
    assert scores.mean.tolist() == expected.mean.tolist()


def test_a_user_who_learned_knows_more_than_a_stranger() -> None:
    """The bonus on an arm falls with every reward seen for it, and the mean nears the rewards."""
    learner = PosteriorLearner(small(memory=False), 3, torch.float64)
    shared = taught(learner, kinds(learner, 20, 10, generator_of(1)))
    arm = torch.tensor([[0.5, -1.0, 0.3]], dtype=torch.float64)
    bonuses, misses = [], []
    for count in (0, 1, 4, 16, 64):
        notes = torch.zeros(count, learner.noted, dtype=torch.float64)
        asker = Past(arm.expand(count, -1), torch.full((count,), 0.9, dtype=torch.float64), notes)
        scores = answered(Scene(learner.settings, 3, shared | {"trunk": 0 * shared["trunk"]}, [], [(asker, -1, arm)]))
        bonuses.append(scores.bonus.item())
        misses.append(abs(scores.mean.item() - 0.9))
    assert bonuses == sorted(bonuses, reverse=True)
    assert bonuses[-1] < 0.5 * bonuses[0]
    assert misses[-1] < 0.1 < misses[0]


def test_a_group_spread_may_change_under_stored_groups() -> None:
    """It is no part of the structure: what groups say to a stranger, Σ weight·centre, does not depend on it."""
    scene = scene_of()
    stranger = replace(scene, requests=[scene.requests[1]], shared=scene.shared | {"guard": torch.ones(()).double()})
    wider = replace(stranger, settings=replace(scene.settings, group_spread=2 * scene.settings.group_spread))
    close(answered(wider).mean, answered(stranger).mean, 1e-8)


# ---------------------------------------------------------------------- users


def test_a_fit_depends_on_the_samples_alone() -> None:
    """Not on who stands beside, on the padding, on the state before, or on what the trunk says today."""
    learner = PosteriorLearner(small(), 3, torch.float64)
    generator = generator_of(2)
    shared = taught(learner, kinds(learner, 10, 6, generator))
    people = [past(learner, count, generator) for count in (2, 7, 0, 4)]
    together = fitted(learner, shared, people)
    for row, person in enumerate(people):
        if person.rewards.shape[0]:
            batch = batch_of([person], padding=3)
            before = {name: torch.full((1, *shape), 9.0, dtype=torch.float64) for name, shape in learner.fields.items()}
            alone = learner.fit(shared | {"trunk": shared["trunk"] + 1}, batch, before)
            for name in learner.fields:
                close(alone[name][0], together[name][row], 1e-10)


@pytest.mark.parametrize("groups", [False, True])
def test_fitting_nothing_is_being_newborn(groups: bool) -> None:
    learner = PosteriorLearner(small(groups=groups), 3, torch.float64)
    shared = taught(learner, kinds(learner, 10, 6, generator_of(2)), **({"guard": 1.0} if groups else {}))
    newborn = learner.newborn(shared)
    assert {name: tuple(value.shape) for name, value in newborn.items()} == learner.fields
    states = learner.fit(shared, batch_of([past(learner, 0, generator_of(0))] * 2, padding=3), {})
    for name in learner.fields:
        close(states[name], newborn[name].expand(2, *newborn[name].shape), 1e-10)


def test_order_matters_only_to_what_is_kept() -> None:
    learner = PosteriorLearner(small(memory_samples=5), 3, torch.float64)
    generator = generator_of(3)
    shared = taught(learner, kinds(learner, 10, 6, generator), gain=1.0, guard=0.5)
    arms = single(torch.randn(3, 3, generator=generator, dtype=torch.float64))
    for count, same in ((5, True), (9, False)):
        person = past(learner, count, generator)
        order = torch.arange(count).flip(0)
        mirrored = Past(person.features[order], person.rewards[order], person.phi[order])
        one, other = (fitted(learner, shared, [who]) for who in (person, mirrored))
        for name in ("gram", "moment", "head"):
            close(one[name], other[name], 1e-10)
        arms[0] = person.features[0]  # remembered in one order only, unless all are kept
        scores = [
            answered(Scene(learner.settings, 3, shared, [], [(who, -1, arms)])).mean for who in (person, mirrored)
        ]
        assert torch.allclose(scores[0], scores[1], atol=1e-10) == same


# ---------------------------------------------------------------------- epochs


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


def test_deriving_twice_gives_the_same() -> None:
    learner = PosteriorLearner(small(), 3)
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


def test_an_epoch_of_nobody_changes_nothing() -> None:
    learner = PosteriorLearner(small(), 3)
    shared = learner.initial_shared()
    derived = learner.derive(shared, [], 0, 512)
    assert all(torch.equal(derived[name], shared[name]) for name in shared)


def test_users_in_one_batch_or_in_several_teach_the_same() -> None:
    learner = PosteriorLearner(small(), 3, torch.float64)
    teachers = kinds(learner, 12, 8, generator_of(6))
    # An epoch after the first, whose standardisation draws outliers in batch by batch.
    shared = learner.derive(learner.initial_shared(), [batch_of(teachers)], 0, 16)
    whole = learner.derive(shared, [batch_of(teachers)], 300, 364)
    parts = learner.derive(shared, [batch_of(teachers[:5]), batch_of(teachers[5:], padding=2)], 300, 364)
    for name in whole:
        close(parts[name], whole[name], 1e-8)


def test_between_refits_inputs_stay_as_they_are() -> None:
    learner = PosteriorLearner(small(head_inputs_max=2, head_directions=2), 3)
    batch = batch_of(kinds(learner, 12, 8, generator_of(7)), torch.float32)
    shared = learner.derive(learner.initial_shared(), [batch], 0, 300)
    later = learner.derive(shared, [replace(batch, features=batch.features * 3 + 1)], 300, 364)
    for name in ("mean", "scale", "edges", "directions", "gain"):
        assert torch.equal(later[name], shared[name])
    assert not torch.equal(later["trunk"], shared["trunk"])
    refitted = learner.derive(shared, [replace(batch, features=batch.features * 3 + 1)], 500, 512)
    for name in ("mean", "scale"):
        assert not torch.equal(refitted[name], shared[name])


def test_standardised_inputs_have_no_mean_and_unit_deviation() -> None:
    learner = PosteriorLearner(small(), 3, torch.float64)
    people = kinds(learner, 30, 8, generator_of(8))
    for person in people:
        person.features = person.features * torch.tensor([5.0, 0.01, 1.0]) + torch.tensor([100.0, 0.0, -3.0])
    shared = learner.derive(learner.initial_shared(), [batch_of(people)], 0, 16)
    z = learner.standardized(shared, torch.cat([person.features for person in people]))
    close(z.mean(0), torch.zeros(3), 1e-8)
    close(z.std(0, correction=0), torch.ones(3), 1e-8)


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
    others[..., 3:] = 1 - others[..., 3:]
    one, other = (learner.derive(shared, [replace(batch, phi=phi)], 0, 512) for phi in (batch.phi, others))
    assert not torch.allclose(one["trunk"], other["trunk"])
    for name in ("prior_mean", "prior_covariance", "noise", "group_pull", "guard", "gain"):
        assert torch.equal(one[name], other[name])


def test_the_trunk_learns_what_kinds_of_users_want() -> None:
    """Rewards that depend on who asks and on the arm together, which the arm alone does not tell."""
    learner = PosteriorLearner(small(width=32, epoch_steps_max=400, replayed=64, trunk_rate=0.01, heads=False), 1)
    generator = generator_of(14)
    features = torch.randn(40, 20, 1, generator=generator)
    kind = torch.where(torch.arange(40) % 2 == 0, 1.0, -1.0)
    batch = batch_of([past(learner, 20, generator)] * 40, torch.float32)
    batch = replace(batch, features=features, rewards=(features[..., 0] * kind.unsqueeze(-1) > 0).float())
    batch.phi[...] = 0.0
    batch.phi[..., 4] = kind.unsqueeze(-1)  # after three predictions, the coefficients of the constant and of x
    shared = learner.derive(learner.initial_shared(), [batch], 0, 2_000)
    assert learner.noted == 5
    own = {name: torch.stack([value, value]) for name, value in learner.newborn(shared).items()}
    deviation = shared["prior_covariance"][1, 1].sqrt().float()
    own["head"][:, 1] = shared["prior_mean"][1].float() + deviation * torch.tensor([1.0, -1.0])
    query = Query(
        arms=torch.tensor([[1.0], [-1.0], [1.0], [-1.0]]),
        request=torch.tensor([0, 0, 1, 1]),
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
    batch.phi[..., 1] = batch.rewards + alone
    batch.phi[..., 2] = batch.rewards - together
    return learner.derive(learner.initial_shared(), [batch], 0, 512)["guard"]


def test_groups_are_believed_as_far_as_they_foresaw_better() -> None:
    assert foreseen(0.5, 0.0) > 0.99
    assert foreseen(0.0, 0.5) < 0.01
    close(foreseen(0.3, 0.3), 0.5, 1e-9)
    assert 0.5 < foreseen(0.03, 0.029) < 0.99


def test_only_the_newer_half_of_what_groups_foresaw_counts() -> None:
    learner = PosteriorLearner(small(), 3, torch.float64)
    batch = batch_of(kinds(learner, 12, 20, generator_of(10)), padding=7)
    batch.phi[..., 1:3] = batch.rewards.unsqueeze(-1)
    batch.phi[:, :10, 2] += 5.0  # when there was little to go by
    batch.phi[:, 10:, 1] += 0.5
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
    _, voices = groups_of(learner.settings, learner.derive(learner.initial_shared(), [batch], 0, 512))
    np.testing.assert_allclose(voices, [2 / 7] * 256)


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
        people.append(Past(arms[chosen], rewards, torch.zeros(40, learner.noted, dtype=torch.float64)))
    return learner.derive(learner.initial_shared(), [batch_of(people)], 0, 512)


def test_the_memory_is_believed_where_arms_earn_the_same_again() -> None:
    assert repeating(repeats=True)["gain"] >= 1.0
    assert repeating(repeats=False)["gain"] <= 0.05


# ---------------------------------------------------------------------- extremes


def extreme(name: str, learner: PosteriorLearner) -> list[Past]:
    """Populations that break careless arithmetic."""
    generator = generator_of(13)
    people = kinds(learner, 6, 8, generator)
    for person in people:
        if name == "huge":
            person.features[:, 0] *= 1e30
        elif name == "one absurd value":
            person.features[0, 0] = 1e30
        elif name == "tiny":
            person.features[:, 0] *= 1e-30
        elif name == "constant column":
            person.features[:, 0] = 5.0
        elif name == "all columns constant":
            person.features[:] = 1e6
        elif name == "all zero rewards":
            person.rewards[:] = 0.0
        elif name == "all one rewards":
            person.rewards[:] = 1.0
        elif name == "equal columns":
            person.features[:] = person.features[:, :1]
        elif name == "exact rewards":
            person.rewards[:] = person.features[:, 0].clamp(-1, 1) / 2 + 0.5
    if name == "one user":
        return people[:1]
    if name == "one sample":
        return [Past(people[0].features[:1], people[0].rewards[:1], people[0].phi[:1])]
    if name == "one arm over and over":
        return [
            Past(person.features[:1].repeat(500, 1), person.rewards[:1].repeat(500), person.phi[:1].repeat(500, 1))
            for person in people
        ]
    return people


EXTREMES = [
    "huge", "one absurd value", "tiny", "constant column", "all columns constant", "all zero rewards",
    "all one rewards", "equal columns", "exact rewards", "one user", "one sample", "one arm over and over",
]  # fmt: skip


@BOTH
@pytest.mark.parametrize("chosen", [small(), small(head_inputs_max=2, head_directions=2)], ids=["all", "narrowed"])
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
        request=torch.zeros(arms.shape[0], dtype=torch.int64),
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
