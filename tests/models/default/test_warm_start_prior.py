"""Warm starts of heads: their effect on the prior, and their conversion when inputs are standardised again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from metaban.models.default.arms import FACTORS
from metaban.models.default.learner import PosteriorLearner
from metaban.models.default.prior import prior_from_state
from metaban.models.default.shared_state import SharedState
from metaban.models.default.warm_start_prior import START_REACH, TRUST_MAX
from metaban.models.features import InputParts
from metaban.models.learner import State
from metaban.models.metaban.paper import PaperLearner
from metaban.models.numerics.arrays import as_arrays, symmetric
from metaban.models.settings import MetaBanSettings, PosteriorSettings
from tests.models.default_worlds import batch_of, generator_of, kinds

#: So many inputs that heads see only the first of them, which describe the arm.
WITH_CONTEXT, OF_ARM = 61, 4
#: So many hashed inputs that heads see the most active ones.
HASHED = 62
#: Inputs with products, without, and so many that heads see only principal directions or the arm's part.
WIDTHS = (3, 12, 60, WITH_CONTEXT, HASHED)


def build(inputs: int, **changes: object) -> PosteriorLearner:
    settings = replace(PosteriorSettings(memory_samples=4), **changes)
    parts = {WITH_CONTEXT: InputParts(inputs, OF_ARM, inputs - OF_ARM), HASHED: InputParts(inputs, inputs, hashed=True)}
    return PosteriorLearner(settings, parts.get(inputs, inputs), torch.float64)


def epoch_of_users(learner: PosteriorLearner, shared: State | None = None, seed: int = 0, events: int = 512) -> State:
    """An epoch from users of two tastes whose inputs are shifted and scaled."""
    people = kinds(learner, 12, 16, generator_of(seed))
    stretch = torch.linspace(0.5, 3, learner.input_size, dtype=torch.float64)
    people = [replace(person, features=person.features * stretch + seed + stretch) for person in people]
    return learner.derive(shared or learner.initial_shared(), [batch_of(people)], events // 2, events)


def start_of(learner: PosteriorLearner, shared: State, head: Tensor, trust: float) -> Tensor:
    raw = learner.starts.raw(shared, head)
    return torch.cat([raw, torch.full((len(raw), 1), trust, dtype=torch.float64)], 1)


def head_near(learner: PosteriorLearner, shared: State, count: int, seed: int) -> Tensor:
    """Heads drawn from the prior."""
    drawn = torch.randn(count, learner.head_size, generator=generator_of(seed), dtype=torch.float64)
    return shared["prior_mean"] + drawn @ torch.linalg.cholesky(shared["prior_covariance"]).mT


def inputs_of(learner: PosteriorLearner, shared: State, arms: Tensor, predicted: Tensor) -> Tensor:
    """h of raw arms, with no common part removed."""
    z = (arms - shared["mean"]) / shared["scale"]
    return learner.inputs.head_inputs(shared, z, predicted)


@pytest.mark.parametrize("trust", [0.05, 0.5, 0.9])
@pytest.mark.parametrize("inputs", WIDTHS)
def test_a_start_is_another_prior(inputs: int, trust: float) -> None:
    """Statistics of starts and samples under N(μ, Σ) against conditioning N(m, (1 − t)Σ) on the samples."""
    learner = build(inputs)
    shared = epoch_of_users(learner)
    prior = prior_from_state(shared)
    heads = head_near(learner, shared, 2, 1)
    people = kinds(learner, 2, 5, generator_of(7))
    batch = replace(batch_of(people), starts=start_of(learner, shared, heads, trust))
    states = learner.fit(shared, batch, {})
    found, covariance = prior.posterior(symmetric(states["gram"], learner.head_size), states["moment"])
    samples = learner.head_samples(SharedState.stored(shared), batch)
    h, targets = samples.inputs.numpy(), samples.targets.numpy()
    for user, head in enumerate(heads.numpy()):
        spread = (1 - trust) * shared["prior_covariance"].numpy()
        joint = h[user] @ spread  # covariance of rewards and coefficients
        of_rewards = joint @ h[user].T + float(prior.noise) * np.eye(5)
        gain = np.linalg.solve(of_rewards, joint).T
        expected = head + gain @ (targets[user] - h[user] @ head)
        np.testing.assert_allclose(found[user].numpy(), expected, rtol=1e-6, atol=1e-8)
        np.testing.assert_allclose(covariance[user].numpy(), spread - gain @ joint, rtol=1e-6, atol=1e-8)
        np.testing.assert_allclose(states["head"][user].numpy(), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("inputs", WIDTHS)
def test_without_samples_the_head_is_the_start(inputs: int) -> None:
    learner = build(inputs)
    shared = epoch_of_users(learner)
    heads = head_near(learner, shared, 3, 2)
    states = learner.warm_started(shared, start_of(learner, shared, heads, 0.6))
    gram = symmetric(states["gram"], learner.head_size)
    mean, covariance = prior_from_state(shared).posterior(gram, states["moment"])
    torch.testing.assert_close(mean, heads, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(covariance, (0.4 * shared["prior_covariance"]).expand_as(covariance))
    assert {name: tuple(value.shape[1:]) for name, value in states.items()} == learner.fields
    torch.testing.assert_close(states["head"], heads, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("inputs", WIDTHS)
def test_numpy_equals_torch(inputs: int) -> None:
    learner = build(inputs)
    shared = epoch_of_users(learner)
    starts = start_of(learner, shared, head_near(learner, shared, 3, 2), 0.6)
    batch = replace(batch_of(kinds(learner, 3, 5, generator_of(7))), starts=starts)
    plain = replace(batch, **{name: getattr(batch, name).numpy() for name in batch.__dataclass_fields__})
    for found, expected in (
        (learner.warm_started(as_arrays(shared), starts.numpy()), learner.warm_started(shared, starts)),
        (learner.fit(as_arrays(shared), plain, {}), learner.fit(shared, batch, {})),
    ):
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value.numpy(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("inputs", [3, 12, WITH_CONTEXT])
def test_a_start_predicts_the_same_after_a_new_standardisation(inputs: int) -> None:
    learner = build(inputs)
    before = epoch_of_users(learner)
    after = epoch_of_users(learner, before, seed=5, events=1_024)
    assert not torch.equal(before["mean"], after["mean"])
    heads = head_near(learner, before, 4, 3)
    raw = learner.starts.raw(before, heads)
    torch.testing.assert_close(learner.starts.heads(before, raw), heads)
    arms = 3 * torch.randn(9, inputs, generator=generator_of(4), dtype=torch.float64) + 2
    predicted = torch.rand(9, generator=generator_of(5), dtype=torch.float64)
    said = [
        inputs_of(learner, shared, arms, predicted) @ learner.starts.heads(shared, raw).mT for shared in (before, after)
    ]
    torch.testing.assert_close(said[1], said[0])


def test_coefficients_of_products_of_wide_inputs_are_kept() -> None:
    """Directions are rotated as little as possible, so products of two of them keep nearly the same meaning."""
    learner = build(60)
    before = epoch_of_users(learner)
    after = epoch_of_users(learner, before, seed=5, events=1_024)
    heads = head_near(learner, before, 4, 3)
    raw = learner.starts.raw(before, heads)
    assert raw.shape == (4, learner.start_size - 1)
    torch.testing.assert_close(learner.starts.heads(before, raw), heads)
    products = slice(1 + learner.inputs.seen, learner.inputs.trunk_column)
    assert heads[:, products].shape[1] == learner.inputs.products > 0
    assert torch.equal(learner.starts.heads(after, raw)[:, products], heads[:, products])


def test_wide_inputs_are_projected() -> None:
    """A linear start keeps its part within the old directions, and in new ones becomes the nearest they can express."""
    learner = build(60, products_max=0)
    before = epoch_of_users(learner)
    after = epoch_of_users(learner, before, seed=5, events=1_024)
    heads = head_near(learner, before, 4, 3)
    raw = learner.starts.raw(before, heads)
    torch.testing.assert_close(learner.starts.heads(before, raw), heads)
    # Least squares over many arms that vary like those the directions were computed from.
    values = 1 / after["directions"].square().sum(0)  # variances of the principal directions
    axes = after["directions"] * values.sqrt()
    drawn = torch.randn(20_000, len(values), generator=generator_of(1), dtype=torch.float64) * values.sqrt()
    z = drawn @ axes.mT
    arms, nothing = z * after["scale"] + after["mean"], torch.zeros(len(z), dtype=torch.float64)
    wanted = (inputs_of(learner, before, arms, nothing) @ heads.mT).numpy()
    end = learner.inputs.trunk_column
    h = inputs_of(learner, after, arms, nothing).numpy()[:, :end]
    best = np.linalg.lstsq(h, wanted, rcond=None)[0].T
    np.testing.assert_allclose(learner.starts.heads(after, raw)[:, :end].numpy(), best, atol=1e-6)


@pytest.mark.parametrize("inputs", WIDTHS)
def test_without_trust_a_user_has_the_initial_state(inputs: int) -> None:
    learner = build(inputs)
    shared = epoch_of_users(learner)
    starts = start_of(learner, shared, head_near(learner, shared, 1, 2), 0.0)
    for name, value in learner.warm_started(shared, starts).items():
        assert torch.equal(value[0], learner.initial_user(shared)[name])
    batch = batch_of(kinds(learner, 1, 5, generator_of(7)))
    for name, value in learner.fit(shared, replace(batch, starts=starts), {}).items():
        assert torch.equal(value, learner.fit(shared, batch, {})[name])


def test_learners_without_starts_ignore_them() -> None:
    learner = PaperLearner(MetaBanSettings(), 4)
    shared = learner.initial_shared()
    states = learner.warm_started(shared, torch.zeros(3, learner.start_size, dtype=torch.float64))
    for name, value in learner.initial_user(shared).items():
        assert states[name].shape == (3, *value.shape)
        assert torch.equal(states[name][2], value)


def test_many_events_outweigh_a_start() -> None:
    learner = build(3)
    shared = epoch_of_users(learner)
    wrong = start_of(learner, shared, head_near(learner, shared, 1, 8) + 1, 0.8)
    arms = learner.head_samples(SharedState.stored(shared), batch_of(kinds(learner, 1, 4_096, generator_of(3)))).inputs[
        0
    ]
    gaps = []
    for samples in (0, 8, 64, 4_096):
        batch = batch_of(kinds(learner, 1, samples, generator_of(3)))
        moved = learner.fit(shared, replace(batch, starts=wrong), {})["head"] - learner.fit(shared, batch, {})["head"]
        gaps.append(float((arms @ moved[0]).square().mean().sqrt()))
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < 0.1 * gaps[0]


def test_starts_do_not_change_shared_state() -> None:
    learner = build(3)
    batch = batch_of(kinds(learner, 12, 16, generator_of(0)))
    shared = learner.initial_shared()
    starts = start_of(learner, shared, head_near(learner, shared, 12, 2), 0.9)
    expected = learner.derive(shared, [batch], 256, 512)
    for name, value in learner.derive(shared, [replace(batch, starts=starts)], 256, 512).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("absurd", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_starts_are_ignored(absurd: float) -> None:
    learner = build(3)
    shared = epoch_of_users(learner)
    starts = start_of(learner, shared, head_near(learner, shared, 2, 2), 0.5)
    starts[0, 1] = absurd
    states = learner.warm_started(shared, starts)
    for name, value in learner.initial_user(shared).items():
        # Alone or in a batch, sums may be rounded differently.
        torch.testing.assert_close(states[name][0], value, rtol=1e-12, atol=1e-12)
    assert bool(states["gram"][1].any())


def test_absurd_starts_are_limited_by_the_prior() -> None:
    """Raw coefficients that were valid for small inputs may be absurd where inputs are large."""
    learner = build(3)
    shared = epoch_of_users(learner)
    starts = torch.full((1, learner.start_size), 1e30, dtype=torch.float64)
    head = learner.warm_started(shared, starts)["head"]
    away = (head - shared["prior_mean"]).abs() / shared["prior_covariance"].diagonal().sqrt()
    assert float(away.max()) <= START_REACH * (1 + 1e-6)
    starts[:, -1] = 2.0  # no share of a variance
    mean, covariance = prior_from_state(shared).posterior(
        *learner.starts.statistics(shared, prior_from_state(shared), starts)
    )
    torch.testing.assert_close(covariance[0], (1 - TRUST_MAX) * shared["prior_covariance"])
    assert bool(mean.isfinite().all())


@pytest.mark.parametrize("constant", [0.0, 1.0, 1e9, 1e30])
def test_constant_and_huge_inputs(constant: float) -> None:
    """The coefficient of a constant column is rounding noise; the rest of the start is kept."""
    learner = build(3)
    basis = {
        "mean": torch.tensor([1.0, constant, 1e5], dtype=torch.float64),
        "scale": torch.tensor([2.0, 1.0, 1.0], dtype=torch.float64),
    }
    heads = torch.randn(2, learner.head_size, generator=generator_of(0), dtype=torch.float64)
    raw = learner.starts.raw(basis, heads)
    assert bool(raw.isfinite().all())
    z = torch.randn(6, 3, generator=generator_of(1), dtype=torch.float64)
    z[:, 1] = 0
    h = learner.inputs.head_inputs(basis, z, torch.zeros(6, dtype=torch.float64))
    again = learner.starts.heads(basis, raw)
    assert bool(again.isfinite().all())
    torch.testing.assert_close(h @ again.mT, h @ heads.mT, atol=1e-4, rtol=1e-4)


def test_an_epoch_without_events_accepts_starts() -> None:
    learner = build(3)
    shared = learner.initial_shared()
    heads = head_near(learner, shared, 2, 1)
    states = learner.warm_started(shared, start_of(learner, shared, heads, 0.5))
    torch.testing.assert_close(states["head"], heads, rtol=1e-6, atol=1e-8)


def test_coefficients_of_the_prediction_and_of_factors_are_unchanged() -> None:
    """These are not inputs: their coefficients are the same in every basis."""
    learner = build(3)
    shared = epoch_of_users(learner)
    heads = head_near(learner, shared, 2, 1)
    same = slice(-1 - FACTORS, None)
    assert torch.equal(learner.starts.raw(shared, heads)[:, same], heads[:, same])
    later = epoch_of_users(learner, shared, seed=5, events=1_024)
    assert torch.equal(learner.starts.heads(later, learner.starts.raw(shared, heads))[:, same], heads[:, same])
