"""`metaban bench bayes`: its references are correct, its bars compare the right numbers, small runs work."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from metaban.bench.bayes import cost as bayes_cost
from metaban.bench.bayes import gradient as bayes_gradient
from metaban.bench.bayes import sine as bayes_sine
from metaban.bench.bayes import tuning as bayes_tuning
from metaban.bench.bayes.command import PARTS, USUAL
from metaban.bench.bayes.plan import BayesPlan
from metaban.bench.bayes.sine import RateAndSteps, Steps
from metaban.bench.bayes.tasks import CUT, SETTINGS, SHAPE, SHOTS, adapt, draw, errors, fresh_net, maml_gradient
from metaban.bench.cli import bench_app
from metaban.models.bayes.gem import GemTrainer, gaussian_gradient
from metaban.models.bayes.inference import Gaussian


def randoms(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Tasks and MAML


def test_tasks_are_sines_of_their_setting() -> None:
    for setting in SETTINGS:
        batch = draw(setting, randoms(), (7, 3), others=50)
        assert batch.x.shape == (7, 3, SHOTS, 1)
        assert batch.other_y.shape == (7, 3, 50)
        assert float(batch.other_x.abs().max()) <= 5
        assert float(batch.other_y.abs().max()) <= 5 * (1 + 5 * setting.noise)
    # Without noise and with frequency 1, y(x) is a linear function of sin x and cos x.
    batch = draw(SETTINGS[0], randoms(), (4,))
    x = batch.x.squeeze(-1).double()
    waves = torch.stack([x.sin(), x.cos()], -1)
    fitted = waves @ torch.linalg.lstsq(waves, batch.y.double()[..., None]).solution
    torch.testing.assert_close(fitted.squeeze(-1), batch.y.double(), atol=1e-4, rtol=1e-4)


def test_maml_equals_the_literal_version() -> None:
    """Compared with plain autograd task by task, for two runs with their own rates."""
    random = randoms()
    theta = torch.stack([fresh_net(random), fresh_net(random)]).double()
    batch = draw(SETTINGS[1], random, (2, 3))
    batch = replace(
        batch, x=batch.x.double(), y=batch.y.double(), other_x=batch.other_x.double(), other_y=batch.other_y.double()
    )
    rates = torch.tensor([0.01, 0.03], dtype=torch.float64)
    found = maml_gradient(theta, batch, rates[:, None, None], 2)
    for run in range(2):
        start, total = theta[run].clone().requires_grad_(), torch.zeros((), dtype=torch.float64)
        for task in range(3):
            net = start
            for _ in range(2):
                loss = (SHAPE.outputs(net, batch.x[run, task]).squeeze(-1) - batch.y[run, task]).square().mean()
                (slope,) = torch.autograd.grad(loss, net, create_graph=True)
                net = net - rates[run] * slope.clamp(-CUT, CUT)
            said = SHAPE.outputs(net, batch.other_x[run, task]).squeeze(-1)
            total = total + (said - batch.other_y[run, task]).square().mean() / 3
        (expected,) = torch.autograd.grad(total, start)
        torch.testing.assert_close(found[run], expected)


def test_gem_with_point_posteriors_adapts_like_maml() -> None:
    """Reptile's rate also applies to mean squared errors: the same rate means the same for all methods."""
    start, batch = fresh_net(randoms())[None], draw(SETTINGS[0], randoms(1), (1, 4))
    learner = bayes_sine.METHODS["Reptile"].learner(start, [0.02], Steps(5, 5))
    *_, found = learner.adapted(batch, 3)
    torch.testing.assert_close(found, adapt(start[:, None].expand(1, 4, -1), batch, 0.02, 3), atol=1e-5, rtol=1e-4)


def test_first_steps_of_posteriors_have_the_same_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """With nearly zero deviation, a rate means the same as for MAML, for any initial variance."""
    monkeypatch.setattr(bayes_sine, "VARIANCE", 1e-12)
    start, batch = fresh_net(randoms())[None], draw(SETTINGS[0], randoms(1), (1, 4))
    learner = bayes_sine.METHODS["GEM-BML+"].learner(start, [0.02], Steps(5, 5))
    (found,) = learner.adapted(batch, 1)
    torch.testing.assert_close(found, adapt(start[:, None].expand(1, 4, -1), batch, 0.02, 1), atol=1e-4, rtol=1e-3)


def test_rates_of_mean_and_variances_fall_together(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[float, float]] = []
    monkeypatch.setattr(
        GemTrainer,
        "step",
        lambda self, *_: seen.append((self.optimiser.param_groups[0]["lr"], self.variance_rate)),
    )
    plan = replace(BayesPlan(), meta_tasks=1, test_tasks=1)
    method, steps = bayes_sine.METHODS["GEM-BML"], 100
    bayes_sine.train(method, SETTINGS[0], (7,), (0.01,), plan, inner=Steps(1, 1), steps=steps, measured=0)
    shares = [rate / bayes_sine.META_RATE for rate, _ in seen]
    assert shares[:71] == pytest.approx([1.0] * 71)
    assert shares[85] == pytest.approx(0.55)
    assert shares[-1] == pytest.approx(0.13)
    assert [rate / bayes_sine.VARIANCE_RATE for _, rate in seen] == pytest.approx(shares)


@pytest.mark.parametrize("name", list(bayes_sine.METHODS))
def test_every_method_learns(name: str) -> None:
    plan = replace(BayesPlan(), meta_tasks=4, test_tasks=20)
    method, steps = bayes_sine.METHODS[name], Steps(5, 5)
    run = bayes_sine.train(method, SETTINGS[0], (7, 8), (0.01, 0.02), plan, inner=steps, steps=60)
    assert run.errors.shape == (2, len(bayes_sine.ADAPT_STEPS))
    assert len(run.curve) == len(run.at)
    before, after = torch.tensor(run.curve[0]), torch.tensor(run.curve[-1])
    assert bool((after < before).all())


def test_reptile_takes_its_steps_on_both_halves_of_a_task() -> None:
    """The first meta-update ends where gradient descent on the ten points, then on the others, ends."""
    start, batch = fresh_net(randoms())[None], draw(SETTINGS[0], randoms(1), (1, 4))
    learner = bayes_sine.METHODS["Reptile"].learner(start, [0.02], Steps(3, 2))
    learner.step(batch)
    others = replace(batch, x=batch.other_x, y=batch.other_y)
    ends = adapt(adapt(start[:, None].expand(1, 4, -1), batch, 0.02, 3), others, 0.02, 2)
    (mean,) = learner.optimiser.param_groups[0]["params"]
    torch.testing.assert_close(-mean.grad, (ends - start).mean(-2), atol=1e-5, rtol=1e-4)


def test_settings_are_chosen_by_the_error_after_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bayes_tuning, "RATES", (1e-6, 0.01, 1e6))
    plan = replace(BayesPlan(), meta_tasks=2, test_tasks=10, tuning_steps=5)
    method = bayes_sine.METHODS["Reptile"]
    chosen, tried = bayes_tuning.choose(method, SETTINGS[0], plan)
    assert chosen.rate == 0.01
    assert min(tried, key=tried.__getitem__) == str(chosen)
    assert len(tried) == 3 * len(bayes_tuning.INNER_STEPS) * len(bayes_tuning.QUERY_STEPS)
    # Each alone, seed by seed.
    ends = [
        float(bayes_sine.train(method, SETTINGS[0], (seed,), (0.01,), plan, inner=chosen.steps, steps=5).errors[0, -1])
        for seed in bayes_tuning.TUNING_SEEDS
    ]
    assert tried[str(chosen)] == pytest.approx(sum(ends) / len(ends), rel=1e-4)


def test_recorded_settings_are_in_the_grid() -> None:
    assert set(bayes_tuning.TUNING_SEEDS).isdisjoint(BayesPlan().seeds)
    for setting in SETTINGS:
        for name, method in bayes_sine.METHODS.items():
            grid = [
                RateAndSteps(rate, steps) for rate in bayes_tuning.RATES for steps in bayes_tuning.candidates(method)
            ]
            assert bayes_sine.CHOSEN[setting.name][name] in grid


def test_errors_are_mean_squares() -> None:
    nets, batch = fresh_net(randoms())[None], draw(SETTINGS[0], randoms(1), (1,))
    said = SHAPE.outputs(nets, batch.x).squeeze(-1)
    torch.testing.assert_close(errors(nets, batch.x, batch.y), (said - batch.y).square().mean(-1))


# Gradients


def test_the_analytic_gradient_is_gem_with_the_exact_posterior() -> None:
    data, prior = bayes_gradient.tasks_of(3, 6, 0), bayes_gradient.prior_of(6)
    precision = 1 / prior.variance + data.x.square().sum(-2) / bayes_gradient.NOISE
    natural = (data.x.mT @ data.y[..., None]).squeeze(-1) / bayes_gradient.NOISE + prior.mean / prior.variance
    exact = gaussian_gradient(prior, Gaussian(natural / precision, 1 / precision))
    expected = torch.cat([exact.mean, exact.log_variance(prior)], -1)
    torch.testing.assert_close(bayes_gradient.analytic(prior, data), expected)


def test_both_estimates_come_near_the_analytic_gradient() -> None:
    data, prior, steps = bayes_gradient.tasks_of(3, 6, 0), bayes_gradient.prior_of(6), (2, 400)
    truth = bayes_gradient.analytic(prior, data)
    for estimate in (bayes_gradient.gem_gradients, bayes_gradient.elbo_gradients):
        early, late = ((found - truth).norm() / truth.norm() for found in estimate(prior, data, steps, 0))
        assert float(late) < 0.02 < float(early)


def test_exact_gradients_are_means_of_sampled_ones() -> None:
    data, around = bayes_gradient.tasks_of(3, 2, 0), bayes_gradient.prior_of(2)
    drawn = replace(data, draws=200_000).slopes(around.mean, around.variance.sqrt(), randoms())
    for ours, theirs in zip(drawn, data.slopes(around.mean, around.variance.sqrt(), None), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=2.0)


# Cost


def test_peak_bytes_are_what_is_alive_at_once() -> None:
    def one_by_one() -> None:
        for _ in range(3):
            torch.empty(1_000_000, dtype=torch.uint8)

    def together() -> list[torch.Tensor]:
        return [torch.empty(1_000_000, dtype=torch.uint8) for _ in range(3)]

    assert bayes_cost.peak_bytes(one_by_one) == pytest.approx(1e6, rel=0.05)
    assert bayes_cost.peak_bytes(together) == pytest.approx(3e6, rel=0.05)


def test_memory_of_gem_does_not_grow_with_its_inner_steps() -> None:
    gem, maml = bayes_cost.works("GEM-BML+"), bayes_cost.works("MAML")
    assert bayes_cost.peak_bytes(gem[8]) <= 1.05 * bayes_cost.peak_bytes(gem[1])
    assert bayes_cost.peak_bytes(maml[8]) >= 2 * bayes_cost.peak_bytes(maml[1])


# Bars


def test_bars_of_sine_tasks_are_ratios_of_the_last_errors() -> None:
    def rows(**ends: float) -> dict[str, dict[str, dict[str, float]]]:
        return {name.replace("_", "-").replace("-plus", "+"): {"10": {"mean": end}} for name, end in ends.items()}

    default = rows(MAML=1.0, Reptile=2.0, GEM_BML=9.0, GEM_BML_plus=1.1)
    hard = rows(MAML=2.0, Reptile=4.0, GEM_BML=3.0, GEM_BML_plus=1.0)
    bars = {bar.name: bar for bar in bayes_sine.sine_bars({"default": default, "challenging": hard}, quick=True)}
    assert bars["default: GEM-BML+ / MAML, quick"].holds
    assert bars["default: GEM-BML+ / MAML, quick"].value == pytest.approx(1.1)
    assert not bars["challenging: GEM-BML / MAML, quick"].holds
    assert bars["challenging: GEM-BML / Reptile, quick"].value == pytest.approx(0.75)
    assert bars["challenging: GEM-BML+ / Reptile, quick"].holds


def test_bars_of_gradients_take_the_worst_number_of_steps() -> None:
    results = {"steps": [1, 2], "sampled": {"GEM": {"mean": [0.1, 0.04]}, "ELBO": {"mean": [1.0, 0.02]}}}
    worst, last = bayes_gradient.gradient_bars(results, quick=False)
    assert worst.value == pytest.approx(2.0)
    assert not worst.holds
    assert last.holds
    assert len(bayes_gradient.gradient_bars(results, quick=True)) == 1


def test_bars_of_cost_are_growth_and_a_ratio() -> None:
    peaks = {"GEM-BML+": {"1": 10, "64": 10}, "MAML": {"1": 10, "64": 300}}
    bars = bayes_cost.cost_bars({"peak_bytes": peaks, "time": {"ratio": 0.6}}, quick=False)
    assert [bar.holds for bar in bars] == [True, True, False]


# The command


def test_the_command_refuses_unknown_parts_with_the_known_ones() -> None:
    result = CliRunner().invoke(bench_app, ["bayes", "--part", "magic"], env={"COLUMNS": "400"})
    assert result.exit_code == 2
    assert all(name in result.output for name in PARTS)


def test_parts_write_their_json_and_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(BayesPlan(), gradient_steps=(1, 4), gradient_tasks=3, timed_rounds=2)
    monkeypatch.setattr(BayesPlan, "quick", lambda self: replace(small, seeds=self.seeds[:1], plot=self.plot))
    monkeypatch.setattr(bayes_cost, "STEPS", (1, 2, 16))
    arguments = ["bayes", "--part", "gradient,cost", "--quick", "--seeds", "7-9"]
    result = CliRunner().invoke(
        bench_app, [*arguments, "--json", str(tmp_path / "bayes.json"), "--plot", str(tmp_path)], env={"COLUMNS": "400"}
    )
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "bayes.json").read_text())
    assert found["settings"]["seeds"] == [7]
    assert set(found["results"]) == {"gradient", "cost"}
    assert found["bars"]
    assert all(bar["name"].endswith("quick") for bar in found["bars"])
    for name in ("bayes-gradient", "bayes-cost"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_settings_change_only_with_tuning() -> None:
    assert {*USUAL, "tuning"} == set(PARTS)
    assert "tuning" not in USUAL


def test_a_small_tuning_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bayes_tuning, "RATES", (0.01,))
    plan = replace(BayesPlan(), tuning_steps=1, meta_tasks=2, test_tasks=4)
    results, bars = bayes_tuning.measure_tuning(plan, True, Console(file=StringIO()))
    assert results["settings"].keys() == bayes_sine.CHOSEN.keys()
    assert all(set(rows) == set(bayes_sine.METHODS) for rows in results["settings"].values())
    assert bars == []


def test_a_small_run_of_sine_tasks(tmp_path: Path) -> None:
    plan = replace(BayesPlan(), seeds=(7,), meta_steps=3, meta_tasks=2, test_tasks=4, plot=tmp_path)
    results, bars = bayes_sine.measure_sinusoids(plan, True, Console(file=StringIO()))
    assert set(results["settings"]) == {"default", "challenging"}
    assert len(bars) == 5
    assert json.dumps(results, allow_nan=False)
    assert (tmp_path / "bayes-sinusoids.png").read_bytes().startswith(b"\x89PNG")
