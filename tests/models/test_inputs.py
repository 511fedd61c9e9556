"""What trunk and heads see of an arm, and how a refit changes it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from models.posterior import PosteriorLearner
from tests.models.literal_posterior import literal_ratio
from tests.models.posterior_worlds import (
    WIDE,
    as_array,
    batch_of,
    generator_of,
    kinds,
    related,
    shown_of,
    small,
)
from tests.models.worlds import close

BOTH = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
WIDTHS = pytest.mark.parametrize("changes", [{}, WIDE], ids=["narrow", "wide"])


def test_between_refits_inputs_stay_as_they_are() -> None:
    learner = PosteriorLearner(small(**WIDE), 3)
    people = related(learner, 12, 8, generator_of(7), torch.full((3,), 2.0))
    batch = batch_of(people, torch.float32)
    shared = learner.derive(learner.initial_shared(), [batch], 0, 300)
    notes = batch.phi.clone()
    learner.offer(notes)[..., 1:] += 1
    changed = replace(batch, features=batch.features * 3 + 1, phi=notes)
    later = learner.derive(shared, [changed], 300, 364)
    for name in ("mean", "scale", "edges", "directions", "gain", "common_ratio", "common_centre"):
        assert torch.equal(later[name], shared[name])
    assert not torch.equal(later["trunk"], shared["trunk"])
    refitted = learner.derive(shared, [changed], 500, 512)
    for name in ("mean", "scale", "common_ratio", "common_centre"):
        assert not torch.equal(refitted[name], shared[name])


@pytest.mark.parametrize("changes", [{}, WIDE, {**WIDE, "apart": False}], ids=["narrow", "wide", "wide, not apart"])
def test_standardised_inputs_have_no_mean_and_unit_deviation(changes: dict[str, int]) -> None:
    """Of wide inputs, what is left without the common part: that is what the learner sees."""
    learner = PosteriorLearner(small(**changes), 3, torch.float64)
    generator = generator_of(8)
    shared_part = torch.full((3,), 2.0)
    people = (
        related(learner, 30, 8, generator, shared_part) if learner.inputs.apart else kinds(learner, 30, 8, generator)
    )
    for person in people:
        for values in shown_of(learner, person):
            values *= torch.tensor([5.0, 0.01, 1.0])
            values += torch.tensor([100.0, 0.0, -3.0])
    shared = learner.derive(learner.initial_shared(), [batch_of(people)], 0, 16)
    features, notes = (torch.cat([getattr(person, name) for person in people]) for name in ("features", "phi"))
    z = learner.inputs.standardized(shared, features, learner.offer(notes))
    close(z.mean(0), torch.zeros(3), 1e-8)
    close(z.std(0, correction=0), torch.ones(3), 1e-8)
    as_they_came = (features - features.mean(0)) / features.std(0, correction=0)
    assert torch.allclose(z, as_they_came, atol=1e-6) != learner.inputs.apart
    close(shared["edges"][:, 0], z.amin(0), 1e-8)
    close(shared["edges"][:, -1], z.amax(0), 1e-8)
    if learner.inputs.narrowed:
        seen = z @ shared["directions"]
        close(seen.mT @ seen / len(z), torch.eye(2), 1e-8)


def test_new_directions_show_samples_as_much_like_the_old_as_they_can() -> None:
    """As they were seen then, with what was common then: turning them any further would lose likeness."""
    learner = PosteriorLearner(small(**WIDE), 3, torch.float64)
    ratio = torch.tensor([0.2, 3.0, 1.0], dtype=torch.float64)
    people = related(learner, 30, 8, generator_of(21), ratio)
    before = learner.derive(learner.initial_shared(), [batch_of(people)], 0, 16)
    people += related(learner, 20, 8, generator_of(22), ratio.flip(0))
    after = learner.derive(before, [batch_of(people)], 16, 32)
    features, notes = (torch.cat([getattr(person, name) for person in people]) for name in ("features", "phi"))
    old, new = (
        learner.inputs.standardized(shared, features, learner.offer(notes)) @ shared["directions"]
        for shared in (before, after)
    )
    likeness = new.mT @ old  # of all rotations, the best makes this symmetric and positive
    close(likeness, likeness.mT, 1e-8)
    assert torch.linalg.eigvalsh(likeness).min() > 0


@BOTH
def test_a_refit_finds_what_arms_have_in_common(dtype: torch.dtype) -> None:
    """From all samples, by what each counts, and near the truth."""
    learner = PosteriorLearner(small(**WIDE), 4, dtype)
    truth = torch.tensor([0.0, 0.5, 4.0, 30.0], dtype=torch.float64)
    people = related(learner, 60, 40, generator_of(17), truth)
    since = 2
    shared = learner.initial_shared() | {"since": torch.tensor(float(since), dtype=torch.float64)}
    batches = [batch_of(people[:20], dtype), batch_of(people[20:], dtype, padding=3)]
    derived = learner.derive(shared, batches, 0, 2_400)
    assert derived["since"] == since
    features, notes = (torch.cat([getattr(person, name) for person in people]) for name in ("features", "phi"))
    epochs = torch.cat([person.epochs for person in people]).tolist()
    weights = [1.0 if epoch >= since else 0.05 for epoch in epochs]
    ratio, centre = literal_ratio(as_array(features), as_array(learner.offer(notes)), weights)
    tolerance = 1e-8 if dtype == torch.float64 else 1e-5
    close(derived["common_ratio"], torch.tensor(ratio, dtype=torch.float64), tolerance)
    close(derived["common_centre"], torch.tensor(centre, dtype=torch.float64), tolerance)
    assert derived["common_ratio"].dtype == derived["common_centre"].dtype == dtype
    # Half of 2 400 samples count: errors of (τ² + σ²/k)/σ² are about √(4/1 200) of it.
    away = (derived["common_ratio"].double() - truth) / (truth + 0.5)
    assert away.abs().max() < 4 * (4 / 1_200) ** 0.5


def test_wide_inputs_that_were_alone_on_offer_stay_as_they_are() -> None:
    """Nothing tells what of such an arm is its own: the epoch is that of a learner that takes nothing out."""
    learner = PosteriorLearner(small(**WIDE), 3, torch.float64)
    people = kinds(learner, 12, 8, generator_of(18))
    for person in people:
        learner.offer(person.phi)[:] = torch.cat([torch.ones(8, 1), person.features], dim=1)
    derived = learner.derive(learner.initial_shared(), [batch_of(people)], 0, 512)
    assert not derived["common_ratio"].any()
    unaware = PosteriorLearner(small(apart=False, **WIDE), 3, torch.float64)
    for person in people:
        person.phi = person.phi[:, : learner.offered_from]
    expected = unaware.derive(unaware.initial_shared(), [batch_of(people)], 0, 512)
    assert set(derived) - set(expected) == {"common_ratio", "common_centre"}
    for name in expected:
        assert torch.equal(derived[name], expected[name])


def test_an_offer_is_not_who_asks() -> None:
    """Notes of it reach trunk and heads through what is taken out of arms only: where that is nothing, not at all."""
    learner = PosteriorLearner(small(**WIDE), 3, torch.float64)
    shared = learner.initial_shared()
    batch = batch_of(kinds(learner, 12, 8, generator_of(19)))
    other = batch.phi.clone()
    learner.offer(other)[..., 1:] += torch.randn(12, 8, 3, generator=generator_of(20), dtype=torch.float64)
    assert not shared["common_ratio"].any()  # and it stays so between refits
    one, same = (learner.derive(shared, [replace(batch, phi=phi)], 300, 364) for phi in (batch.phi, other))
    for name in one:
        assert torch.equal(one[name], same[name])
    shared["common_ratio"] += 1
    one, another = (learner.derive(shared, [replace(batch, phi=phi)], 300, 364) for phi in (batch.phi, other))
    for name in ("trunk", "prior_mean", "prior_covariance"):
        assert not torch.allclose(one[name], another[name])
