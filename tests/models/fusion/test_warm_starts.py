"""Warm starts from profiles: the guard against plain densities, training with known truth, and requests."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from metaban.models.default.learner import PosteriorLearner
from metaban.models.default.prior import Prior, prior_from_state
from metaban.models.fusion.model import InvalidFusion
from metaban.models.fusion.training import FusionSettings
from metaban.models.fusion.warm_start_guard import FirstRewards, evaluate_starts
from metaban.models.fusion.warm_start_training import LEAST_SOURCES, TrainedStarts, gather, train_warm_starts
from metaban.models.fusion.warm_starts import GuardReport, WarmStarter
from metaban.models.learner import State, UserBatch
from metaban.models.metaban.paper import PaperLearner
from metaban.models.numerics.arrays import symmetric
from metaban.models.settings import MetaBanSettings
from tests.models.default_worlds import UserHistory, batch_of, generator_of, small

INPUTS, PROFILE, SOURCES, EVENTS = 3, 2, 60, 24
QUICK = FusionSettings(processes=4, inducing=16, batch=32, rounds=5, round_steps=20, rate=2e-2, warm_rounds=1)


def learner() -> PosteriorLearner:
    return PosteriorLearner(small(trunk=False, kinds=False), INPUTS, torch.float64)


def population(model: PosteriorLearner, seed: int, *, told: bool) -> tuple[State, UserBatch, Tensor]:
    """Users whose tastes follow their profile; the profile given is their own or another user's."""
    generator = generator_of(seed)
    tastes = torch.randn(SOURCES, PROFILE, generator=generator, dtype=torch.float64)
    people = []
    for taste in tastes:
        arms = torch.randn(EVENTS, INPUTS, generator=generator, dtype=torch.float64)
        noise = 0.1 * torch.randn(EVENTS, generator=generator, dtype=torch.float64)
        rewards = 0.5 + 0.3 * (arms[:, :PROFILE] @ taste).tanh() + noise
        notes = torch.zeros(EVENTS, model.noted, dtype=torch.float64)
        people.append(UserHistory(arms, rewards, notes, torch.zeros(EVENTS, dtype=torch.int64)))
    batch = batch_of(people)
    shared = model.derive(model.initial_shared(), [batch], 0, SOURCES * EVENTS)
    profiles = tastes if told else tastes[torch.randperm(SOURCES, generator=generator)]
    return shared, batch, profiles


@cache
def trained(told: bool = True) -> tuple[PosteriorLearner, State, UserBatch, Tensor, TrainedStarts]:
    model = learner()
    shared, batch, profiles = population(model, 5, told=told)
    return model, shared, batch, profiles, train_warm_starts(model, shared, [batch], profiles, seed=0, settings=QUICK)


def starter(**changes: float) -> WarmStarter:
    model, _, _, profiles, found = trained()
    arrays = {**found.arrays, **{name: np.array(value) for name, value in changes.items()}}
    return WarmStarter.from_arrays(model, arrays, profiles.numpy())


def drawn_prior(size: int, generator: torch.Generator) -> Prior:
    root = torch.randn(size, size, generator=generator, dtype=torch.float64)
    mean = torch.randn(size, generator=generator, dtype=torch.float64)
    return Prior.of(mean, root @ root.mT + torch.eye(size), torch.tensor(0.3, dtype=torch.float64))


class TestGuard:
    def test_losses_equal_the_plain_density(self) -> None:
        """User by user, with padding left out instead of masked."""
        generator = generator_of(1)
        prior = drawn_prior(4, generator)
        h = torch.randn(5, 6, 4, generator=generator, dtype=torch.float64)
        rewards = torch.randn(5, 6, generator=generator, dtype=torch.float64)
        counts = torch.tensor([6, 3, 1, 0, 5])
        valid = (torch.arange(6) < counts[:, None]).double()
        away = torch.randn(5, 4, generator=generator, dtype=torch.float64)
        trusts, blends = (0.0, 0.4, 0.9), (0.0, 0.5, 1.5)
        found = FirstRewards(h, rewards, valid).losses(prior, away, trusts, blends)
        for row, trust in enumerate(trusts):
            for column, blend in enumerate(blends):
                for user, count in enumerate(counts.tolist()):
                    seen = h[user, :count]
                    mean = seen @ (prior.mean + blend * away[user])
                    spread = (1 - trust) * seen @ prior.covariance @ seen.mT + prior.noise * torch.eye(
                        count, dtype=torch.float64
                    )
                    plain = -MultivariateNormal(mean, spread).log_prob(rewards[user, :count]) if count else 0.0
                    assert float(found[row, column, user]) == pytest.approx(float(plain), abs=1e-9)

    def test_the_density_equals_sequential_predictions_of_a_started_learner(self) -> None:
        """Reward by reward, each predicted by a user fitted to the start and the earlier rewards."""
        model = learner()
        shared, batch, _ = population(model, 3, told=True)
        prior = prior_from_state(shared)
        first = gather(model, shared, [batch], torch.zeros(SOURCES, PROFILE)).first.rows(torch.tensor([0]))
        trust, head = 0.6, prior.mean + 0.1
        start = np.append(model.starts.raw(shared, head[None]).numpy(), trust)[None]
        expected = 0.0
        for seen in range(int(first.valid.sum())):
            kept = {
                "features": batch.features[:1, :seen], "rewards": batch.rewards[:1, :seen],
                "valid": batch.valid[:1, :seen], "phi": batch.phi[:1, :seen], "epochs": batch.epochs[:1, :seen],
                "events": batch.events[:1], "draw": batch.draw[:1], "weight": batch.weight[:1],
                "arm_keys": batch.arm_keys[:1, :seen], "places": batch.places[:1, :seen],
            }  # fmt: skip
            started = replace(batch, **kept, starts=torch.from_numpy(start))
            state = model.fit(shared, started, {}) if seen else model.warm_started(shared, started.starts)
            mean, covariance = prior.posterior(symmetric(state["gram"][0], len(prior.mean)), state["moment"][0])
            h = first.inputs[0, seen]
            normal = torch.distributions.Normal(h @ mean, (h @ covariance @ h + prior.noise).sqrt())
            expected -= float(normal.log_prob(first.rewards[0, seen]))
        found = first.losses(prior, (head - prior.mean)[None], (trust,), (1.0,))
        assert float(found) == pytest.approx(expected, rel=1e-6)

    def test_uninformative_starts_are_not_used(self) -> None:
        generator = generator_of(2)
        prior = drawn_prior(3, generator)
        h = torch.randn(400, 10, 3, generator=generator, dtype=torch.float64)
        root = torch.linalg.cholesky(prior.covariance)
        heads = prior.mean + torch.randn(400, 3, generator=generator, dtype=torch.float64) @ root.mT
        noise = prior.noise.sqrt() * torch.randn(400, 10, generator=generator, dtype=torch.float64)
        rewards = (h @ heads[..., None]).squeeze(-1) + noise
        first = FirstRewards(h, rewards, torch.ones(400, 10, dtype=torch.float64))
        knowing, blind = evaluate_starts(prior, first, heads), evaluate_starts(prior, first, heads.flip(0))
        assert knowing.verdict == "fusion"
        assert knowing.blend == 1.0
        assert knowing.trust == 0.9
        assert knowing.gain > 0.5
        assert blind == replace(blind, verdict="prior", blend=0.0, trust=0.0)
        assert GuardReport.from_json(knowing.to_json()) == knowing


@pytest.mark.slow
class TestTraining:
    def test_informative_profiles_are_used_and_predict_better(self) -> None:
        report = trained()[-1].report
        assert report.verdict in ("fusion", "blend")
        assert report.gain > 3 * report.gain_error
        assert report.fusion_loss < report.prior_loss
        assert report.held_out == SOURCES

    def test_profiles_of_other_users_are_not_used(self) -> None:
        report = trained(told=False)[-1].report
        assert (report.verdict, report.blend, report.trust) == ("prior", 0.0, 0.0)

    def test_starts_are_nearer_to_learned_heads_than_the_prior(self) -> None:
        model, shared, _, _, _ = trained()
        generator = generator_of(77)
        profiles = torch.randn(200, PROFILE, generator=generator, dtype=torch.float64)
        starts = torch.from_numpy(np.stack([starter().start(profile) for profile in profiles.numpy()]))
        heads = model.starts.heads(shared, starts[:, :-1])
        arms = torch.randn(200, INPUTS, generator=generator, dtype=torch.float64)
        z = model.inputs.standardized(shared, arms, arms[:, :0])
        h = model.inputs.head_inputs(shared, z, torch.zeros(200, dtype=torch.float64))
        truth = 0.5 + 0.3 * (arms[:, :PROFILE] * profiles).sum(-1).tanh()
        by_start = ((h * heads).sum(-1) - truth).square().mean()
        by_prior = (h @ prior_from_state(shared).mean - truth).square().mean()
        assert by_start < 0.5 * by_prior

    def test_the_starts_of_sources_have_no_effect(self) -> None:
        model, shared, batch, profiles, found = trained()
        absurd = torch.full((SOURCES, model.start_size), 0.9, dtype=torch.float64)
        again = train_warm_starts(model, shared, [replace(batch, starts=absurd)], profiles, seed=0, settings=QUICK)
        assert again.report == found.report
        for name, array in found.arrays.items():
            np.testing.assert_array_equal(again.arrays[name], array)

    def test_progress_is_reported_in_order_to_the_end(self) -> None:
        model, shared, batch, profiles, _ = trained()
        told: list[float] = []
        brief = replace(QUICK, rounds=2, round_steps=2)
        train_warm_starts(model, shared, [batch], profiles, seed=0, settings=brief, progress=told.append)
        assert told == sorted(told)
        assert told[-1] == 1.0
        assert told[0] < 0.5

    def test_invalid_training_data_is_refused(self) -> None:
        model, shared, batch, profiles, _ = trained()
        paper = PaperLearner(MetaBanSettings(), INPUTS)
        with pytest.raises(ValueError, match="takes no warm starts"):
            train_warm_starts(paper, paper.initial_shared(), [batch], profiles, seed=0)
        for wrong in (profiles[:-1], profiles[0], profiles / 0):
            with pytest.raises(ValueError, match="needs a profile"):
                train_warm_starts(model, shared, [batch], wrong, seed=0)
        few = UserBatch(**{name: getattr(batch, name)[: LEAST_SOURCES - 1] for name in batch.__dataclass_fields__})
        with pytest.raises(ValueError, match=f"at least {LEAST_SOURCES}"):
            train_warm_starts(model, shared, [few], profiles[: LEAST_SOURCES - 1], seed=0)


class TestStarter:
    def test_trust_in_a_start_falls_with_novelty(self) -> None:
        made = starter(trust=0.8)
        trusts = [made.start(np.full(PROFILE, distance))[-1] for distance in (0.0, 3.0, 8.0)]
        assert trusts[0] > 0.5
        assert trusts[0] > trusts[1] > trusts[2]
        assert trusts[2] < 0.1

    def test_half_the_blend_moves_half_way(self) -> None:
        model, shared, _, _, found = trained()
        profile = np.array([0.3, -0.2])
        heads = {
            blend: model.starts.heads(shared, torch.from_numpy(starter(blend=blend).start(profile)[None, :-1]))[0]
            for blend in (0.0, 0.5, 1.0)
        }
        middle = torch.from_numpy(found.arrays["prior_mean"])
        torch.testing.assert_close(heads[0.0], middle, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(heads[0.5], (heads[0.0] + heads[1.0]) / 2, rtol=1e-6, atol=1e-8)

    def test_without_any_trust_it_is_inactive(self) -> None:
        assert starter().active
        assert not starter(trust=0.0).active
        assert not starter(blend=0.0).active

    def test_nearest_sources_come_first(self) -> None:
        _, _, _, profiles, _ = trained()
        rows = profiles.numpy()
        made = starter().nearest(rows[7], 3)
        gaps = np.linalg.norm((rows - rows[7]) / rows.std(0), axis=1)
        assert [row for row, _ in made] == np.argsort(gaps)[:3].tolist()
        assert made[0] == (7, pytest.approx(0.0))
        assert made[2][1] == pytest.approx(np.sort(gaps)[2])

    def test_a_profile_of_another_length_or_not_finite_is_refused(self) -> None:
        for wrong in (np.zeros(PROFILE + 1), np.array([np.nan, 0.0])):
            with pytest.raises(ValueError, match=f"{PROFILE} numbers"):
                starter().start(wrong)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("trust", np.array(1.5)),
            ("blend", np.array(-1.0)),
            ("novelty", np.array(2.0)),
            ("prior_mean", np.zeros(1)),
            ("profile_scale", np.zeros(PROFILE)),
            ("basis.scale", np.full(INPUTS, np.nan)),
            ("fusion.mean", np.zeros((1, 1))),
        ],
    )
    def test_broken_arrays_are_refused(self, name: str, value: np.ndarray) -> None:
        model, _, _, profiles, found = trained()
        with pytest.raises(InvalidFusion):
            WarmStarter.from_arrays(model, {**found.arrays, name: value}, profiles.numpy())
        left = {kept: array for kept, array in found.arrays.items() if kept != name}
        with pytest.raises(InvalidFusion):
            WarmStarter.from_arrays(model, left, profiles.numpy())
