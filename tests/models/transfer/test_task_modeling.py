"""Task modelling: surrogates against known coefficients, and Algorithm 1 with known truth."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from metaban.models.transfer.task_modeling import (
    SubsetLosses,
    Surrogate,
    TransferSettings,
    draw_subsets,
    each_once,
    fit_surrogate,
    model_transfer,
)

EXACT = TransferSettings(ridge=0.0, early_stop=False)


class Additive(SubsetLosses):
    """f(S) = 1 + Σ effects + noise fixed per set; held-out samples may have other effects."""

    def __init__(self, effects: Tensor, noise: float = 0.0, held_out: Tensor | None = None) -> None:
        self.sources = len(effects)
        self.effects, self.noise = effects.double(), noise
        self.told = self.effects if held_out is None else held_out.double()
        self.asked: list[int] = []

    def validation(self, members: Tensor) -> Tensor:
        self.asked.append(len(members))
        keys = members.double() @ torch.linspace(1, 7, self.sources, dtype=torch.float64).exp()  # [n]
        return 1 + members.double() @ self.effects + self.noise * torch.sin(1_000 * keys)

    def held_out(self, members: Tensor) -> Tensor:
        parts = torch.tensor([-0.1, 0.1], dtype=torch.float64)  # [B]
        return (2 + members.double() @ self.told).unsqueeze(1) + parts


def different(count: int) -> int:
    """Different sets among so many of 12 sources, with the seed of the tests below."""
    return len(each_once(draw_subsets(12, TransferSettings().subset_size, count, torch.Generator().manual_seed(1))))


def sets(sources: int, count: int, size: int = 3, seed: int = 0) -> Tensor:
    drawn = draw_subsets(sources, size, count, torch.Generator().manual_seed(seed))
    return torch.cat([torch.zeros(1, sources, dtype=torch.bool), drawn])


class TestSubsets:
    @settings(max_examples=50, deadline=None)
    @given(st.integers(2, 30), st.integers(1, 40), st.integers(0, 20))
    def test_sets_have_one_size_and_leave_sources_out(self, sources: int, size: int, count: int) -> None:
        members = draw_subsets(sources, size, count, torch.Generator().manual_seed(1))
        assert members.shape == (count, sources)
        assert members.dtype == torch.bool
        assert members.sum(1).tolist() == [min(size, sources - 1)] * count

    def test_sets_are_uniform(self) -> None:
        members = draw_subsets(5, 2, 8_000, torch.Generator().manual_seed(3))
        pairs = members.double().T @ members.double() / len(members)
        apart = ~torch.eye(5, dtype=torch.bool)
        torch.testing.assert_close(pairs.diagonal(), torch.full((5,), 0.4, dtype=torch.float64), atol=0.02, rtol=0)
        torch.testing.assert_close(pairs[apart], torch.full((20,), 0.1, dtype=torch.float64), atol=0.02, rtol=0)

    def test_each_set_is_measured_once(self) -> None:
        """Four sources have six sets of two; drawn 32 times, most of them would come several times."""
        drawn = draw_subsets(4, 2, 32, torch.Generator().manual_seed(3))
        once = each_once(drawn)
        assert len(once) == len({tuple(row) for row in drawn.tolist()}) == 6
        assert once[0].tolist() == drawn[0].tolist()
        losses = Additive(torch.tensor([-0.3, -0.1, 0.1, 0.3]), noise=0.1)
        assert model_transfer(losses, TransferSettings(subset_size=2), seed=1).subsets == 6


class TestSurrogate:
    def test_it_finds_known_coefficients_and_an_intercept(self) -> None:
        effects = torch.linspace(-0.5, 0.7, 8, dtype=torch.float64)
        members = sets(8, 60)
        found = fit_surrogate(members, Additive(effects).validation(members), EXACT)
        assert found.intercept == 1
        torch.testing.assert_close(found.coefficients, effects, atol=1e-8, rtol=0)
        torch.testing.assert_close(found.predict(members), 1 + members.double() @ effects)
        assert found.held_out_error < 1e-12
        assert found.variance == pytest.approx(float((members[1:].double() @ effects).var(correction=0)))

    def test_without_the_empty_set_it_is_the_published_regression(self) -> None:
        generator = torch.Generator().manual_seed(2)
        members = sets(6, 40)[1:]
        losses = torch.rand(40, generator=generator, dtype=torch.float64)
        found = fit_surrogate(members, losses, EXACT)
        expected = torch.linalg.lstsq(members.double(), losses.unsqueeze(1)).solution.squeeze(1)
        assert found.intercept == 0
        torch.testing.assert_close(found.coefficients, expected, atol=1e-7, rtol=0)

    def test_a_ridge_shrinks_towards_the_mean_and_not_to_zero(self) -> None:
        effects = torch.linspace(0.5, 1.5, 8, dtype=torch.float64)
        members = sets(8, 60)
        losses = Additive(effects).validation(members)
        found = fit_surrogate(members, losses, TransferSettings(ridge=1e6))
        torch.testing.assert_close(found.coefficients, torch.ones(8, dtype=torch.float64), atol=0.05, rtol=0)

    def test_noise_gets_a_larger_ridge_than_effects(self) -> None:
        generator = torch.Generator().manual_seed(0)
        members = sets(20, 80)
        noise = torch.randn(81, generator=generator, dtype=torch.float64)
        clear = Additive(torch.linspace(-1, 1, 20)).validation(members) + 0.01 * noise
        assert (
            fit_surrogate(members, clear, TransferSettings()).ridge
            < fit_surrogate(members, 1 + noise, TransferSettings()).ridge
        )

    def test_intervals_have_their_stated_coverage(self) -> None:
        effects = torch.linspace(-0.5, 0.5, 10, dtype=torch.float64)
        members = sets(10, 80)
        truth = Additive(effects).validation(members)
        hits = []
        for seed in range(200):
            noise = torch.randn(81, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            noise[0] = 0.0
            found = fit_surrogate(members, truth + 0.3 * noise, TransferSettings(ridge=0.0, confidence=0.8))
            hits.append((found.low <= effects) & (effects <= found.high))
        assert float(torch.stack(hits).double().mean()) == pytest.approx(0.8, abs=0.03)

    def test_the_estimated_error_is_the_noise(self) -> None:
        members = sets(10, 2_000)
        noise = torch.randn(2_001, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        noise[0] = 0.0
        losses = Additive(torch.linspace(-0.5, 0.5, 10)).validation(members) + 0.3 * noise
        found = fit_surrogate(members, losses, TransferSettings(ridge=0.0))
        assert found.residual == pytest.approx(0.09, rel=0.1)
        assert found.held_out_error == pytest.approx(0.09, rel=0.15)
        assert found.variance > 2 * found.residual

    def test_a_source_in_no_set_has_a_finite_coefficient(self) -> None:
        members = sets(6, 40)
        members[:, 2] = False
        found = fit_surrogate(members, Additive(torch.full((6,), -0.1)).validation(members), TransferSettings())
        assert bool(found.coefficients.isfinite().all())

    def test_one_set_is_too_few(self) -> None:
        with pytest.raises(ValueError, match="at least two sets"):
            fit_surrogate(sets(4, 1), torch.ones(2), EXACT)


class TestAlgorithm:
    def test_it_chooses_the_sources_that_help(self) -> None:
        effects = torch.tensor([-0.1] * 4 + [0.1] * 8)
        found = model_transfer(Additive(effects), EXACT, seed=1)
        assert found.chosen.tolist() == [True] * 4 + [False] * 8
        assert found.gain == pytest.approx(0.4)
        assert found.predicted_gain == pytest.approx(0.4)
        assert found.gain_error == pytest.approx(0.0)
        assert (found.alone, found.everything, found.with_chosen) == pytest.approx((2.0, 2.4, 1.6))
        torch.testing.assert_close(found.single_gain, -effects.double(), atol=1e-7, rtol=0)
        torch.testing.assert_close(found.single_predicted, -effects.double(), atol=1e-7, rtol=0)
        assert found.applies
        assert -0.1 < found.gamma < 0.1

    def test_none_are_chosen_where_all_hurt_and_all_where_all_help(self) -> None:
        hurt = model_transfer(Additive(torch.linspace(0.1, 0.3, 7)), EXACT, seed=1)
        assert not bool(hurt.chosen.any())
        assert hurt.gain == 0
        assert not hurt.applies
        assert bool(model_transfer(Additive(-torch.linspace(0.1, 0.3, 7)), EXACT, seed=1).chosen.all())

    def test_sources_below_gamma_are_chosen(self) -> None:
        found = model_transfer(Additive(torch.linspace(-0.3, 0.5, 12), noise=0.05), seed=3)
        assert found.chosen.tolist() == (found.surrogate.coefficients < found.gamma).tolist()

    def test_the_guard_uses_held_out_samples(self) -> None:
        effects = torch.tensor([-0.1] * 4 + [0.1] * 8)
        found = model_transfer(Additive(effects, held_out=-effects), EXACT, seed=1)
        assert found.chosen.tolist() == [True] * 4 + [False] * 8
        assert found.gain == pytest.approx(-0.4)
        assert not found.applies

    def test_a_gain_within_its_error_does_not_count(self) -> None:
        found = model_transfer(Additive(torch.tensor([-0.1] * 4 + [0.1] * 8)), EXACT, seed=1)
        assert replace(found, gain=0.1, gain_error=0.04).applies
        assert not replace(found, gain=0.1, gain_error=0.06).applies

    def test_a_wide_gap_is_worth_a_little_loss(self) -> None:
        """The fifth source seems to help by a hair, as one of many does by chance."""
        effects = torch.tensor([-0.2] * 4 + [-0.001] + [0.1] * 7)
        careful = model_transfer(Additive(effects), EXACT, seed=1)
        assert careful.chosen.tolist() == [True] * 4 + [False] * 8
        keen = model_transfer(Additive(effects), TransferSettings(ridge=0.0, slack=0.0), seed=1)
        assert keen.chosen.tolist() == [True] * 5 + [False] * 7

    def test_it_stops_early_only_when_more_sets_do_not_help(self) -> None:
        effects = torch.linspace(-0.3, 0.5, 12)
        patient = model_transfer(Additive(effects, noise=0.1), EXACT, seed=1)
        assert not patient.stopped_early
        assert patient.subsets == different(96)
        easy = TransferSettings(tolerance=100.0)
        early = model_transfer(Additive(effects, noise=0.1), easy, seed=1)
        assert early.stopped_early
        assert 48 <= early.subsets < patient.subsets
        never = TransferSettings(tolerance=-1.0)
        assert not model_transfer(Additive(effects, noise=0.1), never, seed=1).stopped_early

    def test_sets_are_measured_in_batches_and_cuts_in_one(self) -> None:
        losses = Additive(torch.linspace(-0.3, 0.5, 12), noise=0.1)
        model_transfer(losses, TransferSettings(early_stop=False), seed=1)
        assert [losses.asked[0], losses.asked[-1]] == [13, 13]
        assert sum(losses.asked[1:-1]) == different(96)
        assert len(losses.asked) == 6

    def test_the_number_of_cuts_is_limited(self) -> None:
        losses = Additive(torch.linspace(-0.3, 0.5, 150))
        found = model_transfer(losses, TransferSettings(subsets_per_source=2, early_stop=False), seed=1)
        assert losses.asked[-1] == 65
        assert 0 < int(found.chosen.sum()) < 150

    def test_two_sources_are_enough_and_one_is_not(self) -> None:
        assert model_transfer(Additive(torch.tensor([-0.1, 0.1])), EXACT, seed=1).chosen.tolist() == [True, False]
        with pytest.raises(ValueError, match="at least 2"):
            model_transfer(Additive(torch.tensor([-0.1])), seed=1)

    def test_a_seed_repeats_the_result_and_progress_is_reported(self) -> None:
        losses, shares = Additive(torch.linspace(-0.3, 0.5, 12), noise=0.1), list[float]()
        first = model_transfer(losses, seed=4, progress=shares.append)
        again = model_transfer(losses, seed=4)
        assert first.to_json() == again.to_json()
        assert shares == sorted(shares)
        assert shares[-1] == 1

    def test_the_progress_callback_may_stop_it(self) -> None:
        def stop(share: float) -> None:
            raise InterruptedError

        with pytest.raises(InterruptedError):
            model_transfer(Additive(torch.linspace(-0.3, 0.5, 12)), seed=4, progress=stop)

    def test_the_result_can_be_serialised(self) -> None:
        found = model_transfer(Additive(torch.tensor([-0.1, 0.1, 0.2])), seed=1)
        told = json.loads(json.dumps(found.to_json(), allow_nan=False))
        assert told["chosen"] == [0]
        assert told["applies"] is True
        assert len(told["low"]) == 3


def test_a_surrogate_is_a_plain_record() -> None:
    ends = torch.tensor([0.1, -0.2])
    found = Surrogate(1.0, ends, 0 * ends, 1.0, 0.9, 0.0, 0.0, 0.0, 0.0)
    assert found.predict(torch.tensor([[True, True], [False, False]])).tolist() == pytest.approx([0.9, 1.0])
