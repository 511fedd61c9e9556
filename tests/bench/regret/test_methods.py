"""Every method keeps the same contract; those of the service run with its shipped settings."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from metaban.bench.baselines import BASELINES
from metaban.bench.core.local_loop import LocalLoop, plain_layout
from metaban.bench.regret.method import Method, VisibleRound
from metaban.bench.regret.methods import METHODS, RIVALS, VARIANTS, build_method, known_methods, preset_of, unavailable
from metaban.bench.regret.runs import Contender, Run, play
from metaban.bench.regret.vowpal import CHOSEN
from metaban.bench.regret.vowpal_tuning import candidates
from metaban.bench.worlds.environments import ENVIRONMENTS, Environment, SyntheticGroups, build_environment
from metaban.models.policies import UpperConfidence
from metaban.models.settings import PRESETS, named_settings
from metaban.worker.epochs.derive_shared import choose_by_hash


def small_world(seed: int = 3) -> Environment:
    return SyntheticGroups(seed=seed, users=4, arms=4, dimension=3)


def method_of(name: str, world: Environment, seed: int = 3, **options: object) -> Method:
    if (reason := unavailable(name)) is not None:
        pytest.skip(f"{name} cannot run here: {reason}")
    return build_method(name, world, env="synthetic", seed=seed, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", METHODS)
def test_decisions_are_places_and_rewards_may_come_late_and_out_of_order(name: str) -> None:
    world = small_world()
    method = method_of(name, world)
    rounds = [world.next_round() for _ in range(8)]
    chosen = [method.decide(VisibleRound(asked.user, asked.arms), number) for number, asked in enumerate(rounds)]
    assert all(type(arm) is int and 0 <= arm < 4 for arm in chosen)
    for number in (5, 0, 7, 1):
        method.learn(number, rounds[number].rewards[chosen[number]])
    assert 0 <= method.decide(VisibleRound(0, rounds[0].arms), 8) < 4
    with pytest.raises(KeyError):
        method.learn(5, 1.0)


@pytest.mark.parametrize("name", METHODS)
def test_the_same_seed_makes_the_same_decisions(name: str) -> None:
    run = Run(Contender.plain(name), "synthetic", 3, 30)
    first, second = (play(small_world(), method_of(name, small_world()), run) for _ in range(2))
    assert np.array_equal(first.earned, second.earned)


@pytest.mark.parametrize(("name", "rounds"), [("paper", 400), ("linucb", 400), ("vw", 1_000)])
def test_one_of_each_kind_learns(name: str, rounds: int) -> None:
    world = SyntheticGroups(seed=5, users=4, groups=1, arms=5, dimension=3)
    outcome = play(world, method_of(name, world), Run(Contender.plain(name), "synthetic", 5, rounds))
    last = slice(rounds // 2, None)
    assert outcome.regret[last].sum() < 0.6 * outcome.random[last].sum()


@pytest.mark.parametrize("name", ["paper", "linucb", "vw"])
def test_contexts_are_part_of_the_inputs(name: str) -> None:
    world = build_environment("synthetic", seed=6, interaction=True, users=3, dimension=3)
    outcome = play(world, method_of(name, world), Run(Contender.plain(name), "synthetic", 6, 20))
    assert outcome.regret.shape == (20,)


def test_products_lengthen_the_inputs_of_a_learner() -> None:
    world = build_environment("synthetic", seed=6, interaction=True, dimension=3)
    with_products = method_of("paper", world, products=True)
    inputs = with_products.settings["inputs"]
    assert (inputs["arm"], inputs["context"], inputs["products"], inputs["intercept"]) == (3, 3, True, True)
    asked = world.next_round()
    assert 0 <= with_products.decide(VisibleRound(asked.user, asked.arms, asked.context), 0) < 10


def test_a_method_gets_only_what_a_client_sends() -> None:
    assert {field.name for field in fields(VisibleRound)} == {"user", "arms", "context"}
    asked = VisibleRound(1, np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([9.0]))
    assert asked.joined.tolist() == [[1, 2, 9], [3, 4, 9]]
    assert VisibleRound(1, asked.arms).joined is asked.arms


def test_learners_run_with_shipped_settings_in_any_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METABAN_EPSILON", "0.5")
    monkeypatch.setenv("METABAN_POLICY", "squarecb")
    monkeypatch.setenv("METABAN_CANDIDATE_POOL", "7")
    settings = method_of("paper", small_world(), seed=8).settings
    assert (settings["policy"], settings["epsilon"], settings["candidate_pool"]) == ("ucb-floor", 0.02, 2_048)
    assert (settings["samples_kept"], settings["seed"]) == (256, 8)


def test_overrides_and_the_pool_reach_the_learner() -> None:
    settings = method_of("paper", small_world(), overrides={"nu": 1.5}, candidate_pool=3).settings
    assert (settings["nu"], settings["candidate_pool"]) == (1.5, 3)


def test_users_outside_the_pool_keep_what_they_learned() -> None:
    loop = LocalLoop(named_settings("paper"), UpperConfidence(), inputs=plain_layout(2), pool_max=2)
    arms = [[1.0, 0.0], [0.0, 1.0]]
    for number in range(3):
        for user in range(7):
            loop.learn(f"user-{user}", loop.choose(f"user-{user}", arms, f"{number}-{user}"), 1.0)
    assert [loop.choose(f"user-{user}", arms, "again").user_events for user in range(7)] == [3] * 7


def test_the_pool_is_chosen_as_the_worker_chooses_it() -> None:
    # Most epochs here have no refit, which would load every user, and come after guests were dropped.
    settings = named_settings("pooled", epoch_events=8, user_steps=1, meta_steps=1, width=4)
    loop = LocalLoop(settings, UpperConfidence(), inputs=plain_layout(2), pool_max=3)
    users: list[str] = []
    for number in range(80):
        epoch = loop._served.epoch_number
        users.append(f"user-{number}")
        loop.learn(users[-1], loop.choose(users[-1], [[1.0, 0.0], [0.0, 1.0]], users[-1]), 1.0)
        if loop._served.epoch_number > epoch:
            assert sorted(loop._served._pool.users) == sorted(choose_by_hash(users, 3))
    assert loop._served.epoch_number > 8


def test_names_are_complete_and_every_rival_can_be_built() -> None:
    assert set(RIVALS) - {"vw"} == set(BASELINES)
    assert set(METHODS) | set(VARIANTS) == set(known_methods())
    assert {preset_of(name) for name in VARIANTS} == {"default"}
    assert preset_of("pooled") == "pooled"


@pytest.mark.skipif("default" not in PRESETS, reason="variants change the preset default")
@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_changes_the_default_learner(name: str) -> None:
    variant = method_of(name, small_world()).settings
    assert variant != method_of("default", small_world()).settings


def test_vowpal_has_one_of_its_candidates_in_every_environment() -> None:
    assert set(CHOSEN) == set(ENVIRONMENTS)
    wide = ("mnist", "digits", "categories-200")
    assert all(options in candidates(793 if env in wide else 20) for env, options in CHOSEN.items())
    assert not any("-q aa" in options for options in candidates(793))
