"""The default learner against its literal version, and its guarantees about samples, epochs and groups."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given

from metaban.models.default.learner import PosteriorLearner
from metaban.models.default.notes import Notes
from tests.models.default_worlds import (
    WIDE,
    Scene,
    UserHistory,
    as_array,
    as_stored_by,
    batch_of,
    epoch_with_kinds,
    fast_scores,
    fitted,
    generator_of,
    kinds,
    literal_of,
    query_of,
    random_history,
    samples_of,
    scenes,
    selected_samples,
    small,
    with_common_part,
    with_known_arms,
)
from tests.models.literal_default import shown
from tests.models.properties import PROPERTY
from tests.models.worlds import assert_close, rounded_to_float32

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
#: A distance this close to the threshold may fall on either side.
TIE = {torch.float64: 1e-10, torch.float32: 1e-4}
BOTH = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
WIDTHS = pytest.mark.parametrize("changes", [{}, WIDE], ids=["narrow", "wide"])


def check_against_literal(scene: Scene, dtype: torch.dtype) -> None:
    """Compare every arm's mean, bonus, notes and agreeing users with the literal ones."""
    learner = scene.learner(dtype)
    shared = as_stored_by(learner, scene.shared)
    pool, query = fitted(learner, shared, scene.pool), query_of(scene, learner, shared)
    scores = learner.score(shared, pool, query)
    assert scores.mean.dtype == scores.bonus.dtype == scores.phi.dtype == dtype
    assert scores.group_size.dtype == torch.int64
    # A pool of one user shows whether that user agrees.
    agreeing = []
    for row in range(len(scene.pool)):
        rows = torch.where(query.own_row == row, 0, -1)
        only = {name: value[row : row + 1] for name, value in pool.items()}
        agreeing.append(learner.score(shared, only, replace(query, own_row=rows)).group_size - 1)
    literal = literal_of(learner, scene.shared)
    heads = [literal.head(samples_of(person)) for person in scene.pool]
    index = 0
    for request, ((asker, own_row, arms), stored) in enumerate(
        zip(scene.requests, as_array(query.own["head"]), strict=True)
    ):
        for offered in shown(list(arms.numpy()), scene.keys_of(request)):
            arm = literal.score(offered, samples_of(asker), stored, heads, own_row)
            assert_close(scores.mean[index], arm.mean, TOLERANCE[dtype])
            # A square root is steep near 0 and magnifies the rounding of its argument.
            assert_close(scores.bonus[index].double().square(), arm.bonus**2, TOLERANCE[dtype])
            assert_close(scores.phi[index], torch.tensor(arm.noted, dtype=torch.float64), TOLERANCE[dtype])
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
def test_scores_equal_the_literal_ones(scene: Scene) -> None:
    check_against_literal(scene, torch.float64)


@PROPERTY
@given(scene=scenes())
def test_scores_in_float32_equal_the_literal_ones(scene: Scene) -> None:
    check_against_literal(scene, torch.float32)


@PROPERTY
@given(scene=scenes(wide=True))
def test_scores_of_wide_inputs_equal_the_literal_ones(scene: Scene) -> None:
    check_against_literal(scene, torch.float64)


@PROPERTY
@given(scene=scenes(wide=True))
def test_scores_of_wide_inputs_in_float32_equal_the_literal_ones(scene: Scene) -> None:
    check_against_literal(scene, torch.float32)


@BOTH
@pytest.mark.parametrize("since", [0.0, 2.0])
@pytest.mark.parametrize(
    "changes",
    [{}, {"kinds": False}, {"memory_samples": 2}, WIDE, {"apart": False, **WIDE}],
    ids=lambda changes: next(iter(changes), "all"),
)
@pytest.mark.parametrize("catalogue", [0, 4], ids=["no ids", "ids"])
def test_fitted_users_equal_the_literal_ones(
    changes: dict[str, int], since: float, dtype: torch.dtype, catalogue: int
) -> None:
    learner = PosteriorLearner(small(**changes), 3, dtype)
    generator = generator_of(4)
    shared = epoch_with_kinds(learner, kinds(learner, 8, 6, generator), since=since)
    shared = with_common_part(learner, shared, generator)
    if catalogue:
        shared = with_known_arms(shared, generator, catalogue)
    people = [random_history(learner, count, generator, catalogue=catalogue) for count in (0, 1, 3, 4, 9)]
    states = fitted(learner, shared, people)
    assert {name: tuple(value.shape[1:]) for name, value in states.items()} == learner.fields
    assert all(value.dtype == dtype for value in states.values())
    literal = literal_of(learner, shared)
    for row, person in enumerate(people):
        samples = samples_of(person)
        gram, moment = literal.statistics(samples)
        triangle = gram[np.triu_indices(learner.head_size)]
        np.testing.assert_allclose(as_array(states["gram"][row]), triangle, rtol=1e-5, atol=TOLERANCE[dtype])
        np.testing.assert_allclose(as_array(states["moment"][row]), moment, rtol=1e-5, atol=TOLERANCE[dtype])
        np.testing.assert_allclose(as_array(states["head"][row]), literal.head(samples), atol=TOLERANCE[dtype])
        kept = literal.kept(samples)
        assert not states["kept_weights"][row, len(kept) :].any()
        for place, sample in enumerate(kept):
            assert_close(states["kept_weights"][row, place], literal.weight(sample), TOLERANCE[dtype])
            h = literal.h(sample.arm, sample.noted)
            seen = h[1 : 1 + learner.inputs.seen]
            np.testing.assert_allclose(as_array(states["kept_arms"][row, place]), seen, atol=TOLERANCE[dtype])
            residual = literal.target(sample) - h @ literal.head(samples)
            assert_close(states["kept_residuals"][row, place], residual, TOLERANCE[dtype])


# ---------------------------------------------------------------------- requests


def scene_of(seed: int = 0, users: int = 6, **changes: object) -> Scene:
    """A fixed scene with groups, memory and agreement."""
    generator = generator_of(seed)
    learner = PosteriorLearner(small(**changes), 3, torch.float64)
    teachers = kinds(learner, 12, 8, generator)
    shared = with_common_part(learner, epoch_with_kinds(learner, teachers, gain=1.0), generator)
    pool = [random_history(learner, 1 + user % 4, generator) for user in range(users)]
    requests = []
    for asker, row in (
        (pool[2], 2),
        (random_history(learner, 0, generator), -1),
        (random_history(learner, 5, generator), -1),
    ):
        arms = rounded_to_float32(torch.randn(4, 3, generator=generator, dtype=torch.float64))
        arms[0] = asker.features[0] if asker.features.shape[0] else arms[0]
        requests.append((asker, row, arms))
    return Scene(learner.settings, 3, shared, pool, requests)


@WIDTHS
def test_batched_requests_equal_single_requests(changes: dict[str, int]) -> None:
    scene = scene_of(**changes)
    together, start = fast_scores(scene), 0
    for request in scene.requests:
        alone = fast_scores(replace(scene, requests=[request]))
        stop = start + request[2].shape[0]
        for name in ("mean", "bonus", "phi", "group_size"):
            assert_close(getattr(together, name)[start:stop], getattr(alone, name), 1e-10)
        start = stop


@WIDTHS
def test_arms_in_another_order_have_the_same_scores(changes: dict[str, int]) -> None:
    scene = scene_of(**changes)
    straight = fast_scores(scene)
    order = torch.tensor([3, 1, 0, 2])
    mixed = fast_scores(replace(scene, requests=[(asker, row, arms[order]) for asker, row, arms in scene.requests]))
    places = torch.cat([order + 4 * request for request in range(3)])
    for name in ("mean", "bonus", "phi", "group_size"):
        assert_close(getattr(mixed, name), getattr(straight, name)[places], 1e-10)


def test_the_asking_users_row_in_the_pool_is_ignored() -> None:
    """The asking user counts as a member with the state in the query; an old row in the pool is ignored."""
    scene = scene_of()
    learner = scene.learner(torch.float64)
    pool, query = fitted(learner, scene.shared, scene.pool), query_of(scene, learner, scene.shared)
    expected = learner.score(scene.shared, pool, query)
    stale = {name: value.clone() for name, value in pool.items()}
    for value in stale.values():
        value[2] = 100.0
    scores = learner.score(scene.shared, stale, query)
    first = query.request == 0  # the request of that user
    assert scores.group_size[first].tolist() == expected.group_size[first].tolist()
    assert scores.mean.tolist() == expected.mean.tolist()


def test_rewards_lower_the_bonus_and_move_the_mean() -> None:
    """The bonus of an arm falls with every reward for it, and the mean approaches the rewards."""
    learner = PosteriorLearner(small(memory=False, kinds=False), 3, torch.float64)
    shared = epoch_with_kinds(learner, kinds(learner, 20, 10, generator_of(1)))
    arm = torch.tensor([[0.5, -1.0, 0.3]], dtype=torch.float64)
    bonuses, misses = [], []
    for count in (0, 1, 4, 16, 64):
        notes = torch.zeros(count, learner.noted, dtype=torch.float64)
        rewards = torch.full((count,), 0.9, dtype=torch.float64)
        asker = UserHistory(arm.expand(count, -1), rewards, notes, torch.zeros(count, dtype=torch.int64))
        scores = fast_scores(
            Scene(learner.settings, 3, shared | {"trunk": 0 * shared["trunk"]}, [], [(asker, -1, arm)])
        )
        bonuses.append(scores.bonus.item())
        misses.append(abs(scores.mean.item() - 0.9))
    assert bonuses == sorted(bonuses, reverse=True)
    assert bonuses[-1] < 0.5 * bonuses[0]
    assert misses[-1] < 0.1 < misses[0]


# ---------------------------------------------------------------------- common part of slates


@pytest.mark.parametrize(("inputs", "apart"), [(2, True), (2, False), (3, True), (3, False)])
def test_the_slate_is_noted_for_wide_inputs_only(inputs: int, apart: bool) -> None:
    learner = PosteriorLearner(small(apart=apart, **WIDE), inputs)
    looked_at = apart and inputs == 3  # WIDE begins here
    assert learner.inputs.removes_common == looked_at
    assert learner.noted - Notes.COUNT == (1 + inputs) * looked_at
    tensors = {"common_ratio", "common_centre"}
    assert tensors & set(learner.initial_shared()) == (tensors if looked_at else set())


def test_without_a_common_part_inputs_are_unchanged() -> None:
    """Until the first refit, and where arms have nothing in common, wide inputs are unchanged, bit for bit."""
    scene = scene_of(**WIDE)
    scene.shared["common_ratio"] = torch.zeros(3, dtype=torch.float64)
    without = {name: value for name, value in scene.shared.items() if not name.startswith("common")}
    unaware = replace(scene, settings=replace(scene.settings, apart=False), shared=without)
    one, other = fast_scores(scene), fast_scores(unaware)
    for name in ("mean", "bonus", "group_size"):
        assert torch.equal(getattr(one, name), getattr(other, name))
    assert torch.equal(one.phi[:, : other.phi.shape[1]], other.phi)


def moved_scene(scene: Scene, by: torch.Tensor) -> Scene:
    """The same scene with all arms of every request moved by a vector [d]; the users' memory is unchanged."""
    return replace(scene, requests=[(asker, row, arms + by) for asker, row, arms in scene.requests])


def test_a_shift_of_the_slate_is_seen_by_a_known_share() -> None:
    """x + v − ρ·(x̄ + v − m) equals x − ρ·(x̄ − m) + v/(1 + k·τ²/σ²), as a learner without common parts sees it."""
    scene = scene_of(**WIDE)
    ratio = torch.tensor([0.0, 0.4, 7.0], dtype=torch.float64)
    centre = torch.tensor([0.3, -2.0, 0.5], dtype=torch.float64)
    scene.shared |= {"common_ratio": ratio, "common_centre": centre}
    by = torch.tensor([0.2, -0.7, 1.1], dtype=torch.float64)
    learner = scene.learner(torch.float64)
    pool, query = fitted(learner, scene.shared, scene.pool), query_of(scene, learner, scene.shared)
    scores = learner.score(scene.shared, pool, replace(query, arms=query.arms + by))
    arms = []
    for _, _, offered in scene.requests:
        rest = 1 / (1 + offered.shape[0] * ratio)
        arms.append(offered - (1 - rest) * (offered.mean(0) - centre) + rest * by)
    unaware = PosteriorLearner(replace(scene.settings, apart=False), 3, torch.float64)
    expected = unaware.score(scene.shared, pool, replace(query, arms=torch.cat(arms)))
    for name in ("mean", "bonus", "group_size"):
        assert_close(getattr(scores, name), getattr(expected, name), 1e-10)
    assert_close(scores.phi[:, : Notes.COUNT], expected.phi, 1e-10)


@pytest.mark.parametrize("arms", [1, 4])
@pytest.mark.parametrize("ratio", [0.25, 3.0, 1e12])
def test_a_linear_head_sees_less_of_a_shift_the_more_arms_share(ratio: float, arms: int) -> None:
    """The mean moves by 1/(1 + k·τ²/σ²) of the shift seen without common parts."""
    scene = scene_of(1, trunk=False, kinds=False, memory=False, products_max=0, **WIDE)
    scene = replace(scene, requests=[(asker, row, shelf[:arms]) for asker, row, shelf in scene.requests])
    learner = scene.learner(torch.float64)
    # Users are fitted once: only the view of new arms is compared, not what was learned.
    pool, query = fitted(learner, scene.shared, scene.pool), query_of(scene, learner, scene.shared)
    richer = replace(query, arms=query.arms + torch.tensor([0.2, -0.3, 0.4], dtype=torch.float64))

    def gained(common_ratio: float) -> torch.Tensor:
        shared = scene.shared | {"common_ratio": torch.full((3,), common_ratio, dtype=torch.float64)}
        return learner.score(shared, pool, richer).mean - learner.score(shared, pool, query).mean

    assert gained(0.0).abs().min() > 1e-3
    assert_close(gained(ratio), gained(0.0) / (1 + arms * ratio), 1e-9)


@pytest.mark.parametrize("heads", [True, False])
def test_when_nearly_all_is_common_only_differences_between_arms_count(heads: bool) -> None:
    """With every part of the learner on, a shift of all arms changes the notes and nothing else."""
    scene = scene_of(heads=heads, **WIDE)
    by = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    for ratio, minded in ((1e12, False), (0.0, True)):
        scene.shared["common_ratio"] = torch.full((3,), ratio, dtype=torch.float64)
        before, after = fast_scores(scene), fast_scores(moved_scene(scene, by))
        assert torch.allclose(before.mean, after.mean, rtol=0, atol=1e-8) != minded
        assert torch.allclose(before.bonus, after.bonus, rtol=0, atol=1e-8) != (minded and heads)
        assert_close(Notes(after.phi).slate[:, 1:] - Notes(before.phi).slate[:, 1:], by.expand(12, 3), 1e-10)


@BOTH
def test_a_sample_uses_the_slate_of_its_decision(dtype: torch.dtype) -> None:
    """From the slate noted at the decision; later epochs apply their common part to the same slate."""
    scene = scene_of(**WIDE)
    learner = scene.learner(dtype)
    arms, notes = torch.cat([shelf for _, _, shelf in scene.requests]), fast_scores(scene, dtype).phi
    later = with_common_part(learner, as_stored_by(learner, scene.shared), generator_of(99))
    assert not torch.equal(later["common_ratio"], as_stored_by(learner, scene.shared)["common_ratio"])
    offered = [arm for _, _, shelf in scene.requests for arm in shown(list(shelf.numpy()))]
    for shared in (as_stored_by(learner, scene.shared), later):
        literal = literal_of(learner, shared)
        for row, arm in enumerate(offered):
            person = UserHistory(
                arms[row : row + 1], torch.ones(1), notes[row : row + 1], torch.zeros(1, dtype=torch.int64)
            )
            found = fitted(learner, shared, [person])["kept_arms"][0, 0]
            expected = literal.h(arm, float(notes[row, 0]))[1 : 1 + learner.inputs.seen]
            np.testing.assert_allclose(as_array(found), expected, rtol=1e-4, atol=TOLERANCE[dtype])


# ---------------------------------------------------------------------- users


@WIDTHS
def test_a_fit_depends_on_the_samples_alone(changes: dict[str, int]) -> None:
    """Not on other users in the batch, the padding, the previous state or the current trunk."""
    learner = PosteriorLearner(small(**changes), 3, torch.float64)
    generator = generator_of(2)
    shared = with_common_part(learner, epoch_with_kinds(learner, kinds(learner, 10, 6, generator)), generator)
    people = [random_history(learner, count, generator) for count in (2, 7, 0, 4)]
    together = fitted(learner, shared, people)
    for row, person in enumerate(people):
        if person.rewards.shape[0]:
            batch = batch_of([person], padding=3)
            before = {name: torch.full((1, *shape), 9.0, dtype=torch.float64) for name, shape in learner.fields.items()}
            alone = learner.fit(shared | {"trunk": shared["trunk"] + 1}, batch, before)
            for name in learner.fields:
                assert_close(alone[name][0], together[name][row], 1e-10)


@pytest.mark.parametrize("several", [False, True])
def test_fitting_without_samples_gives_the_initial_state(several: bool) -> None:
    learner = PosteriorLearner(small(kinds=several), 3, torch.float64)
    shared = epoch_with_kinds(learner, kinds(learner, 10, 6, generator_of(2)))
    initial_user = learner.initial_user(shared)
    assert {name: tuple(value.shape) for name, value in initial_user.items()} == learner.fields
    states = learner.fit(shared, batch_of([random_history(learner, 0, generator_of(0))] * 2, padding=3), {})
    for name in learner.fields:
        assert_close(states[name], initial_user[name].expand(2, *initial_user[name].shape), 1e-10)


def test_sample_order_affects_only_the_kept_samples() -> None:
    learner = PosteriorLearner(small(memory_samples=5), 3, torch.float64)
    generator = generator_of(3)
    shared = epoch_with_kinds(learner, kinds(learner, 10, 6, generator), gain=1.0)
    arms = rounded_to_float32(torch.randn(3, 3, generator=generator, dtype=torch.float64))
    for count, same in ((5, True), (9, False)):
        person = random_history(learner, count, generator)
        order = torch.arange(count).flip(0)
        mirrored = selected_samples(person, order)
        one, other = (fitted(learner, shared, [who]) for who in (person, mirrored))
        for name in ("gram", "moment", "head"):
            assert_close(one[name], other[name], 1e-10)
        arms[0] = person.features[0]  # differs with the order, unless all samples are kept
        scores = [
            fast_scores(Scene(learner.settings, 3, shared, [], [(who, -1, arms)])).mean for who in (person, mirrored)
        ]
        assert torch.allclose(scores[0], scores[1], atol=1e-10) == same
