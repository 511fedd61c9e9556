"""Model fusion against slow computations, and on small worlds with known truth."""

from __future__ import annotations

import math
from dataclasses import replace

import gpytorch
import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from metaban.models.fusion.gp import ProfileProcesses
from metaban.models.fusion.model import FIELDS, FusionModel, FusionState, InvalidFusion
from metaban.models.fusion.modules import BASE, NOISE, NOISE_DRAWS, CrossingModule, FusionModules, SourceBatch
from metaban.models.fusion.training import FusionFit, FusionSettings, fit_fusion
from metaban.models.numerics.dense_net import NetShape

HEAD = NetShape((4, 1), offsets=False)
NET = NetShape((1, 20, 1))
SHORT = FusionSettings(rounds=6, round_steps=25, inducing=12, processes=3)


def generator_of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def heads(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Profiles in the plane, and linear heads that are smooth functions of them."""
    generator = generator_of(seed)
    profiles = torch.rand(count, 2, generator=generator) * 4 - 2
    x, y = profiles.unbind(1)
    truth = torch.stack([x, y, torch.sin(x), torch.cos(y)], 1)
    return profiles, truth + 0.05 * torch.randn(truth.shape, generator=generator)


def modules_of(shape: NetShape, count: int, inputs: Tensor | None) -> tuple[FusionModules, SourceBatch]:
    """Untrained modules with random sources."""
    generator = generator_of(3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        profiles, nets = torch.randn(count, 2), torch.randn(count, shape.parameters)
        processes = ProfileProcesses(profiles[:4].expand(3, -1, -1).clone(), generator)
        crossing = CrossingModule(nets.mean(0), nets.std(0), shape.kinds(), 0.05)
        torch.nn.init.normal_(crossing.variance.weight)
        modules = FusionModules(shape, processes, crossing, 0.3 if inputs is not None else 1.0)
        weights = torch.rand(count) + 0.5
    outputs = None if inputs is None else shape.outputs(nets, inputs)
    scale = None if outputs is None else outputs.std((1, 2))
    return modules, SourceBatch(profiles, nets, weights, outputs, scale)


@pytest.fixture(scope="module")
def fitted() -> FusionFit:
    profiles, nets = heads(60)
    return fit_fusion(profiles, nets, HEAD, SHORT, seed=0, inputs=torch.eye(4))


@pytest.mark.parametrize("with_outputs", [False, True])
def test_the_bound_equals_the_formula(with_outputs: bool) -> None:
    shape, count, samples, total = NetShape((1, 3, 1)), 5, 2, 7.0
    inputs = torch.tensor([[-1.0], [0.5], [2.0]]) if with_outputs else None
    modules, batch = modules_of(shape, count, inputs)
    found = float(modules.bound(batch, total, samples, generator_of(8), inputs).detach())
    with torch.no_grad():
        generator = generator_of(8)  # the same noise in the same order
        base_noise = torch.randn(samples, 1, BASE, generator=generator)
        task_noise = torch.randn(samples, count, 3, generator=generator)
        prior_noise = torch.randn(NOISE_DRAWS, NOISE, generator=generator)
        where, spread = modules.processes.marginals(batch.profiles)
        likelihood = 0.0
        for row in range(count):
            for draw in range(samples):
                base = modules.base.mean + modules.base.log_deviation.exp() * base_noise[draw, 0]
                processes = where[row] + spread[row].sqrt() * task_noise[draw, row]
                task = modules.warp_2(torch.tanh(modules.warp_1(processes)))
                latent = torch.relu(modules.crossing.first(torch.cat([base, task])))
                latent = torch.relu(modules.crossing.second(latent))
                scale = modules.crossing.scale
                mean = modules.crossing.centre + scale * modules.crossing.mean(latent)
                log_variance = torch.tanh(modules.crossing.variance(latent)) + modules.crossing.variance_offset()
                deviation = (log_variance.exp()[shape.kinds()] * scale.square()).sqrt()
                log_density = torch.distributions.Normal(mean, deviation).log_prob(batch.nets[row]).sum()
                value = float(log_density) * (0.3 if with_outputs else 1.0)
                if inputs is not None and batch.outputs is not None and batch.output_scale is not None:
                    noise = modules.log_output_noise.exp() + 0.003
                    said, meant = batch.outputs[row], shape.outputs(mean, inputs)
                    errors = (said - meant) / batch.output_scale[row]
                    value += float(torch.distributions.Normal(0, noise).log_prob(errors).sum())
                likelihood += value * float(batch.weights[row]) / samples
        likelihood *= total / float(batch.weights.sum())
        own = torch.distributions.Normal(modules.base.mean, modules.base.log_deviation.exp())
        bent = torch.tanh(modules.base.prior_variance(prior_noise))
        normalised = torch.nn.functional.batch_norm(bent, None, None, training=True)
        prior = torch.distributions.Normal(modules.base.prior_mean(prior_noise), (0.5 * normalised).exp())
        divergence = float(torch.distributions.kl_divergence(own, prior).sum(-1).mean())
        whitened = modules.processes.variational_strategy._variational_distribution
        for process in range(3):
            factor = whitened.chol_variational_covar[process].tril()
            mean = whitened.variational_mean[process]
            covariance = factor @ factor.mT
            divergence += 0.5 * float(covariance.trace() + mean @ mean - len(mean) - covariance.logdet())
    assert found == pytest.approx(likelihood - divergence, rel=1e-4)


def test_with_all_inputs_inducing_the_posterior_is_exact() -> None:
    """q(s) at the exact posterior of s must give the exact posterior everywhere."""
    generator = generator_of(5)
    x = torch.randn(9, 2, generator=generator)
    y, noise = torch.sin(x[:, 0]) + x[:, 1], 0.1
    new = torch.randn(20, 2, generator=generator)
    processes = ProfileProcesses(x[None].clone(), generator)

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return (-0.5 * torch.cdist(a.double(), b.double()).square()).exp()

    jitter = gpytorch.settings.variational_cholesky_jitter.value(torch.float32)
    gram = kernel(x, x) + jitter * torch.eye(9, dtype=torch.float64)
    inverse = (gram + noise * torch.eye(9, dtype=torch.float64)).inverse()
    factor = torch.linalg.cholesky(gram)
    mean, covariance = gram @ inverse @ y.double(), gram - gram @ inverse @ gram
    turn = torch.linalg.inv(factor)
    whitened = processes.variational_strategy._variational_distribution
    with torch.no_grad():
        whitened.variational_mean.copy_((turn @ mean)[None])
        spread = turn @ covariance @ turn.mT
        whitened.chol_variational_covar.copy_(torch.linalg.cholesky(0.5 * (spread + spread.mT))[None])
        processes.eval()
        found, variance = processes.marginals(new)
    cross = kernel(new, x)
    exact = cross @ inverse @ y.double()
    exact_variance = 1 - (cross @ inverse * cross).sum(-1)
    torch.testing.assert_close(found[:, 0].double(), exact, atol=2e-3, rtol=1e-3)
    torch.testing.assert_close(variance[:, 0].double(), exact_variance, atol=2e-3, rtol=1e-3)


def test_answers_equal_the_trained_modules() -> None:
    """The precomputed products of a request against the modules used in training."""
    shape = NetShape((1, 3, 1))
    modules, _ = modules_of(shape, 6, None)
    modules.eval()
    tensors = {
        "profile_centre": torch.zeros(2),
        "profile_scale": torch.ones(2),
        **{name: tensor.detach() for name, tensor in modules.tensors().items()},
    }
    fusion = FusionModel(FusionState(shape, tensors))
    new = torch.randn(7, 2, generator=generator_of(1))
    with torch.no_grad():
        where, spread = modules.processes.marginals(new)
        found, variance = fusion.processes(new)
        torch.testing.assert_close(found, where, atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(variance, spread, atol=1e-4, rtol=1e-3)
        task = modules.warp_2(modules.warp_1(where).tanh())
        mean, deviation = modules.crossing(modules.base.mean.expand(1, 1, -1), task[None])
        folded = fusion.cross(fusion.base_at_mean, found)
        torch.testing.assert_close(folded[0], mean[0], atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(folded[1], deviation[0], atol=1e-3, rtol=1e-3)


def test_batched_profiles_equal_single_ones(fitted: FusionFit) -> None:
    fusion = FusionModel(fitted.state)
    profiles, _ = heads(9, seed=4)
    together = fusion.predict(profiles)
    for row in range(9):
        alone = fusion.predict(profiles[row : row + 1])
        torch.testing.assert_close(alone.mean[0], together.mean[row], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(alone.spread[0], together.spread[row], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(alone.novelty[0], together.novelty[row], atol=1e-5, rtol=1e-4)


def test_heads_follow_the_profile(fitted: FusionFit) -> None:
    profiles, truth = heads(40, seed=9)
    found = FusionModel(fitted.state).predict(profiles).mean
    _, sources = heads(60)
    blind = (truth - sources.mean(0)).square().mean()
    assert float((found - truth).square().mean()) < 0.25 * float(blind)


def test_samples_have_the_stated_mean_and_spread(fitted: FusionFit) -> None:
    fusion = FusionModel(fitted.state)
    profiles, _ = heads(3, seed=4)
    drawn = fusion.sample(profiles, 4_000, generator_of(0))
    said = fusion.predict(profiles)
    assert drawn.shape == (4_000, 3, 4)
    torch.testing.assert_close(drawn.std(0), said.spread, rtol=0.3, atol=0.02)
    assert bool(((drawn.mean(0) - said.mean).abs() < said.spread).all())


def test_far_profiles_have_high_novelty(fitted: FusionFit) -> None:
    profiles, _ = heads(60)
    fusion = FusionModel(fitted.state)
    near, far = fusion.predict(profiles).novelty, fusion.predict(profiles + 100).novelty
    assert float(near.max()) < float(far.min())


def test_a_state_survives_storage_and_broken_ones_are_refused(fitted: FusionFit) -> None:
    stored = load(save(fitted.state.to_dict()))
    restored = FusionState.from_dict(stored)
    profiles, _ = heads(4, seed=2)
    assert restored.shape == HEAD
    assert restored.profile_size == 2
    assert torch.equal(FusionModel(restored).predict(profiles).mean, FusionModel(fitted.state).predict(profiles).mean)
    for name in FIELDS:
        with pytest.raises(InvalidFusion):
            FusionState.from_dict({key: tensor for key, tensor in stored.items() if key != name})
        with pytest.raises(InvalidFusion, match=name):
            FusionState.from_dict(stored | {name: torch.full_like(stored[name], math.nan)})
    with pytest.raises(InvalidFusion):
        FusionState.from_dict(stored | {"mean": stored["mean"][:-1]})


def test_results_depend_on_the_seed_alone(fitted: FusionFit) -> None:
    profiles, nets = heads(60)
    before = torch.get_rng_state()
    again = fit_fusion(profiles, nets, HEAD, SHORT, seed=0, inputs=torch.eye(4))
    assert torch.equal(torch.get_rng_state(), before)
    assert again.bounds == fitted.bounds
    assert fit_fusion(profiles, nets, HEAD, SHORT, seed=1, inputs=torch.eye(4)).bounds != fitted.bounds


def test_equal_profiles_and_constant_parameters() -> None:
    profiles, nets = torch.ones(6, 2), torch.ones(6, 4)
    found = fit_fusion(profiles, nets, HEAD, replace(SHORT, rounds=2), seed=0)
    torch.testing.assert_close(FusionModel(found.state).predict(profiles[:1]).mean, nets[:1], atol=0.01, rtol=0)


def test_invalid_sources_are_refused() -> None:
    profiles, nets = heads(5)
    broken = nets.clone()
    broken[0, 0] = math.inf
    for given in (
        lambda: fit_fusion(profiles[:1], nets[:1], HEAD, seed=0),
        lambda: fit_fusion(profiles[:4], nets, HEAD, seed=0),
        lambda: fit_fusion(profiles, nets[:, :3], HEAD, seed=0),
        lambda: fit_fusion(profiles, broken, HEAD, seed=0),
        lambda: fit_fusion(profiles, nets, HEAD, seed=0, inputs=torch.ones(3, 5)),
        lambda: fit_fusion(profiles, nets, HEAD, seed=0, weights=torch.zeros(5)),
    ):
        with pytest.raises(ValueError, match=r"must be|needs"):
            given()


def test_a_profile_of_another_length_is_refused(fitted: FusionFit) -> None:
    with pytest.raises(ValueError, match="2 columns"):
        FusionModel(fitted.state).predict(torch.zeros(1, 3))


def test_progress_is_reported_to_the_end() -> None:
    profiles, nets = heads(8)
    told: list[float] = []
    fit_fusion(profiles, nets, HEAD, replace(SHORT, rounds=3, round_steps=2), seed=0, progress=told.append)
    assert told == pytest.approx([1 / 3, 2 / 3, 1])


@pytest.mark.slow
def test_few_trusted_sources_outweigh_many_that_are_not() -> None:
    profiles = torch.zeros(20, 1)
    nets = torch.cat([torch.ones(4, 4), -torch.ones(16, 4)])
    weights = torch.cat([torch.full((4,), 100.0), torch.ones(16)])
    settings = replace(SHORT, rounds=10, vicinity=0)
    trusted = FusionModel(fit_fusion(profiles, nets, HEAD, settings, seed=0, weights=weights).state)
    alike = FusionModel(fit_fusion(profiles, nets, HEAD, settings, seed=0).state)
    assert float(trusted.predict(profiles[:1]).mean.mean()) > 0.5
    assert float(alike.predict(profiles[:1]).mean.mean()) < 0


@pytest.mark.slow
def test_aligned_networks_fuse_better_than_unaligned_ones() -> None:
    """The same networks with shuffled units: without alignment they average to nothing."""
    generator = generator_of(0)
    base, slope = torch.randn(2, NET.parameters, generator=generator)
    profiles = torch.rand(40, 1, generator=generator)
    nets = base + profiles * 0.3 * slope
    orders = torch.stack([torch.randperm(20, generator=generator) for _ in nets])
    units = nets[:, :60].view(-1, 3, 20)
    shuffled = torch.cat([torch.take_along_dim(units, orders[:, None, :], 2).flatten(1), nets[:, 60:]], 1)
    x = torch.linspace(-2, 2, 30)[:, None]
    new = torch.linspace(0.1, 0.9, 9)[:, None]
    truth = NET.outputs(base + new * 0.3 * slope, x)
    settings = replace(SHORT, rounds=12, outputs=False, inducing=20)
    errors = {}
    for align in (True, False):
        found = fit_fusion(profiles, shuffled, NET, replace(settings, align=align), seed=0, inputs=x)
        errors[align] = float((NET.outputs(FusionModel(found.state).predict(new).mean, x) - truth).square().mean())
    assert errors[True] < 0.1 * errors[False]
