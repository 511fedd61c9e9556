"""Effects and factors of arms, looks of places: every step against loops and dense algebra, and what EM finds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from metaban.models.default.arms import (
    ARMS_MAX,
    FACTORS,
    FIRST_ARMS,
    FIRST_EFFECT,
    FIRST_FACTOR,
    FIRST_WIDE,
    RIDGE_CONSTANT_EVENTS,
    RIDGE_EVENTS,
    TERMS_TOGETHER,
    UNUSED_KEY,
    ArmEffects,
    ArmLookup,
    ArmPosteriors,
    ArmSamples,
    SharedEffects,
    SharedTerms,
    arms_by_samples,
    derive_effects,
    with_tastes,
)
from metaban.models.default.places import LEAST_LOOK, LOOK_EVIDENCE, MOST_LOOK, PLACES, looks_at
from metaban.models.default.prior import Prior
from metaban.models.learner import NO_ARM_KEY
from tests.models.literal_default import Array
from tests.models.worlds import assert_close

#: Head inputs without factors: a constant and two others.
INPUTS = 3


def generator_of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def samples_of(
    seed: int, users: int, each: int, *, arms: int = 5, wide: int = 0, places: int = 4, padding: int = 2
) -> ArmSamples:
    """Random samples; some are old, some arms have no id (key 0), and padding has numbers that must have no effect.

    All terms but the last make factors.
    """
    random = np.random.default_rng(seed)
    inputs = random.normal(size=(users, each + padding, INPUTS))
    inputs[..., 0] = 1
    weights = random.choice([1.0, 1.0, 0.05], size=(users, each + padding))
    weights[:, each:] = 0
    terms = random.normal(size=(users, each + padding, wide))
    given = {
        "inputs": inputs,
        "wide": terms,
        "making_factors": terms[..., :-1],
        "rewards": random.random((users, each + padding)),
        "weights": weights,
        "keys": 10 * random.integers(0, 1 + arms, size=(users, each + padding)),
        "places": random.integers(0, places, size=(users, each + padding)),
    }
    return ArmSamples(**{name: torch.from_numpy(value) for name, value in given.items()})


def rows_of(batch: ArmSamples, rows: slice | Tensor) -> ArmSamples:
    """Some users of a batch."""
    return ArmSamples(**{each.name: getattr(batch, each.name)[rows] for each in fields(batch)})


def prior_of(seed: int = 0) -> Prior:
    """A prior with correlated coefficients; tastes have N(0, I)."""
    random = np.random.default_rng(seed)
    root = random.normal(size=(INPUTS + FACTORS, INPUTS + FACTORS))
    covariance, mean = root @ root.T / 9 + 0.1 * np.eye(len(root)), random.normal(size=len(root))
    return with_tastes(
        Prior.of(torch.from_numpy(mean), torch.from_numpy(covariance), torch.tensor(0.3, dtype=torch.float64))
    )


def effects_of(keys: Tensor, seed: int = 0, wide: int = 0) -> SharedEffects:
    """Random posteriors of these arms, and of shared terms."""
    random, count = np.random.default_rng(seed), keys.shape[0]
    looks = 0.3 + random.random(PLACES)
    looks[0] = 1
    given = {
        "effects": random.normal(size=count),
        "variances": random.random(count),
        "factors": random.normal(size=(count, FACTORS)),
        "effect_spread": np.array(0.4),
        "factor_spread": 0.1 + random.random(FACTORS),
    }
    arms = ArmEffects(keys=keys, **{name: torch.from_numpy(value) for name, value in given.items()})
    of_terms = {
        "coefficients": random.normal(size=wide),
        "spread": 0.1 + random.random(wide),
        "factors": 0.3 * random.normal(size=(max(0, wide - 1), FACTORS)),
        "factor_spread": 0.1 + random.random(FACTORS),
    }
    terms = SharedTerms(**{name: torch.from_numpy(value) for name, value in of_terms.items()})
    return SharedEffects(arms, terms, torch.from_numpy(looks))


def real_samples(batch: ArmSamples) -> list[tuple[int, int]]:
    """User and place in the batch of each sample that counts."""
    return [(int(user), int(place)) for user, place in torch.nonzero(batch.weights > 0)]


# ---------------------------------------------------------------------- the table


class TestTable:
    @pytest.mark.parametrize("most", [1, 3, 100])
    def test_the_arms_with_most_samples(self, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Against a dictionary: fewer rows than arms, more rows than arms, padding, and arms without ids."""
        monkeypatch.setattr("metaban.models.default.arms.ARMS_MAX", most)
        batches = [samples_of(1, 6, 9, arms=8), samples_of(2, 2, 4, arms=8)]
        counted = Counter(int(batch.keys[where]) for batch in batches for where in real_samples(batch))
        del counted[NO_ARM_KEY]
        found = arms_by_samples(batches)
        assert found.shape[0] <= most
        chosen = [key for key in found.tolist() if key != UNUSED_KEY]
        assert len(chosen) == min(most, len(counted))
        assert sorted((counted[key] for key in chosen), reverse=True) == [n for _, n in counted.most_common(most)]
        assert found.tolist() == [*sorted(chosen), *[UNUSED_KEY] * (found.shape[0] - len(chosen))]

    def test_rows_depend_on_shapes_alone(self) -> None:
        """Otherwise a number would have to be read back from a GPU."""
        few, many = samples_of(1, 6, 9, arms=1), samples_of(2, 6, 9, arms=50)
        none = replace(few, weights=torch.zeros_like(few.weights))
        assert arms_by_samples([few]).shape == arms_by_samples([many]).shape == arms_by_samples([none]).shape
        assert (arms_by_samples([none]) == UNUSED_KEY).all()
        assert arms_by_samples([few] * 200).shape[0] == ARMS_MAX

    @pytest.mark.parametrize("library", ["torch", "numpy", "served"])
    def test_lookup_equals_a_dictionary(self, library: str) -> None:
        keys = torch.tensor([3, 7, 20, UNUSED_KEY, UNUSED_KEY])
        arms = effects_of(keys).arms
        known = {int(key): row for row, key in enumerate(keys) if key != UNUSED_KEY}
        asked = torch.tensor([[3, 20, NO_ARM_KEY], [7, 4, UNUSED_KEY - 1], [2**62, 20, 1]])
        shared = {name: value.numpy() for name, value in arms.state().items()}
        if library == "torch":
            found = [value.numpy() for value in arms.of(asked)]
        elif library == "numpy":
            found = list(ArmEffects.stored(shared).of(asked.numpy()))
        else:
            looked_up = ArmLookup.of(ArmEffects.stored(shared), shared["arm_effects"]).look_up(asked.numpy().ravel())
            found = [looked_up.effects.reshape(3, 3), looked_up.variances.reshape(3, 3)]
            found.append(looked_up.factors.reshape(3, 3, FACTORS))
            on_gpu = ArmLookup.of(arms, arms.effects).look_up(asked.ravel())
            assert np.array_equal(on_gpu.factors.numpy(), looked_up.factors)
        effects, variances, factors = found
        assert factors.shape == (3, 3, FACTORS)
        for place in np.ndindex(3, 3):
            key = int(asked[place])
            row = known.get(key)
            assert effects[place] == (0 if row is None else arms.effects[row])
            unknown = 0 if key == NO_ARM_KEY else float(arms.effect_spread)
            assert variances[place] == (unknown if row is None else arms.variances[row])
            np.testing.assert_array_equal(factors[place], np.zeros(FACTORS) if row is None else arms.factors[row])

    def test_served_without_unused_rows(self) -> None:
        initial = ArmEffects.initial(torch.tensor(0.1, dtype=torch.float64))
        for arms, keys in ((effects_of(torch.tensor([3, 7])).arms, [3, 7]), (initial, [])):
            shared = {name: value.numpy() for name, value in arms.state().items()}
            table = ArmLookup.of(ArmEffects.stored(shared), shared["arm_effects"])
            assert table.keys.tolist() == [NO_ARM_KEY, *keys, UNUSED_KEY]

    def test_a_new_table_keeps_what_is_known(self) -> None:
        given = effects_of(torch.tensor([10, 20, 30, UNUSED_KEY]))
        keys, before = torch.tensor([20, 40, UNUSED_KEY]), given.arms
        started = ArmPosteriors([samples_of(0, 2, 3)], keys).start(given).arms
        assert torch.equal(started.keys, keys)
        assert started.effects[:2].tolist() == [before.effects[1], 0]
        assert started.variances[:2].tolist() == [before.variances[1], before.effect_spread]
        assert torch.equal(started.factors[:2], torch.stack([before.factors[1], 0 * before.factors[1]]))

    def test_places_after_the_last_share_its_looks(self) -> None:
        looks = torch.arange(PLACES, dtype=torch.float64)
        assert looks_at(looks, torch.tensor([[0, 3], [PLACES, 999]])).tolist() == [[0, 3], [PLACES - 1] * 2]


# ---------------------------------------------------------------------- the steps of a round


@dataclass(frozen=True)
class Round:
    """Samples, arms and users in the middle of a round, in torch and as plain lists of samples."""

    batches: list[ArmSamples]
    prior: Prior
    effects: SharedEffects
    means: list[Tensor]
    spreads: list[Tensor]

    @classmethod
    def random(cls, seed: int, wide: int = 0) -> Round:
        """Two batches; one arm has no row in the table, as if it had too few samples."""
        batches = [samples_of(seed, 4, 6, wide=wide), samples_of(seed + 50, 3, 5, wide=wide, padding=0)]
        keys = torch.tensor([10, 20, 30, 50, UNUSED_KEY, UNUSED_KEY])
        random, size = np.random.default_rng(seed), INPUTS + FACTORS
        means = [torch.from_numpy(random.normal(size=(len(batch.rewards), size))) for batch in batches]
        roots = [torch.from_numpy(random.normal(size=(len(batch.rewards), size, size))) for batch in batches]
        return cls(
            batches, prior_of(seed), effects_of(keys, seed, wide), means, [root @ root.mT / 10 for root in roots]
        )

    @property
    def posteriors(self) -> ArmPosteriors:
        return ArmPosteriors(self.batches, self.effects.arms.keys)

    @property
    def used(self) -> list[int]:
        return [int(key) for key in self.effects.arms.keys if key != UNUSED_KEY]

    def samples(self) -> list[PlainSample]:
        """All samples that count, with what belongs to them."""
        found = []
        for batch, means, spreads in zip(self.batches, self.means, self.spreads, strict=True):
            for user, place in real_samples(batch):
                key = int(batch.keys[user, place])
                row = self.used.index(key) if key in self.used else None
                look = float(self.effects.looks[min(int(batch.places[user, place]), PLACES - 1)])
                found.append(
                    PlainSample(
                        x=batch.inputs[user, place].numpy(),
                        wide=batch.wide[user, place].numpy(),
                        reward=float(batch.rewards[user, place]),
                        weight=float(batch.weights[user, place]),
                        place=int(batch.places[user, place]),
                        look=look,
                        row=row,
                        own=np.zeros(FACTORS) if row is None else self.effects.arms.factors[row].numpy(),
                        made=self.effects.terms.factors.numpy().T @ batch.making_factors[user, place].numpy(),
                        b=0.0 if row is None else float(self.effects.arms.effects[row]),
                        mean=means[user].numpy(),
                        spread=spreads[user].numpy(),
                    )
                )
        return found


@dataclass(frozen=True)
class PlainSample:
    x: Array
    wide: Array
    reward: float
    weight: float
    place: int
    look: float
    row: int | None  # of its arm, None if it has none
    own: Array  # factors of the arm itself
    made: Array  # factors that its inputs make
    b: float
    mean: Array  # of the user's head
    spread: Array

    @property
    def q(self) -> Array:
        return self.own + self.made

    @property
    def making_factors(self) -> Array:
        return self.wide[:-1]

    def regression(self, effects: SharedEffects, noise: float) -> tuple[Array, float, float]:
        """E of [w, p][w, p]ᵀ, what these explain of the reward at the first place, and how often it counts."""
        second = self.spread + np.outer(self.mean, self.mean)
        shared = self.b + float(self.wide @ effects.terms.coefficients.numpy())
        return second, self.reward / self.look - shared, self.weight * self.look**2 / noise


class TestSteps:
    @pytest.mark.parametrize("wide", [0, 2])
    @pytest.mark.parametrize("seed", range(3))
    def test_features_and_effects_are_the_dense_posterior(self, seed: int, wide: int) -> None:
        """The normal posterior of (μ, β, b) by one large matrix, given how users differ from μ."""
        now = Round.random(seed, wide)
        prior, noise, count = now.prior, float(now.prior.noise), len(now.used)
        size = INPUTS + wide + count
        ridge = np.full(size, 1 / float(now.effects.arms.effect_spread))
        ridge[:INPUTS], ridge[INPUTS : INPUTS + wide] = RIDGE_EVENTS / noise, 1 / now.effects.terms.spread
        ridge[0] = RIDGE_CONSTANT_EVENTS / noise
        precision, moment = np.diag(ridge), np.zeros(size)
        for sample in now.samples():
            columns = np.zeros(size)
            columns[:INPUTS], columns[INPUTS : INPUTS + wide] = sample.x, sample.wide
            if sample.row is not None:
                columns[INPUTS + wide + sample.row] = 1
            away = sample.mean - prior.mean.numpy()
            # r = e·(xᵀμ + zᵀβ + b + hᵀ(w − μ)) + noise, h = [x, q]
            left = sample.reward - sample.look * (np.concatenate([sample.x, sample.q]) @ away)
            precision += sample.weight / noise * sample.look**2 * np.outer(columns, columns)
            moment += sample.weight / noise * sample.look * columns * left
        covariance = np.linalg.inv(precision)
        expected, variances = covariance @ moment, np.diag(covariance)
        after, found = now.posteriors.effects_step(prior, now.effects, now.means)
        arms = found.arms
        np.testing.assert_allclose(after.mean[:INPUTS], expected[:INPUTS], atol=1e-9)
        assert torch.equal(after.mean[INPUTS:], prior.mean[INPUTS:])
        np.testing.assert_allclose(found.terms.coefficients, expected[INPUTS : INPUTS + wide], atol=1e-9)
        effects, uncertain = expected[INPUTS + wide :], variances[INPUTS + wide :]
        np.testing.assert_allclose(arms.effects[:count], effects, atol=1e-9)
        np.testing.assert_allclose(arms.variances[:count], uncertain, atol=1e-9)
        # M step: the mean of E[b²] over the arms, and over some imagined ones of the first value.
        total = (effects**2 + uncertain).sum() + FIRST_ARMS * FIRST_EFFECT * noise
        assert float(arms.effect_spread) == pytest.approx(total / (count + FIRST_ARMS))
        # Each term has a variance of its own, with a share of the mean of all.
        squares = (expected**2 + variances)[INPUTS : INPUTS + wide]
        together = (squares.sum() + FIRST_ARMS * FIRST_WIDE * noise) / (wide + FIRST_ARMS)
        own = (squares + TERMS_TOGETHER * together) / (1 + TERMS_TOGETHER)
        np.testing.assert_allclose(found.terms.spread, own, rtol=1e-9)
        assert torch.equal(found.looks, now.effects.looks)
        assert torch.equal(arms.factors, now.effects.arms.factors)

    @pytest.mark.parametrize("wide", [0, 3])
    @pytest.mark.parametrize("seed", range(3))
    def test_factors_minimise_the_expected_error(self, seed: int, wide: int) -> None:
        """Arm by arm, with the expectation over uncertain heads [w, p]: E[ppᵀ](q + Vᵀu) = E[p·(y − xᵀw)]."""
        now = Round.random(seed, wide)
        noise = float(now.prior.noise)
        found = now.posteriors.factors_step(now.prior, now.effects, now.means, now.spreads).arms
        squares = np.zeros(FACTORS)
        for row in range(len(now.used)):
            precision, moment = np.diag(1 / now.effects.arms.factor_spread.numpy()), np.zeros(FACTORS)
            for sample in now.samples():
                if sample.row != row:
                    continue
                second, target, weight = sample.regression(now.effects, noise)
                precision += weight * second[INPUTS:, INPUTS:]
                moment += weight * (sample.mean[INPUTS:] * target - second[INPUTS:] @ [*sample.x, *sample.made])
            np.testing.assert_allclose(found.factors[row], np.linalg.solve(precision, moment), atol=1e-9)
            squares += found.factors[row].numpy() ** 2 + np.diag(np.linalg.inv(precision))
        expected = (squares + FIRST_ARMS * FIRST_FACTOR * noise) / (len(now.used) + FIRST_ARMS)
        np.testing.assert_allclose(found.factor_spread, expected, rtol=1e-9)

    @pytest.mark.parametrize("seed", range(3))
    def test_factors_made_by_inputs_minimise_the_expected_error(self, seed: int) -> None:
        """One regression on all products of an input and a taste, u ⊗ p, given the arms' own factors."""
        now = Round.random(seed, 4)
        noise, before = float(now.prior.noise), now.effects.terms
        found = now.posteriors.input_factors_step(now.prior, now.effects, now.means, now.spreads)
        precision = np.diag(np.tile(1 / before.factor_spread.numpy(), 3))
        moment = np.zeros(3 * FACTORS)
        for sample in now.samples():
            second, target, weight = sample.regression(now.effects, noise)
            u = sample.making_factors
            precision += weight * np.kron(np.outer(u, u), second[INPUTS:, INPUTS:])
            each = sample.mean[INPUTS:] * target - second[INPUTS:] @ [*sample.x, *sample.own]
            moment += weight * np.kron(u, each)
        expected = np.linalg.solve(precision, moment).reshape(3, FACTORS)
        np.testing.assert_allclose(found.terms.factors, expected, atol=1e-9)
        squares = expected**2 + np.diag(np.linalg.inv(precision)).reshape(3, FACTORS)
        spread = (squares.sum(0) + FIRST_ARMS * FIRST_FACTOR * noise / 3) / (3 + FIRST_ARMS)
        np.testing.assert_allclose(found.terms.factor_spread, spread, rtol=1e-9)
        assert torch.equal(found.terms.coefficients, before.coefficients)
        assert torch.equal(found.arms.factors, now.effects.arms.factors)

    def test_factors_that_are_zero_stay_so_until_they_are_sought(self) -> None:
        now = Round.random(1)
        factors = now.effects.arms.factors.clone()
        factors[:, 2] = 0
        given = replace(now.effects, arms=replace(now.effects.arms, factors=factors))
        found = now.posteriors.factors_step(now.prior, given, now.means, now.spreads).arms
        assert not found.factors[:, 2].any()
        assert (found.factors[:4, [0, 1, 3]] != 0).all()

    def test_so_do_those_made_by_inputs(self) -> None:
        now = Round.random(1, 3)
        factors = now.effects.terms.factors.clone()
        factors[:, 2] = 0
        given = replace(now.effects, terms=replace(now.effects.terms, factors=factors))
        found = now.posteriors.input_factors_step(now.prior, given, now.means, now.spreads).terms
        assert not found.factors[:, 2].any()
        assert (found.factors[:, [0, 1, 3]] != 0).all()

    @pytest.mark.parametrize("wide", [0, 2])
    @pytest.mark.parametrize("seed", range(3))
    def test_looks_are_a_regression_on_predictions(self, seed: int, wide: int) -> None:
        """Place by place, with the variance of what is predicted; relative to the first place."""
        now = Round.random(seed, wide)
        for means in now.means:
            means[:, 0] += 3  # predictions are positive, as looks are
        earned, seen = LOOK_EVIDENCE * now.effects.looks.numpy(), np.full(PLACES, LOOK_EVIDENCE)
        counted = np.zeros(PLACES)
        variances = [*now.effects.arms.variances.tolist()]
        for sample in now.samples():
            h = np.concatenate([sample.x, sample.q])
            predicted = h @ sample.mean + sample.b + sample.wide @ now.effects.terms.coefficients.numpy()
            variance = h @ sample.spread @ h
            variance += float(now.effects.arms.effect_spread) if sample.row is None else variances[sample.row]
            earned[sample.place] += sample.weight * sample.reward * predicted
            seen[sample.place] += sample.weight * (predicted**2 + variance)
            counted[sample.place] += 1
        looks = earned / seen
        expected = np.clip(looks / max(looks[0], LEAST_LOOK), LEAST_LOOK, MOST_LOOK)
        found = now.posteriors.looks_step(now.effects, now.means, now.spreads)
        assert 0 < (counted > 0).sum() < PLACES
        assert ((expected > LEAST_LOOK) & (expected < MOST_LOOK))[counted > 0].sum() > 2, "few are limited"
        np.testing.assert_allclose(found.looks[counted > 0], expected[counted > 0], rtol=1e-9)
        np.testing.assert_array_equal(found.looks[counted == 0], now.effects.looks[counted == 0])

    def test_places_share_the_last_looks(self) -> None:
        now = Round.random(2)
        late = [replace(batch, places=batch.places + PLACES - 1) for batch in now.batches]
        last = [replace(batch, places=0 * batch.places + PLACES - 1) for batch in now.batches]
        one, other = (replace(now, batches=batches) for batches in (late, last))
        first = one.posteriors.looks_step(now.effects, now.means, now.spreads)
        second = other.posteriors.looks_step(now.effects, now.means, now.spreads)
        assert torch.equal(first.looks, second.looks)
        assert torch.equal(first.looks[:-1], now.effects.looks[:-1])


def test_tastes_have_no_scale_of_their_own() -> None:
    """N(0, I) for the coefficients of factors, independent of the others, which stay."""
    random, size = np.random.default_rng(3), INPUTS + FACTORS
    root = torch.from_numpy(random.normal(size=(size, size)))
    mean = torch.from_numpy(random.normal(size=size))
    given = Prior.of(mean, root @ root.mT, torch.tensor(0.2, dtype=torch.float64))
    before = mean.clone(), given.covariance.clone()
    found = with_tastes(given)
    assert torch.equal(found.mean, torch.cat([mean[:INPUTS], torch.zeros(FACTORS, dtype=torch.float64)]))
    expected = torch.block_diag(given.covariance[:INPUTS, :INPUTS], torch.eye(FACTORS, dtype=torch.float64))
    assert torch.equal(found.covariance, expected)
    assert_close(found.precision @ found.covariance, torch.eye(size, dtype=torch.float64), 1e-9)
    assert found.noise == given.noise
    assert torch.equal(given.mean, before[0])
    assert torch.equal(given.covariance, before[1])


# ---------------------------------------------------------------------- EM in simulated worlds


@dataclass(frozen=True)
class World:
    """Users × arms with a known truth; every user has samples of random arms at random places."""

    samples: ArmSamples
    held_out: ArmSamples
    effects: Array
    looks: Array
    noise: float


def world_of(
    *, effect: float = 0.0, taste: float = 0.0, users: int = 120, each: int = 24, arms: int = 40, seed: int = 0
) -> World:
    """Rewards e_k·(level_u + x + b_i + p_uᵀq_i) + noise, with two latent tastes."""
    random = np.random.default_rng(seed)
    looks, noise = np.array([1.0, 0.7, 0.45]), 0.2
    b, q = effect * random.normal(size=arms), random.normal(size=(arms, 2)) * np.sqrt(taste / 2)
    p, level = random.normal(size=(users, 2)), 0.5 + 0.1 * random.normal(size=(users, 1))

    def drawn() -> ArmSamples:
        inputs = random.normal(size=(users, each, INPUTS))
        inputs[..., 0] = 1
        arm, place = random.integers(arms, size=(users, each)), random.integers(3, size=(users, each))
        first = level + 0.2 * inputs[..., 1] + b[arm] + (p[:, None] * q[arm]).sum(-1)
        rewards = looks[place] * first + noise * random.normal(size=(users, each))
        ones, nothing = np.ones((users, each)), np.zeros((users, each, 0))
        parts = (inputs, nothing, nothing, rewards, ones, 1 + arm, place)
        return ArmSamples(*(torch.from_numpy(part) for part in parts))

    return World(drawn(), drawn(), b, looks, noise)


def nothing_known(batch: ArmSamples) -> tuple[Prior, SharedEffects]:
    prior = with_tastes(Prior.initial(INPUTS + FACTORS))
    return prior, SharedEffects.initial(prior.noise, batch.wide.shape[-1], batch.making_factors.shape[-1])


def learned(batches: list[ArmSamples], epochs: int = 8, *, seek: bool = False) -> tuple[Prior, SharedEffects]:
    """After some epochs; factors are sought in the first and in the fourth."""
    prior, effects = nothing_known(batches[0])
    users = torch.ones(sum(len(batch.rewards) for batch in batches), dtype=torch.float64)
    for epoch in range(epochs):
        prior, effects = derive_effects(
            prior, effects, batches, users, seek=seek and epoch % 3 == 0, generator=generator_of(epoch)
        )
    return prior, effects


def held_out_error(world: World, prior: Prior, effects: SharedEffects) -> float:
    """Mean squared error on other samples of the same users."""
    known = ArmPosteriors([world.samples], effects.arms.keys)
    statistics = known.statistics(effects)
    heads = prior.posterior_mean(statistics.gram, statistics.moment)
    b, _, factors = effects.arms.of(world.held_out.keys)
    h = torch.cat([world.held_out.inputs, factors], dim=-1)
    predicted = (h @ heads.unsqueeze(-1)).squeeze(-1) + b
    missed = world.held_out.rewards - looks_at(effects.looks, world.held_out.places) * predicted
    return float(missed.square().mean())


class TestLearning:
    def test_effects_and_looks_are_found(self) -> None:
        world = world_of(effect=0.3)
        prior, effects = learned([world.samples])
        found = effects.arms.effects[: len(world.effects)].numpy()
        # μ takes the mean of all effects.
        away = (found - found.mean()) - (world.effects - world.effects.mean())
        assert np.sqrt((away**2).mean()) < 0.05
        inside = np.abs(away) < 3 * np.sqrt(effects.arms.variances[: len(found)].numpy())
        assert inside.mean() > 0.9, "their variances are those of their errors"
        assert float(effects.arms.effect_spread) == pytest.approx(world.effects.var(), rel=0.3)
        np.testing.assert_allclose(effects.looks[:3], world.looks, atol=0.05)
        assert float(prior.noise) == pytest.approx(world.noise**2, rel=0.1)
        assert held_out_error(world, prior, effects) < 1.15 * world.noise**2

    def test_without_effects_their_variance_shrinks(self) -> None:
        """EM approaches 0 slowly, but what is left is far below the noise."""
        _, some = learned([world_of(effect=0.3).samples])
        prior, none = learned([world_of(effect=0.0).samples], epochs=20)
        assert float(none.arms.effect_spread) < 0.02 * float(some.arms.effect_spread)
        assert float(none.arms.effect_spread) < 0.5 * FIRST_EFFECT * float(prior.noise)
        assert none.arms.effects.abs().max() < 0.05

    @pytest.mark.parametrize("seed", range(3))
    def test_low_rank_tastes_are_found_and_help(self, seed: int) -> None:
        world = world_of(effect=0.1, taste=0.1, seed=seed)
        without = held_out_error(world, *learned([world.samples]))
        prior, effects = learned([world.samples], seek=True)
        error, noise = held_out_error(world, prior, effects), world.noise**2
        assert error - noise < 0.4 * (without - noise)
        assert effects.arms.factors.any()
        # Two tastes are two directions: the others are small.
        sizes = torch.linalg.svdvals(effects.arms.factors[effects.arms.keys != UNUSED_KEY])
        assert sizes[2] < 0.5 * sizes[1]

    @pytest.mark.parametrize("seed", range(3))
    def test_directions_in_which_users_differ_are_found(self, seed: int) -> None:
        """30 inputs that heads do not see, two latent tastes, arms without ids: V spans these two directions."""
        random = np.random.default_rng(seed)
        users, each, count = 100, 60, 30
        truth, p = 0.3 * random.normal(size=(count, 2)) / np.sqrt(2), random.normal(size=(users, 1, 2))
        seen = random.normal(size=(users, each, count))
        inputs = np.ones((users, each, INPUTS))
        inputs[..., 1:] = random.normal(size=(users, each, INPUTS - 1))
        rewards = 0.5 + ((seen @ truth) * p).sum(-1) + 0.3 * random.normal(size=(users, each))
        nothing = np.zeros((users, each), dtype=np.int64)
        parts = (inputs, seen, seen, rewards, np.ones((users, each)), nothing, nothing)
        samples = ArmSamples(*(torch.from_numpy(part) for part in parts))
        _, effects = learned([samples], seek=True)
        found = effects.terms.factors.numpy()
        sizes = np.linalg.svd(found, compute_uv=False)
        assert sizes[2] < 0.3 * sizes[1], "two tastes are two directions"
        spanned = np.linalg.svd(found)[0][:, :2]
        missed = truth - spanned @ (spanned.T @ truth)
        assert np.linalg.norm(missed) < 0.25 * np.linalg.norm(truth)
        _, none = learned(
            [replace(samples, rewards=torch.from_numpy(0.3 * random.normal(size=(users, each))))], seek=True
        )
        assert np.linalg.norm(none.terms.factors) < 0.15 * np.linalg.norm(truth), "nothing to find"

    def test_factors_without_tastes_do_no_harm(self) -> None:
        world = world_of(effect=0.2)
        without = held_out_error(world, *learned([world.samples]))
        assert held_out_error(world, *learned([world.samples], seek=True)) < 1.05 * without


# ---------------------------------------------------------------------- what must not matter


def assert_same_effects(one: SharedEffects, other: SharedEffects, tolerance: float = 1e-8) -> None:
    """Equal up to the number of unused rows."""
    used = int((one.arms.keys != UNUSED_KEY).sum())
    assert one.arms.keys[:used].tolist() == other.arms.keys[:used].tolist()
    assert (other.arms.keys[used:] == UNUSED_KEY).all()
    found, expected = one.state(), other.state()
    for name in ("arm_effects", "arm_variances", "arm_factors"):
        assert_close(found[name][:used], expected[name][:used], tolerance)
    whole = ("arm_effect_spread", "arm_factor_spread", "arm_looks")
    for name in (*whole, "arm_wide", "arm_wide_spread", "arm_wide_factors", "arm_wide_factor_spread"):
        assert_close(found[name], expected[name], tolerance)


@pytest.mark.parametrize("seek", [False, True], ids=["as before", "factors sought"])
class TestInvariance:
    def test_one_batch_or_several(self, seek: bool) -> None:
        whole = samples_of(4, 12, 10, wide=2)
        parts = [rows_of(whole, slice(0, 5)), rows_of(whole, slice(5, 12))]
        narrow = ArmSamples(**{each.name: getattr(parts[1], each.name)[:, :10] for each in fields(whole)})
        for batches in (parts, [parts[0], narrow]):  # with padding and without
            (prior, effects), (expected, other) = (learned(each, 3, seek=seek) for each in (batches, [whole]))
            assert_same_effects(effects, other)
            assert_close(prior.mean, expected.mean, 1e-8)
            assert_close(prior.covariance, expected.covariance, 1e-8)

    def test_the_order_of_users(self, seek: bool) -> None:
        whole = samples_of(5, 12, 10)
        order = torch.from_numpy(np.random.default_rng(0).permutation(12))
        (prior, effects), (expected, other) = (
            learned([batch], 3, seek=seek) for batch in (rows_of(whole, order), whole)
        )
        assert_same_effects(effects, other)
        assert_close(prior.covariance, expected.covariance, 1e-8)

    def test_padding(self, seek: bool) -> None:
        batch = samples_of(6, 5, 8)
        changed = replace(batch, rewards=torch.where(batch.weights > 0, batch.rewards, 9.0), keys=batch.keys.clone())
        changed.keys[batch.weights == 0] = 990
        _, one = learned([batch], 3, seek=seek)
        _, other = learned([changed], 3, seek=seek)
        assert_same_effects(one, other)

    def test_without_ids_nothing_is_known_of_arms(self, seek: bool) -> None:
        batch = samples_of(7, 6, 8, places=1)
        unnamed = replace(batch, keys=torch.full_like(batch.keys, NO_ARM_KEY))
        for nothing in (unnamed, replace(batch, weights=torch.zeros_like(batch.weights))):
            prior, effects = learned([nothing], 3, seek=seek)
            assert (effects.arms.keys == UNUSED_KEY).all()
            assert not effects.arms.effects.any()
            assert not effects.arms.factors.any()
            assert (effects.looks == 1).all()
            assert_close(effects.arms.effect_spread, FIRST_EFFECT * prior.noise, 1e-9)

    @pytest.mark.parametrize("name", ["zeros", "ones", "one sample", "one arm", "one of each arm", "huge"])
    def test_extremes_stay_finite(self, seek: bool, name: str) -> None:
        batch = samples_of(8, 6, 8, wide=1)
        if name == "zeros":
            batch = replace(batch, rewards=torch.zeros_like(batch.rewards))
        elif name == "ones":
            batch = replace(batch, rewards=torch.ones_like(batch.rewards))
        elif name == "one sample":
            batch = ArmSamples(**{each.name: getattr(batch, each.name)[:1, :1] for each in fields(batch)})
        elif name == "one arm":
            batch = replace(batch, keys=torch.full_like(batch.keys, 5))
        elif name == "one of each arm":
            batch = replace(batch, keys=torch.arange(1, 1 + batch.keys.numel()).view_as(batch.keys))
        else:
            batch = replace(batch, rewards=1e6 * batch.rewards)
        prior, effects = learned([batch], 12, seek=seek)
        for value in (*effects.state().values(), prior.mean, prior.covariance, prior.precision, prior.noise):
            assert value.isfinite().all()
        assert (effects.arms.variances >= 0).all()
        assert effects.looks.min() >= LEAST_LOOK
        assert effects.looks.max() <= MOST_LOOK
        if name in ("zeros", "ones"):
            assert effects.arms.effects.abs().max() < 0.05
